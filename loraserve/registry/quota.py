"""Quota of a tenant: adapters and bytes, including running uploads and restorable versions.

Files count too, and results of batches that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import Adapter, AdapterVersion, BatchChunk, BatchRow, FileRow, Upload
from loraserve.errors import QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.storage_totals import StorageTotals, read_totals
from loraserve.types import Digest, TenantId

Limits = Mapping[str, int | None]
"""Limits in a tenant's row."""


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
    num_ephemeral: int = 0,
) -> None:
    """Check that the tenant may also hold this.

    The result holds until the commit if the tenant's row is locked.

    Args:
        is_counted: whether the row of a new adapter exists already.
        blob: digest of the weights, whose own upload isn't counted.
        restorable_since: versions deleted after this still have their bytes, which may add up to
            the tenant's quota once more. None: don't check them.
        num_ephemeral: adapters in addition to those in the database.

    Raises:
        QuotaExceeded
    """
    max_adapters = min(
        LIMITS.max_adapters_per_tenant, _or_none(limits.get("max_adapters"), LIMITS.max_adapters_per_tenant)
    )
    max_bytes = limits.get("max_stored_bytes")
    if max_bytes is None and not is_new_adapter:
        return
    totals = await read_totals(session, repository.tenant, deleted_since=restorable_since or now)
    if is_new_adapter:
        others = totals.num_adapters - is_counted + num_ephemeral
        if others >= max_adapters:
            is_servers = max_adapters == LIMITS.max_adapters_per_tenant
            cure = "Delete one that isn't needed." if is_servers else f"{_cure('one', '--max-adapters')}."
            raise QuotaExceeded(
                f"The tenant has {others} adapters; at most {max_adapters} are allowed.",
                hint=f"{cure} See: loraserve adapter list",
            )
    if max_bytes is None:
        return
    stored, uploading = await _stored_bytes(session, repository.tenant, totals, now, besides=blob)
    if stored + uploading + size_bytes > max_bytes:
        raise QuotaExceeded(
            f"The tenant stores {stored} bytes and uploads {uploading}; "
            f"with this one's {size_bytes}, it would exceed its limit of {max_bytes}.",
            hint=_cure("versions or uploads", "--max-stored-bytes"),
        )
    if (
        restorable_since is not None
        # with whole days and the same bytes many times: no less than what is kept
        and totals.num_deleted_bytes > max_bytes
        and (kept := await _restorable_bytes(session, repository.tenant, restorable_since)) > max_bytes
    ):
        raise QuotaExceeded(
            f"{kept} bytes of deleted versions are kept for a restore, more than the tenant's limit of {max_bytes}.",
            hint="Wait until they are deleted, restore some, or have an admin raise the limit: loraserve tenant set "
            "TENANT --max-stored-bytes N",
        )


async def check_upload_quota(session: AsyncSession, tenant: TenantId, limits: Limits, size: int, now: datetime) -> None:
    """Check that the tenant, whose row is locked, may begin another upload of that size.

    Raises:
        QuotaExceeded
    """
    # A published upload counts as a version, even after that is deleted: the row stays.
    is_published = Upload.is_complete & _versions_of_upload(tenant).exists()
    mine = (Upload.tenant_id == tenant, Upload.expires_at > now, ~is_published)
    num_open = await session.scalar(select(func.count()).select_from(Upload).where(*mine)) or 0
    if num_open >= LIMITS.max_open_uploads_per_tenant:
        raise QuotaExceeded(
            f"{num_open} uploads of this tenant are open, the maximum.",
            hint="Delete one, or wait until one expires.",
        )
    max_bytes = limits.get("max_stored_bytes")
    if max_bytes is None:
        return
    totals = await read_totals(session, tenant, deleted_since=now)
    stored, uploading = await _stored_bytes(session, tenant, totals, now)
    if stored + uploading + size > max_bytes:
        raise QuotaExceeded(
            f"The tenant stores {stored} bytes and uploads {uploading}; with this upload's {size}, "
            f"it would exceed its limit of {max_bytes}.",
            hint=_cure("versions or uploads", "--max-stored-bytes"),
        )


