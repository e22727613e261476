"""What a tenant may hold: adapters and bytes, with those that are on their way in, and those that may still come back."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import Adapter, AdapterVersion, Upload
from loraserve.errors import QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.registry.repository import AdapterRepository
from loraserve.types import Digest, TenantId

Limits = Mapping[str, int | None]
"""A tenant's own, as its row has them."""


async def check_quota(
    session: AsyncSession,
    repository: AdapterRepository,
    limits: Limits,
    now: datetime,
    *,
    is_new_adapter: bool,
    size_bytes: int,
    is_counted: bool = True,
    blob: Digest | None = None,
    restorable_since: datetime | None = None,
) -> None:
    """Return if the tenant may hold this too. It holds until the commit where the tenant's row is locked.

    Args:
        is_counted: whether a new adapter's own row is there already.
        blob: the weights, whose own upload isn't counted beside them.
        restorable_since: what was deleted after that still has its bytes: the tenant may hold as many of them again as it may store. None:
            nothing is added to them.

    Raises:
        QuotaExceeded
    """
    max_adapters = min(
        LIMITS.max_adapters_per_tenant, _or_none(limits.get("max_adapters"), LIMITS.max_adapters_per_tenant)
    )
    if is_new_adapter and (others := await _num_adapters(session, repository.tenant) - is_counted) >= max_adapters:
        raise QuotaExceeded(
            f"The tenant has {others} adapters; it may have {max_adapters}.", hint="Delete one, or ask for more."
        )
    max_bytes = limits.get("max_stored_bytes")
    if max_bytes is None:
        return
    stored = await _stored_bytes(session, repository.tenant)
    uploading = await uploading_bytes(session, repository.tenant, now, besides=blob)
    if stored + uploading + size_bytes > max_bytes:
        raise QuotaExceeded(
            f"The tenant stores {stored} bytes, uploads {uploading} and may store {max_bytes}; this takes {size_bytes} more.",
            hint="Delete versions or uploads, or ask for more.",
        )
    if (
        restorable_since is not None
        and (kept := await _restorable_bytes(session, repository.tenant, restorable_since)) > max_bytes
    ):
        raise QuotaExceeded(
            f"{kept} bytes of what the tenant deleted are kept for a restore, more than the {max_bytes} that it may store.",
            hint="Wait until they are gone, restore some, or ask for more.",
        )


async def check_upload_quota(session: AsyncSession, tenant: TenantId, limits: Limits, size: int, now: datetime) -> None:
    """Return if the tenant, whose row is locked, may have another upload of that size.

    Raises:
        QuotaExceeded
    """
    # A published one is a version, and bounded as that; it stays so when the version is deleted, whose row is kept.
    is_published = Upload.is_complete & _versions_of_upload(tenant).exists()
    mine = (Upload.tenant_id == tenant, Upload.expires_at > now, ~is_published)
    num_open = await session.scalar(select(func.count()).select_from(Upload).where(*mine)) or 0
    if num_open >= LIMITS.max_open_uploads_per_tenant:
        raise QuotaExceeded(
            f"{num_open} uploads of this tenant are open, the most it may have.",
            hint="Delete one, or wait until one expires.",
        )
    max_bytes = limits.get("max_stored_bytes")
    if max_bytes is None:
        return
    uploading = await uploading_bytes(session, tenant, now)
    stored = await _stored_bytes(session, tenant)
    if stored + uploading + size > max_bytes:
        raise QuotaExceeded(
            f"The tenant stores {stored} bytes, uploads {uploading} and may store {max_bytes}; this upload has {size}.",
            hint="Delete versions or uploads, or ask for more.",
        )


async def uploading_bytes(
    session: AsyncSession, tenant: TenantId, now: datetime, *, besides: Digest | None = None
) -> int:
    """Of the tenant's open uploads, at their full sizes, but for those that are published: these are counted as versions.

    Args:
        besides: a digest whose complete upload isn't counted: it is being published.
    """
    # Only of a complete upload is it known that it has those bytes.
    published = _versions_of_upload(tenant).where(AdapterVersion.deleted_at.is_(None))
    is_published = Upload.is_complete & (published.exists() | (Upload.sha256 == (besides or "")))
    query = select(func.sum(Upload.size)).where(Upload.tenant_id == tenant, Upload.expires_at > now, ~is_published)
    return int(await session.scalar(query) or 0)


async def _num_adapters(session: AsyncSession, tenant: TenantId) -> int:
    query = select(func.count()).select_from(Adapter)
    return await session.scalar(query.where(Adapter.tenant_id == tenant, Adapter.deleted_at.is_(None))) or 0


async def _stored_bytes(session: AsyncSession, tenant: TenantId) -> int:
    """Return the bytes of the tenant's versions that aren't deleted, each counted in full."""
    query = (
        select(func.sum(AdapterVersion.size_bytes))
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.tenant_id == tenant, AdapterVersion.deleted_at.is_(None))
    )
    return int(await session.scalar(query) or 0)


async def _restorable_bytes(session: AsyncSession, tenant: TenantId, since: datetime) -> int:
    """Return the bytes of the tenant's versions deleted after `since`, counting versions with the same weights once."""
    sizes = (
        select(func.max(AdapterVersion.size_bytes).label("size"))
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.tenant_id == tenant, AdapterVersion.deleted_at > since)
        .group_by(AdapterVersion.weights_blob)
        .subquery()
    )
    return int(await session.scalar(select(func.sum(sizes.c.size))) or 0)


def _versions_of_upload(tenant: TenantId) -> Select[str]:
    """Return the question for the tenant's versions, deleted ones among them, with the bytes of the upload that it stands beside."""
    return (
        select(AdapterVersion.id)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.tenant_id == tenant, AdapterVersion.weights_blob == Upload.sha256)
    )


def _or_none(value: int | None, default: int) -> int:
    return default if value is None else value
