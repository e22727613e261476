"""Tiers of adapters' weights, and the use of each tier's memory."""

from __future__ import annotations

from typing import Annotated

from loraserve.contract.result import Page, Result, one_of


class AdapterResidency(Result):
    """The tier of a version's weights."""

    tenant: str
    """The name of the tenant that owns it."""
    name: str
    version: int
    digest: str
    size_bytes: int
    """Bytes of its files, which are always on disk. Versions of one digest share their weights:
    a sum of sizes, on disk or in memory, counts each digest once.
    """
    state: str = "ready"
    """ready, quarantined, or other_base (the server serves another base)."""
    tier: Annotated[str, one_of("device", "host", "disk", "loading")]
    device_bytes: int
    host_bytes: int
    num_pins: int | None
    """Requests for this version, alone or in a sum, that have had their first token and not their
    last; None for a tenant's key.
    """
    is_pinned: bool
    """Pinned by an operator: never evicted."""
    last_used_s: float | None
    """Seconds since this version's last use; None: not used since the server started."""
    dtype: str | None = None
    """Data type of its matrices in memory (fp32, bf16, fp16, int8); None: it is in no memory."""
    precision_loss: float | None = None
    """The largest relative error, over its modules, of its update as it is held against as it was
    uploaded; None: it's in no memory.
    """
    uses_per_s: float | None = None
    """Recent requests for this version per second, decaying; None for a tenant's key."""

    @property
    def model(self) -> str:
        """The `model=` that names exactly this version."""
        return f"{self.name}@{self.version}"


class Memory(Result):
    """Use of each memory tier, by the engine's last heartbeat."""

    budget_bytes: int
    """Device memory for KV blocks and adapters together: the sum of the five below."""
    kv_used_bytes: int
    kv_idle_bytes: int
    """Kept for prompts that begin alike; it goes where room is needed."""
    adapters_used_bytes: int
    """Bytes of adapters that are pinned or being loaded."""
    adapters_idle_bytes: int
    free_bytes: int
    num_device_adapters: int
    host_budget_bytes: int
    host_adapter_bytes: int
    num_host_adapters: int


class ResidencyPage(Page[AdapterResidency]):
    """A page of versions, and the memory of all."""

    memory: Memory | None = None
    """Use of memory; None for a tenant's key: it would reveal what other tenants do."""


class Tiers(Result):
    """Digests of adapters by the tier of their weights."""

    device: list[str]
    loading: list[str]
    host: list[str]
    """Digests of adapters in the host's memory alone."""
