"""Residency of adapters: bring them from the store to the device, and report where each is.

The way of an adapter's bytes, each step in its module::

    HTTP → `registry.publishing`       check, store the blobs, certify, record the version
    store → `loading.load`             on a loader's thread: read, verify the digest, compile,
                                       lower, pack
          → `residency.host_cache`     wait in host memory, held while requested
          → `residency.device_cache`   take memory on the device, evict what is worth less
          → `devices`                  a CPU uses the packed tensors as they are; a GPU copies
                                       them to pages of its pool
          → `engine.execution.batch`   name the adapter of each row by its handle
          → `loraserve_kernels.ops`    apply_lora: shrink, expand

The step's thread requests and the loaders work: a loader gets an `AdapterRef` and hands back a
result through a queue, nothing more. All else runs on the step's thread, costs microseconds, and
needs no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from adapters_store import BlobStore
from loraserve.adapters.load_memory import Reservation
from loraserve.errors import AdapterCorrupt, AdapterUnavailable, LoraserveError
from loraserve.limits import LIMITS
from loraserve.memory.devices.base import AdapterHandle
from loraserve.memory.loading.adapter_metadata import AdapterMetadata, LoadedAdapter
from loraserve.memory.loading.base_weights import BaseWeights
from loraserve.memory.loading.bounded_loads import BoundedLoads
from loraserve.memory.loading.load import load_adapter
from loraserve.memory.loading.precision import EXACT, Precision
from loraserve.memory.residency.device_cache import DeviceCache, Pin
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.load_queue import LoadQueue, PendingAdapter
from loraserve.memory.residency.loader import Corruption, LoaderPool, LoadHistory
from loraserve.memory.residency.prefetcher import Prefetcher
from loraserve.memory.residency.resident_adapter import AdapterState, EvictedAdapter
from loraserve.memory.residency.snapshot import adapter_usage, memory_usage, residency_rows
from loraserve.memory.timings import Stopwatch, timed
from loraserve.types import AdapterRef, AdapterResidency, BaseSpec, Digest, Histogram, Residency, Tier


class Pager:
    """The tiers of all adapters: which each is in, which wait, which are pinned.

    On a CPU the device is host memory: an adapter is in one tier at a time, a move between them
    copies nothing, and the two budgets add up. On a GPU the host cache keeps its copy of a resident
    adapter for as long as it has room: an eviction from the device moves nothing, and coming back
    is one copy. An adapter is resident once its copy has landed; until then its memory is taken,
    and steps continue without it.

    Loaded adapters that wait for the device are held in the host cache; where that has no room they
    are dropped, and read again when their turn comes. Beyond the two budgets, host memory holds
    what the loads in flight take, which has a budget of its own, and the adapters on their way to a
    GPU.

    Invariants (`check`):
        On a CPU no adapter is in both tiers; what the host cache holds is in the queue.

    Attributes:
        stopwatch: time that the step's thread spends here.
    """

    def __init__(
        self,
        store: BlobStore,
        base: BaseSpec,
        pool: DeviceCache,
        host_cache: HostCache,
        num_threads: int,
        *,
        load_bytes: int = LIMITS.max_load_bytes,
        weights: BaseWeights | None = None,
        precision: Precision = EXACT,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a pager with nothing loaded.

        Args:
            store: the blobs; the caller closes it.
            pool: adapters on the device, which decides how they are packed.
            num_threads: loader threads, and loads in flight.
            load_bytes: host memory of the loads in flight together; one that needs more runs alone.
            weights: the base's, for adapters whose load reads them.
            precision: what adapters may lose by how they are held.
            wake: called on a loader's thread when there is something for `poll`.
            clock: monotonic seconds.
        """
        self._pool = pool
        self._host = host_cache
        self._clock = clock

        def load(ref: AdapterRef, reservation: Reservation) -> LoadedAdapter:
            return load_adapter(store, ref, base, pool.device, weights, precision, reservation.take)

        self._loads = BoundedLoads(store, load, load_bytes)
        self._loaders = LoaderPool(num_threads, self._loads.load, on_done=wake)
        self._history = LoadHistory(pool.device)
        self._queue = LoadQueue()
        self._prefetcher = Prefetcher(pool, host_cache, self._queue, self._loaders, self._history)
        self._operator_pins: set[Digest] = set()
        # to be freed once nothing uses them
        self._discarded: set[Digest] = set()
        pool.on_evicted = self._note_evicted
        self.stopwatch = Stopwatch()

    @property
    def num_loading(self) -> int:
        """Loads in flight."""
        return len(self._loaders)

    @property
    def is_copying(self) -> bool:
        """Whether an adapter is on its way to the device; `poll` finds out when it has landed."""
        return self._pool.num_arriving > 0

    @property
    def num_pins(self) -> int:
        """Pins that were given out and not released."""
        return self._pool.num_pins

    @property
    def num_violations(self) -> int:
        """Broken invariants since the start."""
        return self._pool.num_violations

    @property
    def mean_load_s(self) -> float:
        """Seconds of a successful load, on average; 0 until there was one."""
        return self._history.mean_load_s

    @property
    def is_admission_paused(self) -> bool:
        """Whether an adapter has waited so long that no new request may begin before it."""
        return self._queue.reserved_for is not None

    def tier(self, digest: Digest) -> Tier:
        """Find the tier in which a new request finds the adapter.

        It is usable on the device, in host memory or on its way from there, or on disk.
        """
        if self._pool.takes_requests(digest):
            return Tier.DEVICE
        return Tier.HOST if digest in self._pool or digest in self._host else Tier.DISK

    @timed
    def request(self, ref: AdapterRef) -> Residency:
        """Request an adapter on the device and start whatever is needed.

        Never block; a request repeats the call at will.

        RESIDENT holds until the next `poll`: pin at once. A waiting request repeats the call within
        `STALE_AFTER_S`, or the adapter leaves the queue (and `poll` returns it).
        """
        digest, now = ref.digest, self._clock()
        self._discarded.discard(digest)
        if self._pool.state(digest) is AdapterState.ARRIVING:
            return Residency.LOADING
        if self._pool.takes_requests(digest):
            self._leave_queue(digest)
            self._pool.touch(digest, now)
            self._prefetcher.note_request(ref)
            return Residency.RESIDENT
        if self._history.is_held_off(digest, now):
            return Residency.FAILED
        is_new = digest not in self._queue
        pending = self._queue.join(ref, now)
        if is_new:
            self._host.hold(digest)
            # a hit in the host cache costs no step; none passes an adapter that has waited long
            if digest in self._host and self._queue.reserved_for is None and self._place(digest, {}, now):
                return Residency.RESIDENT if self._pool.has_landed(digest) else Residency.LOADING
            if self._loaders.has_free and self._may_load(digest):
                # all else that could be loaded is being loaded already
                self._start_load(pending)
        size = self._history.size(digest)
        if size is None or digest in self._loaders or self._pool.can_admit(size.footprint):
            return Residency.LOADING
        return Residency.WAITING_FOR_SPACE

    @timed
    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        """Read adapters that will be requested, soonest first, while loaders are idle."""
        self._prefetcher.prefetch(refs, self._clock())

    @timed
    def poll(self) -> list[Digest]:
        """Take in finished loads and copies and give what room there is to the queue.

        The step's thread calls it once a step. It costs no more than a look at each waiting
        adapter.

        Returns:
            The digests that became resident, failed or left the queue.
        """
        now = self._clock()
        changed = self._pool.take_landed()
        loaded = self._take_results(now, changed)
        for digest in self._queue.stale(now):
            if digest not in self._operator_pins:
                self._leave_queue(digest)
                changed.append(digest)
        changed += self._serve_queue(loaded, now)
        # in the queue's order, whichever thread was done first
        for pending in self._queue:
            adapter = loaded.pop(pending.ref.digest, None)
            if adapter is not None:
                self._host.put(pending.ref.digest, adapter, now, hold=True)
        for digest in sorted(loaded):
            self._host.put(digest, loaded[digest], now)
        self._start_loads()
        self._prefetcher.rewarm(now)
        if self._discarded:
            self._free_discarded()
        return changed

    @timed
    def pin(self, digest: Digest, *, is_use: bool = True) -> Pin:
        """Pin an adapter that `request` has just called RESIDENT.

        Args:
            is_use: False for a probe: it makes the adapter no more popular.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._pool.pin(digest, self._clock(), is_use=is_use)

    def handle(self, digest: Digest) -> AdapterHandle:
        """Look up the handle by which a step names a resident adapter.

        On a CPU these are its packed tensors, on a GPU its slot in the pool.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._pool.handle(digest)

    def metadata(self, digest: Digest) -> AdapterMetadata:
        """Look up what is known of a resident adapter apart from its weights.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._pool.metadata(digest)

    def memory_share(self, digest: Digest) -> float:
        """Compute the share of the device's memory an adapter takes; 0 before its first load."""
        size, arena = self._history.size(digest), self._pool.device.arena_client.arena
        return 0.0 if size is None else size.footprint.num_bytes / max(1, arena.num_pages * arena.page_num_bytes)

    def other_resident(self, digest: Digest) -> Digest | None:
        """Find another adapter that takes requests on the device; None if there is none."""
        return next((d for d, _ in self._pool.items() if d != digest and self._pool.takes_requests(d)), None)

    def error(self, digest: Digest) -> LoraserveError | None:
        """Look up why the adapter's last load failed; None if it didn't.

        It is an `AdapterUnavailable`, or the `InvalidRequest` of an invalid composition.
        """
        return self._history.error(digest)

    def forget_failure(self, digest: Digest) -> None:
        """Let the next request load the adapter again, however its last load ended."""
        self._history.forget_failure(digest)

    def note_corruption(self, error: AdapterCorrupt) -> None:
        """Add what another read of an adapter's bytes found to the next `take_corruptions`."""
        self._history.note_corruption(error)

    def take_corruptions(self) -> list[Corruption]:
        """Take, once, the blobs found damaged or gone, one per load that failed for it."""
        return self._history.take_corruptions()

    def set_operator_pin(self, ref: AdapterRef, is_pinned: bool) -> None:
        """Bring the adapter to the device and never evict it, or let it be evicted again.

        A pin lasts from a successful load on: an adapter whose load fails isn't pinned, and `error`
        has the reason.
        """
        digest = ref.digest
        self._pool.set_operator_pin(digest, is_pinned)
        if is_pinned:
            self._operator_pins.add(digest)
            if self.request(ref) is Residency.FAILED:
                self._operator_pins.discard(digest)
        else:
            self._operator_pins.discard(digest)

    def discard(self, digest: Digest) -> None:
        """Free an ephemeral adapter's memory in every tier, and that of sums with it.

        One in use is freed after its last pin's release. No-op where requests have asked for a
        stored version of the same bytes, and undone by the next request for it.
        """
        if not self._prefetcher.is_stored(digest):
            self._discarded.update((digest, *self._prefetcher.sums_of(digest)))
            self._free_discarded()

    def residency(self, only: Collection[Digest] | None = None) -> list[AdapterResidency]:
        """List where each adapter is that is in memory or on its way, or each of `only`."""
        return residency_rows(
            self._pool, self._host, self._queue, self._loaders, self._operator_pins, self._clock(), only
        )

    def stats(self) -> dict[str, int | float | Histogram]:
        """Collect the adapters' fields of EngineStats."""
        return {
            **adapter_usage(self._pool, self._host),
            "load_bytes": self._loads.memory.num_bytes,
            "load_budget_bytes": self._loads.memory.budget_bytes,
            **self._history.stats(),
            "adapters_brought_back": self._prefetcher.num_rewarmed,
            "device_load_s": self._pool.load_s,
            **memory_usage(self._pool.device.arena_client.arena),
        }

    def check(self) -> list[str]:
        """List the broken invariants, in words; empty when all hold."""
        problems = [*self._pool.check(), *self._host.check(), *self._loads.check(), *self._queue.check()]
        problems += self._loaders.check()
        in_host = {digest for digest, _ in self._host.items()}
        if self._pool.device.is_host_memory and any(digest in self._pool for digest in in_host):
            problems.append("pager: an adapter is on the device and in the host cache")
        num_waiting_in_host = sum(pending.ref.digest in in_host for pending in self._queue)
        if num_waiting_in_host != self._host.num_held:
            problems.append(f"pager: {self._host.num_held} host copies are held for {num_waiting_in_host} queued loads")
        states = (self._pool.state(pending.ref.digest) for pending in self._queue)
        if any(state not in (None, AdapterState.DRAINING) for state in states):
            problems.append("pager: an adapter on the device is queued for a load")
        return problems

    def close(self) -> None:
        """Wait for the loads in flight, drop their results and end the loader threads."""
        self._loads.close()
        self._loaders.close()

    def _free_discarded(self) -> None:
        self._discarded.difference_update(self._operator_pins)
        for digest in list(self._discarded):
            self._prefetcher.forget(digest)
            self._leave_queue(digest)
            self._host.take(digest)
            # what a loader reads arrives later
            if digest not in self._loaders and self._pool.discard(digest):
                self._discarded.remove(digest)

    def _start_loads(self) -> None:
        """Give free loaders the adapters that may be loaded, tenants in turn."""
        if not self._loaders.has_free:
            return
        startable = [pending for pending in self._queue if self._may_load(pending.ref.digest)]
        while startable and self._loaders.has_free:
            first = self._queue.next_to_load(startable, self._loaders.num_by_tenant())
            startable.remove(first)
            self._start_load(first)

    def _start_load(self, pending: PendingAdapter) -> None:
        self._queue.note_load(pending)
        self._loaders.start(pending.ref, pending.tenants)

    def _may_load(self, digest: Digest) -> bool:
        if digest in self._loaders or digest in self._pool or digest in self._host:
            return False
        size = self._history.size(digest)
        # an adapter of known size without room anywhere would only be dropped, and read again
        may_pass = self._queue.reserved_for in (None, digest)
        return (
            size is None or (may_pass and self._pool.can_admit(size.footprint)) or self._host.can_put(size.host_bytes)
        )

    def _take_results(self, now: float, changed: list[Digest]) -> dict[Digest, LoadedAdapter]:
        """Take the adapters of successful loads; remove those of failed ones from the queue."""
        loaded: dict[Digest, LoadedAdapter] = {}
        for result in self._loaders.take():
            digest = result.ref.digest
            self._loads.taken(digest)
            is_unavailable = isinstance(result.outcome, AdapterUnavailable)
            if is_unavailable and self._queue.may_load_again(result.ref):
                continue
            self._history.note(result, now)
            if isinstance(result.outcome, LoraserveError):
                self._operator_pins.discard(digest)
                # only another request reads again what is damaged or gone
                self._prefetcher.forget(digest)
                self._leave_queue(digest)
                changed.append(digest)
                continue
            if self._pool.device.is_host_memory:
                self._pool.load_cost.note(result.outcome.num_bytes, result.elapsed_s)
            loaded[digest] = result.outcome
        return loaded

    def _leave_queue(self, digest: Digest) -> None:
        self._queue.leave(digest)
        self._host.unhold(digest)

    def _serve_queue(self, loaded: dict[Digest, LoadedAdapter], now: float) -> list[Digest]:
        """Place adapters in the queue's order, and return those that are resident now.

        While the device is reserved for one adapter, as many residents as cover its footprint are
        drained: they take no new requests and go when their last pin does. Thus many small adapters
        can't starve a large one, nor adapters in constant use a cold one.
        """
        placed: list[Digest] = []

        def place(digest: Digest) -> bool:
            is_placed = self._place(digest, loaded, now)
            if is_placed and self._pool.has_landed(digest):
                placed.append(digest)
            return is_placed

        self._queue.serve(self._is_placeable, place, self._can_ever_place, now)
        first = self._queue.reserved_for
        size = None if first is None else self._history.size(first)
        if size is not None:
            self._pool.drain_for(size.footprint)
            return placed
        reopened = [digest for digest in self._pool.draining if digest in self._queue]
        for digest in reopened:
            self._leave_queue(digest)
        self._pool.end_drain()
        return placed + reopened

    def _is_placeable(self, digest: Digest) -> bool:
        """Check whether the adapter lacks only room: it was read once, and isn't draining."""
        return digest not in self._pool and self._history.size(digest) is not None

    def _can_ever_place(self, digest: Digest) -> bool:
        size = self._history.size(digest)
        return size is not None and self._pool.can_ever_admit(size.footprint)

    def _place(self, digest: Digest, loaded: dict[Digest, LoadedAdapter], now: float) -> bool:
        """Admit a waiting adapter to the device if it is in memory and there is room.

        Return whether it was admitted.
        """
        size = self._history.size(digest)
        if size is None or not self._pool.can_admit(size.footprint):
            return False
        adapter = loaded.pop(digest, None)
        if adapter is None:
            entry = self._host.take(digest)
            if entry is None:
                return False
            adapter = entry.adapter
        is_pinned = digest in self._operator_pins
        evicted = self._pool.admit(digest, adapter, now, is_operator_pinned=is_pinned, is_protected=True)
        self._queue.leave_placed(digest)
        self._host.unhold(digest)
        for other in evicted:
            self._note_evicted(other)
        if not self._pool.device.is_host_memory:
            self._host.put(digest, adapter, now)
        return True

    def _note_evicted(self, other: EvictedAdapter) -> None:
        """Keep an evicted adapter in host memory, if that has room."""
        if other.moved is not None:
            self._host.put(other.digest, other.moved, other.last_used_s, hold=other.digest in self._queue)
        else:
            self._host.touch(other.digest, other.last_used_s)
