"""Tables of the registry.

The migrations in `loraserve_migrations` create them; a test keeps the two equal.

Rows of `adapter_versions` change only in state, checks, base, metadata, tombstone, and the blobs of
a repaired version. Aliases move under the adapter's row lock. A delete sets `deleted_at`: rows that
tenants made stay, except aliases, grants and pins, and only bytes are collected after the
retention.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    TextClause,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
NOT_DELETED = text("deleted_at IS NULL")
ULID_LENGTH = 26
DIGEST_LENGTH = 64
NAME_LENGTH = 63
ADAPTER_NAME_LENGTH = 128
KEY_NAME_LENGTH = 128
DAY_LENGTH = 10
OBJECT_ID_LENGTH = 32
"""Length of a ULID behind ``file-`` or ``batch_``."""


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC time on every database.

    SQLite stores no offset, so values are stored and returned in UTC.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a naive datetime ({value.isoformat()}) can't be stored: it has no time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING_CONVENTION)


class Tenant(Base):
    __tablename__ = "tenants"
    __table_args__ = (
        # A deleted tenant's name is free again; its rows keep the old id, so nothing of it comes
        # back with the name.
        Index("uq_tenants_name", "name", unique=True, sqlite_where=NOT_DELETED, postgresql_where=NOT_DELETED),
    )

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    limits: Mapped[dict[str, Any]] = mapped_column(JSON)
    weight: Mapped[float] = mapped_column(Float, server_default="1")
    """Weight of its share of the engine relative to other tenants, under contention."""
    prices: Mapped[dict[str, Any]] = mapped_column(JSON, server_default="{}")
    """Price table; empty if answers carry no cost."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class ApiKey(Base):
    __tablename__ = "api_keys"
    __table_args__ = (UniqueConstraint("secret_hash"), Index(None, "tenant_id", "id"))

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    """NULL: an operator's key."""
    role: Mapped[str | None] = mapped_column(String(16))
    """Role of an operator's key; NULL: a tenant's."""
    name: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    prefix: Mapped[str] = mapped_column(String(16))
    """First characters of the secret, so that people can distinguish keys."""
    secret_hash: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    """HMAC-SHA256 of the secret under the server's pepper, in hex."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class ServerSecret(Base):
    """Secret that all replicas on this database share, such as the pepper of the keys' hashes."""

    __tablename__ = "server_secrets"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    value: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Adapter(Base):
    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name_key"),)

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(ADAPTER_NAME_LENGTH))
    """Name as it was first written."""
    name_key: Mapped[str] = mapped_column(String(ADAPTER_NAME_LENGTH))
    """Name in lower case (`loraserve.db.names.name_key`), by which it is found."""
    last_version: Mapped[int] = mapped_column(Integer)
    """Highest number ever used; numbers aren't reused, not even after a delete."""
    revision: Mapped[int] = mapped_column(Integer)
    """Counter of changes of the adapter, its versions and its aliases."""
    notes: Mapped[str] = mapped_column(Text, server_default=text("''"))
    tags: Mapped[dict[str, str]] = mapped_column(JSON, server_default="{}")
    fallback: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    """Version number, alias or ``base`` that answers if the requested version can't;
    NULL for none.
    """
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


def _index_of_some(condition: TextClause, *columns: str) -> Index:
    """Build an index of the rows for which the condition holds."""
    return Index(None, *columns, sqlite_where=condition, postgresql_where=condition)


