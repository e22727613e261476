"""What the management API returns: adapters, versions, aliases, tenants, keys, and where adapters are."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, TypeVar

from pydantic import Field

from loraserve.sdk.call import Result

R = TypeVar("R", bound=Result)


class Page(Result, Generic[R]):
    """Some rows of a list, and where the next ones begin."""

    data: list[R]
    next_cursor: str | None = None


class Version(Result):
    """One immutable version of an adapter, or what a dry run found it would be (`version` is None then)."""

    name: str
    version: int | None = None
    digest: str
    """SHA-256 over the canonical config and tensors: the version's identity."""
    state: str = "checked"
    size_bytes: int
    rank: int
    """The highest of its modules."""
    target_modules: list[str]
    aliases: list[str] = Field(default_factory=list)
    created_at: datetime | None = None
    checks: list[Any] = Field(default_factory=list)

    @property
    def model(self) -> str:
        """What to write as `model=` to get exactly this version."""
        return self.name if self.version is None else f"{self.name}@{self.version}"


class Alias(Result):
    """A name that points to a version: `live` is what the adapter's bare name means."""

    alias: str
    version: int
    name: str | None = None


class Adapter(Result):
    name: str
    aliases: dict[str, int] = Field(default_factory=dict)
    """Alias → version."""
    latest_version: int | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None


class Tenant(Result):
    name: str
    id: str | None = None
    limits: dict[str, Any] = Field(default_factory=dict)
    created_at: datetime | None = None


class Key(Result):
    """An API key without its secret."""

    id: str
    name: str
    scopes: list[str]
    prefix: str | None = None
    """The secret's first characters, to tell keys apart."""
    created_at: datetime | None = None
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class NewKey(Key):
    """The only answer that ever holds the secret."""

    key: str = Field(repr=False)


class AdapterResidency(Result):
    """Where one version's weights are now."""

    name: str | None = None
    version: int | None = None
    tenant: str | None = None
    digest: str
    tier: str
    """device, host, disk, or loading."""
    device_bytes: int = 0
    host_bytes: int = 0
    num_pins: int = 0
    """Running sequences that hold it."""
    is_pinned: bool = False
    """Pinned by an operator: never evicted."""
    last_used_s: float | None = None


class Base(Result):
    """The resident base model."""

    id: str
    digest: str
    architecture: str
    max_model_len: int
    dtype: str | None = None
    quantization: str | None = None
    size_bytes: int | None = None


class Limits(Result):
    """Every bound of the server, by name: read them as attributes, or all with `model_dump`."""
