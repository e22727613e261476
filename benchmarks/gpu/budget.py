"""How long the two calls of docs/gpu.md take, computed from what they do: nothing runs.

    python3 -P benchmarks/gpu/budget.py [--cores 16] [--compile]

Counts are those of the parts themselves (their cases, shapes, repeats); a kernel's time is that of
its limit on an H100, over the share of it that is assumed to be reached. The assumptions are the
constants below. With --compile, no kernels were compiled beforehand.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    from benchmarks.gpu import stand_ins

    stand_ins.install()

import torch  # noqa: E402 (once what is missing is stood in for)

from benchmarks.gpu import bench_decode, bench_engine, bench_kernels, bench_linears, bench_prefill, bench_tune  # noqa: E402
from benchmarks.gpu.limits import Rates, SiteShape, Work, linear_work  # noqa: E402
from benchmarks.gpu.machine import REPLAYS, Machine  # noqa: E402
from benchmarks.gpu.parts import BY_NAME  # noqa: E402
from benchmarks.gpu.run import SHARE_OF_CHECKS  # noqa: E402
from benchmarks.gpu.shapes import LLAMA_8B, module_shapes, site_shapes  # noqa: E402
from benchmarks.gpu.supervise import side_by_side  # noqa: E402
from loraserve.engine.execution.cuda_graphs import bucket_sizes  # noqa: E402
from loraserve_kernels.common.modules import LAYER_MODULES  # noqa: E402

FIRST = (
    *("check-lora", "check-attention", "check-gemm", "check-rows", "check-sampling", "check-model", "check-memory"),
    *("engine", "prefill", "tune", "decode", "kernels"),
)
SECOND = ("decode", "linears", "attention", "loading", "tools", "peft")
CALLS = {"first": (FIRST, 420.0), "second": (SECOND, 200.0)}
"""Parts and --budget-s of the calls in docs/gpu.md."""

H100 = Rates(3.0e12, 7.9e14, 5.0e10)
"""Bytes copied, operations, and bytes from pinned memory in a second."""
DECODE_SHARE, PROMPT_SHARE = 0.5, 0.25
"""Share of the limit that kernels for few rows, and prompts' steps, are assumed to reach."""
START_S = 12.0
"""Start of a worker: torch, Triton, the device's context."""
LAUNCH_S = 1e-5
"""Time of the host for one launch, described in Python."""
CAPTURE_S = 0.03
"""Capture of a graph, beside its launches: the allocator is emptied for it."""
CASE_S = 0.4
"""Time of a check: its operands, float64, the comparison."""
SETUP_S = 0.35
"""Preparation of a case of `kernels`: adapters in pages, described on the host."""
BASE_S = {"none": 2.0, "int8": 4.0, "int4": 5.0}
"""Making of a base of random weights, rounded on the device."""
ADAPTER_S = 0.15
"""Time of an adapter's load: its file read, hashed and packed, by one of the loaders."""
COMPILE_S = 1.0
"""Compilation of a kernel on one core; 0.65 s were measured (Triton 3.9, sm_90, 89 kernels)."""
KERNELS = {"check-lora": 46, "check-attention": 22, "check-gemm": 244, "check-rows": 8, "check-sampling": 8,
           "check-model": 109, "engine": 89, "prefill": 27, "tune": 245, "decode": 55, "kernels": 16, "linears": 102,
           "attention": 5}  # fmt: skip
"""Compiled for a part on sm_90 where none was compiled before; tools/gpu_cache.py counts them."""
PEERS_KERNELS = 420
"""Of vLLM's and SGLang's, by tile sizes, that `kernels` compiles on the machine in any case."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a call: checks and warming side by side, then each timed part."""

    side_by_side_s: float
    timed_s: dict[str, float]

    @property
    def total_s(self) -> float:
        return self.side_by_side_s + sum(self.timed_s.values())


def machine() -> Machine:
    """Return an H100 that nothing runs on: parts make their cases for it."""
    return Machine(torch.device("meta"), False, H100, 50 << 20, None)


def estimate(parts: Sequence[str], *, num_cores: int, is_compiling: bool) -> Estimate:
    """Return a call's seconds on a machine with so many cores."""
    lengths = []
    for job in side_by_side(parts, num_cores):
        (name,) = job.parts
        kernels = KERNELS.get(name, 0) if is_compiling else 0
        kernels += PEERS_KERNELS if name == "kernels" else 0
        seconds = START_S + kernels * COMPILE_S / job.num_shards
        lengths.append(seconds + (CASE_S * num_cases(name) if not job.is_warming else _warm_s(name)) / job.num_shards)
    timed = [name for name in parts if not BY_NAME[name].is_check]
    return Estimate(
        _side_by_side_s(lengths, num_cores),
        {name: TIMED[name]() + (START_S if name == timed[0] else 0.0) for name in timed},
    )


