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


class Certificate(Result):
    """How far an adapter's answers on the server are from those of a plain float32 evaluation of it on the same base.

    Differences are of logits, over all tokens at every probe position. None: not a finite number.
    """

    verdict: str
    """passed, or failed."""
    max_difference: float | None
    mean_difference: float | None
    base_difference: float | None
    """The largest of the base alone."""
    tolerance: float | None
    """What `max_difference` must not pass."""
    max_effect: float | None
    """The largest change that the adapter makes to a logit of the base."""
    top1_agreement: float | None
    """The part of probe positions at which the two have the same likeliest token."""
    precision_loss: float | None
    """The largest relative error, over the adapter's modules, of its update as it is served against as it was uploaded."""
    num_probe_tokens: int
    seconds: float | None
    reason: str = ""
    """Why it failed."""


class Version(Result):
    """One immutable version of an adapter, or what a dry run found it would be (`version` is None then)."""

    name: str
    version: int | None = None
    digest: str
    """SHA-256 over the canonical config and tensors: the version's identity."""
    state: str
    """ready; quarantined: its certificate failed, or its stored bytes were found damaged, and it isn't served; checked: a dry run's."""
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

    @property
    def is_quarantined(self) -> bool:
        return self.state == "quarantined"

    @property
    def verdict(self) -> str | None:
        """passed, failed, or skipped: there is no certificate. None: the server verifies nothing."""
        return self.detail_of("parity", "status")

    @property
    def certificate(self) -> Certificate | None:
        found = next((check.get("certificate") for check in self.checks if check.get("name") == "parity"), None)
        return None if found is None else Certificate.model_validate(found)

    def detail_of(self, check: str, field: str = "detail") -> str | None:
        """What the check of this name found, in words; None where there is no such check."""
        return next((str(one[field]) for one in self.checks if one.get("name") == check and field in one), None)


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
    """Of its files, which are on disk wherever else it is."""
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
    dtype: str | None = None
    """What its matrices are held in (fp32, bf16, fp16, int8); None: it's in no memory."""
    precision_loss: float | None = None
    """The largest relative error, over its modules, of its update as it is held against as it was uploaded; None: it's in no memory."""
    uses_per_s: float | None = None
    """Of late, older uses counting less and less; None for a tenant's key, or in no memory."""

    @property
    def model(self) -> str:
        """What to write as `model=` to get exactly this version."""
        return f"{self.name}@{self.version}"


class Memory(Result):
    """What there is of each tier's memory, and who has it."""

    budget_bytes: int
    """What KV blocks and adapters may take of the device together: the sum of the five below."""
    kv_used_bytes: int
    kv_idle_bytes: int
    """Kept for prompts that begin alike; it goes where room is needed."""
    adapters_used_bytes: int
    """Pinned, or on their way."""
    adapters_idle_bytes: int
    free_bytes: int
    num_device_adapters: int
    host_budget_bytes: int
    host_adapter_bytes: int
    num_host_adapters: int


class ResidencyPage(Page[AdapterResidency]):
    """Some versions, and the memory that all are in."""

    memory: Memory | None = None
    """None for a tenant's key."""


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
