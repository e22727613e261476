"""Loader threads, and what their loads have taught: sizes, failures, durations, corruption."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from cachetools import LRUCache

from loraserve.background import LOADER_NICENESS, lower_thread_priority
from loraserve.errors import AdapterCorrupt, AdapterUnavailable, LoraserveError
from loraserve.memory.devices.base import AdapterDevice, Footprint
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.memory.timings import Timings
from loraserve.types import AdapterRef, Digest, Histogram, TenantId

logger = logging.getLogger("loraserve.memory")

RETRY_S = 1.0
"""Seconds until a failed load is tried again, doubled with every failure in a row."""
MAX_RETRY_S = 60.0
"""The same, at most."""

_MAX_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The outcome of a load: the adapter, or the reason why there is none."""

    ref: AdapterRef
    outcome: LoadedAdapter | LoraserveError
    elapsed_s: float


class LoaderPool:
    """Loads in flight, by digest.

    One thread uses it: a loader gets an `AdapterRef` and hands back a result through a queue,
    nothing more.

    Invariants (`check`):
        At most `num_threads` loads are in flight.
    """

    def __init__(
        self,
        num_threads: int,
        load: Callable[[AdapterRef], LoadedAdapter],
        *,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the loaders' threads.

        Args:
            num_threads: threads, and loads in flight.
            load: makes one adapter, on a loader's thread; it touches no shared state.
            on_done: called on a loader's thread when there is something to `take`.
        """
        self.num_threads = num_threads
        self._load = load
        self._on_done = on_done
        self._executor = ThreadPoolExecutor(
            num_threads,
            thread_name_prefix="adapter-loader",
            initializer=lower_thread_priority,
            initargs=(LOADER_NICENESS,),
        )
        self._results: SimpleQueue[LoadResult] = SimpleQueue()
        # with the tenants that each was started for
        self._in_flight: dict[Digest, frozenset[TenantId]] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._in_flight

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def has_free(self) -> bool:
        """Whether one more load may be started."""
        return len(self._in_flight) < self.num_threads

    def num_by_tenant(self) -> Counter[TenantId]:
        """Count the loads in flight of each tenant."""
        return Counter(tenant for tenants in self._in_flight.values() for tenant in tenants)

    def start(self, ref: AdapterRef, tenants: Iterable[TenantId]) -> None:
        """Start the adapter's load for these tenants.

        It isn't in flight, and `has_free` is true.
        """
        self._in_flight[ref.digest] = frozenset(tenants)
        self._executor.submit(self._run, ref)

    def take(self) -> list[LoadResult]:
        """Take the loads that have ended since the last call, in the order of their ends.

        They are no longer in flight.
        """
        results: list[LoadResult] = []
        # nothing else takes any
        while not self._results.empty():
            result = self._results.get_nowait()
            self._in_flight.pop(result.ref.digest, None)
            results.append(result)
        return results

    def check(self) -> list[str]:
        """List the broken invariants, in words; empty when all hold."""
        if len(self._in_flight) > self.num_threads:
            return [f"loaders: {len(self._in_flight)} loads are in flight on {self.num_threads} threads"]
        return []

    def close(self) -> None:
        """Wait for the loads in flight, drop their results and end the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, ref: AdapterRef) -> None:
        """Load one adapter on a loader's thread."""
        started = time.perf_counter()
        outcome: LoadedAdapter | LoraserveError
        try:
            outcome = self._load(ref)
        except LoraserveError as error:
            outcome = error
        except Exception as error:
            logger.exception("loading adapter %s failed", ref.digest)
            outcome = AdapterUnavailable(f"The adapter can't be loaded: {type(error).__name__}.")
        self._results.put(LoadResult(ref, outcome, time.perf_counter() - started))
        self._on_done()


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """Memory that an adapter takes on the device and in the host cache."""

    footprint: Footprint
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Corruption:
    """A blob that was found damaged, or gone, when a version's bytes were read.

    Attributes:
        digest: the version's.
        blob: the blob's.
    """

    digest: Digest
    blob: Digest