class AdapterVersion(Base):
    __tablename__ = "adapter_versions"
    __table_args__ = (
        UniqueConstraint("adapter_id", "number"),
        Index(
            "uq_adapter_versions_adapter_id_digest",
            "adapter_id",
            "digest",
            unique=True,
            sqlite_where=NOT_DELETED,
            postgresql_where=NOT_DELETED,
        ),
        Index(None, "digest"),
        # the collector looks for references to blobs; few versions have files for chats
        Index(None, "config_blob"),
        Index(None, "weights_blob"),
        _index_of_some(text("chat_template_blob IS NOT NULL"), "chat_template_blob"),
        _index_of_some(text("generation_config_blob IS NOT NULL"), "generation_config_blob"),
        _index_of_some(text("tokenizer_blob IS NOT NULL"), "tokenizer_blob"),
        # covers counts by base, and sums of bytes
        _index_of_some(NOT_DELETED, "adapter_id", "base_digest", "size_bytes"),
        # what a tenant's deleted versions keep
        _index_of_some(text("deleted_at IS NOT NULL"), "adapter_id", "deleted_at"),
        CheckConstraint("number >= 1", name="number_positive"),
    )

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"))
    number: Mapped[int] = mapped_column(Integer)
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    config_blob: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    weights_blob: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    base_digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    """Digest of the base that the version was checked against."""
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    rank: Mapped[int] = mapped_column(Integer)
    target_modules: Mapped[list[str]] = mapped_column(JSON)
    dtype: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    checks: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    chat_template_blob: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    """Blob of its own chat template; NULL: it has none."""
    chat_template_bytes: Mapped[int | None] = mapped_column(Integer)
    generation_config_blob: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    """Blob of its defaults of requests' fields; NULL: it has none."""
    generation_config_bytes: Mapped[int | None] = mapped_column(Integer)
    tool_parser: Mapped[str | None] = mapped_column(String(64))
    """Format of its tool calls; NULL: recognized, or the base's."""
    reasoning_parser: Mapped[str | None] = mapped_column(String(64))
    chat_template_kwargs: Mapped[str | None] = mapped_column(Text)
    """Variables of its chat template, as canonical JSON; NULL: it sets none."""
    tokenizer_blob: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    """Blob of what its tokenizer has in addition to the base's; NULL: nothing."""
    tokenizer_bytes: Mapped[int | None] = mapped_column(Integer)
    notes: Mapped[str] = mapped_column(Text, server_default=text("''"))
    tags: Mapped[dict[str, str]] = mapped_column(JSON, server_default="{}")
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


EXTRA_COLUMNS = (
    AdapterVersion.chat_template_blob,
    AdapterVersion.chat_template_bytes,
    AdapterVersion.generation_config_blob,
    AdapterVersion.generation_config_bytes,
    AdapterVersion.tool_parser,
    AdapterVersion.reasoning_parser,
    AdapterVersion.chat_template_kwargs,
    AdapterVersion.tokenizer_blob,
    AdapterVersion.tokenizer_bytes,
)
"""Columns of a version's extra files."""
BLOB_COLUMNS = (
    AdapterVersion.config_blob,
    AdapterVersion.weights_blob,
    AdapterVersion.chat_template_blob,
    AdapterVersion.generation_config_blob,
    AdapterVersion.tokenizer_blob,
)
"""Columns of a version that refer to blobs."""


class StorageTotal(Base):
    """Total of a tenant's adapters and versions: of all, or of those that were deleted on a day.

    Code that changes their rows adds to it in the same transaction
    (`loraserve.registry.storage_totals`).
    """

    __tablename__ = "storage_totals"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    day: Mapped[str] = mapped_column(String(DAY_LENGTH), primary_key=True)
    """Day of the deletion in UTC, as 2026-01-31; empty: all that it ever made, deleted or not."""
    num_adapters: Mapped[int] = mapped_column(BigInteger)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    """Bytes of versions, each counted in full."""


class Alias(Base):
    __tablename__ = "aliases"
    __table_args__ = (
        ForeignKeyConstraint(["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.number"]),
        Index(None, "adapter_id", "version"),
    )

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    version: Mapped[int] = mapped_column(Integer)
    """Version; with a split, the one with the largest weight."""
    split: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    """``[{version, weight}, …]``; NULL: all traffic goes to `version`."""
    shadow: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """``{version, share}``: copies of this share of the requests run on that version;
    their answers are dropped.
    """
    previous: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """``{version, split}`` before the last move: the target of a rollback."""
    revision: Mapped[int] = mapped_column(Integer)
    """Revision of the adapter at the last move; never reused,
    so that an ETag can't match a later state.
    """
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class AuditRow(Base):
    __tablename__ = "audit"
    __table_args__ = (Index(None, "tenant_id", "id"),)

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    actor: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))
    """Id of the key, or the server's own name (``server``, ``admin``)."""
    action: Mapped[str] = mapped_column(String(NAME_LENGTH))
    target: Mapped[str] = mapped_column(String(255))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)


