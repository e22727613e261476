"""The registry's tables. The migrations in `loraserve_migrations` make them; a test holds the two equal.

Rows of `adapter_versions` never change but for their state, their certificate and their damage (among `checks`), the blobs of a damaged one that was pushed
again, their notes and tags, and their tombstone; names are
pointers (`aliases`) moved under the adapter's row lock. Of what tenants made nothing is deleted but aliases, grants and pins: a delete sets `deleted_at`, and what
is collected after the retention is the bytes.
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
KEY_NAME_LENGTH = 128


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC instant on every database. SQLite keeps no offset, so it is stored in UTC and given back as UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a naive datetime ({value.isoformat()}) can't be stored: its instant isn't known")
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
        # A deleted tenant's name is free again; its rows keep the old id, so nothing of it comes back with the name.
        Index("uq_tenants_name", "name", unique=True, sqlite_where=NOT_DELETED, postgresql_where=NOT_DELETED),
    )

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    limits: Mapped[dict[str, Any]] = mapped_column(JSON)
    weight: Mapped[float] = mapped_column(Float, server_default="1")
    """Its share of the engine against other tenants' weights, when there isn't enough for all."""
    prices: Mapped[dict[str, Any]] = mapped_column(JSON, server_default="{}")
    """Its price table; empty: answers carry no cost."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class ApiKey(Base):
    __tablename__ = "api_keys"
    __table_args__ = (UniqueConstraint("secret_hash"), Index(None, "tenant_id", "id"))

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    """NULL: an admin key."""
    name: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    prefix: Mapped[str] = mapped_column(String(16))
    """The first characters of the secret, so that people can tell keys apart."""
    secret_hash: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    """HMAC-SHA256 of the secret under the server's pepper, in hex."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class ServerSecret(Base):
    """What every replica on this database must share, such as the pepper of the keys' hashes."""

    __tablename__ = "server_secrets"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    value: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Adapter(Base):
    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    last_version: Mapped[int] = mapped_column(Integer)
    """The highest number ever given: a number is never given twice, not even after a delete."""
    revision: Mapped[int] = mapped_column(Integer)
    """Grows with every change of the adapter, its versions or its aliases."""
    notes: Mapped[str] = mapped_column(Text, server_default=text("''"))
    tags: Mapped[dict[str, str]] = mapped_column(JSON, server_default="{}")
    fallback: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    """What answers when the version asked for can't: a version's number, an alias, or ``base``. NULL: nothing does."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


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
        CheckConstraint("number >= 1", name="number_positive"),
    )

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"))
    number: Mapped[int] = mapped_column(Integer)
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    config_blob: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    weights_blob: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    base_digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    """The base that the version was checked against."""
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    rank: Mapped[int] = mapped_column(Integer)
    target_modules: Mapped[list[str]] = mapped_column(JSON)
    dtype: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    checks: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    notes: Mapped[str] = mapped_column(Text, server_default=text("''"))
    tags: Mapped[dict[str, str]] = mapped_column(JSON, server_default="{}")
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Alias(Base):
    __tablename__ = "aliases"
    __table_args__ = (
        ForeignKeyConstraint(["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.number"]),
        Index(None, "adapter_id", "version"),
    )

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    version: Mapped[int] = mapped_column(Integer)
    """Of a split, the version with the largest weight."""
    split: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    """``[{version, weight}, …]``; NULL: all traffic goes to `version`."""
    shadow: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """``{version, share}``: a copy of this share of the requests runs on that version, and its answers are dropped."""
    previous: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """``{version, split}`` before the last move: what a rollback goes back to."""
    revision: Mapped[int] = mapped_column(Integer)
    """The adapter's revision when the alias last moved: it never comes back, so an ETag can't match a later state by chance."""
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class AuditRow(Base):
    __tablename__ = "audit"
    __table_args__ = (Index(None, "tenant_id", "id"),)

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    actor: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))
    """The key's id, or the name of the server's own doing (``server``, ``admin``)."""
    action: Mapped[str] = mapped_column(String(NAME_LENGTH))
    target: Mapped[str] = mapped_column(String(255))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)


class IdempotencyRow(Base):
    __tablename__ = "idempotency_keys"
    __table_args__ = (Index(None, "expires_at"), Index(None, "owner", "created_at"))

    owner: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH), primary_key=True)
    """Whose key: the API key's id and the tenant that it acts for."""
    key_hash: Mapped[str] = mapped_column(String(DIGEST_LENGTH), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    """SHA-256 over the method, path, query and content of the request."""
    status: Mapped[int] = mapped_column(Integer)
    headers: Mapped[dict[str, str]] = mapped_column(JSON)
    body: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class OperatorPin(Base):
    """A version that an operator keeps on the device, on every replica and after every start."""

    __tablename__ = "operator_pins"
    __table_args__ = (
        ForeignKeyConstraint(["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.number"]),
    )

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))


class Grant(Base):
    """Another tenant may use (not see the files of, nor change) an adapter, as ``OWNER/NAME``."""

    __tablename__ = "grants"
    __table_args__ = (Index(None, "tenant_id"),)

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))