def num_cases(name: str) -> int:
    """Return how many cases a part has on a device."""
    return sum(1 for _ in BY_NAME[name].cases(_Countable.of(machine())))


class _Countable(Machine):
    """A machine whose cases are counted: it has fp8."""

    has_fp8 = True  # type: ignore[assignment]

    @staticmethod
    def of(other: Machine) -> _Countable:
        return _Countable(other.device, other.is_tiny, other.rates, other.cache_bytes, None)


def _warm_s(name: str) -> float:
    # one layer's kernels, and an engine's start and steps twice
    return 60.0 if name == "engine" else 20.0


def _side_by_side_s(lengths: Sequence[float], num_cores: int) -> float:
    """Jobs in their order, each on the core that is free first."""
    cores = [0.0] * num_cores
    for seconds in lengths:
        heapq.heapreplace(cores, cores[0] + seconds)
    return max(cores)


# what the parts do

LAYERS: int = LLAMA_8B["num_hidden_layers"]
_HEAD = LLAMA_8B["vocab_size"] * LLAMA_8B["hidden_size"]
_WEIGHTS = LAYERS * sum(a * b for name, (a, b) in module_shapes(False).items() if name in LAYER_MODULES) + _HEAD
_BYTES = {"none": 2.0, "int8": 1.0, "int4": 0.53}
_ADAPTER_BYTES = 2 * 16 * LAYERS * sum(sum(module_shapes(False)[name]) for name in LAYER_MODULES)
_LAUNCHES = LAYERS * 14


def _step_s(format: str, rows: int, adapters: int, context: int = 512) -> float:
    kv = rows * context * 4 * LAYERS * LLAMA_8B["num_key_value_heads"] * LLAMA_8B["head_dim"]
    work = Work(_WEIGHTS * _BYTES[format] + adapters * _ADAPTER_BYTES + kv, 2.0 * rows * _WEIGHTS)
    return H100.seconds(work) / DECODE_SHARE


def _prompt_s(format: str, tokens: int) -> float:
    return max(
        H100.seconds(Work(_WEIGHTS * _BYTES[format], 2.0 * tokens * _WEIGHTS)) / PROMPT_SHARE, _LAUNCHES * LAUNCH_S
    )


def _engine_s() -> float:
    b, total = bench_engine, 0.0
    sizes = bucket_sizes(b.MAX_NUM_SEQS)
    for format in ("none", "int8"):
        prompts = sum(_prompt_s(format, n) for n in b.PROMPTS)
        streams = _prompt_s(format, b.STREAMS * b.CONTEXT)
        step = _step_s(format, b.STREAMS, b.STREAMS)
        start = BASE_S[format] + 4 * _prompt_s(format, b.MAX_NUM_TOKENS)
        start += 2 * len(sizes) * (2 * _LAUNCHES * LAUNCH_S + _step_s(format, b.MAX_NUM_SEQS, 0, 0) + CAPTURE_S)
        between = streams + b.STEPS * step + b.REPEATS * (prompts + 10 * len(b.PROMPTS) * step)
        total += start + (b.REPEATS + 1) * prompts + between + b.STREAMS * ADAPTER_S
        total += sum(_prompt_s(format, n * b.CONTEXT) + b.THROUGHPUT_S for n in (32, 256, 64, 1))
        total += streams + ADAPTER_S + 20 * step
        if format == "none":
            # between tokens without adapters; graphs off; penalised, whose first step compiles
            total += between + 2 * streams + 60 * (_LAUNCHES * LAUNCH_S + step) + b.STEPS * (step + 2e-3) + 8.0
    return total


def _prefill_s() -> float:
    runs = 2 * (1 + bench_prefill.REPLAYS) + 1
    return sum(
        BASE_S[format] + 2 * sum(runs * _prompt_s(format, n) + CAPTURE_S for n in bench_prefill.TOKENS)
        for format in bench_prefill.FORMATS
    )


def _timed_s(calls: int, call_s: float, replays: int, launches: int = 1) -> float:
    """One `Machine.time`: twice as the host launches it, once more and captured, then replayed."""
    return 4 * calls * launches * LAUNCH_S + CAPTURE_S + (replays + 3) * calls * call_s


def _tune_s() -> float:
    b, total, device = bench_tune, 0.0, machine()
    for format, width in (("int8", 1.0), ("plain", 2.0), ("int4", 0.53)):
        for site in ("gate_up", "down", "qkv", "o"):
            shape = site_shapes(False)[site]
            num_bytes = shape.num_weights * width
            copies = device.num_copies(int(num_bytes), 16)
            call = H100.seconds(linear_work(shape, 64, num_bytes)) / DECODE_SHARE
            total += 3 * (0.03 * copies + (1 + len(b.DECODE)) * _timed_s(copies, call, b.REPLAYS))
            if format != "plain":
                call = H100.seconds(linear_work(shape, 2048, num_bytes)) / PROMPT_SHARE
                total += 0.06 + (1 + len(b.PREFILL)) * _timed_s(2, call, b.REPLAYS)
    total += sum(1 + len(c) for c in (b.ATTEND_DECODE, b.ATTEND_CHUNK)) * _timed_s(3, 1e-3, b.REPLAYS)
    loras = 2 * len(site_shapes(False))
    return total + loras * (SETUP_S + (2 + len(b.SHRINK) + len(b.EXPAND)) * _timed_s(16, 1e-4, b.REPLAYS, 3))


