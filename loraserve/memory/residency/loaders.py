"""Worker threads that load adapters, a bounded number at a time. What they made lies in a queue until the step's thread takes it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from loraserve.background import LOADER_NICENESS, lower_thread_priority
from loraserve.errors import AdapterUnavailable, LoraserveError
from loraserve.memory.loading.adapter_metadata import Loaded
from loraserve.types import AdapterRef, Digest, TenantId

logger = logging.getLogger("loraserve.memory")


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended: with the adapter, or with the reason why there is none."""

    ref: AdapterRef
    outcome: Loaded | LoraserveError
    elapsed_s: float


class Loaders:
    """Loads in flight, by digest. Used by one thread: a worker gets an `AdapterRef` and hands back a result through a queue, nothing more.

    Invariants (`check`):
        At most `num_threads` loads are in flight.
    """

    def __init__(
        self,
        num_threads: int,
        load: Callable[[AdapterRef], Loaded],
        *,
        when_done: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            num_threads: worker threads, and loads in flight.
            load: makes one adapter, on a worker thread; it touches no shared state.
            when_done: called on a worker's thread when `take` has something to give.
        """
        self.num_threads = num_threads
        self._load = load
        self._when_done = when_done
        self._executor = ThreadPoolExecutor(
            num_threads,
            thread_name_prefix="adapter-loader",
            initializer=lower_thread_priority,
            initargs=(LOADER_NICENESS,),
        )
        self._results: SimpleQueue[LoadResult] = SimpleQueue()
        # with whom each was started for
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
        """Loads in flight for each tenant."""
        return Counter(tenant for tenants in self._in_flight.values() for tenant in tenants)

    def start(self, ref: AdapterRef, tenants: Iterable[TenantId]) -> None:
        """The adapter's load is in flight, for these tenants. It wasn't, and `has_free` is true."""
        self._in_flight[ref.digest] = frozenset(tenants)
        self._executor.submit(self._run, ref)

    def take(self) -> list[LoadResult]:
        """The loads that have ended since the last call, the first to end first: they are no longer in flight."""
        results: list[LoadResult] = []
        while True:
            try:
                result = self._results.get_nowait()
            except Empty:
                return results
            self._in_flight.pop(result.ref.digest, None)
            results.append(result)

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty when all hold."""
        if len(self._in_flight) > self.num_threads:
            return [f"loaders: {len(self._in_flight)} loads are in flight on {self.num_threads} threads"]
        return []

    def close(self) -> None:
        """Loads in flight have ended, their results dropped; the worker threads are gone."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, ref: AdapterRef) -> None:
        """On a worker thread."""
        started = time.perf_counter()
        outcome: Loaded | LoraserveError
        try:
            outcome = self._load(ref)
        except LoraserveError as error:
            outcome = error
        except Exception as error:
            logger.exception("loading adapter %s failed", ref.digest)
            outcome = AdapterUnavailable(f"The adapter can't be loaded: {type(error).__name__}.")
        self._results.put(LoadResult(ref, outcome, time.perf_counter() - started))
        self._when_done()
