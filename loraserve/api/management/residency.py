"""Show the memory tier of each version's weights: device, host, loading, or disk alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.responses import answer
from loraserve.api.services import services_of
from loraserve.contract import residency
from loraserve.contract.residency import Memory, ResidencyPage, Tiers
from loraserve.registry.records import OTHER_BASE
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import AdapterResidency, Digest, EngineStats, Tier

if TYPE_CHECKING:
    from loraserve.registry.residency import OwnedVersion

router = APIRouter()

_LOOKERS_S = 2.0
"""Age of what all who look at the tiers share."""
_PAGES_S = 10.0
"""Age up to which the pages after the first show the first one's moment."""
_reader = scopes.require(scopes.ADAPTERS_READ)


@router.get("/residency", response_model=ResidencyPage)
async def get_residency(
    request: Request,
    limit: int = 50,
    cursor: str | None = None,
    resident: bool = False,
    digest: str | None = None,
    caller: Caller = Depends(_reader),
) -> Response:
    """List the versions of the caller's tenant, or for an admin of all tenants.

    With ``?resident=true``, only those in memory or being loaded; with ``?digest=…``, only those of
    these bytes.

    Weights are shared between tenants that hold the same bytes; uses are counted by version, so
    that none shows another tenant's. A tenant's key sees only weights that its own use loaded, so
    that it doesn't learn what others hold.
    """
    services = services_of(request)
    registry = services.registry
    wanted = None
    if digest is not None:
        wanted = [Digest(digest)]
        by_digest = {one.digest: one for one in await services.engine.residency(wanted)}
    else:
        # the pages of a list are of one moment, and the engine is asked once for all of them
        by_digest = dict((await services.residency.take(max_age_s=_PAGES_S if cursor else 0.0)).by_digest)
    if not caller.is_operator:
        used = registry.last_used
        by_digest = {one: where for one, where in by_digest.items() if used.has_used(caller.tenant, one)}
    if resident:
        wanted = sorted(by_digest)
    page = await registry.list_owned(
        None if caller.sees_all else caller.tenant,
        limit=limit,
        cursor=cursor,
        digests=wanted,
    )
    served, load = registry.served_base.digest, services.metrics.adapter_load

    def told(owned: OwnedVersion) -> residency.AdapterResidency:
        if caller.is_operator:
            uses = _Uses(
                registry.last_used.seconds_since_anyone(owned), load.num_running(owned), load.uses_per_s(owned)
            )
        else:
            uses = _Uses(registry.last_used.seconds_since(owned.tenant, owned))
        return _row(owned, by_digest.get(owned.digest), served, uses)

    return answer(
        request,
        ResidencyPage(
            data=[told(owned) for owned in page.items],
            next_cursor=page.next_cursor,
            memory=memory_of(services.engine.stats) if caller.is_operator else None,
        ),
    )


@router.get("/residency/tiers", response_model=Tiers)
async def get_tiers(request: Request, caller: Caller = Depends(_reader)) -> Response:
    """List the digests in each tier of memory, as they were at most two seconds ago.

    It is what a page of many adapters asks for again and again: servers answer it without their
    database, and ask the engine once for all who look. A tenant's key sees only weights that its
    own use loaded.
    """
    services = services_of(request)
    snapshot = await services.residency.take(max_age_s=_LOOKERS_S)
    if caller.is_operator:
        return Response(snapshot.all_tiers, media_type="application/json")
    used = services.registry.last_used
    body = snapshot.tiers(lambda digest: used.has_used(caller.tenant, digest))
    return Response(body, media_type="application/json")


def memory_of(stats: EngineStats) -> Memory:
    """Read the use of memory from the engine's figures."""
    return Memory(
        budget_bytes=stats.device_bytes,
        kv_used_bytes=stats.kv_bytes_used,
        kv_idle_bytes=stats.kv_bytes_idle,
        adapters_used_bytes=stats.adapter_bytes_used,
        adapters_idle_bytes=stats.adapter_bytes_idle,
        free_bytes=stats.free_bytes,
        num_device_adapters=stats.device_adapters,
        host_budget_bytes=stats.host_adapter_budget_bytes,
        host_adapter_bytes=stats.host_adapter_bytes,
        num_host_adapters=stats.host_adapters,
    )


class _Uses(NamedTuple):
    last_used_s: float | None
    num_pins: int | None = None
    uses_per_s: float | None = None


def _row(
    owned: OwnedVersion, one: AdapterResidency | None, served: Digest | None, uses: _Uses
) -> residency.AdapterResidency:
    """Return where the version is.

    Args:
        uses: by version, which the engine doesn't know: it knows digests alone.
    """
    return residency.AdapterResidency(
        tenant=owned.tenant_name,
        name=owned.name,
        version=owned.version,
        digest=owned.digest,
        size_bytes=owned.size_bytes,
        state=owned.state if served in (None, owned.base_digest) else OTHER_BASE,
        tier=Tier.DISK if one is None else one.tier,
        device_bytes=0 if one is None else one.device_bytes,
        host_bytes=0 if one is None else one.host_bytes,
        num_pins=uses.num_pins,
        is_pinned=one is not None and one.is_pinned and owned.is_pinned,
        last_used_s=uses.last_used_s,
        dtype=None if one is None else one.dtype or None,
        precision_loss=None if one is None else one.precision_loss,
        uses_per_s=uses.uses_per_s,
    )