def _decode_s() -> float:
    b, total = bench_decode, 0.0
    for format in b.FORMATS:
        total += BASE_S[format] + 4.0 + len(b.ROWS) * 2 * (2 * _LAUNCHES * LAUNCH_S + CAPTURE_S)
        for rows in b.ROWS:
            wanted = (0, rows) if rows in b.BETWEEN else {*(a for a in b.ADAPTERS if a < rows), rows}
            total += sum((b.REPLAYS + 4 + b.LOOP_STEPS) * (_step_s(format, rows, a) + 1e-3) for a in wanted)
    return total


def _kernels_s() -> float:
    b, total, device = bench_kernels, 0.0, machine()
    for mix in b.mixes(False):
        for shape in site_shapes(False).values():
            layer_bytes = 2 * sum(mix.ranks) * shape.weights_per_rank
            layers = device.num_copies(layer_bytes)
            call = max(layer_bytes / H100.copy_bytes_per_s / DECODE_SHARE, 1e-5)
            pairs = len(mix.ranks) * len(shape.out_features)
            loops = min(layers, max(1, b.LOOP_LAUNCHES // (2 * pairs)))
            # our own, a torch loop, vLLM's and SGLang's defaults with their slabs, and the searched
            total += SETUP_S + _timed_s(layers, call, REPLAYS, 2)
            total += _timed_s(loops, 2 * pairs * 4e-6, REPLAYS, 2 * pairs)
            slabs = 2 * min(layers * pairs * 4, 20_000) * LAUNCH_S
            total += slabs + 2 * _timed_s(layers, 2 * call, REPLAYS, 4)
            if set(mix.ranks) == {b.RANKS[0]}:
                others = 8 + 4 * (2 if mix.num_rows > b.MAX_DECODE_ROWS else 1)
                total += others * _timed_s(min(layers, b.SWEEP_CALLS), 2 * call, b.SWEEP_REPLAYS, 4)
    return total


def _linears_s() -> float:
    shapes = [*site_shapes(False).values(), SiteShape(4096, (LLAMA_8B["vocab_size"],))]
    cases, device = num_cases("linears"), machine()
    mean = sum(shape.num_weights for shape in shapes[:4]) / 4
    copies = device.num_copies(int(mean), bench_linears.MAX_COPIES)
    # the linear, the library's, and with LoRA in two steps and in one, for a third of the cases
    one = _timed_s(copies, mean / H100.copy_bytes_per_s / DECODE_SHARE * 3, REPLAYS)
    return cases * (0.02 * copies + 2.7 * one)


def _attention_s() -> float:
    return num_cases("attention") * (0.6 + 2 * _timed_s(6, 6e-4, REPLAYS))


def _loading_s() -> float:
    return BASE_S["none"] + 12 * ADAPTER_S + 6.0 + 3 * 200 * _step_s("none", 32, 8)


def _tools_s() -> float:
    return 25.0


def _peft_s() -> float:
    # PEFT adds 32 adapters to eight layers
    return 6.0 + 12.0 + num_cases("peft") * 1.5


TIMED = {
    "engine": _engine_s,
    "prefill": _prefill_s,
    "tune": _tune_s,
    "decode": _decode_s,
    "kernels": _kernels_s,
    "linears": _linears_s,
    "attention": _attention_s,
    "loading": _loading_s,
    "tools": _tools_s,
    "peft": _peft_s,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="no kernels were compiled beforehand")
    options = parser.parse_args()
    print("| call | part | seconds | of its share |\n| --- | --- | --- | --- |")
    for call, (parts, budget_s) in CALLS.items():
        found = estimate(parts, num_cores=options.cores, is_compiling=options.compile)
        most = SHARE_OF_CHECKS * budget_s
        print(f"| {call} | checks and warming | {found.side_by_side_s:.0f} | {most:.0f} |")
        left, names = budget_s - min(found.side_by_side_s, most), list(found.timed_s)
        for i, name in enumerate(names):
            share = left * BY_NAME[name].weight / sum(BY_NAME[other].weight for other in names[i:])
            print(f"| {call} | {name} | {found.timed_s[name]:.0f} | {share:.0f} |")
            left -= min(share, found.timed_s[name])
        print(f"| {call} | together | {found.total_s:.0f} | {budget_s:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
