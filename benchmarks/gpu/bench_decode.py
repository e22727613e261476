"""Whole decode steps of an 8B shape: bases in bf16, int8 and int4, by rows and adapters, through
the decoder and the graphs that the engine runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.gpu.close import dtype_name
from benchmarks.gpu.limits import decode_work, share
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.model import RandomBase, make_base
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.shapes import llama, module_shapes
from benchmarks.gpu.steps import BLOCK_SIZE, Steps
from loraserve.types import SamplingParams
from loraserve_kernels.cpu.lora.layout import LAYER_MODULES, LoraModule
from loraserve_kernels.gpu.paged.packing import make_pages
from loraserve_kernels.gpu.paged.pool import PagedPool
from loraserve_kernels.gpu.sampling.sampling import SamplingRows, sample

FORMATS = ("none", "int4", "int8")
ROWS = (64, 32, 1, 256, 128, 192, 65)
BETWEEN = (65, 128, 192)
ADAPTERS = (0, 1, 32)
RANK = 16
CONTEXT = 512
LOOP_STEPS = 20
REPLAYS = 15
"""Of a step: one takes milliseconds."""
PAGE_BYTES = 2 << 20
SHARE_OF_MEMORY = 0.8


@dataclass(slots=True)
class World:
    """A base, its adapters, and steps of as many rows as anybody asks for.

    Attributes:
        adapter_bytes, adapter_weights: of one adapter.
        kv_bytes_per_token: of the cache.
    """

    machine: Machine
    format: str
    base: RandomBase
    pool: PagedPool
    slots: list[int]
    steps: Steps
    context: int
    adapter_weights: int
    sampling: SamplingRows
    _on_host: list[torch.Tensor]
    _events: list[torch.cuda.Event | None] = field(default_factory=lambda: [None, None])
    _turn: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        num_layers, num_kv_heads, head_dim = self.base.decoder.kv_shape
        return 4 * num_layers * num_kv_heads * head_dim

    def row_slots(self, num_rows: int, num_adapters: int) -> list[int]:
        """As many rows of each adapter, or one more; all the base's for no adapters."""
        return sorted(self.slots[i % num_adapters] for i in range(num_rows)) if num_adapters else [0] * num_rows

    def limit_s(self, num_rows: int, num_adapters: int) -> float:
        work = decode_work(
            base_bytes=self.base.base_bytes,
            base_weights=self.base.base_weights,
            num_rows=num_rows,
            adapter_bytes=num_adapters * self.adapter_weights * 2,
            row_adapter_weights=num_rows * self.adapter_weights if num_adapters else 0,
            kv_bytes=num_rows * (self.context + 1) * self.kv_bytes_per_token,
        )
        return self.machine.rates.seconds(work)

    def step_ms(self, row_slots: Sequence[int]) -> float | None:
        """The median of the replays of one step; None in a dry run."""
        count = len(row_slots)
        has_lora = self.steps.fill(range(count), [self.context] * count, [7] * count, row_slots)
        timing = self.machine.time_replays(lambda: self.steps.decode(count, has_lora), REPLAYS)
        return timing.us / 1e3 if timing else None

    def loop_ms(self, row_slots: Sequence[int], num_steps: int) -> float | None:
        """A step's time among steps that follow each other as an engine launches them;
        None in a dry run.
        """
        self.loop(row_slots, 2)
        if not self.machine.is_timing:
            return None
        self.machine.synchronize()
        start = time.perf_counter()
        self.loop(row_slots, num_steps)
        self.machine.synchronize()
        return (time.perf_counter() - start) / num_steps * 1e3

    @torch.inference_mode()
    def loop(self, row_slots: Sequence[int], num_steps: int, after: Callable[[], None] = lambda: None) -> None:
        """Launch steps with two in flight: the host takes a step's tokens after it has launched the
        next.

        Args:
            after: called behind each launch.
        """
        count, device = len(row_slots), self.machine.device
        tokens = torch.zeros(count, dtype=torch.int64, device=device)
        finite = torch.zeros(count, dtype=torch.bool, device=device)
        # half of the rows greedy, half drawn
        params = [SamplingParams(temperature=i % 2 * 0.8, top_p=0.95, seed=i) for i in range(count)]
        last = [7] * count
        for step in range(num_steps):
            # what the step before the last was described in and answered into is free again, also
            # across loops
            turn, self._turn = self._turn, 1 - self._turn
            if (event := self._events[turn]) is not None:
                event.synchronize()
                last = self._on_host[turn][:count].tolist()
            positions = [self.context + step] * count
            has_lora = self.steps.fill(range(count), positions, last, row_slots)
            logits = self.steps.decode(count, has_lora)
            self.sampling.fill(params, positions)
            sample(logits, self.sampling, tokens, finite)
            self._on_host[turn][:count].copy_(tokens, non_blocking=True)
            if device.type == "cuda":
                self._events[turn] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            after()


