"""Policy of a tenant: limits, weight and prices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS
from loraserve.tenancy.prices import PriceTable, read_prices


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant. None: only the server's own bounds. 0: nothing at all."""

    max_adapters: int | None = None
    max_stored_bytes: int | None = None
    """Sum over its versions, counted in full even if another tenant has the same bytes."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and completion tokens together."""
    max_concurrent_requests: int | None = None
    max_queued_requests: int | None = None
    """Sequences that wait for a slot in the engine."""
    max_kv_share: float | None = None
    """Share of the memory for KV blocks and adapters, above 0 up to 1."""
    max_cached_bytes: int | None = None
    """Bytes of its answers that the result cache may keep. None: nothing either: keeping them is
    for tenants that need it.
    """

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None:
                continue
            param = f"limits.{name}"
            if name == "max_kv_share":
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                    raise InvalidRequest(f"{param} should be a number above 0 and at most 1.", param=param)
                continue
            # every request waits for a moment before it is served
            least = 1 if name == "max_queued_requests" else 0
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
                raise InvalidRequest(f"{param} should be a whole number, at least {least}.", param=param)

    @classmethod
    def of_row(cls, value: Mapping[str, Any]) -> TenantLimits:
        """Parse the limits of a row, ignoring those that only a newer program has."""
        return cls(**{name: value[name] for name in LIMIT_NAMES if name in value})


LIMIT_NAMES = tuple(item.name for item in fields(TenantLimits))


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """Policy of a tenant; on the token path at most `LIMITS.auth_cache_s` old, like its keys."""

    limits: TenantLimits = field(default_factory=TenantLimits)
    weight: float = 1.0
    """Weight of its share of the engine relative to other tenants, under contention."""
    prices: PriceTable | None = None
    """Price table; None if tokens have no price."""


NO_POLICY = TenantPolicy()
"""Policy of a tenant without settings."""


def read_weight(value: float) -> float:
    """Check that `value` is a valid weight, and return it.

    Raises:
        InvalidRequest: the weight is out of bounds.
    """
    low, high = LIMITS.min_tenant_weight, LIMITS.max_tenant_weight
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"weight should be a number from {low:g} to {high:g}.", param="weight")
    return float(value)


def policy_of_row(limits: Mapping[str, Any], weight: float, prices: Mapping[str, Any]) -> TenantPolicy:
    """Read the policy in a tenant's row."""
    return TenantPolicy(TenantLimits.of_row(limits), weight, read_prices(prices))
