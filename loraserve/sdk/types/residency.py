"""Where adapters' weights are, and what there is of each tier's memory."""

from __future__ import annotations

from loraserve.sdk.call import Result
from loraserve.sdk.types.management import Page


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
    """Requests for this version, alone or in a sum, that have had their first token and not their last; None for a tenant's key."""
    is_pinned: bool
    """Pinned by an operator: never evicted."""
    last_used_s: float | None
    """Seconds since this version's last use; None: not used since the server started."""
    dtype: str | None = None
    """What its matrices are held in (fp32, bf16, fp16, int8); None: it's in no memory."""
    precision_loss: float | None = None
    """The largest relative error, over its modules, of its update as it is held against as it was uploaded; None: it's in no memory."""
    uses_per_s: float | None = None
    """Requests for this version of late, older ones counting less and less; None for a tenant's key."""

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
