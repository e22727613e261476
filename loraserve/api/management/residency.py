"""Show the memory tier of each version's weights: device, host, loading, or disk alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.resources import PageResource, Resource
from loraserve.api.management.payloads.responses import answer
from loraserve.api.services import services_of
from loraserve.registry.records import OTHER_BASE
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import AdapterResidency, Digest, Tier

if TYPE_CHECKING:
    from loraserve.registry.residency import OwnedVersion

router = APIRouter()

_reader = scopes.require(scopes.ADAPTERS_READ)


class ResidencyResource(Resource):
    tenant: str
    name: str
    version: int
    digest: str
    size_bytes: int
    """Bytes of its files, which are on disk wherever else it is."""
    state: str
    """ready; quarantined; other_base (this server serves another base)."""
    tier: Tier
    device_bytes: int
    host_bytes: int
    num_pins: int | None
    """Requests for this version, alone or in a sum, that are being answered. null for a tenant's
    key.
    """
    is_pinned: bool
    last_used_s: float | None
    """Seconds since this version's last use, a tenant's own. null: not used since the server
    started.
    """
    dtype: str | None
    """Format of its matrices (fp32, bf16, fp16, int8); null: it's in no memory."""
    precision_loss: float | None
    """Largest relative error over its modules of the update in memory, compared with the
    uploaded one. null: it's in no memory.
    """
    uses_per_s: float | None
    """Recent requests for this version per second, decaying; null for a tenant's key."""


class MemoryResource(Resource):
    """Use of each memory tier, by the engine's last heartbeat."""

    budget_bytes: int = Field(validation_alias="device_bytes")
    """Maximum bytes of the device for KV blocks and adapters together: the sum of the five below.
    """
    kv_used_bytes: int = Field(validation_alias="kv_bytes_used")
    kv_idle_bytes: int = Field(validation_alias="kv_bytes_idle")
    adapters_used_bytes: int = Field(validation_alias="adapter_bytes_used")
    """Bytes of adapters that are pinned or being loaded."""
    adapters_idle_bytes: int = Field(validation_alias="adapter_bytes_idle")
    free_bytes: int
    num_device_adapters: int = Field(validation_alias="device_adapters")
    host_budget_bytes: int = Field(validation_alias="host_adapter_budget_bytes")
    host_adapter_bytes: int
    num_host_adapters: int = Field(validation_alias="host_adapters")


class ResidencyPageResource(PageResource[ResidencyResource]):
    memory: MemoryResource | None
    """null for a tenant's key: it would reveal what other tenants do."""


@router.get("/residency", response_model=ResidencyPageResource)
async def get_residency(
    request: Request,
    limit: int = 50,
    cursor: str | None = None,
    resident: bool = False,
    caller: Caller = Depends(_reader),
) -> Response:
    """List the versions of the caller's tenant, or for an admin of all tenants.

    With ``?resident=true``, only those in memory or being loaded.

    Weights are shared between tenants that hold the same bytes; uses are counted by version, so
    that none shows another tenant's. A tenant's key sees only weights that its own use loaded, so
    that it doesn't learn what others hold.
    """
    services = services_of(request)
    by_digest = {one.digest: one for one in await services.engine.residency()}
    registry = services.registry
    tenant = None if caller.sees_all else caller.tenant
    if not caller.is_operator:
        used = registry.last_used
        by_digest = {digest: one for digest, one in by_digest.items() if used.has_used(caller.tenant, digest)}
    page = await registry.list_owned(
        tenant, limit=limit, cursor=cursor, digests=sorted(by_digest) if resident else None
    )

    def told(owned: OwnedVersion) -> ResidencyResource:
        row = _row(owned, by_digest.get(owned.digest), registry.served_base.digest)
        if not caller.is_operator:
            return row.model_copy(update={"last_used_s": registry.last_used.seconds_since(owned.tenant, owned)})
        load = services.metrics.adapter_load
        counts = {"num_pins": load.num_running(owned), "uses_per_s": load.uses_per_s(owned)}
        return row.model_copy(update={"last_used_s": registry.last_used.seconds_since_anyone(owned), **counts})

    return answer(
        request,
        ResidencyPageResource(
            data=[told(owned) for owned in page.items],
            next_cursor=page.next_cursor,
            memory=MemoryResource.of(services.engine.stats) if caller.is_operator else None,
        ),
    )


def _row(owned: OwnedVersion, one: AdapterResidency | None, served: Digest | None) -> ResidencyResource:
    """Return where the version is.

    Counts are by version, which the engine doesn't know: it knows digests alone.
    """
    return ResidencyResource(
        tenant=owned.tenant_name,
        name=owned.name,
        version=owned.version,
        digest=owned.digest,
        size_bytes=owned.size_bytes,
        state=owned.state if served in (None, owned.base_digest) else OTHER_BASE,
        tier=Tier.DISK if one is None else one.tier,
        device_bytes=0 if one is None else one.device_bytes,
        host_bytes=0 if one is None else one.host_bytes,
        num_pins=None,
        is_pinned=one is not None and one.is_pinned and owned.is_pinned,
        last_used_s=None,
        dtype=None if one is None else one.dtype or None,
        precision_loss=None if one is None else one.precision_loss,
        uses_per_s=None,
    )