class Upload(Base):
    """A resumable upload: which bytes of a blob have come, and where they lie."""

    __tablename__ = "uploads"
    __table_args__ = (Index(None, "tenant_id", "id"), Index(None, "expires_at"))

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    sha256: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    size: Mapped[int] = mapped_column(BigInteger)
    received: Mapped[int] = mapped_column(BigInteger)
    """Bytes from the first on that are durable."""
    is_complete: Mapped[bool]
    """Whether the whole blob is in the store, and hashes to `sha256`."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class UploadChunk(Base):
    """A run of an upload's bytes, a blob of its own until the upload is complete: any replica can take the next one."""

    __tablename__ = "upload_chunks"
    __table_args__ = (Index(None, "digest"),)

    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id"), primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))


class GcCandidate(Base):
    """A blob that nothing refers to any more. It is deleted a while later, unless it is referred to again."""

    __tablename__ = "doomed_blobs"

    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH), primary_key=True)
    listed_at: Mapped[datetime] = mapped_column("doomed_at", UtcDateTime)
    deleting_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Since when a collector is deleting it: nobody else may take it off the list. None: nobody is."""


class Lease(Base):
    """What one server does for all of them, and which one does it now."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    holder: Mapped[str] = mapped_column(String(ULID_LENGTH))
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class OperationRow(Base):
    """Something that takes longer than a request, and goes on without one."""

    __tablename__ = "operations"
    __table_args__ = (Index(None, "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str] = mapped_column(String(NAME_LENGTH))
    target: Mapped[str] = mapped_column(String(255))
    state: Mapped[str] = mapped_column(String(16))
    """running, done, failed, cancelled."""
    is_cancelling: Mapped[bool]
    progress: Mapped[dict[str, Any]] = mapped_column(JSON)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    actor: Mapped[str] = mapped_column(String(KEY_NAME_LENGTH))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """Renewed while it runs: one that isn't lost its server."""


class UsageHour(Base):
    """What a tenant used of one adapter version in one hour, on all replicas. Grows only."""

    __tablename__ = "usage_hours"
    __table_args__ = (Index(None, "hour"),)

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    hour: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    owner: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True, server_default=text("''"))
    """The id of the tenant whose adapter it was, where that is another."""
    adapter: Mapped[str] = mapped_column(String(255), primary_key=True)
    """Its name; the base: empty; a composition: its label."""
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    """0: the base, or a composition."""
    price: Mapped[str] = mapped_column(String(64), primary_key=True, server_default=text("''"))
    """What a million tokens cost when they were used: ``EUR 0.5 0.05 1.5`` (prompt, cached, completion). A new price table changes no old cost. Empty: nothing."""
    num_requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    """Of the prompt tokens, those that weren't computed again."""
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    """Those that were handed to a client."""
    undelivered_tokens: Mapped[int] = mapped_column(BigInteger)
    """Those that were made for a client that had left, or for an answer that failed. They cost nothing."""


class UsageJournal(Base):
    """How far a server's journal of usage is in `UsageHour`: what comes again is known by its number."""

    __tablename__ = "usage_journals"

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    """The journal's, made with its file."""
    sequence: Mapped[int] = mapped_column(BigInteger)
    """The last entry that is counted."""
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class ServerRow(Base):
    """A server that works on this database now, or was killed not long ago."""

    __tablename__ = "servers"

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    """Its process's, made at its start."""
    num_beats: Mapped[int] = mapped_column(BigInteger)
    """Grows as long as it lives. Others see by their own clocks that it does: no two machines' need to agree."""
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)


class RegistryIdentity(Base):
    """Identity of the registry that this database is, in its one row; made when it first looks at a store."""

    __tablename__ = "registry_identity"

    slot: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    """Always 1, so that there is one row."""
    id: Mapped[str] = mapped_column(String(ULID_LENGTH))
    """The name that stores' markers bear."""
    made_at: Mapped[datetime] = mapped_column(UtcDateTime)


class StoreStamp(Base):
    """A stamp that this registry made to put in its store's marker. A marker with another one is another registry's, or a later state's."""

    __tablename__ = "store_stamps"

    id: Mapped[str] = mapped_column(String(ULID_LENGTH), primary_key=True)
    made_at: Mapped[datetime] = mapped_column(UtcDateTime)
    written_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Time at which the marker was known to have it; None: it wasn't written, or that isn't known."""


class ShadowHour(Base):
    """How a shadow version did against the one that answered, in one hour."""

    __tablename__ = "shadow_hours"
    __table_args__ = (Index(None, "hour"),)

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    alias: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    """By which the requests came."""
    hour: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    shadow_version: Mapped[int] = mapped_column(Integer, primary_key=True)
    num_requests: Mapped[int] = mapped_column(BigInteger)
    num_failed: Mapped[int] = mapped_column(BigInteger)
    """Of those, the ones to which the shadow had no answer."""
    num_equal: Mapped[int] = mapped_column(BigInteger)
    """Those where both made the same tokens."""
    num_tokens: Mapped[int] = mapped_column(BigInteger)
    """The answers' tokens, of those that the shadow answered too."""
    num_agreed_tokens: Mapped[int] = mapped_column(BigInteger)
    """Of those, the ones before the first that differs."""
    live_ms: Mapped[int] = mapped_column(BigInteger)
    shadow_ms: Mapped[int] = mapped_column(BigInteger)
    """From the request to the last token, summed over the requests that both answered."""
