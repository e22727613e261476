"""Weighted sums of versions as one adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from types import MappingProxyType

from loraserve.adapters.composition import composition_digest
from loraserve.registry.model_name import check_weight
from loraserve.types import AdapterPart, AdapterRef, Digest, TenantId

NO_BLOB = Digest("")
NO_VERSION = 0
_NO_OWNERS: Mapping[TenantId, str] = MappingProxyType({})


def compose(tenant: TenantId, terms: Iterable[tuple[AdapterRef, Decimal]]) -> AdapterRef | None:
    """Compose the weighted sum of the terms, in a canonical order.

    It is None, the base, if all weights cancel out. Weights of the same bytes add up exactly,
    whatever their names. A single version with weight 1 is returned itself. Any other sum has
    `parts`, a digest of its own, and a descriptive name: ``a@3+0.5*b@1``.

    Raises:
        InvalidRequest: the weights of a version add up to more than
            `LIMITS.max_composition_weight`.
    """
    adapters: dict[Digest, AdapterRef] = {}
    weights: dict[Digest, Decimal] = {}
    for adapter, weight in sorted(terms, key=lambda term: (term[0].name, term[0].version)):
        adapters.setdefault(adapter.digest, adapter)
        weights[adapter.digest] = weights.get(adapter.digest, Decimal(0)) + weight
    sums = ((adapters[digest], float(check_weight(weight, "model"))) for digest, weight in weights.items())
    parts = tuple(AdapterPart(adapter=adapter, weight=weight) for adapter, weight in sums if weight)
    if not parts:
        return None
    if len(parts) == 1 and parts[0].weight == 1:
        return parts[0].adapter
    return AdapterRef(
        tenant=tenant,
        name=_sum(parts, _NO_OWNERS),
        version=NO_VERSION,
        digest=composition_digest(parts),
        config_blob=NO_BLOB,
        weights_blob=NO_BLOB,
        parts=parts,
    )


def label(adapter: AdapterRef, owners: Mapping[TenantId, str] = _NO_OWNERS) -> str:
    """Format the adapter's name for headers and messages: ``NAME@VERSION``, or the terms of a sum.

    Args:
        owners: names of the tenants whose adapters are written as ``OWNER/NAME@VERSION``.
    """
    if adapter.parts:
        return _sum(adapter.parts, owners)
    owner = owners.get(adapter.tenant)
    return f"{adapter.name}@{adapter.version}" if owner is None else f"{owner}/{adapter.name}@{adapter.version}"


def versions_of(adapter: AdapterRef | None) -> tuple[AdapterRef, ...]:
    """List the versions that the adapter consists of: none for the base, several for a sum."""
    if adapter is None:
        return ()
    return tuple(part.adapter for part in adapter.parts) or (adapter,)


def _sum(parts: Iterable[AdapterPart], owners: Mapping[TenantId, str]) -> str:
    return "+".join(_written(part, owners) for part in parts)


def _written(part: AdapterPart, owners: Mapping[TenantId, str]) -> str:
    weight = repr(part.weight).removesuffix(".0")
    name = label(part.adapter, owners)
    return name if weight == "1" else f"{weight}*{name}"
