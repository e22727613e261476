"""The machine that a worker runs on: its device, its measured rates, and its clock.

In a dry run the clock calls what it is given once and measures nothing.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.limits import Rates

REPLAYS = 30
PACKAGES = ("torch", "triton", "numpy", "transformers", "peft")
# a dry run's shares of a limit would mean nothing: they are left out, and these only keep the
# arithmetic going
_NO_RATES = Rates(1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one call among those that were captured together.

    Attributes:
        us: the median of the replays.
        low_us: the tenth part of the replays was faster.
        host_us: the same calls launched one by one, as the host sees them.
    """

    us: float
    low_us: float
    host_us: float


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


@dataclass(slots=True)
class Machine:
    """A device and what is known of it.

    Attributes:
        is_tiny: a dry run: toy sizes, in Triton's interpreter, on the CPU.
        rates: measured when the worker starts; meaningless in a dry run.
        cache_bytes: of the device's last cache.
        peers: the folder with other projects' kernels, if one was given.
        is_warming: other processes use the device too, so nothing is timed: kernels are compiled,
            for those that will be.
        deadline: of the part that runs, in seconds of time.time().
        results: the folder for files that a part writes beside its table.
    """

    device: torch.device
    is_tiny: bool
    rates: Rates
    cache_bytes: int
    peers: Path | None
    is_warming: bool = False
    deadline: float = float("inf")
    results: Path | None = None

    @staticmethod
    def found(peers: Path | None, *, is_alone: bool, is_warming: bool, results: Path | None = None) -> Machine:
        """The first CUDA device; without one, a dry run's.

        Its rates are measured now if this process has it alone.
        """
        if not torch.cuda.is_available():
            return Machine(torch.device("cpu"), True, _NO_RATES, 1 << 16, peers, results=results)
        device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        machine = Machine(device, False, _NO_RATES, int(properties.L2_cache_size), peers, is_warming, results=results)
        if is_alone:
            machine.rates = machine._measure()
            machine.free()
        return machine

    @property
    def is_timing(self) -> bool:
        return not (self.is_tiny or self.is_warming)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return torch.bfloat16, torch.float16

    @property
    def has_fp8(self) -> bool:
        return self.is_tiny or torch.cuda.get_device_capability(self.device) >= (8, 9)

    @property
    def is_late(self) -> bool:
        return time.time() >= self.deadline

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(std=std)

    def synchronize(self) -> None:
        if not self.is_tiny:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Memory that nothing refers to any more is the device's again.

        That of steps is held by cycles (their graphs know what they call), and no capture collects
        them.
        """
        gc.collect()
        if not self.is_tiny:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def num_copies(self, num_bytes: int, most: int = 1024) -> int:
        """How many copies of so many bytes are read in turn until none is left in the cache when
        its turn comes again; 3 at least.
        """
        return 2 if not self.is_timing else min(most, max(3, -(-6 * self.cache_bytes // max(1, num_bytes))))

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Call `work` once, then return what repeats it: a graph's replay,
        or in a dry run the work itself.
        """
        work()
        if self.is_tiny:
            return work
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def time(self, calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> Timing | None:
        """Time the calls as one CUDA graph; None in a dry run or while warming,
        which call the first one once.

        They are run outside the graph before, so that kernels are compiled and workspaces there.
        """
        if not self.is_timing:
            calls[0]()
            return None
        host_s = self._host_s(calls)
        return self._timing(self.capture(lambda: _call_all(calls)), len(calls), replays, host_s)

    def time_eagerly(self, calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> Timing | None:
        """The same without a graph: for what can't be captured."""
        if not self.is_timing:
            calls[0]()
            return None
        host_s = self._host_s(calls)
        return self._timing(lambda: _call_all(calls), len(calls), replays, host_s)

    def time_replays(self, replay: Callable[[], object], replays: int = REPLAYS) -> Timing | None:
        """Time what is a graph's replay already."""
        replay()
        return self._timing(replay, 1, replays, 0.0) if self.is_timing else None

    def _host_s(self, calls: Sequence[Callable[[], object]]) -> float:
        _call_all(calls)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        _call_all(calls)
        host_s = time.perf_counter() - start
        torch.cuda.synchronize(self.device)
        return host_s

    def _timing(self, run: Callable[[], object], num_calls: int, replays: int, host_s: float) -> Timing:
        spans = []
        for _ in range(replays):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            events[0].record()
            run()
            events[1].record()
            events[1].synchronize()
            spans.append(events[0].elapsed_time(events[1]) * 1e3 / num_calls)
        spans.sort()
        return Timing(statistics.median(spans), spans[len(spans) // 10], host_s / num_calls * 1e6)

    def _measure(self) -> Rates:
        size = min(2 << 30, int(torch.cuda.mem_get_info(self.device)[0] // 4))
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy_us = self._least_us(lambda: target.copy_(source))
        pinned = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
        load_us = self._least_us(lambda: target[: pinned.numel()].copy_(pinned, non_blocking=True))
        a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        product = torch.empty_like(a)
        product_us = self._least_us(lambda: torch.mm(a, b, out=product))
        return Rates(2e6 * size / copy_us, 2e6 * 8192**3 / product_us, 1e6 * pinned.numel() / load_us)

    def _least_us(self, run: Callable[[], object]) -> float:
        """Return the best of many runs: a limit that was measured in a slow moment is no limit."""
        return min(self._timing(run, 1, 1, 0.0).us for _ in range(20))

    def facts(self) -> dict[str, Any]:
        """Return the machine's facts that a result states; nothing that names it."""
        versions = {}
        for name in PACKAGES:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        facts: dict[str, Any] = {"python": platform.python_version(), "versions": versions, "is_dry_run": self.is_tiny}
        if self.is_tiny:
            return {**facts, "device": "none: Triton's interpreter on a CPU"}
        properties = torch.cuda.get_device_properties(self.device)
        found = {
            **facts,
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cache_bytes": self.cache_bytes,
            "cuda": torch.version.cuda,
        }
        if self.rates is _NO_RATES:
            return found
        return {
            **found,
            "copy_bytes_per_s": self.rates.copy_bytes_per_s,
            "operations_per_s": self.rates.operations_per_s,
            "load_bytes_per_s": self.rates.load_bytes_per_s,
        }
