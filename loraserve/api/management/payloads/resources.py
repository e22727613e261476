"""What management routes answer: each resource as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from loraserve.registry.health.checks import WARNED
from loraserve.registry.records import OTHER_BASE
from loraserve.types import Digest, EngineStats, Tier

if TYPE_CHECKING:
    from loraserve.registry.audit import AuditEntry
    from loraserve.registry.records import AdapterRecord, AliasRecord, SplitPart, VersionRecord
    from loraserve.tenancy.identity.keys import KeyRecord
    from loraserve.tenancy.identity.tenants import TenantRecord

R = TypeVar("R", bound="Resource")
T = TypeVar("T")


class Resource(BaseModel):
    model_config = ConfigDict(frozen=True)


class PageResource(Resource, Generic[R]):
    data: list[R]
    next_cursor: str | None
    """Pass it as ``cursor`` for the next page; null: this is the last."""


class VersionResource(Resource):
    name: str
    version: int | None
    """null: a dry run of bytes that aren't published."""
    digest: str
    state: str
    """ready; quarantined; other_base: made for another base than this server's, where it isn't served; checked: a dry run's."""
    base_digest: str
    """The base that it was made for."""
    size_bytes: int
    rank: int
    target_modules: list[str]
    dtype: str
    aliases: list[str]
    notes: str
    tags: dict[str, str]
    created_at: datetime
    checks: list[dict[str, Any]]
    warnings: list[str]
    """Findings of the checks that don't keep it from being served."""

    @classmethod
    def of(cls, record: VersionRecord, served: Digest | None) -> VersionResource:
        """Return the version as a server of the base `served` shows it; None: its base isn't loaded yet."""
        return cls(
            name=record.name,
            version=record.version,
            digest=record.digest,
            state=record.state if served in (None, record.base_digest) else OTHER_BASE,
            base_digest=record.base_digest,
            size_bytes=record.size_bytes,
            rank=record.rank,
            target_modules=list(record.target_modules),
            dtype=record.dtype,
            aliases=list(record.aliases),
            notes=record.notes,
            tags=dict(record.tags),
            created_at=record.created_at,
            checks=[dict(check) for check in record.checks],
            warnings=[check["detail"] for check in record.checks if check["status"] == WARNED],
        )


class SplitResource(Resource):
    version: int
    weight: float

    @classmethod
    def list_of(cls, parts: Iterable[SplitPart]) -> list[SplitResource]:
        return [cls(version=part.version, weight=part.weight) for part in parts]


class AdapterResource(Resource):
    name: str
    aliases: dict[str, int]
    """Of a split, the version with the largest weight."""
    splits: dict[str, list[SplitResource]]
    """Aliases, among `aliases`, whose traffic is shared: the versions and their weights."""
    num_versions: int
    num_versions_of_another_base: int
    """Versions among those that are of another base than this server's: they aren't served here."""
    latest_version: int | None
    notes: str
    tags: dict[str, str]
    fallback: str | None
    """What answers when the version asked for can't: a version's number, an alias, or ``base``; null: nothing does."""
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, record: AdapterRecord, served: Digest | None) -> AdapterResource:
        """Return the adapter as a server of the base `served` shows it; None: its base isn't loaded yet."""
        num_own = record.num_versions if served is None else record.num_versions_by_base.get(served, 0)
        return cls(
            name=record.name,
            aliases=dict(record.aliases),
            splits={name: SplitResource.list_of(parts) for name, parts in record.splits.items()},
            num_versions=record.num_versions,
            num_versions_of_another_base=record.num_versions - num_own,
            latest_version=record.latest_version,
            notes=record.notes,
            tags=dict(record.tags),
            fallback=record.fallback,
            created_at=record.created_at,
            updated_at=record.updated_at,
        )


class ShadowResource(Resource):
    version: int
    share: float


