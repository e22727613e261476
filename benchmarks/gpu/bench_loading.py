"""How long an adapter takes from packed, pinned memory to where steps may use it, and what that
does to the steps that run meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import torch

from benchmarks.gpu.bench_decode import RANK, World, make_world, num_layers_that_fit, zero_modules
from benchmarks.gpu.limits import quantile
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.shapes import llama, module_shapes
from loraserve.memory.arena import Arena, Owner
from loraserve.memory.devices.base import HostAdapter, PlacedAdapter
from loraserve.memory.devices.gpu import GpuDevice
from loraserve.memory.memory_plan import plan_gpu_arena
from loraserve.types import BaseSpec, Digest
from loraserve_kernels.cpu.lora.layout import LAYER_MODULES

NUM_RESIDENT, NUM_SPARE = 8, 4
ROWS = 32
STEPS = 200


@dataclass(slots=True)
class Loading:
    """A decoder whose adapters lie in the engine's own device, and packed ones that come and go.

    Attributes:
        pack_s: how long each took to pack.
    """

    machine: Machine
    device: GpuDevice
    world: World
    resident: list[PlacedAdapter]
    spare: list[HostAdapter]
    pack_s: list[float]
    landed_s: list[float] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.device.footprint_of(self.spare[0]).num_bytes

    def load(self) -> float:
        """Place a spare adapter while nothing else runs; seconds until it may be used."""
        start = time.perf_counter()
        placed = self.device.place(self.spare[0])
        while not self.device.is_ready(placed):
            pass
        took = time.perf_counter() - start
        self.device.remove(placed)
        return took

    def step_times_ms(self, *, with_loads: bool) -> tuple[list[float], int]:
        """Milliseconds from the end of each step to that of the next;
        how many adapters landed meanwhile.
        """
        is_cuda, marks = self.machine.device.type == "cuda", []
        placed: PlacedAdapter | None = None
        started_s, turn, num_loads = 0.0, 0, 0

        def after() -> None:
            nonlocal placed, started_s, turn, num_loads
            self.device.step_launched()
            if is_cuda:
                mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                mark.record()
                marks.append(mark)
            if not with_loads:
                return
            if placed is not None and self.device.is_ready(placed):
                self.landed_s.append(time.perf_counter() - started_s)
                self.device.remove(placed)
                placed, num_loads = None, num_loads + 1
            if placed is None:
                started_s = time.perf_counter()
                placed = self.device.place(self.spare[turn % len(self.spare)])
                turn += 1

        slots = sorted(self._slots()[i % len(self.resident)] for i in range(self.rows))
        # a sequence's room in the cache is for so many steps, and then they begin again
        for _ in range(1 if self.machine.is_tiny else STEPS // 20):
            self.world.loop(slots, 2 if self.machine.is_tiny else 20, after)
        self.machine.synchronize()
        if placed is not None:
            while not self.device.is_ready(placed):
                pass
            self.device.remove(placed)
        if not is_cuda:
            return [], num_loads
        return [a.elapsed_time(b) for a, b in pairwise(marks)][5:], num_loads

    @property
    def rows(self) -> int:
        return 2 if self.machine.is_tiny else ROWS

    def _slots(self) -> Sequence[int]:
        return [placed.handle for placed in self.resident if isinstance(placed.handle, int)]


def make_loading(machine: Machine) -> Loading:
    config = llama(machine.is_tiny)
    rows = 2 if machine.is_tiny else ROWS
    layers = num_layers_that_fit(machine, config, rows, NUM_RESIDENT + NUM_SPARE)
    shapes = module_shapes(machine.is_tiny)
    dtype = torch.float16 if machine.is_tiny else torch.bfloat16
    spec = BaseSpec(
        id="random",
        digest=Digest("0" * 64),
        architecture="LlamaForCausalLM",
        num_layers=layers,
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_model_len=config["max_position_embeddings"],
        modules=shapes,
        module_paths={},
        layers_path="model.layers",
        eos_token_ids=(),
        dtype=str(dtype).removeprefix("torch."),
        quantization="none",
    )
    modules = zero_modules(shapes, layers, RANK)
    one = layers * RANK * sum(sum(shapes[name]) for name in LAYER_MODULES) * dtype.itemsize
    budget = int(1.3 * one * (NUM_RESIDENT + NUM_SPARE)) + (8 << 20)
    plan = plan_gpu_arena(spec, budget, 16 * layers * 2 * shapes["k_proj"][0] * dtype.itemsize, 1)
    arena = Arena(plan.num_pages, plan.page_num_bytes, is_indexed=True)
    data = torch.empty(plan.num_pages * plan.page_num_bytes, dtype=torch.uint8, device=machine.device)
    device = GpuDevice.in_arena(spec, data, arena.client(Owner.ADAPTERS), plan, budget, dtype)
    packed: list[HostAdapter] = []
    pack_s = []
    num_resident = 2 if machine.is_tiny else NUM_RESIDENT
    for _ in range(num_resident + NUM_SPARE):
        start = time.perf_counter()
        packed.append(device.pack(modules, torch.bfloat16))
        pack_s.append(time.perf_counter() - start)
    resident = [device.place(adapter) for adapter in packed[:num_resident]]
    machine.synchronize()
    for placed in resident:
        if not device.is_ready(placed):
            raise RuntimeError("an adapter's copies are done and the device doesn't know")
    world = make_world(machine, "none", (rows,), 1, num_layers=layers, pool=(device.pool, [0]))
    return Loading(machine, device, world, resident, packed[num_resident:], pack_s)


def cases(machine: Machine) -> Iterator[Case]:
    loading = cache(lambda: make_loading(machine))
    yield Case("loads alone", lambda: _alone(loading()))
    yield Case("loads beside steps", lambda: _beside(loading()))


def _alone(loading: Loading) -> list[Row]:
    machine, num_bytes = loading.machine, loading.num_bytes
    took = [loading.load() for _ in range(2 if machine.is_tiny else 20)]
    rows: list[Row] = [{"what": "packing, on one thread of the host", "num_bytes": num_bytes, "ms": None}]
    rows.append({"what": "loading, nothing else runs", "num_bytes": num_bytes})
    if not machine.is_tiny:
        median = statistics.median(took)
        rows[0] |= {"ms": 1e3 * statistics.median(loading.pack_s)}
        rows[1] |= _speed(machine, num_bytes, median)
    return rows


def _speed(machine: Machine, num_bytes: int, seconds: float) -> Row:
    return {
        "ms": 1e3 * seconds,
        "gb_per_s": num_bytes / seconds / 1e9,
        "share": num_bytes / machine.rates.load_bytes_per_s / seconds,
    }


def _beside(loading: Loading) -> list[Row]:
    rows: list[Row] = []
    if loading.machine.is_timing:
        loading.step_times_ms(with_loads=False)
    for with_loads in (False, True):
        times, num_loads = loading.step_times_ms(with_loads=with_loads)
        what = f"steps of {loading.rows} rows, {'an adapter always on its way' if with_loads else 'no loads'}"
        row: Row = {"what": what, "loads": num_loads}
        if times:
            row |= {"p50_ms": quantile(times, 0.5), "p99_ms": quantile(times, 0.99)}
        if times and loading.landed_s and with_loads:
            row |= {
                "num_bytes": loading.num_bytes,
                **_speed(loading.machine, loading.num_bytes, statistics.median(loading.landed_s)),
            }
        rows.append(row)
    if loading.machine.is_tiny and rows[1]["loads"] < 1:
        raise RuntimeError("no adapter landed beside the steps")
    return rows
