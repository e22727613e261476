"""Brings adapters from disk to host memory to the device, and says where each is. The step's thread asks; workers do the work.

Reading, verifying, compiling and packing run on worker threads. Everything else here runs on the step's thread, costs microseconds, and
needs no lock: a worker gets an `AdapterRef` and hands back a result through a queue, nothing more.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from adapters_store import BlobStore
from loraserve.errors import AdapterCorrupt, InvariantViolation, LoraserveError
from loraserve.memory.adapter_pool import AdapterPool, Evicted, Pin
from loraserve.memory.arena import Tenure
from loraserve.memory.base_weights import BaseWeights
from loraserve.memory.facts import AdapterFacts, Loaded
from loraserve.memory.favourites import Favourites
from loraserve.memory.host_cache import HostCache
from loraserve.memory.load import load_adapter
from loraserve.memory.load_history import Damage, LoadHistory
from loraserve.memory.loaders import Loaders
from loraserve.memory.precision import EXACT, Precision
from loraserve.memory.timings import Stopwatch, Timings, timed
from loraserve.memory.turns import Turns
from loraserve.memory.usage import memory_usage
from loraserve.types import AdapterRef, AdapterResidency, BaseSpec, Digest, Histogram, TenantId, Tier
from loraserve_kernels.layout import PackedAdapter

INTEREST_S = 5.0
"""A waiting adapter that nobody has asked for in this time leaves the line."""
PATIENCE_S = 1.0
"""While the first in line has waited less than this for space, later ones that fit may pass it; then room is made for it."""


class Residency(StrEnum):
    """What `Pager.request` answers."""

    RESIDENT = "resident"
    LOADING = "loading"
    WAITING_FOR_SPACE = "waiting_for_space"
    """Loaded, or known in size; everything on the device is in use."""
    FAILED = "failed"
    """`Pager.error` says why."""


@dataclass(slots=True)
class _Wait:
    ref: AdapterRef
    since_s: float
    asked_s: float
    tenants: set[TenantId] = field(default_factory=set)
    """Who has asked for it."""


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
        pool: AdapterPool,
        host_cache: HostCache,
        num_threads: int,
        *,
        weights: BaseWeights | None = None,
        precision: Precision = EXACT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            store: where the blobs are; it stays the caller's to close.
            pool: its device says how adapters are packed.
            num_threads: worker threads, and loads in flight.
            weights: the base's, for adapters whose load takes them.
            precision: what adapters may lose by how they're held.
            clock: monotonic seconds.
        """
        self._pool = pool
        self._host = host_cache
        self._clock = clock
        self._loaders = Loaders(
            num_threads, lambda ref: load_adapter(store, ref, base, pool.device, weights, precision)
        )
        self._history = LoadHistory(pool.device)
        # in the order they came: the line for the device
        self._waiting: OrderedDict[Digest, _Wait] = OrderedDict()
        # tenants have their turns at the loaders, and at places on the device
        self._load_turns = Turns()
        self._place_turns = Turns()
        self._operator_pins: set[Digest] = set()
        # residents that take no new requests, so that the first in line gets their place
        self._draining: set[Digest] = set()
        # who has waited long enough: nobody else passes
        self._line_closed_for: Digest | None = None
        # admitted since the last poll: their requests get one chance to pin them
        self._fresh: set[Digest] = set()
        self._favourites = Favourites(pool.popularity)
        pool.when_evicted = self._note_evicted
        self._num_brought_back = 0
        self._device_load_s = Timings()
        # of those on their way to the device: when each got its place
        self._placed_at_s: dict[Digest, float] = {}
        self.stopwatch = Stopwatch()
        """Times what the step's thread does here; whoever steps takes from it."""

    @property
    def num_loading(self) -> int:
        """Loads in flight."""
        return len(self._loaders)

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
    def is_line_closed(self) -> bool:
        """Whether somebody has waited for space long enough: nobody who isn't running may begin, so that what runs gives it back."""
        return self._line_closed_for is not None

    def tier(self, digest: Digest) -> Tier:
        """Where a request that comes now finds the adapter: on the device, usable; in the host's memory, or on its way from there; or on disk, read already or not."""
        if self._pool.has_landed(digest) and digest not in self._draining:
            return Tier.DEVICE
        return Tier.HOST if digest in self._pool or digest in self._host else Tier.DISK

    @timed
    def request(self, ref: AdapterRef) -> Residency:
        """Ask for an adapter on the device; starts whatever is needed. Never blocks; ask again whenever you like.

        RESIDENT holds until the next `poll`: pin at once. Whoever still waits asks again within `INTEREST_S`, or else the adapter leaves
        the line (and `poll` says so).
        """
        digest, now = ref.digest, self._clock()
        if digest in self._pool and digest not in self._draining:
            if not self._pool.has_landed(digest):
                return Residency.LOADING
            self._leave_line(digest)
            self._pool.touch(digest, now)
            self._favourites.asked(ref)
            return Residency.RESIDENT
        if self._history.is_held_off(digest, now):
            return Residency.FAILED
        wait = self._waiting.get(digest)
        if wait is not None:
            self._join_line(wait, ref.tenant)
        else:
            wait = self._waiting[digest] = _Wait(ref, now, now)
            self._join_line(wait, ref.tenant)
            self._host.hold(digest)
            # a hit in the host cache costs no step, unless it would pass somebody who has waited long enough
            if digest in self._host and self._line_closed_for is None and self._place(digest, {}, now):
                return Residency.RESIDENT if self._pool.has_landed(digest) else Residency.LOADING
            self._start_load(wait)
        wait.asked_s = now
        size = self._history.size(digest)
        if size is None or digest in self._loaders or self._pool.can_admit(size.footprint, self._fresh):
            return Residency.LOADING
        return Residency.WAITING_FOR_SPACE

    @timed
    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        """Adapters that will be asked for, soonest first, are read to the host's memory while loaders have nothing else to do.

        Nothing is evicted for them that is held for who waits, nor one of them for another; no place on the device is taken. All but one loader may be busy for them
        (a single one may, too): who asks in earnest finds a loader free, or waits for one load at most.
        """
        now, room = self._clock(), self._host.budget_bytes - self._host.held_bytes
        for ref in refs:
            digest = ref.digest
            if digest in self._pool or digest in self._waiting or digest in self._loaders:
                continue
            size = self._history.size(digest)
            if size is not None:
                room -= size.host_bytes
                if room < 0:
                    return
            if digest in self._host:
                # the last to be evicted for the others
                self._host.touch(digest, now)
                continue
            if self._history.is_held_off(digest, now):
                continue
            if len(self._loaders) >= max(1, self._loaders.num_threads - 1):
                return
            self._loaders.start(ref, (ref.tenant,))

    @timed
    def poll(self) -> list[Digest]:
        """Take finished loads and copies in, give the line what place there is; returns the digests that became resident, failed or left the line.

        Called by the step's thread once a step. Costs no more than a look at each waiting adapter.
        """
        now = self._clock()
        changed = self._pool.take_landed()
        for digest in changed:
            self._device_load_s.add(time.perf_counter() - self._placed_at_s.pop(digest))
        self._fresh = self._pool.fresh = set(changed)
        landed = self._take_results(now, changed)
        for digest, wait in list(self._waiting.items()):
            if now - wait.asked_s > INTEREST_S and digest not in self._operator_pins:
                self._leave_line(digest)
                changed.append(digest)
        changed += self._serve_line(landed, now)
        # in the line's order, whichever thread was done first
        for digest in [d for d in self._waiting if d in landed]:
            self._host.put(digest, landed.pop(digest), now, hold=True)
        for digest in sorted(landed):
            self._host.put(digest, landed[digest], now)
        self._start_loads()
        self._bring_favourites_back(now)
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

    def facts(self, digest: Digest) -> AdapterFacts:
        """What is known of a resident adapter beside its weights.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._pool.facts(digest)

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
        others = (d for d, r in self._pool.items() if d != digest and r.has_landed and d not in self._draining)
        return next(others, None)

    def error(self, digest: Digest) -> LoraserveError | None:
        """Why the adapter's last load failed: an `AdapterUnavailable`, or `InvalidRequest` of a composition that doesn't add up. None if it didn't."""
        return self._history.error(digest)

    def forget_failure(self, digest: Digest) -> None:
        """The next request for the adapter loads it anew, however its last load ended."""
        self._history.forget_failure(digest)

    def note_damage(self, error: AdapterCorrupt) -> None:
        """What somebody else's read of an adapter's bytes found is among the next `take_damages`."""
        self._history.note_damage(error)

    def take_damages(self) -> list[Damage]:
        """Return, once, what was found damaged: one entry per load that failed for it."""
        return self._history.take_damages()

    def set_operator_pin(self, ref: AdapterRef, is_pinned: bool) -> None:
        """The adapter is brought to the device and never evicted from it, or may be evicted again.

        A pin lasts from one load that goes well on: whose load fails isn't pinned, and `error` says why.
        """
        digest = ref.digest
        self._pool.set_operator_pin(digest, is_pinned)
        if is_pinned:
            self._operator_pins.add(digest)
            self._draining.discard(digest)
            if self.request(ref) is Residency.FAILED:
                self._operator_pins.discard(digest)
        else:
            self._operator_pins.discard(digest)

    def residency(self) -> list[AdapterResidency]:
        """Where each adapter is that is in memory or on its way."""
        now = self._clock()
        in_host = dict(self._host.items())
        rows = [
            self._row(
                digest,
                Tier.DEVICE if r.has_landed else Tier.LOADING,
                now - r.last_used_s,
                device_bytes=r.footprint.num_bytes,
                host_bytes=in_host[digest].adapter.num_bytes if digest in in_host else 0,
                num_pins=r.num_pins,
                facts=r.facts,
            )
            for digest, r in self._pool.items()
        ]
        rows += [
            self._row(
                digest,
                Tier.HOST,
                now - entry.last_used_s,
                host_bytes=entry.adapter.num_bytes,
                facts=entry.adapter.facts,
            )
            for digest, entry in in_host.items()
            if digest not in self._pool
        ]
        for digest, wait in self._waiting.items():
            if digest not in self._pool and digest not in self._host:
                tier = Tier.LOADING if digest in self._loaders else Tier.DISK
                rows.append(self._row(digest, tier, now - wait.asked_s))
        return rows

    def stats(self) -> dict[str, int | float | Histogram]:
        """The adapters' part of EngineStats, by its names."""
        return {
            "device_adapters": len(self._pool),
            "device_adapter_bytes": self._pool.num_bytes,
            "device_adapter_budget_bytes": self._pool.budget_bytes,
            "host_adapters": len(self._host),
            "host_adapter_bytes": self._host.num_bytes,
            "host_adapter_budget_bytes": self._host.budget_bytes,
            "num_pins": self._pool.num_pins,
            **self._history.stats(),
            "adapters_brought_back": self._num_brought_back,
            "device_load_s": self._device_load_s.histogram,
            "device_evictions": self._pool.num_evictions,
            "device_evictions_for_kv": self._pool.num_evictions_for[Tenure.KV],
            "host_evictions": self._host.num_evictions,
            **memory_usage(self._pool.device.lease.arena),
        }

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty when all hold."""
        problems = [*self._pool.check(), *self._host.check(), *self._loaders.check()]
        if any(not wait.tenants for wait in self._waiting.values()):
            problems.append("pager: an adapter waits for nobody")
        if len(self._load_turns) != len({tenant for wait in self._waiting.values() for tenant in wait.tenants}):
            problems.append("pager: tenants have turns without waiting")
        in_host = {digest for digest, _ in self._host.items()}
        if self._pool.device.is_host_memory and any(digest in self._pool for digest in in_host):
            problems.append("pager: an adapter is on the device and in the host cache")
        num_waiting_in_host = sum(digest in in_host for digest in self._waiting)
        if num_waiting_in_host != self._host.num_held:
            problems.append(f"pager: {self._host.num_held} adapters are held for {num_waiting_in_host} that wait")
        if any(digest in self._pool and digest not in self._draining for digest in self._waiting):
            problems.append("pager: an adapter waits that is on the device")
        if any(digest not in self._pool for digest in self._draining):
            problems.append("pager: an adapter that isn't on the device is drained from it")
        return problems

    def close(self) -> None:
        """Loads in flight have ended, their results dropped; the worker threads are gone."""
        self._loaders.close()

    def _start_loads(self) -> None:
        """The loaders have work, if there is any: tenants in turn, those with fewer loads in flight first, each one's in the order of its arrivals."""
        if not self._loaders.has_free:
            return
        startable = [(wait, wait.tenants) for wait in self._waiting.values() if self._may_load(wait)]
        while startable and self._loaders.has_free:
            first = self._load_turns.order(startable, self._loaders.num_by_tenant())[0]
            startable = [entry for entry in startable if entry[0] is not first]
            self._load_in_turn(first)

    def _start_load(self, wait: _Wait) -> None:
        """If a loader is free: whatever else could be loaded is being loaded then."""
        if self._loaders.has_free and self._may_load(wait):
            self._load_in_turn(wait)

    def _load_in_turn(self, wait: _Wait) -> None:
        self._load_turns.take(wait.tenants)
        self._loaders.start(wait.ref, wait.tenants)

    def _bring_favourites_back(self, now: float) -> None:
        """While loaders have nothing to do, one of them reads what is likely to be asked for to the host's memory: into free room, and that of what is worth less there."""
        if self._waiting or self._loaders:
            return
        ref = self._favourites.next(now, lambda digest: self._is_worth_bringing_back(digest, now))
        if ref is not None:
            self._num_brought_back += 1
            self._loaders.start(ref, (ref.tenant,))

    def _is_worth_bringing_back(self, digest: Digest, now: float) -> bool:
        if digest in self._pool or digest in self._host:
            return False
        size = self._history.size(digest)
        if size is None or self._history.is_held_off(digest, now):
            return False
        # by far: what is brought back today isn't to be evicted for its victim tomorrow
        least = self._pool.popularity.per_second(digest, now) / size.host_bytes / 2
        return self._host.has_room_for(size.host_bytes, lambda other: self._value_per_byte(other, now) < least)

    def _value_per_byte(self, digest: Digest, now: float) -> float:
        size = self._history.size(digest)
        return math.inf if size is None else self._pool.popularity.per_second(digest, now) / size.host_bytes

    def _may_load(self, wait: _Wait) -> bool:
        digest = wait.ref.digest
        if digest in self._loaders or digest in self._pool or digest in self._host:
            return False
        size = self._history.size(digest)
        # Of known size and without a place: it would only be dropped again, and read again.
        may_pass = self._line_closed_for is None or self._line_closed_for == digest
        return (
            size is None
            or (may_pass and self._pool.can_admit(size.footprint, self._fresh))
            or self._host.can_put(size.host_bytes)
        )

    def _take_results(self, now: float, changed: list[Digest]) -> dict[Digest, Loaded]:
        """Finished loads that are good; those whose load failed leave the line."""
        landed: dict[Digest, Loaded] = {}
        for result in self._loaders.take():
            digest = result.ref.digest
            self._history.note(result, now)
            if isinstance(result.outcome, LoraserveError):
                self._operator_pins.discard(digest)
                # who wants it asks again; by itself nobody reads what is damaged or gone
                self._favourites.forget(digest)
                self._leave_line(digest)
                changed.append(digest)
                continue
            if self._pool.device.is_host_memory:
                self._pool.load_pace.note(result.outcome.num_bytes, result.elapsed_s)
            landed[digest] = result.outcome
        return landed

    def _join_line(self, wait: _Wait, tenant: TenantId) -> None:
        if tenant not in wait.tenants:
            wait.tenants.add(tenant)
            self._load_turns.join(tenant)
            self._place_turns.join(tenant)

    def _leave_line(self, digest: Digest) -> None:
        wait = self._waiting.pop(digest, None)
        if wait is not None:
            self._load_turns.leave(wait.tenants)
            self._place_turns.leave(wait.tenants)
        self._host.unhold(digest)

    def _serve_line(self, landed: dict[Digest, Loaded], now: float) -> list[Digest]:
        """Give places, tenants in turn and each one's in the order of its arrivals; returns who is resident by that.

        Whoever fits may pass the first in line until its patience is over. From then on nobody does, and residents that cover what
        it takes are drained: they take no new requests and go when their last pin does. So a large adapter isn't starved by many small ones, nor
        a cold one by those that are always in use.
        """
        placed: list[Digest] = []
        line = self._line()
        self._line_closed_for = None
        is_first = True
        for digest in line:
            wait = self._waiting[digest]
            if self._place(digest, landed, now):
                if self._pool.has_landed(digest):
                    placed.append(digest)
                continue
            # what operators have pinned no patience frees, and nobody is held up for it
            can_ever = self._can_ever_place(digest)
            if is_first and can_ever and now - wait.since_s > PATIENCE_S:
                self._line_closed_for = digest
                self._drain_for(digest)
                return placed
            is_first = is_first and not can_ever
        returned = [digest for digest in self._draining if digest in self._waiting]
        for digest in returned:
            self._leave_line(digest)
        self._draining.clear()
        return placed + returned

    def _line(self) -> list[Digest]:
        """Those that wait for a place alone, in the order in which they get one; whom the line is closed for stays its first."""
        # not those still to be read for the first time, or waiting for their own drain to end
        ready = [
            (digest, wait.tenants)
            for digest, wait in self._waiting.items()
            if digest not in self._pool and self._history.size(digest) is not None
        ]
        line = self._place_turns.order(ready)
        first = self._line_closed_for
        if first is not None and first in line:
            line.remove(first)
            line.insert(0, first)
        return line

    def _place(self, digest: Digest, landed: dict[Digest, Loaded], now: float) -> bool:
        """Whether a waiting adapter that is in memory got a place, from which it may still be a copy away."""
        size = self._history.size(digest)
        if size is None or not self._pool.can_admit(size.footprint, self._fresh):
            return False
        adapter = landed.pop(digest, None)
        if adapter is None:
            entry = self._host.take(digest)
            if entry is None:
                return False
            adapter = entry.adapter
        is_operator_pinned = digest in self._operator_pins
        placed_at_s = time.perf_counter()
        evicted = self._pool.admit(digest, adapter, now, is_operator_pinned=is_operator_pinned, keep=self._fresh)
        self._place_turns.take(self._waiting[digest].tenants)
        self._leave_line(digest)
        if self._pool.has_landed(digest):
            self._fresh.add(digest)
            self._device_load_s.add(time.perf_counter() - placed_at_s)
        else:
            self._placed_at_s[digest] = placed_at_s
        for other in evicted:
            self._note_evicted(other)
        if not self._pool.device.is_host_memory:
            self._host.put(digest, adapter, now)
        return True

    def _note_evicted(self, other: Evicted) -> None:
        """What has left the device, for an adapter or for KV blocks, is in the host's memory, if that has room."""
        self._draining.discard(other.digest)
        if other.moved is not None:
            self._host.put(other.digest, other.moved, other.last_used_s, hold=other.digest in self._waiting)
        else:
            self._host.touch(other.digest, other.last_used_s)

    def _can_ever_place(self, digest: Digest) -> bool:
        size = self._history.size(digest)
        return size is not None and self._pool.can_ever_admit(size.footprint)

    def _drain_for(self, waiting: Digest) -> None:
        """Residents that are drained suffice, once idle, for that one; the least recently used are chosen first."""
        size = self._history.size(waiting)
        if size is None:
            return
        footprint, room = size.footprint, self._pool.free
        for digest, resident in self._pool.items():
            if digest in self._draining:
                room += resident.footprint
        for digest, resident in self._pool.items():
            if self._pool.can_admit_without(footprint, self._draining, room):
                return
            # what is still on its way may be drained as soon as it has landed
            if not resident.is_operator_pinned and resident.has_landed and digest not in self._draining:
                self._draining.add(digest)
                room += resident.footprint

    def _row(
        self,
        digest: Digest,
        tier: Tier,
        last_used_s: float,
        *,
        device_bytes: int = 0,
        host_bytes: int = 0,
        num_pins: int = 0,
        facts: AdapterFacts | None = None,
    ) -> AdapterResidency:
        return AdapterResidency(
            digest=digest,
            tier=tier,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            num_pins=num_pins,
            is_pinned=digest in self._operator_pins,
            last_used_s=last_used_s,
            dtype="" if facts is None else facts.dtype,
            precision_loss=None if facts is None else facts.precision_loss,
            uses_per_s=self._pool.popularity.per_second(digest, self._clock()),
        )