class IdempotencyRow(Base):
    __tablename__ = "idempotency_keys"
    __table_args__ = (Index(None, "expires_at"), Index(None, "owner", "created_at"))

    owner: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH), primary_key=True)
    """Owner of the key: id of the API key, and the tenant that it acts for."""
    key_hash: Mapped[str] = mapped_column(String(DIGEST_LENGTH), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    """SHA-256 over the method, path, query and content of the request."""
    status: Mapped[int] = mapped_column(Integer)
    headers: Mapped[dict[str, str]] = mapped_column(JSON)
    body: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class OperatorPin(Base):
    """Version that an operator has pinned to the device, on all replicas and after each start."""

    __tablename__ = "operator_pins"
    __table_args__ = (
        ForeignKeyConstraint(["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.number"]),
    )

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))


class EvaluationRow(Base):
    """Result of a version's evaluation on a file of data."""

    __tablename__ = "evaluations"
    __table_args__ = (
        ForeignKeyConstraint(["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.number"]),
    )

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    data_sha256: Mapped[str] = mapped_column(String(DIGEST_LENGTH), primary_key=True)
    """SHA-256 of the file of data."""
    data_name: Mapped[str] = mapped_column(String(255))
    num_lines: Mapped[int] = mapped_column(Integer)
    metrics: Mapped[dict[str, float]] = mapped_column(JSON)
    """Values by metric, of which more is better."""
    base_metrics: Mapped[dict[str, float]] = mapped_column(JSON)
    """Values of the base in the same run."""
    settings: Mapped[dict[str, str]] = mapped_column(JSON)
    """Settings of the run on which its metrics depend, such as ``max_tokens``."""
    base_digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    arithmetic: Mapped[str] = mapped_column(String(200))
    """Arithmetic of the base's linears on the server."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))


class Grant(Base):
    """Permission of another tenant to use an adapter as ``OWNER/NAME``.

    It can neither read the adapter's files nor change it.
    """

    __tablename__ = "grants"
    __table_args__ = (Index(None, "tenant_id"),)

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))


class Upload(Base):
    """Resumable upload, and how many of its bytes have arrived."""

    __tablename__ = "uploads"
    __table_args__ = (Index(None, "tenant_id", "id"), Index(None, "expires_at"))

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    sha256: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    size: Mapped[int] = mapped_column(BigInteger)
    received: Mapped[int] = mapped_column(BigInteger)
    """Number of durable bytes from the start."""
    is_complete: Mapped[bool]
    """Whether the whole blob is in the store, and hashes to `sha256`."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class UploadChunk(Base):
    """Run of an upload's bytes, a blob of its own until the upload is complete.

    So any replica can take the next one.
    """

    __tablename__ = "upload_chunks"
    __table_args__ = (Index(None, "digest"),)

    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id"), primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))


class GcCandidate(Base):
    """Unreferenced blob, which is deleted after a grace period unless it is referred to again."""

    __tablename__ = "doomed_blobs"

    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH), primary_key=True)
    listed_at: Mapped[datetime] = mapped_column("doomed_at", UtcDateTime)
    deleting_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Time since which a collector has locked the blob for deletion; None if it isn't locked."""