@dataclass(frozen=True, slots=True)
class _Failure:
    error: LoraserveError
    retry_at_s: float
    num_failures: int


class LoadHistory:
    """The outcomes of loads, of the last `_MAX_REMEMBERED` adapters. One thread at a time."""

    def __init__(self, device: AdapterDevice) -> None:
        """Make a record of sizes, with no adapter yet.

        Args:
            device: computes what an adapter takes of it.
        """
        self._device = device
        self._failures: LRUCache[Digest, _Failure] = LRUCache(_MAX_REMEMBERED)
        self._sizes: LRUCache[Digest, AdapterSize] = LRUCache(_MAX_REMEMBERED)
        self._corruptions: list[Corruption] = []
        self._num_loads = 0
        self._num_load_failures = 0
        self._load_s = 0.0
        self._good_load_s = 0.0
        self._host_load_s = Timings()

    @property
    def mean_load_s(self) -> float:
        """Seconds of a successful load, on average; 0 until there was one."""
        return self._good_load_s / self._num_loads if self._num_loads else 0.0

    def note(self, result: LoadResult, now_s: float) -> None:
        """Note a load's outcome: the adapter's size, or a failure that holds off the next try."""
        digest, outcome = result.ref.digest, result.outcome
        self._load_s += result.elapsed_s
        if isinstance(outcome, LoraserveError):
            self._num_load_failures += 1
            if isinstance(outcome, AdapterCorrupt):
                self.note_corruption(outcome)
            self._note_failure(digest, outcome, now_s)
            return
        self._num_loads += 1
        self._good_load_s += result.elapsed_s
        self._host_load_s.add(result.elapsed_s)
        self._failures.pop(digest, None)
        self._sizes[digest] = AdapterSize(self._device.footprint_of(outcome.host), outcome.num_bytes)

    def size(self, digest: Digest) -> AdapterSize | None:
        """Look up the adapter's size; None until it was loaded once."""
        return self._sizes.get(digest)

    def error(self, digest: Digest) -> LoraserveError | None:
        """Look up why the adapter's last load failed; None if it didn't."""
        failure = self._failures.get(digest)
        return failure.error if failure is not None else None

    def is_held_off(self, digest: Digest, now_s: float) -> bool:
        """Check whether the last load failed so recently that it isn't tried again yet."""
        failure = self._failures.get(digest)
        return failure is not None and now_s < failure.retry_at_s

    def forget_failure(self, digest: Digest) -> None:
        """Let the adapter be loaded at once, however its last load ended."""
        self._failures.pop(digest, None)

    def note_corruption(self, error: AdapterCorrupt) -> None:
        """Add the blob that the error names, if it names one, to the next `take_corruptions`."""
        if error.digest is not None and error.blob is not None:
            self._corruptions.append(Corruption(Digest(error.digest), Digest(error.blob)))

    def take_corruptions(self) -> list[Corruption]:
        """Take, once, the blobs found damaged or gone, one per load that failed for it."""
        corruptions, self._corruptions = self._corruptions, []
        return corruptions

    def stats(self) -> dict[str, int | float | Histogram]:
        """Collect the loads' fields of EngineStats."""
        return {
            "adapter_loads": self._num_loads,
            "adapter_load_failures": self._num_load_failures,
            "adapter_load_s": self._load_s,
            "host_load_s": self._host_load_s.histogram,
        }

    def _note_failure(self, digest: Digest, error: LoraserveError, now_s: float) -> None:
        before = self._failures.get(digest)
        num_failures = 1 + (before.num_failures if before is not None else 0)
        delay_s = min(RETRY_S * 2 ** min(num_failures - 1, 16), MAX_RETRY_S)
        self._failures[digest] = _Failure(error, now_s + delay_s, num_failures)