async def room_bytes(
    session: AsyncSession, tenant: TenantId, limits: Limits, now: datetime, *, is_adapter: bool
) -> int | None:
    """Compute how many bytes of running uploads the tenant may have; None: any number.

    They are those that it may store in addition. Adapters may have as many as the whole
    limit: a version is sent again to repair it.
    """
    max_bytes = limits.get("max_stored_bytes")
    if max_bytes is None or is_adapter:
        return max_bytes
    totals = await read_totals(session, tenant, deleted_since=now)
    return max(0, max_bytes - sum(await _stored_bytes(session, tenant, totals, now)))


async def check_stored_bytes(session: AsyncSession, tenant: TenantId, limits: Limits, size: int, now: datetime) -> None:
    """Check that the tenant may store that many more bytes, of a file or of a batch's results.

    Raises:
        QuotaExceeded
    """
    max_bytes = limits.get("max_stored_bytes")
    if max_bytes is None:
        return
    totals = await read_totals(session, tenant, deleted_since=now)
    stored = sum(await _stored_bytes(session, tenant, totals, now))
    if stored + size > max_bytes:
        raise QuotaExceeded(
            f"The tenant stores {stored} bytes; with {size} more, it would exceed its limit of {max_bytes}.",
            hint=_cure("files, versions or uploads", "--max-stored-bytes"),
        )


async def _stored_bytes(
    session: AsyncSession, tenant: TenantId, totals: StorageTotals, now: datetime, *, besides: Digest | None = None
) -> tuple[int, int]:
    """Sum the bytes that the tenant stores, and those that it uploads.

    It stores files, batches' results and versions that aren't deleted. It uploads the full sizes of
    open uploads. Published ones are left out: they count as versions.

    Args:
        besides: digest whose complete upload isn't counted because it is being published.
    """
    files = select(func.sum(FileRow.size)).where(FileRow.tenant_id == tenant)
    chunks = select(func.sum(BatchChunk.size)).join(BatchRow, BatchRow.id == BatchChunk.batch_id)
    # Only complete uploads are known to have the announced bytes.
    published = _versions_of_upload(tenant).where(AdapterVersion.deleted_at.is_(None))
    is_published = Upload.is_complete & (published.exists() | (Upload.sha256 == (besides or "")))
    uploads = select(func.sum(Upload.size)).where(Upload.tenant_id == tenant, Upload.expires_at > now, ~is_published)
    queries = (files, chunks.where(BatchRow.tenant_id == tenant), uploads)
    row = (await session.execute(select(*(query.scalar_subquery() for query in queries)))).one()
    of_files, of_chunks, uploading = (int(value or 0) for value in row)
    return totals.num_bytes + of_files + of_chunks, uploading


async def _restorable_bytes(session: AsyncSession, tenant: TenantId, since: datetime) -> int:
    """Sum the bytes of the tenant's versions deleted after `since`.

    Versions with the same weights count once.
    """
    sizes = (
        select(func.max(AdapterVersion.size_bytes).label("size"))
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.tenant_id == tenant, AdapterVersion.deleted_at > since)
        .group_by(AdapterVersion.weights_blob)
        .subquery()
    )
    return int(await session.scalar(select(func.sum(sizes.c.size))) or 0)


def _versions_of_upload(tenant: TenantId) -> Select[str]:
    """Select the tenant's versions of the weights of the enclosing query's upload.

    They may be deleted or not.
    """
    return (
        select(AdapterVersion.id)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.tenant_id == tenant, AdapterVersion.weights_blob == Upload.sha256)
    )


def _or_none(value: int | None, default: int) -> int:
    return default if value is None else value


def _cure(what: str, flag: str) -> str:
    return f"Delete {what}, or have an admin raise the limit: loraserve tenant set TENANT {flag} N"