class Lease(Base):
    """Lease of a task that one server does for all, with its present holder."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    holder: Mapped[str] = mapped_column(String(ULID_LENGTH))
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class OperationRow(Base):
    """Work that takes longer than a request."""

    __tablename__ = "operations"
    __table_args__ = (Index(None, "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str] = mapped_column(String(NAME_LENGTH))
    target: Mapped[str] = mapped_column(String(255))
    state: Mapped[str] = mapped_column(String(16))
    """State: running, done, failed or cancelled."""
    is_cancelling: Mapped[bool]
    progress: Mapped[dict[str, Any]] = mapped_column(JSON)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    actor: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """Time of the last change, renewed while it runs; a stale one means that its server died."""


class UsageHour(Base):
    """Usage of one adapter version by one tenant in one hour, on all replicas. It only grows."""

    __tablename__ = "usage_hours"
    __table_args__ = (Index(None, "hour"),)

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    hour: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    owner: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True, server_default=text("''"))
    """Id of the tenant that owns the adapter, if it is another one."""
    adapter: Mapped[str] = mapped_column(String(255), primary_key=True)
    """Name of the adapter; empty for the base; the label of a sum."""
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Number of the version; 0 for the base or a sum."""
    price: Mapped[str] = mapped_column(String(64), primary_key=True, server_default=text("''"))
    """Prices of a million tokens at the time of use: ``EUR 0.5 0.05 1.5`` (prompt,
    cached, completion).

    Empty for none.
    """
    num_requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    """Prompt tokens that were cached."""
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    """Completion tokens that were delivered to a client."""
    undelivered_tokens: Mapped[int] = mapped_column(BigInteger)
    """Tokens generated for a client that had left or an answer that failed; they cost nothing."""
    num_cached_requests: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """Requests whose answers the result cache had."""
    cached_completion_tokens: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """Completion tokens of these answers."""


class UsageJournal(Base):
    """Number up to which a server's journal is counted in `UsageHour`.

    So nothing is counted twice.
    """

    __tablename__ = "usage_journals"

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    """Id of the journal, created with its file."""
    sequence: Mapped[int] = mapped_column(BigInteger)
    """Number of the last counted entry."""
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class ServerRow(Base):
    """Server that works on this database, or was killed recently."""

    __tablename__ = "servers"

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    """Id of its process, created at its start."""
    num_beats: Mapped[int] = mapped_column(BigInteger)
    """Number of heartbeats; other servers observe its growth by their own clocks,
    which needn't agree.
    """
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    rates: Mapped[dict[str, list[float]]] = mapped_column(JSON, server_default="{}")
    """Parts of its requests and tokens per minute that each tenant has used here lately, by id."""


class BasePrecisionRow(Base):
    """Cost of rounding for a base in one arithmetic, against its checkpoint in float32."""

    __tablename__ = "base_precisions"

    base_digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH), primary_key=True)
    quantization: Mapped[str] = mapped_column(String(32), primary_key=True)
    dtype: Mapped[str] = mapped_column(String(32), primary_key=True)
    arithmetic: Mapped[str] = mapped_column(String(200), primary_key=True)
    device: Mapped[str] = mapped_column(String(16), primary_key=True)
    num_positions: Mapped[int] = mapped_column(Integer)
    top1_agreement: Mapped[float] = mapped_column(Float)
    mean_divergence: Mapped[float] = mapped_column(Float)
    loss: Mapped[float] = mapped_column(Float)
    served_loss: Mapped[float] = mapped_column(Float)
    measured_at: Mapped[datetime] = mapped_column(UtcDateTime)


class RegistryIdentity(Base):
    """Identity of this database's registry, in a single row.

    It is created when the registry first reads a store's marker.
    """

    __tablename__ = "registry_identity"

    slot: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    """Always 1, so that there is a single row."""
    id: Mapped[str] = mapped_column(String(ULID_LENGTH))
    """Id of the registry in stores' markers."""
    made_at: Mapped[datetime] = mapped_column(UtcDateTime)


class StoreStamp(Base):
    """Stamp that this registry made for its store's marker.

    Other stamps belong to other registries or to later states.
    """

    __tablename__ = "store_stamps"

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    made_at: Mapped[datetime] = mapped_column(UtcDateTime)
    written_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Time at which the marker was known to have the stamp; None if that isn't known."""


