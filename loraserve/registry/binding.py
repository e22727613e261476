"""Binding of a request at admission: the version that answers, its fallback, and its shadow."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any

from loraserve.errors import AdapterUnavailable
from loraserve.registry.health.checks import quarantine_error
from loraserve.registry.records import QUARANTINED
from loraserve.registry.served_base import other_base_error
from loraserve.types import AdapterRef, BaseSpec, Digest, TenantId

_TAG = b"loraserve split v1"


@dataclass(frozen=True, slots=True)
class Fallback:
    """Adapter that answers if the bound version can't."""

    adapter: AdapterRef | None
    """Adapter to use; None for the base."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """Version that runs copies of some requests; its answers are dropped."""

    adapter: AdapterRef
    adapter_id: str
    """Row id of the adapter whose alias has this shadow."""
    alias: str
    share: float
    """Share of the requests that are copied, in (0, 1]."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Version that answers a request.

    It doesn't change when aliases move while the request runs.
    """

    adapter: AdapterRef | None
    """Adapter that answers; None for the base."""
    fallback: Fallback | None = None
    """Fallback for a load that fails before the first token;
    None if there is none or it is bound already.
    """
    shadow: Shadow | None = None
    fell_back_from: AdapterRef | None = None
    """Adapter that was requested, if `adapter` is its fallback."""
    fell_back_for: str = ""
    """Code of the error that refused `fell_back_from`."""
    owners: Mapping[TenantId, str] = field(default_factory=lambda: MappingProxyType({}))
    """Names of the other tenants that own these adapters,
    as the request gave them in ``OWNER/NAME``.
    """


BASE = Binding(None)


@dataclass(frozen=True, slots=True)
class Target:
    """Version that a route may select."""

    ref: AdapterRef
    created_at: datetime
    state: str
    checks: tuple[Mapping[str, Any], ...]
    base_digest: Digest
    """Digest of the base that the version was made for."""
    served: BaseSpec
    """Base that this server serves."""

    @property
    def is_of_another_base(self) -> bool:
        return self.base_digest != self.served.digest

    @property
    def is_servable(self) -> bool:
        return self.state != QUARANTINED and not self.is_of_another_base

    def refusal(self) -> AdapterUnavailable:
        """Build the error that refuses this version.

        It is `AdapterOfAnotherBase` or `AdapterQuarantined`.
        """
        if self.is_of_another_base:
            return other_base_error(self.ref.name, self.ref.version, self.base_digest, self.checks, self.served)
        return quarantine_error(self.ref.name, self.ref.version, self.checks)


@dataclass(frozen=True, slots=True)
class SplitTarget:
    """Version of a split, with its weight."""

    target: Target
    weight: float


@dataclass(frozen=True, slots=True)
class Route:
    """Resolution of a model name.

    It has everything needed to bind requests without querying the database.
    """

    adapter_id: str
    alias: str
    """Alias in the name; empty if the name states a version number."""
    main: Target
    """Version to use; with a split, the one with the largest weight."""
    split: tuple[SplitTarget, ...] = ()
    """Versions of the split by number; empty without a split."""
    fallback: Target | None = None
    is_base_fallback: bool = False
    """Whether the base is the fallback; `fallback` is None then."""
    shadow: Target | None = None
    shadow_share: float = 0.0

    @property
    def has_fallback(self) -> bool:
        """Whether something answers for the main version while it isn't servable."""
        return self._fallback_of(self.main) is not None

    def choose(self, sticky: str | None, draw: Callable[[], float]) -> Target:
        """Choose the version for one request.

        Equal `sticky` keys get the same version on every server.

        Args:
            draw: uniform in [0, 1); called if `sticky` is None.
        """
        if not self.split:
            return self.main
        position = draw() if sticky is None else _position(self.adapter_id, self.alias, sticky)
        position *= sum(part.weight for part in self.split)
        for part in self.split:
            position -= part.weight
            if position < 0:
                return part.target
        # what rounding left over
        return self.split[-1].target

    def bind(self, sticky: str | None, draw: Callable[[], float]) -> Binding:
        """Bind one request to a version or its fallback.

        Raises:
            AdapterQuarantined, AdapterOfAnotherBase: neither the version nor a fallback is served.
        """
        target = self.choose(sticky, draw)
        fallback = self._fallback_of(target)
        if target.is_servable:
            return Binding(target.ref, fallback, self._shadow_of(target))
        refusal = target.refusal()
        if fallback is None:
            raise refusal
        return Binding(fallback.adapter, fell_back_from=target.ref, fell_back_for=refusal.code)

    def _fallback_of(self, target: Target) -> Fallback | None:
        if self.is_base_fallback:
            return Fallback(None)
        other = self.fallback
        if other is None or not other.is_servable or other.ref.digest == target.ref.digest:
            return None
        return Fallback(other.ref)

    def _shadow_of(self, target: Target) -> Shadow | None:
        other = self.shadow
        if other is None or not other.is_servable or other.ref.digest == target.ref.digest:
            return None
        return Shadow(other.ref, self.adapter_id, self.alias, self.shadow_share)


def _position(adapter_id: str, alias: str, sticky: str) -> float:
    """Hash the three to a position in [0, 1)."""
    sha = hashlib.sha256()
    # lone surrogates, which no client can send as JSON, have no other encoding
    for frame in (_TAG, adapter_id.encode(), alias.encode(), sticky.encode("utf-8", "surrogatepass")):
        sha.update(len(frame).to_bytes(8, "big"))
        sha.update(frame)
    return (int.from_bytes(sha.digest()[:8], "big") >> 11) / (1 << 53)
