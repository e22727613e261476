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
    state: str
    size_bytes: int
    rank: int
    """The highest of its modules."""
    target_modules: list[str]
    dtype: str | None = None
    aliases: list[str]
    created_at: datetime
    checks: list[dict[str, Any]] = Field(default_factory=list)
    """What was checked before it was taken, and what was found."""

    @property
    def model(self) -> str:
        """What to write as `model=` to get exactly this version."""
        return self.name if self.version is None else f"{self.name}@{self.version}"


class Alias(Result):
    """A name that points to a version: `live` is what the adapter's bare name means."""

    name: str
    """The adapter's."""
    alias: str
    version: int
    updated_at: datetime


class Adapter(Result):
    name: str
    aliases: dict[str, int]
    """Alias → version."""
    num_versions: int
    latest_version: int | None
    created_at: datetime
    updated_at: datetime


class Action(Result):
    """What `warm`, `pin` or `unpin` did."""

    name: str
    version: int
    digest: str
    action: str
    is_done: bool
    """False: begun, and still under way when the server stopped waiting."""


class Tenant(Result):
    id: str
    """Never given twice, unlike the name."""
    name: str
    limits: dict[str, int | None] = Field(default_factory=dict)
    """What it may hold; None: only the server's own bounds."""
    created_at: datetime


class Key(Result):
    """An API key without its secret."""

    id: str
    name: str
    scopes: list[str]
    prefix: str
    """The secret's first characters, to tell keys apart."""
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class NewKey(Key):
    """The only answer that ever holds the secret."""

    key: str = Field(repr=False)


class AdapterResidency(Result):
    """Where one version's weights are now."""

    tenant: str
    """The name of the tenant whose it is."""
    name: str
    version: int
    digest: str
    size_bytes: int
    tier: str
    """device, host, disk, or loading."""
    device_bytes: int
    host_bytes: int
    num_pins: int | None
    """Running sequences that hold it; None for a tenant's key."""
    is_pinned: bool
    """Pinned by an operator: never evicted."""
    last_used_s: float | None
    """Seconds since its last use."""

    @property
    def model(self) -> str:
        """What to write as `model=` to get exactly this version."""
        return f"{self.name}@{self.version}"


class Base(Result):
    """The resident base model, with the shapes that an adapter must have."""

    id: str
    digest: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    modules: dict[str, tuple[int, int]]
    """Linear → (out_features, in_features)."""
    dtype: str
    quantization: str
    num_parameters: int
    size_bytes: int


class Limits(Result):
    """Every bound of the server, by name: read them as attributes, or all with `model_dump`."""


class AuditEntry(Result):
    """Something that was done."""

    id: int
    at: datetime
    tenant: str | None
    actor: str
    """The key's id, or the server's own doing."""
    action: str
    target: str
    detail: dict[str, Any] = Field(default_factory=dict)
