"""Brings adapters from disk to host memory to the device, and says where each is. The step's thread asks; workers do the work.

Reading, verifying, compiling and packing run on worker threads. Everything else here runs on the step's thread, costs microseconds, and
needs no lock: a worker gets an `AdapterRef` and hands back a result through a queue, nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from adapters_store import BlobStore
from loraserve.errors import AdapterCorrupt, InvariantViolation, LoraserveError
from loraserve.memory.loading.adapter_metadata import AdapterMetadata, LoadedAdapter
from loraserve.memory.loading.base_weights import BaseWeights
from loraserve.memory.loading.load import load_adapter
from loraserve.memory.loading.precision import EXACT, Precision
from loraserve.memory.residency.arrivals import Arrivals
from loraserve.memory.residency.device_cache import DeviceCache, EvictedAdapter, Pin
from loraserve.memory.residency.drain import Drain
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.load_queue import LoadQueue, PendingAdapter
from loraserve.memory.residency.loader import Corruption, LoaderPool, LoadHistory
from loraserve.memory.residency.prefetcher import Prefetcher
from loraserve.memory.residency.snapshot import adapter_usage, memory_usage, residency_rows
from loraserve.memory.timings import Stopwatch, timed
from loraserve.types import AdapterRef, AdapterResidency, BaseSpec, Digest, Histogram, Tier
from loraserve_kernels.cpu.lora.layout import PackedAdapter


class Residency(StrEnum):
    """What `Pager.request` answers."""

    RESIDENT = "resident"
    LOADING = "loading"
    WAITING_FOR_SPACE = "waiting_for_space"
    """Loaded, or known in size; everything on the device is in use."""
    FAILED = "failed"
    """`Pager.error` says why."""


class Pager:
    """Owns residency: which adapter is in which tier, who waits, who is pinned.

    On a CPU the device is host memory: an adapter is in one tier at a time, moving between them moves no bytes, and the two budgets add up. On a GPU the host
    cache keeps its copy of what is on the device, as long as it has room for it: an eviction from the device moves nothing, and coming back is one copy.
    An adapter is resident once its copy has landed; until then its place is taken, and everyone else goes on.

    Loaded adapters that wait for the device are held in the host cache; where that has no room they are dropped and read again
    when their turn comes. Beside the two budgets, the host's memory holds at most `num_threads` adapters that workers are making and those on their way to a GPU.

    Invariants (`check`):
        On a CPU no adapter is in both tiers; what the host holds is in the line.
    """

    def __init__(
        self,
        store: BlobStore,
        base: BaseSpec,
        pool: DeviceCache,
        host_cache: HostCache,
        num_threads: int,
        *,
        weights: BaseWeights | None = None,
        precision: Precision = EXACT,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            store: where the blobs are; it stays the caller's to close.
            pool: its device says how adapters are packed.
            num_threads: worker threads, and loads in flight.
            weights: the base's, for adapters whose load takes them.
            precision: what adapters may lose by how they're held.
            wake: called on a worker's thread when there is something for `poll`.
            clock: monotonic seconds.
        """
        self._pool = pool
        self._host = host_cache
        self._clock = clock
        self._loaders = LoaderPool(
            num_threads, lambda ref: load_adapter(store, ref, base, pool.device, weights, precision), on_done=wake
        )
        self._history = LoadHistory(pool.device)
        self._queue = LoadQueue()
        self._drain = Drain(pool)
        self._arrivals = Arrivals(pool)
        self._prefetcher = Prefetcher(pool, host_cache, self._queue, self._loaders, self._history)
        self._operator_pins: set[Digest] = set()
        pool.on_evicted = self._note_evicted
        self.stopwatch = Stopwatch()
        """Times what the step's thread does here; whoever steps takes from it."""

    @property
    def num_loading(self) -> int:
        """Loads in flight."""
        return len(self._loaders)

    @property
    def is_copying(self) -> bool:
        """Whether an adapter is on its way to the device; `poll` finds out when it's there."""
        return self._arrivals.is_any_on_its_way

    @property
    def num_pins(self) -> int:
        """Pins that were given out and not released."""
        return self._pool.num_pins

    @property
    def num_violations(self) -> int:
        """Invariants that were found broken, since the start."""
        return self._pool.num_violations

    @property
    def mean_load_s(self) -> float:
        """What a load took, on average; 0 until there was one."""
        return self._history.mean_load_s

    @property
    def is_admission_paused(self) -> bool:
        """Whether somebody has waited for space long enough: nobody who isn't running may begin, so that what runs gives it back."""
        return self._queue.reserved_for is not None

    def tier(self, digest: Digest) -> Tier:
        """Where a request that comes now finds the adapter: on the device, usable; in the host's memory, or on its way from there; or on disk, read already or not."""
        if self._pool.has_landed(digest) and digest not in self._drain:
            return Tier.DEVICE
        return Tier.HOST if digest in self._pool or digest in self._host else Tier.DISK

    @timed
    def request(self, ref: AdapterRef) -> Residency:
        """Ask for an adapter on the device; starts whatever is needed. Never blocks; ask again whenever you like.

        RESIDENT holds until the next `poll`: pin at once. Whoever still waits asks again within `STALE_AFTER_S`, or else the adapter leaves
        the line (and `poll` says so).
        """
        digest, now = ref.digest, self._clock()
        if digest in self._pool and digest not in self._drain:
            if not self._pool.has_landed(digest):
                return Residency.LOADING
            self._leave_line(digest)
            self._pool.touch(digest, now)
            self._prefetcher.asked(ref)
            return Residency.RESIDENT
        if self._history.is_held_off(digest, now):
            return Residency.FAILED
        is_new = digest not in self._queue
        wait = self._queue.join(ref, now)
        if is_new:
            self._host.hold(digest)
            # a hit in the host cache costs no step, unless it would pass somebody who has waited long enough
            if digest in self._host and self._queue.reserved_for is None and self._place(digest, {}, now):
                return Residency.RESIDENT if self._pool.has_landed(digest) else Residency.LOADING
            if self._loaders.has_free and self._may_load(digest):
                # whatever else could be loaded is being loaded then
                self._load_in_turn(wait)
        size = self._history.size(digest)
        if size is None or digest in self._loaders or self._arrivals.can_admit(size.footprint):
            return Residency.LOADING
        return Residency.WAITING_FOR_SPACE

    @timed
    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        """Adapters that will be asked for, soonest first, are read to the host's memory while loaders have nothing else to do.

        Nobody who asks in earnest pays for it: see `Prefetcher`.
        """
        self._prefetcher.prefetch(refs, self._clock())

    @timed
    def poll(self) -> list[Digest]:
        """Take finished loads and copies in, give the line what place there is; returns the digests that became resident, failed or left the line.

        Called by the step's thread once a step. Costs no more than a look at each waiting adapter.
        """
        now = self._clock()
        changed = self._arrivals.take_landed()
        landed = self._take_results(now, changed)
        for digest in self._queue.stale(now):
            if digest not in self._operator_pins:
                self._leave_line(digest)
                changed.append(digest)
        changed += self._serve_line(landed, now)
        # in the line's order, whichever thread was done first
        for wait in self._queue:
            adapter = landed.pop(wait.ref.digest, None)
            if adapter is not None:
                self._host.put(wait.ref.digest, adapter, now, hold=True)
        for digest in sorted(landed):
            self._host.put(digest, landed[digest], now)
        self._start_loads()
        self._prefetcher.rewarm(now)
        return changed

    @timed
    def pin(self, digest: Digest, *, is_use: bool = True) -> Pin:
        """A pin on an adapter that `request` has just called RESIDENT.

        Args:
            is_use: False of a probe, which nobody waits for: it makes the adapter no more popular.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._pool.pin(digest, self._clock(), is_use=is_use)

    def resident(self, digest: Digest) -> PackedAdapter | int:
        """What a step names a resident adapter by: its packed tensors on a CPU, its slot in the pool on a GPU.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._pool.handle(digest)

    def metadata(self, digest: Digest) -> AdapterMetadata:
        """What is known of a resident adapter beside its weights.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._pool.metadata(digest)

    def packed(self, digest: Digest) -> PackedAdapter:
        """The weights of an adapter that is resident on a CPU.

        Raises:
            InvariantViolation: it isn't.
        """
        handle = self._pool.handle(digest)
        if isinstance(handle, int):
            raise InvariantViolation(f"Adapter {digest} is on a GPU, in slot {handle}: it has no packed tensors.")
        return handle

    def slot(self, digest: Digest) -> int:
        """The slot of an adapter that is resident on a GPU.

        Raises:
            InvariantViolation: it isn't.
        """
        handle = self._pool.handle(digest)
        if not isinstance(handle, int):
            raise InvariantViolation(f"Adapter {digest} is on a CPU: it has no slot.")
        return handle

    def other_resident(self, digest: Digest) -> Digest | None:
        """Some adapter that is on the device, and isn't this one; None if there is none."""
        others = (d for d, r in self._pool.items() if d != digest and r.has_landed and d not in self._drain)
        return next(others, None)

    def error(self, digest: Digest) -> LoraserveError | None:
        """Why the adapter's last load failed: an `AdapterUnavailable`, or `InvalidRequest` of a composition that doesn't add up. None if it didn't."""
        return self._history.error(digest)

    def forget_failure(self, digest: Digest) -> None:
        """The next request for the adapter loads it anew, however its last load ended."""
        self._history.forget_failure(digest)

    def note_corruption(self, error: AdapterCorrupt) -> None:
        """What somebody else's read of an adapter's bytes found is among the next `take_corruptions`."""
        self._history.note_corruption(error)

    def take_corruptions(self) -> list[Corruption]:
        """Return, once, what was found damaged: one entry per load that failed for it."""
        return self._history.take_corruptions()

    def set_operator_pin(self, ref: AdapterRef, is_pinned: bool) -> None:
        """The adapter is brought to the device and never evicted from it, or may be evicted again.

        A pin lasts from one load that goes well on: whose load fails isn't pinned, and `error` says why.
        """
        digest = ref.digest
        self._pool.set_operator_pin(digest, is_pinned)
        if is_pinned:
            self._operator_pins.add(digest)
            self._drain.discard(digest)
            if self.request(ref) is Residency.FAILED:
                self._operator_pins.discard(digest)
        else:
            self._operator_pins.discard(digest)

    def residency(self) -> list[AdapterResidency]:
        """Where each adapter is that is in memory or on its way."""
        return residency_rows(self._pool, self._host, self._queue, self._loaders, self._operator_pins, self._clock())

    def stats(self) -> dict[str, int | float | Histogram]:
        """The adapters' part of EngineStats, by its names."""
        return {
            **adapter_usage(self._pool, self._host),
            **self._history.stats(),
            "adapters_brought_back": self._prefetcher.num_rewarmed,
            "device_load_s": self._arrivals.load_s,
            **memory_usage(self._pool.device.arena_client.arena),
        }

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty when all hold."""
        problems = [*self._pool.check(), *self._host.check(), *self._loaders.check(), *self._queue.check()]
        problems += self._drain.check()
        in_host = {digest for digest, _ in self._host.items()}
        if self._pool.device.is_host_memory and any(digest in self._pool for digest in in_host):
            problems.append("pager: an adapter is on the device and in the host cache")
        num_waiting_in_host = sum(wait.ref.digest in in_host for wait in self._queue)
        if num_waiting_in_host != self._host.num_held:
            problems.append(f"pager: {self._host.num_held} adapters are held for {num_waiting_in_host} that wait")
        if any(wait.ref.digest in self._pool and wait.ref.digest not in self._drain for wait in self._queue):
            problems.append("pager: an adapter waits that is on the device")
        return problems

    def close(self) -> None:
        """Loads in flight have ended, their results dropped; the worker threads are gone."""
        self._loaders.close()

    def _start_loads(self) -> None:
        """The loaders have work, if there is any."""
        if not self._loaders.has_free:
            return
        startable = [wait for wait in self._queue if self._may_load(wait.ref.digest)]
        while startable and self._loaders.has_free:
            first = self._queue.next_to_load(startable, self._loaders.num_by_tenant())
            startable.remove(first)
            self._load_in_turn(first)

    def _load_in_turn(self, wait: PendingAdapter) -> None:
        self._queue.note_load(wait)
        self._loaders.start(wait.ref, wait.tenants)

    def _may_load(self, digest: Digest) -> bool:
        if digest in self._loaders or digest in self._pool or digest in self._host:
            return False
        size = self._history.size(digest)
        # Of known size and without a place: it would only be dropped again, and read again.
        may_pass = self._queue.reserved_for in (None, digest)
        return (
            size is None
            or (may_pass and self._arrivals.can_admit(size.footprint))
            or self._host.can_put(size.host_bytes)
        )

    def _take_results(self, now: float, changed: list[Digest]) -> dict[Digest, LoadedAdapter]:
        """Finished loads that are good; those whose load failed leave the line."""
        landed: dict[Digest, LoadedAdapter] = {}
        for result in self._loaders.take():
            digest = result.ref.digest
            self._history.note(result, now)
            if isinstance(result.outcome, LoraserveError):
                self._operator_pins.discard(digest)
                # who wants it asks again; by itself nobody reads what is damaged or gone
                self._prefetcher.forget(digest)
                self._leave_line(digest)
                changed.append(digest)
                continue
            if self._pool.device.is_host_memory:
                self._pool.load_cost.note(result.outcome.num_bytes, result.elapsed_s)
            landed[digest] = result.outcome
        return landed

    def _leave_line(self, digest: Digest) -> None:
        self._queue.leave(digest)
        self._host.unhold(digest)

    def _serve_line(self, landed: dict[Digest, LoadedAdapter], now: float) -> list[Digest]:
        """Give places in the line's order; returns who is resident by that.

        While the line is closed for one, residents that cover what it takes are drained: they take no new requests and go when their last pin does. So a
        large adapter isn't starved by many small ones, nor a cold one by those that are always in use.
        """
        placed: list[Digest] = []

        def place(digest: Digest) -> bool:
            has_place = self._place(digest, landed, now)
            if has_place and self._pool.has_landed(digest):
                placed.append(digest)
            return has_place

        self._queue.serve(self._is_ready, place, self._can_ever_place, now)
        first = self._queue.reserved_for
        size = None if first is None else self._history.size(first)
        if size is not None:
            self._drain.widen(size.footprint)
            return placed
        returned = [digest for digest in self._drain if digest in self._queue]
        for digest in returned:
            self._leave_line(digest)
        self._drain.end()
        return placed + returned

    def _is_ready(self, digest: Digest) -> bool:
        """Whether it waits for a place alone: not to be read for the first time, nor for its own drain to end."""
        return digest not in self._pool and self._history.size(digest) is not None

    def _can_ever_place(self, digest: Digest) -> bool:
        size = self._history.size(digest)
        return size is not None and self._pool.can_ever_admit(size.footprint)

    def _place(self, digest: Digest, landed: dict[Digest, LoadedAdapter], now: float) -> bool:
        """Whether a waiting adapter that is in memory got a place, from which it may still be a copy away."""
        size = self._history.size(digest)
        if size is None or not self._arrivals.can_admit(size.footprint):
            return False
        adapter = landed.pop(digest, None)
        if adapter is None:
            entry = self._host.take(digest)
            if entry is None:
                return False
            adapter = entry.adapter
        evicted = self._arrivals.admit(digest, adapter, now, is_operator_pinned=digest in self._operator_pins)
        self._queue.leave_with_place(digest)
        self._host.unhold(digest)
        for other in evicted:
            self._note_evicted(other)
        if not self._pool.device.is_host_memory:
            self._host.put(digest, adapter, now)
        return True

    def _note_evicted(self, other: EvictedAdapter) -> None:
        """What has left the device, for an adapter or for KV blocks, is in the host's memory, if that has room."""
        self._drain.discard(other.digest)
        if other.moved is not None:
            self._host.put(other.digest, other.moved, other.last_used_s, hold=other.digest in self._queue)
        else:
            self._host.touch(other.digest, other.last_used_s)