class ShadowHour(Base):
    """Comparisons of a shadow version with the version that answered, in one hour."""

    __tablename__ = "shadow_hours"
    __table_args__ = (Index(None, "hour"),)

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    alias: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    """Alias of the requests."""
    hour: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    shadow_version: Mapped[int] = mapped_column(Integer, primary_key=True)
    num_requests: Mapped[int] = mapped_column(BigInteger)
    num_failed: Mapped[int] = mapped_column(BigInteger)
    """Requests that the shadow failed to answer."""
    num_equal: Mapped[int] = mapped_column(BigInteger)
    """Requests for which both generated the same tokens."""
    num_tokens: Mapped[int] = mapped_column(BigInteger)
    """Tokens of the answers, for requests that the shadow answered too."""
    num_agreed_tokens: Mapped[int] = mapped_column(BigInteger)
    """Tokens before the first difference."""
    live_ms: Mapped[int] = mapped_column(BigInteger)
    shadow_ms: Mapped[int] = mapped_column(BigInteger)
    """Times from the request to the last token, summed over the requests that both answered."""


class StoredResponseRow(Base):
    """Response that later ones may continue: its own input and output."""

    __tablename__ = "stored_responses"
    # the first covers the sums over a tenant's responses
    __table_args__ = (Index(None, "tenant_id", "id", "num_bytes"), Index(None, "expires_at"))

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    previous_id: Mapped[str | None] = mapped_column(String(ULID_LENGTH))
    """Response that it continues; not a foreign key: that one may be deleted before."""
    input: Mapped[bytes] = mapped_column(LargeBinary)
    """Its own input items, as JSON."""
    answer: Mapped[bytes] = mapped_column(LargeBinary)
    """The response object, as JSON."""
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class FileRow(Base):
    """File of a tenant: a batch's input, or what came of one. Its bytes are a blob."""

    __tablename__ = "files"
    __table_args__ = (Index(None, "tenant_id", "id"), Index(None, "expires_at"), Index(None, "blob"))

    id: Mapped[str] = mapped_column(String(OBJECT_ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    purpose: Mapped[str] = mapped_column(String(16))
    filename: Mapped[str] = mapped_column(String(255))
    size: Mapped[int] = mapped_column(BigInteger)
    blob: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class BatchRow(Base):
    """Batch of requests, and how far it has come.

    Its runner changes it only if `num_chunks` and `state` are as it last read them: of two runners,
    one finds out that the other was faster.
    """

    __tablename__ = "batches"
    __table_args__ = (Index(None, "tenant_id", "id"), Index(None, "state", "id"), Index(None, "input_blob"))

    id: Mapped[str] = mapped_column(String(OBJECT_ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    created_by: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))
    input_file_id: Mapped[str] = mapped_column(String(OBJECT_ID_LENGTH))
    """Id of the file, which may be deleted meanwhile: the batch keeps the blob."""
    input_blob: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    endpoint: Mapped[str] = mapped_column(String(NAME_LENGTH))
    completion_window: Mapped[str] = mapped_column(String(8))
    labels: Mapped[dict[str, str] | None] = mapped_column("metadata", JSON(none_as_null=True))
    output_ttl_s: Mapped[int | None] = mapped_column(Integer)
    """Seconds for which the files of its results are kept; NULL: until they are deleted."""
    state: Mapped[str] = mapped_column(String(16))
    times: Mapped[dict[str, int]] = mapped_column(JSON)
    """Second since 1970 at which it came to each state that it has been in."""
    errors: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    """Faults of the input, or the reason why the batch failed."""
    num_lines: Mapped[int] = mapped_column(Integer)
    num_completed: Mapped[int] = mapped_column(Integer)
    num_failed: Mapped[int] = mapped_column(Integer)
    num_chunks: Mapped[int] = mapped_column(Integer)
    usage: Mapped[dict[str, int]] = mapped_column(JSON)
    output_file_id: Mapped[str | None] = mapped_column(String(OBJECT_ID_LENGTH))
    error_file_id: Mapped[str | None] = mapped_column(String(OBJECT_ID_LENGTH))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """End of its window: lines that aren't done by then aren't computed any more."""


class BatchChunk(Base):
    """Results of some lines of a batch, a blob until the batch ends: these lines are done."""

    __tablename__ = "batch_chunks"
    __table_args__ = (Index(None, "digest"),)

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    sequence: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    size: Mapped[int] = mapped_column(BigInteger)
    lines: Mapped[list[int]] = mapped_column(JSON)
    """Numbers of the lines, from 1."""