class AliasResource(Resource):
    adapter: str
    name: str
    version: int
    """Of a split, the one with the largest weight."""
    split: list[SplitResource] | None
    """null: all its traffic goes to `version`."""
    shadow: ShadowResource | None
    revision: int
    """What its ETag says."""
    updated_at: datetime

    @classmethod
    def of(cls, record: AliasRecord) -> AliasResource:
        shadow = record.shadow
        return cls(
            adapter=record.adapter,
            name=record.name,
            version=record.version,
            split=SplitResource.list_of(record.target.split) or None,
            shadow=None if shadow is None else ShadowResource(version=shadow.version, share=shadow.share),
            revision=record.revision,
            updated_at=record.updated_at,
        )


class ResidencyResource(Resource):
    tenant: str
    name: str
    version: int
    digest: str
    size_bytes: int
    """Of its files, which are on disk wherever else it is."""
    tier: Tier
    device_bytes: int
    host_bytes: int
    num_pins: int | None
    """Requests for this version, alone or in a sum, that have had their first token and not their last; null for a tenant's key."""
    is_pinned: bool
    last_used_s: float | None
    """Seconds since this version's last use, a tenant's own; null: not used since the server started."""
    dtype: str | None
    """What its matrices are held in (fp32, bf16, fp16, int8); null: it's in no memory."""
    precision_loss: float | None
    """The largest relative error, over its modules, of its update as it is held against as it was uploaded; null: it's in no memory."""
    uses_per_s: float | None
    """Requests for this version of late, older ones counting less and less; null for a tenant's key."""


class MemoryResource(Resource):
    """What there is of each tier's memory, and who has it, by the engine's last heartbeat."""

    budget_bytes: int
    """What KV blocks and adapters may take of the device together: the sum of the five below."""
    kv_used_bytes: int
    kv_idle_bytes: int
    adapters_used_bytes: int
    """Pinned, or on their way."""
    adapters_idle_bytes: int
    free_bytes: int
    num_device_adapters: int
    host_budget_bytes: int
    host_adapter_bytes: int
    num_host_adapters: int

    @classmethod
    def of(cls, stats: EngineStats) -> MemoryResource:
        return cls(
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


class ResidencyPageResource(PageResource[ResidencyResource]):
    memory: MemoryResource | None
    """null for a tenant's key: it would tell what others do."""


class TenantResource(Resource):
    id: str
    name: str
    limits: dict[str, int | float | None]
    """null: only the server's own bounds."""
    weight: float
    prices: dict[str, Any] | None
    """Per million tokens, as decimal text; null: its tokens have no price."""
    created_at: datetime

    @classmethod
    def of(cls, record: TenantRecord) -> TenantResource:
        policy = record.policy
        return cls(
            id=record.id,
            name=record.name,
            limits=asdict(policy.limits),
            weight=policy.weight,
            prices=None if policy.prices is None else policy.prices.as_json(),
            created_at=record.created_at,
        )


class KeyResource(Resource):
    id: str
    name: str
    scopes: list[str]
    prefix: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    @classmethod
    def of(cls, record: KeyRecord) -> KeyResource:
        return cls(
            id=record.id,
            name=record.name,
            scopes=list(record.scopes),
            prefix=record.prefix,
            created_at=record.created_at,
            expires_at=record.expires_at,
            revoked_at=record.revoked_at,
        )


class AuditResource(Resource):
    id: int
    at: datetime
    tenant: str | None
    actor: str
    action: str
    target: str
    detail: dict[str, Any]

    @classmethod
    def of(cls, entry: AuditEntry) -> AuditResource:
        return cls(
            id=entry.id,
            at=entry.at,
            tenant=entry.tenant,
            actor=entry.actor,
            action=entry.action,
            target=entry.target,
            detail=dict(entry.detail),
        )


def page_of(items: tuple[T, ...], next_cursor: str | None, convert: Callable[[T], R]) -> PageResource[R]:
    return PageResource(data=[convert(item) for item in items], next_cursor=next_cursor)
