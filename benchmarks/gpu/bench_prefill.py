"""Whole steps of prompts on Llama-3.1-8B's shape, as the host sees them and as the device does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.bench_decode import RANK, make_pool
from benchmarks.gpu.close import dtype_name
from benchmarks.gpu.limits import Work, share
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.model import RandomBase, make_base
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.shapes import llama, module_shapes
from benchmarks.gpu.steps import Steps
from loraserve_kernels.cpu.lora.layout import LAYER_MODULES

TOKENS = (512, 2048, 128, 8192)
FORMATS = ("none", "int8")
REPLAYS = 3


class Prompts:
    """One base at a time, with steps of up to the most tokens."""

    def __init__(self, machine: Machine, tokens: tuple[int, ...]) -> None:
        self.machine, self.tokens = machine, tokens
        self._format: str | None = None
        self.base: RandomBase
        self.steps: Steps
        self.slots: list[int]

    def use(self, format: str) -> None:
        if self._format == format:
            return
        self._format = None
        for name in ("base", "steps", "slots"):
            if hasattr(self, name):
                delattr(self, name)
        machine = self.machine
        machine.free()
        config = dict(llama(machine.is_tiny))
        if machine.is_warming:
            config["num_hidden_layers"] = 1
        layers, shapes = config["num_hidden_layers"], module_shapes(machine.is_tiny)
        dtype = torch.float16 if machine.is_tiny else torch.bfloat16
        pool, self.slots = make_pool(machine, shapes, layers, 1, dtype)
        self.base = make_base(machine, config, dtype=dtype, format=format)
        most = max(self.tokens)
        self.steps = Steps(machine, self.base, pool, max_num_seqs=1, max_len=most, max_num_tokens=most, sizes=[])
        self._format = format

    def measure(self, format: str, num_tokens: int, *, with_adapter: bool) -> Row:
        self.use(format)
        machine, steps = self.machine, self.steps
        prompt, slots = [7] * num_tokens, [self.slots[0] if with_adapter else 0]

        def whole() -> torch.Tensor:
            return steps.prefill([0], [prompt], slots, last_rows_only=True)

        logits = whole()
        if not bool(torch.isfinite(logits).all()):
            raise RuntimeError("a prompt's last logits aren't finite")
        row: Row = {
            "base": dtype_name(self.base.decoder.kv_dtype) if format == "none" else format,
            "tokens": num_tokens,
            "adapters": int(with_adapter),
        }
        if not machine.is_timing:
            return row
        wall_s = min(self._wall_s(whole) for _ in range(REPLAYS))
        device = machine.time_replays(machine.capture(steps.prepared_prefill), REPLAYS)
        limit_s = machine.rates.seconds(self.work(num_tokens, with_adapter=with_adapter))
        device_s = device.us / 1e6 if device else None
        return row | {
            "ms": wall_s * 1e3,
            "device_ms": device_s * 1e3 if device_s else None,
            "limit_ms": limit_s * 1e3,
            "share": share(limit_s, device_s),
            "tokens_per_s": num_tokens / wall_s,
        }

    def _wall_s(self, run: Any) -> float:
        self.machine.synchronize()
        start = time.perf_counter()
        run()
        self.machine.synchronize()
        return time.perf_counter() - start

    def work(self, num_tokens: int, *, with_adapter: bool) -> Work:
        """Products of all linears but the head's, which sees one row; attention's, causal."""
        config = self.base.config
        head = config.vocab_size * config.hidden_size
        adapter = config.num_layers * RANK * sum(sum(config.module_shapes[name]) for name in LAYER_MODULES)
        pairs = num_tokens * (num_tokens + 1) // 2
        attention = 4 * pairs * config.num_heads * config.head_dim * config.num_layers
        linears = 2 * num_tokens * (self.base.base_weights - head + (adapter if with_adapter else 0)) + 2 * head
        return Work(self.base.base_bytes, linears + attention)


def cases(machine: Machine) -> Iterator[Case]:
    tokens = (6, 20) if machine.is_tiny else TOKENS
    prompts = Prompts(machine, tokens)
    for format in ("int8",) if machine.is_tiny else FORMATS:
        for num_tokens in tokens:
            for with_adapter in (False, True):
                arguments = {"format": format, "num_tokens": num_tokens, "with_adapter": with_adapter}
                name = f"{format}, {num_tokens} tokens{', an adapter' if with_adapter else ''}"
                yield Case(name, lambda a=arguments: [prompts.measure(**a)], group=format)
