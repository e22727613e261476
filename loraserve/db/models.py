"""The registry's tables. The migrations in `loraserve_migrations` make them; a test holds the two equal.

Rows of `adapter_versions` never change but for their state, their certificate and their damage (among `checks`), the blobs of a damaged one that was pushed
again, and their tombstone; names are
pointers (`aliases`) moved under the adapter's row lock. Nothing is deleted but aliases and expired idempotency rows: a delete sets `deleted_at`.
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
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
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