def zero_modules(shapes: dict[str, tuple[int, int]], num_layers: int, rank: int) -> list[LoraModule]:
    """An adapter on every linear, of memory that it doesn't take: for places, not for weights."""
    nothing = torch.zeros(1, dtype=torch.bfloat16)
    return [
        LoraModule(layer, name, nothing.expand(rank, shapes[name][1]), nothing.expand(shapes[name][0], rank), 0.5)
        for layer in range(num_layers)
        for name in LAYER_MODULES
    ]


def make_pool(
    machine: Machine, shapes: dict[str, tuple[int, int]], num_layers: int, count: int, dtype: torch.dtype
) -> tuple[PagedPool, list[int]]:
    """A pool with so many random adapters of `RANK` on all seven linears,
    in pages of the engine's size; their slots.
    """
    page = 4096 if machine.is_tiny else PAGE_BYTES
    modules = zero_modules(shapes, num_layers, RANK)
    pages = make_pages(modules, num_layers=num_layers, module_shapes=shapes, page_num_bytes=page, dtype=dtype)
    pages = replace(pages, pages=pages.pages.to(machine.device))
    pool = PagedPool(
        num_pages=count * pages.num_pages,
        page_num_bytes=page,
        num_layers=num_layers,
        max_tiles=count * pages.num_tiles,
        max_slots=count + 1,
        module_shapes=shapes,
        dtype=dtype,
        device=machine.device,
    )
    slots = [pool.load(pages) for _ in range(count)]
    pool.weights.normal_(std=0.02)
    return pool, slots


