"""The parts of `make gpu`: what each is called, how much of the time it may take,
and what its rows show.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to check or measure. Cheap to make; all work is in `run`.

    Attributes:
        run: returns the rows that it adds to the part's table.
        group: cases that share what is slow to make, and so one process, name it; others are on
            their own.
    """

    name: str
    run: Callable[[], list[Row]]
    group: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Cases of one kind, from one module of this folder.

    Attributes:
        weight: its part of the time that is left when it starts, beside the weights of those behind
            it.
        columns: key of a row → heading, in the order in which they are shown.
        note: what a reader must know to read the table.
        is_check: nothing is timed, so others may use the device meanwhile.
        num_shards: into how many processes the part may be divided while nothing is timed:
            compiling is what takes long then.
        is_warmed: its kernels are compiled beforehand.
    """

    name: str
    title: str
    module: str
    weight: float
    columns: dict[str, str]
    note: str = ""
    is_check: bool = False
    num_shards: int = 1
    is_warmed: bool = False

    def cases(self, machine: Machine) -> Iterator[Case]:
        """The part's cases in the order of their importance: time may run out before the last.

        Raises:
            ModuleNotFoundError: the machine lacks a package that it needs.
        """
        make: Callable[[Machine], Iterable[Case]] = importlib.import_module(f"benchmarks.gpu.{self.module}").cases
        yield from make(machine)


_CHECK = {"check": "check", "error": "error", "bound": "bound", "ok": "result", "note": "note"}
_TIME = {"us": "µs", "limit_us": "limit µs", "share": "of the limit"}


def _check(name: str, title: str, module: str, weight: float, num_shards: int = 1) -> Part:
    return Part(name, title, module, weight, _CHECK, is_check=True, num_shards=num_shards)


PARTS: tuple[Part, ...] = (
    _check("check-lora", "LoRA kernels against float64", "check_lora", 3, 2),
    _check("check-attention", "Attention against float64", "check_attention", 3),
    _check("check-gemm", "Weight-only linears against float64", "check_gemm", 3, 4),
    _check("check-rows", "Embedding, norms, rotation, SwiGLU against float64", "check_rows", 1),
    _check("check-sampling", "Sampling against the CPU's", "check_sampling", 2),
    _check("check-model", "Whole models: logits, bits, graphs", "check_model", 4, 4),
    _check("check-memory", "Accesses to memory, watched by compute-sanitizer", "check_memory", 1),
    Part(
        "engine",
        "The engine itself: Llama-3.1-8B's shape, random weights, rank 16",
        "bench_engine",
        18,
        {
            "base": "base",
            "what": "what",
            "ms": "ms",
            "p50_ms": "p50 ms between tokens",
            "p99_ms": "p99 ms",
            "tokens_per_s": "tokens/s",
            "note": "note",
        },
        "The runner, scheduler, pager and division of memory that a worker has, without a server. ms: until ready, or "
        "until the first token of a prompt of so many tokens (median of 5), beside the streams where there are any.",
        is_warmed=True,
    ),
    Part(
        "prefill",
        "Whole steps of one prompt, Llama-3.1-8B's shape",
        "bench_prefill",
        7,
        {
            "base": "base",
            "tokens": "tokens",
            "adapters": "adapters",
            "ms": "ms",
            "device_ms": "device ms",
            "limit_ms": "limit ms",
            "share": "of the limit",
            "tokens_per_s": "tokens/s",
        },
        "ms: as the host sees it, described, launched and waited for, the best of 3. Device: the same launches as one "
        "graph. The head sees the last row.",
        is_warmed=True,
        num_shards=2,
    ),
    Part(
        "tune",
        "Tile sizes by shape: the default's time, and the best of some others",
        "bench_tune",
        8,
        {
            "kernel": "kernel",
            "shape": "shape",
            "us": "default µs",
            "best_us": "best µs",
            "gain": "gain",
            "sizes": "best sizes",
            "note": "left out",
        },
        "The best are written to gpu-tuned.json beside this page, for shapes where they gain 3 % or more. LoRA's times "
        "are of shrink and expand together, with a copy of y.",
        is_warmed=True,
        num_shards=6,
    ),
    Part(
        "decode",
        "Whole decode steps, Llama-3.1-8B's shape, random weights",
        "bench_decode",
        12,
        {
            "base": "base",
            "layers": "layers",
            "rows": "rows",
            "adapters": "adapters",
            "step_ms": "step ms",
            "limit_ms": "limit ms",
            "share": "of the limit",
            "tax": "tax",
            "bytes_tax": "its bytes' tax",
            "loop_ms": "loop ms",
            "tokens_per_s": "tokens/s",
        },
        "A step is one replay of the decode graph, median of 15; the loop is steps as an engine launches them, two in "
        "flight: filled in by the host, replayed, sampled, tokens copied back. Tokens/s are the loop's. Tax: the step "
        "over that of the same rows without adapters; its bytes' tax: the same of the limits. Adapters have rank 16 "
        "on all seven linears.",
        is_warmed=True,
        num_shards=3,
    ),
    Part(
        "kernels",
        "Shrink and expand alone",
        "bench_kernels",
        20,
        {
            "site": "site",
            "ranks": "ranks",
            "rows": "rows",
            "adapters": "adapters",
            **_TIME,
            "loop": "torch loop ÷",
            "vllm": "vLLM ÷",
            "vllm_best": "vLLM best ÷",
            "csgmv": "csgmv ÷",
            "host_us": "host µs",
            "error": "error",
            "note": "note",
        },
        "Of one layer. Each pass is a CUDA graph over several layers' weights, more than the cache holds; the median "
        "of 30 replays, by layer. A peer's column is its time over ours. Error: the largest against float64, by the "
        "largest number. Host: the time of the launches without a graph. Peers' best: of several tile sizes, at rank "
        "16 alone.",
        is_warmed=True,
        num_shards=8,
    ),
    Part(
        "linears",
        "Base linears, and LoRA's expand in their epilogue",
        "bench_linears",
        5,
        {
            "site": "site",
            "base": "base",
            "rows": "rows",
            **_TIME,
            "torch": "F.linear ÷",
            "two_step_us": "with LoRA, two steps µs",
            "epilogue_us": "with LoRA, epilogue µs",
            "note": "note",
        },
        "LoRA: each row has an adapter of rank 16 of its own, 32 at most.",
        is_warmed=True,
        num_shards=3,
    ),
    Part(
        "attention",
        "Attention of one layer",
        "bench_attention",
        3,
        {
            "step": "step",
            "rows": "rows",
            "context": "context",
            "block_size": "block",
            **_TIME,
            "sdpa": "SDPA ÷",
            "varlen": "varlen ÷",
            "note": "note",
        },
        "SDPA: torch's scaled_dot_product_attention on keys side by side, its time over ours, where all sequences are "
        "alike. varlen: torch.nn.attention.varlen's time over ours, both with blocks of the same size.",
        is_warmed=True,
        num_shards=1,
    ),
    Part(
        "loading",
        "Loading adapters beside decode steps",
        "bench_loading",
        4,
        {
            "what": "what",
            "num_bytes": "bytes",
            "ms": "ms",
            "gb_per_s": "GB/s",
            "share": "of the copy limit",
            "p50_ms": "step p50 ms",
            "p99_ms": "step p99 ms",
            "loads": "loads",
        },
    ),
    Part(
        "tools",
        "Nsight Compute on a few launches",
        "bench_tools",
        4,
        {
            "what": "what",
            "us": "µs",
            "memory": "% of memory's peak",
            "multiprocessors": "% of the multiprocessors'",
            "warps": "% of warps",
            "registers": "registers",
            "note": "note",
        },
    ),
    Part(
        "peft",
        "The same decode work through transformers and PEFT",
        "bench_peft",
        5,
        {
            "layers": "layers",
            "rows": "rows",
            "adapters": "adapters",
            "ours": "ours tokens/s",
            "peft": "PEFT tokens/s",
            "ratio": "ratio",
        },
        "bfloat16, the same shape, layers and ranks; PEFT's mixed batch (adapter_names) with its own cache, greedy, "
        "without a graph: it has none for mixed batches.",
    ),
)

BY_NAME: dict[str, Part] = {part.name: part for part in PARTS}


@dataclass(slots=True)
class Outcome:
    """What is known of a part so far.

    Attributes:
        state: ``waiting``, ``running``, ``complete``, ``out of time``, or why it was left out.
        problems: cases that failed, in words.
    """

    state: str = "waiting"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_cases: int = 0
