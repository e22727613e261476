"""Load one adapter for a request: from a path or a body, to the registry or to memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field

from loraserve.adapters.extra_files import NO_EXTRA_FILES
from loraserve.api.management.payloads.bodies import Body
from loraserve.errors import AlreadyExists, InvalidRequest, LoraserveError, PermissionDenied
from loraserve.limits import LIMITS
from loraserve.registry.catalog.ephemeral_adapters import WARM_WAIT_S, already_loaded
from loraserve.registry.health.checks import quarantine_error
from loraserve.registry.records import QUARANTINED
from loraserve.registry.uploads.staging import JudgedWeights

if TYPE_CHECKING:
    from adapters_store import MemoryBlob
    from loraserve.adapters.extra_files import ExtraFiles
    from loraserve.api.services import Services
    from loraserve.background import Throttle
    from loraserve.registry.uploads.concurrency_limiter import Sender
    from loraserve.registry.uploads.staging import WeightsWriter
    from loraserve.tenancy.identity.auth import Caller

Fill = Callable[["WeightsWriter"], Awaitable["tuple[bytes, ExtraFiles]"]]
"""Function that writes the weights to its argument; returns the config and the extra files."""


class LoadBody(Body):
    """Fields of all loads."""

    lora_name: str = Field(min_length=1)
    ephemeral: bool | None = None
    """Whether it is held in memory alone; null: as the operator chose (``--ephemeral-loads``)."""
    ttl_s: float | None = Field(default=None, ge=LIMITS.min_ephemeral_ttl_s, le=LIMITS.max_ephemeral_ttl_s)
    """Seconds after which an ephemeral adapter is unloaded."""


class PathLoadBody(LoadBody):
    lora_path: str = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class LiveLoad:
    """Load that a request describes."""

    name: str
    is_in_place: bool
    """Whether the name may be loaded already."""
    is_ephemeral: bool
    ttl_s: float | None
    is_pinned: bool

    @classmethod
    def of(cls, body: LoadBody, services: Services, *, is_in_place: bool, is_pinned: bool = False) -> LiveLoad:
        """Build the load that the body describes.

        Raises:
            InvalidRequest: its fields contradict each other.
        """
        if body.ephemeral and is_pinned:
            raise InvalidRequest("An ephemeral adapter can't be pinned.", param="pinned")
        is_default = services.settings.ephemeral_loads and not is_pinned
        is_ephemeral = is_default if body.ephemeral is None else body.ephemeral
        if body.ttl_s is not None and not is_ephemeral:
            raise InvalidRequest(
                "ttl_s is for ephemeral adapters; this one would be stored.",
                param="ttl_s",
                hint="Send ephemeral: true.",
            )
        return cls(body.lora_name, is_in_place, is_ephemeral, body.ttl_s, is_pinned)


class LiveLoader:
    """Load an adapter for one request.

    Args:
        sender: client that sends the weights; None if they are read from a folder.
    """

    def __init__(self, services: Services, caller: Caller, load: LiveLoad, *, sender: Sender | None = None) -> None:
        self._services = services
        self._registry = services.registry
        self._caller = caller
        self._load = load
        self._sender = sender

    @property
    def throttle(self) -> Throttle:
        """Throttle of the work on the weights."""
        return self._registry.ephemeral.throttle if self._load.is_ephemeral else self._registry.uploads.throttle

    async def check(self) -> None:
        """Check what can be refused before any weights are read.

        Raises:
            Overloaded: the server is shutting down.
            PermissionDenied: the request pins, and its key isn't an admin's.
            InvalidRequest: the name isn't valid, or is loaded and may not be.
        """
        self._services.check_open()
        load = self._load
        if load.is_pinned and not self._caller.is_admin:
            raise PermissionDenied(
                "pinned takes memory from every tenant, so it needs an admin key.", hint="Leave it out."
            )
        try:
            self._registry.inspector.check_name(load.name)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="lora_name", hint=error.hint) from None
        if not load.is_in_place and await self._registry.has(self._caller.tenant, load.name):
            raise already_loaded(load.name)

    async def load_path(self, path: str) -> None:
        """Load the adapter in the folder that the request names.

        Raises:
            PermissionDenied, InvalidRequest, NotFound: `check`, or `LocalFolders.read`.
            LoraserveError: as `fill`.
        """
        folders = self._registry.local_folders

        async def read(weights: WeightsWriter) -> tuple[bytes, ExtraFiles]:
            return await self.throttle.run(partial(folders.read, path, self._caller.tenant_name, weights))

        await self.check()
        await self.fill(read)

    async def fill(self, fill: Fill) -> None:
        """Let `fill` write the weights to where they belong, and publish or load them.

        Raises:
            InvalidRequest: the name has been loaded meanwhile.
            AdapterRejected: the files can't be served; lists every reason.
            AdapterQuarantined: the version failed its certificate, so that the name means another.
            Conflict: the name is the other kind of adapter's.
            RateLimited, Overloaded: the tenant has its share of uploads or memory, or there is no
                room.
            StorageError: they can't be stored, or held.
        """
        if self._load.is_ephemeral:
            await self._fill_memory(fill)
        else:
            await self._fill_store(fill)

    async def take(self, config: bytes, weights: MemoryBlob, extras: ExtraFiles = NO_EXTRA_FILES) -> None:
        """Load an ephemeral adapter whose weights are in memory already.

        The caller closes them if this fails.

        Raises:
            LoraserveError: as `fill`.
        """
        load, caller = self._load, self._caller
        await self._registry.ephemeral.load(
            caller.tenant,
            load.name,
            config,
            weights,
            owner=caller.tenant_name,
            extras=extras,
            is_replacing=load.is_in_place,
            ttl_s=load.ttl_s,
        )

    async def _fill_memory(self, fill: Fill) -> None:
        tenant = self._caller.tenant
        # a slot of the uploads: their bytes occupy memory too while they arrive
        async with self._registry.uploads.slot(tenant, self._sender, wait_s=LIMITS.live_load_wait_s):
            weights = self._registry.ephemeral.stage(tenant)
            try:
                config, extras = await fill(JudgedWeights(weights, self._registry.uploads.containers))
            except BaseException:
                weights.close()
                raise
        try:
            await self.take(config, weights, extras)
        except BaseException:
            weights.close()
            raise

    async def _fill_store(self, fill: Fill) -> None:
        load, caller, uploads = self._load, self._caller, self._registry.uploads
        weights = await uploads.stage(caller.tenant, self._sender, wait_s=LIMITS.live_load_wait_s)
        try:
            config, extras = await fill(weights)
            published = await self._registry.publisher.publish(
                caller.tenant,
                load.name,
                config,
                weights,
                actor=caller.key_id,
                extras=extras,
                is_new_name=not load.is_in_place,
                on_stored=lambda: uploads.end_arrival(caller.tenant, weights),
            )
        except AlreadyExists:
            raise already_loaded(load.name) from None
        finally:
            await uploads.release(caller.tenant, weights)
        version, number = published.version, published.version.ref.version
        if version.state == QUARANTINED:
            raise quarantine_error(load.name, number, version.checks)
        if load.is_pinned:
            await self._registry.pins.pin(
                caller.tenant, load.name, number, actor=caller.key_id, once=None, wait_s=WARM_WAIT_S
            )
            return
        # the version is there, whatever the engine answers now
        with suppress(TimeoutError, LoraserveError):
            async with asyncio.timeout(WARM_WAIT_S):
                await self._services.engine.warm(version.ref)