def num_layers_that_fit(machine: Machine, config: dict[str, Any], most_rows: int, num_adapters: int) -> int:
    """All, if the device's memory holds them in bf16 with so many rows and adapters."""
    if machine.is_tiny:
        return int(config["num_hidden_layers"])
    shapes = module_shapes(False)
    weights = sum(shapes[name][0] * shapes[name][1] for name in LAYER_MODULES)
    adapter = sum(sum(shapes[name]) for name in LAYER_MODULES) * RANK
    kv = 2 * config["num_key_value_heads"] * config["head_dim"] * (CONTEXT + LOOP_STEPS + BLOCK_SIZE) * most_rows
    around = 4 * config["vocab_size"] * config["hidden_size"]
    free = torch.cuda.mem_get_info(machine.device)[0] * SHARE_OF_MEMORY - around - (4 << 30)
    # while a layer's weight is made, it's there twice
    per_layer = 2 * (weights + num_adapters * adapter + kv)
    return max(1, min(int(config["num_hidden_layers"]), int(free // per_layer)))


def make_world(
    machine: Machine,
    format: str,
    rows: Sequence[int],
    num_adapters: int,
    *,
    num_layers: int | None = None,
    context: int = CONTEXT,
    pool: tuple[PagedPool, list[int]] | None = None,
) -> World:
    """
    Args:
        num_layers: as many as fit (None).
        pool: and its slots; made here if it isn't given.
    """
    config = dict(llama(machine.is_tiny))
    context = 20 if machine.is_tiny else context
    config["num_hidden_layers"] = num_layers or num_layers_that_fit(machine, config, max(rows), num_adapters)
    shapes = module_shapes(machine.is_tiny)
    dtype = torch.float16 if machine.is_tiny else torch.bfloat16
    adapters, slots = pool or make_pool(machine, shapes, config["num_hidden_layers"], num_adapters, dtype)
    base = make_base(machine, config, dtype=dtype, format=format)
    steps = Steps(
        machine,
        base,
        adapters,
        max_num_seqs=max(rows),
        max_len=context + LOOP_STEPS + BLOCK_SIZE,
        max_num_tokens=max(rows),
        sizes=sorted(rows),
    )
    steps.capture()
    return World(
        machine=machine,
        format=format,
        base=base,
        pool=adapters,
        slots=slots,
        steps=steps,
        context=context,
        adapter_weights=config["num_hidden_layers"] * RANK * sum(sum(shapes[name]) for name in LAYER_MODULES),
        sampling=SamplingRows(max(rows), machine.device),
        _on_host=[
            torch.zeros(max(rows), dtype=torch.int64, pin_memory=machine.device.type == "cuda") for _ in range(2)
        ],
    )


class Worlds:
    """One at a time: there isn't room for two."""

    def __init__(self, machine: Machine, rows: Sequence[int], num_adapters: int) -> None:
        self._machine, self._rows, self._num_adapters = machine, rows, num_adapters
        self._current: World | None = None
        self._without: dict[tuple[str, int], tuple[float | None, float]] = {}

    def get(self, format: str) -> World:
        if self._current is None or self._current.format != format:
            self._current = None
            self._machine.free()
            # kernels don't know how many layers there are
            num_layers = 1 if self._machine.is_warming else None
            self._current = make_world(self._machine, format, self._rows, self._num_adapters, num_layers=num_layers)
        return self._current

    def measure(self, format: str, num_rows: int, num_adapters: int) -> Row:
        world = self.get(format)
        slots, limit_s = world.row_slots(num_rows, num_adapters), world.limit_s(num_rows, num_adapters)
        step_ms = world.step_ms(slots)
        if num_adapters == 0:
            self._without[format, num_rows] = step_ms, limit_s
        base_ms, base_limit_s = self._without.get((format, num_rows), (None, None))
        loop_ms = world.loop_ms(slots, LOOP_STEPS)
        is_measured = step_ms is not None
        return {
            "base": dtype_name(world.base.decoder.kv_dtype) if format == "none" else format,
            "layers": world.base.config.num_layers,
            "rows": num_rows,
            "adapters": num_adapters,
            "context": world.context,
            "step_ms": step_ms,
            "limit_ms": limit_s * 1e3 if is_measured else None,
            "share": share(limit_s, step_ms / 1e3 if step_ms else None),
            "tax": step_ms / base_ms if step_ms and base_ms else None,
            "bytes_tax": limit_s / base_limit_s if is_measured and base_limit_s else None,
            "loop_ms": loop_ms,
            "tokens_per_s": num_rows / loop_ms * 1e3 if loop_ms else None,
        }


def cases(machine: Machine) -> Iterator[Case]:
    rows, formats = ((2,), ("int4",)) if machine.is_tiny else (ROWS, FORMATS)
    worlds = Worlds(machine, rows, max(rows))
    for format in formats:
        for count in rows:
            wanted = (0, count) if machine.is_tiny else sorted({a for a in ADAPTERS if a < count} | {count})
            if count in BETWEEN:
                # where the kernel for few rows ends: without adapters, and one each
                wanted = [0, count]
            for adapters in wanted:
                name = f"{format}, {count} rows, {adapters} adapters"
                yield Case(name, lambda f=format, c=count, a=adapters: [worlds.measure(f, c, a)], group=format)
