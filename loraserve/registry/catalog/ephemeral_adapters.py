"""Ephemeral adapters of all tenants, by name.

A version is in this process alone: its files are in anonymous memory (`adapters_store.memory`), and
nothing of it is in the database or on a disk. So a kill leaves nothing behind, and no other server
has the name.

**Who holds the memory.** Every request that was bound to a version holds the same `AdapterRef`
object. The memory is freed when the last holder has dropped it: the name (which moves to the next
version, is unloaded, or expires), then the last running request, however that ends. A finalizer
notes it, from whichever thread; `sweep` frees, on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from weakref import WeakValueDictionary

from adapters_store import MemoryBlob
from loraserve.adapters.extra_files import NO_EXTRA_FILES, ExtraFiles
from loraserve.adapters.ir import SCORE
from loraserve.background import BackgroundTask, Throttle
from loraserve.db.names import name_key
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import AdapterNotFound, Conflict, InvalidRequest
from loraserve.limits import DEFAULT_EPHEMERAL_BYTES, DEFAULT_EPHEMERAL_TTL_S, LIMITS
from loraserve.registry.binding import Route, Target
from loraserve.registry.health.checks import replace_check, state_of
from loraserve.registry.health.inspection import Inspected
from loraserve.registry.health.numeric_failures import as_check, num_failures
from loraserve.registry.model_name import LIVE, ParsedModel, model_not_found, other_case
from loraserve.registry.publishing.conversion import with_container
from loraserve.registry.publishing.inspector import UploadInspector
from loraserve.registry.quota import check_quota
from loraserve.registry.records import READY, ServableAdapter
from loraserve.registry.repository import AdapterRepository
from loraserve.tenancy.limits.shares import Holder, Shares, tenant_holder
from loraserve.types import AdapterRef, BaseSpec, Digest, TenantId

logger = logging.getLogger(__name__)

Warm = Callable[[AdapterRef], Awaitable[None]]
PAUSE_FACTOR = 1.0
"""Seconds of pause per second of a load's inspection, while the engine computes on this machine's
processors: a trainer waits for it, and an upload's client doesn't (`UPLOAD_PAUSE_FACTOR`).
"""
WARM_WAIT_S = 30.0
"""Seconds that a load waits for room on the device; then requests wait for it."""


@dataclass(frozen=True, slots=True)
class EphemeralLoad:
    """Result of a load."""

    name: str
    version: int
    digest: Digest
    size_bytes: int
    is_new: bool
    """Whether the version is new; False if the present one has these bytes."""


@dataclass(frozen=True, slots=True)
class _Held:
    """Memory of a version, by what it is freed for. It must not refer to the `AdapterRef`."""

    holder: Holder
    digest: Digest
    blob: MemoryBlob


@dataclass(slots=True)
class _Named:
    """Present version of a name."""

    route: Route
    owner: str
    created_at: datetime
    expires_s: float
    size_bytes: int

    @property
    def ref(self) -> AdapterRef:
        return self.route.main.ref


class EphemeralAdapters:
    """Load, replace, resolve and unload ephemeral adapters.

    A name has one version that requests are bound to; a load in place makes the next one. A name
    is an ephemeral adapter's or an ordinary one's, never both on one server.

    Args:
        base: the resident base model; may raise `EngineUnavailable` while there is none.
        inspector: checks names, and inspects files as it does for uploads.
        on_unused: called with the digest of bytes that no ephemeral version has any more.
        warm: brings a version to the device; None: the first request does.
        throttle: pauses uploads, and for less time loads, while an engine computes on this
            machine's processors.
        memory_bytes: memory for all of them; a tenant may have as much of it as is free.
        ttl_s: seconds after a load at which a name is unloaded, if the load doesn't set it.
        monotonic: clock that measures the seconds.
    """

    def __init__(
        self,
        database: Database,
        base: Callable[[], BaseSpec],
        inspector: UploadInspector,
        on_unused: Callable[[Digest], None] = lambda _: None,
        *,
        warm: Warm | None = None,
        throttle: Throttle | None = None,
        memory_bytes: int = DEFAULT_EPHEMERAL_BYTES,
        ttl_s: float = DEFAULT_EPHEMERAL_TTL_S,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._base = base
        self._inspector = inspector
        self._on_unused = on_unused
        self.on_freed: Callable[[Digest], None] = lambda _: None
        """Callback with the same digest, for whatever else was kept with the version."""
        self._warm = warm
        self.throttle = (throttle or Throttle()).urgent(PAUSE_FACTOR)
        """Throttle of the work on the files of loads."""
        self.ttl_s = ttl_s
        self._clock = clock
        self._monotonic = monotonic
        # by the name's key
        self._names: dict[tuple[TenantId, str], _Named] = {}
        self._lock = threading.Lock()
        # held while a name gets a version
        self._locks: WeakValueDictionary[tuple[TenantId, str], asyncio.Lock] = WeakValueDictionary()
        # names that a load is under way for
        self._claimed: set[tuple[TenantId, str]] = set()
        self._num_by_digest: Counter[Digest] = Counter()
        # appended to by finalizers, in any thread
        self._unused: deque[_Held] = deque()
        self.versions = Shares(
            "ephemeral_versions",
            "ephemeral versions",
            LIMITS.max_ephemeral_versions,
            max_per_holder=LIMITS.max_ephemeral_versions_per_tenant,
        )
        """Versions that have memory: those of a name, and those that requests still run on."""
        self.bytes = Shares("ephemeral_bytes", "bytes of ephemeral adapters", memory_bytes)
        """Memory of all versions, and of loads that are under way."""
        self.num_loaded = 0
        """Versions since the start."""
        self.num_expired = 0
        """Names that were unloaded at the end of their time, since the start."""
        self._task = BackgroundTask(
            "ephemeral adapters",
            self._sweep,
            lambda: LIMITS.ephemeral_sweep_s,
            failure="ephemeral adapters can't be freed",
            logger=logger,
        )

    def start(self) -> None:
        """Unload names at the end of their time, until `close`."""
        self._task.start()

    async def close(self) -> None:
        """Stop, and unload all names."""
        await self._task.close()
        self._names.clear()
        self.sweep()

    def __len__(self) -> int:
        return len(self._names)

    def shares(self) -> tuple[Shares, ...]:
        """List the shares of versions and of memory, for metrics."""
        return self.versions, self.bytes

    def stage(self, tenant: TenantId) -> MemoryBlob:
        """Allocate memory for the weights of a load, which the caller closes unless `load` returns.

        Raises:
            StorageError: the system has none.
        """
        # what earlier loads have replaced makes room
        self.sweep()
        holder = tenant_holder(tenant)
        return MemoryBlob(
            take=lambda num_bytes: self._take(holder, num_bytes),
            give_back=lambda num_bytes: self._give_back(holder, num_bytes),
        )

    def check(self, tenant: TenantId, name: str, *, is_replacing: bool) -> None:
        """Check that the name may be loaded, before its files are read.

        Raises:
            InvalidRequest: the name isn't valid, or is loaded and `is_replacing` is false.
            Conflict: the name is loaded in another case.
        """
        self._inspector.check_name(name)
        loaded = self.name_of(tenant, name)
        if loaded not in (None, name):
            raise other_case(name, str(loaded))
        if not is_replacing and loaded is not None:
            raise already_loaded(name)

    async def load(
        self,
        tenant: TenantId,
        name: str,
        config: bytes,
        blob: MemoryBlob,
        *,
        owner: str,
        extras: ExtraFiles = NO_EXTRA_FILES,
        is_replacing: bool = False,
        ttl_s: float | None = None,
    ) -> EphemeralLoad:
        """Make the files in memory the version that new requests for `name` are bound to.

        They are inspected as an upload's are, but get no certificate. Until the adapter is on the
        device, requests are bound to the version before, so that none waits for a load. The bytes
        of the present version again make no new one: its time begins again.

        Args:
            owner: name of the tenant.
            extras: files of the version for chats with it.
            ttl_s: seconds after which the name is unloaded; None: the server's own.

        Raises:
            InvalidRequest: as `check`.
            AdapterRejected: the files can't be served; lists every reason.
            Conflict: an ordinary adapter has the name.
            QuotaExceeded: the tenant has too many adapters or bytes, these among them.
            RateLimited, Overloaded: it has its share of this server's versions or memory, or there
                is no room.
            AdapterUnavailable, EngineUnavailable: the engine can't load it.
            StorageError: the memory can't be had.
        """
        self.check(tenant, name, is_replacing=is_replacing)
        base = self._base()
        converted = await self._inspector.convert(
            config,
            blob,
            base,
            partial(self._stage, tenant),
            MemoryBlob.close,
            extras=extras,
            throttle=self.throttle,
        )
        if converted is None:
            return await self._load(tenant, name, config, blob, (), base, owner, extras, is_replacing, ttl_s)
        blob.close()
        try:
            return await self._load(
                tenant,
                name,
                converted.config,
                converted.weights,
                converted.notes,
                base,
                owner,
                extras,
                is_replacing,
                ttl_s,
            )
        except BaseException:
            converted.weights.close()
            raise

    async def _stage(self, tenant: TenantId) -> MemoryBlob:
        return self.stage(tenant)

    async def _load(
        self,
        tenant: TenantId,
        name: str,
        config: bytes,
        blob: MemoryBlob,
        notes: Sequence[str],
        base: BaseSpec,
        owner: str,
        extras: ExtraFiles,
        is_replacing: bool,
        ttl_s: float | None,
    ) -> EphemeralLoad:
        inspected = await self._inspector.inspect(
            config, blob.read, base, tenant=tenant, extras=extras, throttle=self.throttle
        )
        inspected, extras = with_container(inspected, notes), inspected.files
        size_bytes = blob.num_bytes + len(config) + extras.num_bytes
        key = name_key(name)
        async with self._locks.setdefault((tenant, key), asyncio.Lock()), self._claim(tenant, key):
            self.check(tenant, name, is_replacing=is_replacing)
            await self._check_database(tenant, name, size_bytes)
            ttl_s = self.ttl_s if ttl_s is None else ttl_s
            present = self._names.get((tenant, key))
            if present is not None and present.ref.digest == inspected.digest:
                present.expires_s = self._monotonic() + ttl_s
                blob.close()
                return EphemeralLoad(name, present.ref.version, inspected.digest, size_bytes, is_new=False)
            number = 1 if present is None else present.ref.version + 1
            is_new_name = present is None
            del present
            target = self._target(tenant, name, number, config, extras, blob, inspected, base)
            await self._bring_to_device(target.ref)
            if is_new_name:
                # a publish that was about to commit when this load claimed the name
                await self._check_not_stored(tenant, name)
            self._names[tenant, key] = _Named(
                Route("", LIVE, target), owner, target.created_at, self._monotonic() + ttl_s, size_bytes
            )
        self.num_loaded += 1
        return EphemeralLoad(name, number, inspected.digest, size_bytes, is_new=True)

    def unload(self, tenant: TenantId, name: str) -> None:
        """Forget the name; running requests complete on the version they are bound to.

        Raises:
            AdapterNotFound: the tenant has no ephemeral adapter of this name.
        """
        if self._names.pop((tenant, name_key(name)), None) is None:
            raise AdapterNotFound("There is no ephemeral adapter of that name.")
        self.sweep()

    def unload_tenant(self, tenant: TenantId) -> None:
        """Forget all names of a tenant."""
        for key in [key for key in self._names if key[0] == tenant]:
            del self._names[key]
        self.sweep()

    def check_free(self, tenant: TenantId, name: str) -> None:
        """Check that a stored adapter may have the name.

        Raises:
            Conflict: it is an ephemeral adapter's, or a load is under way for one.
        """
        key = name_key(name)
        if (tenant, key) in self._names or (tenant, key) in self._claimed:
            shown = self.name_of(tenant, name) or name
            raise Conflict(
                f'"{shown}" is an ephemeral adapter on this server.',
                hint="Unload it first, or choose another name.",
            )

    def name_of(self, tenant: TenantId, name: str) -> str | None:
        """Look up the name, as it was loaded, of the tenant's ephemeral adapter of that name.

        None: it has none.
        """
        named = self._names.get((tenant, name_key(name)))
        return None if named is None else named.ref.name

    def route(self, tenant: TenantId, model: ParsedModel) -> Route | None:
        """Find the route of `model`; None if it isn't an ephemeral adapter of the tenant.

        A name means its present version, as do its alias `LIVE` and the version's own number.

        Raises:
            ModelNotFound: it has another alias or number, and could be a granted one's.
        """
        if not self._names:
            return None
        found = (self._names.get((tenant, key)) for key in model.own_keys)
        named = next((one for one in found if one is not None), None)
        if named is None:
            return None
        is_meant = model.version == named.ref.version if model.alias is None else model.alias == LIVE
        if not is_meant and model.granted is not None:
            # it hides what was granted
            raise model_not_found(model)
        return named.route if is_meant else None

    def servable(self, tenant: TenantId) -> list[ServableAdapter]:
        """List the tenant's ephemeral adapters that are served, by name."""
        found = [(key, named) for (owner, key), named in self._names.items() if owner == tenant]
        return [
            ServableAdapter(
                name=named.ref.name,
                owner=None,
                owned_by=named.owner,
                created_at=named.created_at,
                version=named.ref.version,
                digest=named.ref.digest,
                size_bytes=named.size_bytes,
            )
            for _, named in sorted(found, key=lambda item: item[0])
            if named.route.main.is_servable
        ]

    def note_numeric_failure(self, ref: AdapterRef) -> None:
        """Count an answer that wasn't finite; too many put the version in quarantine."""
        named = self._names.get((ref.tenant, name_key(ref.name)))
        if named is None or named.ref is not ref:
            return
        target = named.route.main
        checks = replace_check(target.checks, as_check(num_failures(target.checks) + 1))
        named.route = replace(named.route, main=replace(target, checks=tuple(checks), state=state_of(checks)))

    def sweep(self) -> None:
        """Unload the names whose time is over, and free the memory that nothing holds any more."""
        now_s = self._monotonic()
        for key in [key for key, named in self._names.items() if named.expires_s <= now_s]:
            del self._names[key]
            self.num_expired += 1
        while self._unused:
            held = self._unused.popleft()
            held.blob.close()
            self.versions.give_back(held.holder)
            self._num_by_digest[held.digest] -= 1
            if not self._num_by_digest[held.digest]:
                del self._num_by_digest[held.digest]
                self._on_unused(held.digest)
                self.on_freed(held.digest)

    async def _sweep(self) -> None:
        self.sweep()

    def _take(self, holder: Holder, num_bytes: int) -> None:
        # uploads write on threads
        with self._lock:
            self.bytes.take(holder, num_bytes)

    def _give_back(self, holder: Holder, num_bytes: int) -> None:
        with self._lock:
            self.bytes.give_back(holder, num_bytes)

    @asynccontextmanager
    async def _claim(self, tenant: TenantId, key: str) -> AsyncIterator[None]:
        """Keep stored adapters from getting the name of that key for so long."""
        self._claimed.add((tenant, key))
        try:
            yield
        finally:
            self._claimed.discard((tenant, key))

    async def _check_not_stored(self, tenant: TenantId, name: str) -> None:
        """Check that no stored adapter of the tenant has the name.

        Raises:
            Conflict
        """
        async with self._database.read() as session:
            if await AdapterRepository(session, tenant).has_adapter(name):
                raise _is_stored(name)

    async def _bring_to_device(self, ref: AdapterRef) -> None:
        """Have the engine load the version; return without it if the device has no room for long.

        Raises:
            AdapterUnavailable, EngineUnavailable: it can't be loaded.
        """
        if self._warm is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(WARM_WAIT_S):
                    await self._warm(ref)

    async def _check_database(self, tenant: TenantId, name: str, size_bytes: int) -> None:
        """Check the name and the quota against the tenant's rows.

        Raises:
            Conflict, QuotaExceeded
        """
        mine = [(named.ref.name, named) for (owner, _), named in self._names.items() if owner == tenant]
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            if await repository.has_adapter(name):
                raise _is_stored(name)
            await check_quota(
                session,
                repository,
                (await repository.tenant_row()).limits,
                self._clock(),
                is_new_adapter=all(own != name for own, _ in mine),
                size_bytes=size_bytes + sum(named.size_bytes for own, named in mine if own != name),
                is_counted=False,
                num_ephemeral=len(mine),
            )

    def _target(
        self,
        tenant: TenantId,
        name: str,
        number: int,
        config: bytes,
        extras: ExtraFiles,
        blob: MemoryBlob,
        inspected: Inspected,
        base: BaseSpec,
    ) -> Target:
        """Build the version, whose reference holds the memory from now on."""
        holder = tenant_holder(tenant)
        self.versions.take(holder)
        try:
            memory = blob.seal(config, b"".join(extras.files))
        except BaseException:
            self.versions.give_back(holder)
            raise
        ref = AdapterRef(
            tenant=tenant,
            name=name,
            version=number,
            digest=inspected.digest,
            config_blob=Digest(hashlib.sha256(config).hexdigest()),
            weights_blob=blob.digest,
            has_head=SCORE in inspected.target_modules,
            memory=memory,
            extras=inspected.extras,
        )
        self._num_by_digest[ref.digest] += 1
        # at the process's end the kernel frees the memory
        weakref.finalize(ref, self._unused.append, _Held(holder, ref.digest, blob)).atexit = False
        return Target(ref, self._clock(), READY, inspected.checks, base.digest, base)


def _is_stored(name: str) -> Conflict:
    return Conflict(
        f'"{name}" is an adapter that isn\'t ephemeral.', hint="Choose another name, or load it without ephemeral."
    )


def already_loaded(name: str) -> InvalidRequest:
    """Build the refusal of a load without ``load_inplace``, in the words that clients look for."""
    return InvalidRequest(
        f"The lora adapter '{name}' has already been loaded.",
        param="lora_name",
        hint="If you want to load the adapter in place, set 'load_inplace' to True.",
    )
