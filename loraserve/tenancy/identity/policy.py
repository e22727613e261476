"""What a tenant may use, what weight it has against others, and what it pays: the facts about it that travel with its callers."""

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
    """What a tenant may hold and use. None: only the server's own bounds. 0: nothing at all."""

    max_adapters: int | None = None
    max_stored_bytes: int | None = None
    """Sum over its versions, charged in full also when another tenant has the same bytes."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and completion together."""
    max_concurrent_requests: int | None = None
    max_queued_requests: int | None = None
    """Of its sequences that wait for a place in the engine."""
    max_kv_share: float | None = None
    """Of the memory that KV blocks and adapters share, above 0 up to 1."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None:
                continue
            param = f"limits.{name}"
            if name == "max_kv_share":
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                    raise InvalidRequest(f"{param} should be a number above 0, 1 at most.", param=param)
                continue
            # a request can't be served without waiting a moment
            least = 1 if name == "max_queued_requests" else 0
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
                raise InvalidRequest(f"{param} should be a whole number from {least} on.", param=param)

    @classmethod
    def of_row(cls, value: Mapping[str, Any]) -> TenantLimits:
        """The limits as their column has them. A later program may have written some that this one doesn't know."""
        return cls(**{name: value[name] for name in LIMIT_NAMES if name in value})


LIMIT_NAMES = tuple(item.name for item in fields(TenantLimits))


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """A tenant's facts as they are where tokens flow: at most `LIMITS.auth_cache_s` old, like its keys."""

    limits: TenantLimits = field(default_factory=TenantLimits)
    weight: float = 1.0
    """Its share of the engine against other tenants' weights, when there isn't enough for all."""
    prices: PriceTable | None = None
    """None: its tokens have no price."""


NO_POLICY = TenantPolicy()
"""Of a tenant that nobody set anything for."""


def read_weight(value: float) -> float:
    """`value` if a tenant may have it as its weight.

    Raises:
        InvalidRequest: it is out of bounds.
    """
    low, high = LIMITS.min_tenant_weight, LIMITS.max_tenant_weight
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"weight should be a number from {low:g} to {high:g}.", param="weight")
    return float(value)


def policy_of_row(limits: Mapping[str, Any], weight: float, prices: Mapping[str, Any]) -> TenantPolicy:
    """The policy that a tenant's row says."""
    return TenantPolicy(TenantLimits.of_row(limits), weight, read_prices(prices))
