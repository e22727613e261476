"""What one request is bound to when it is admitted: a version, what answers if that can't, and what shadows it."""

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
    """What answers where the bound version can't."""

    adapter: AdapterRef | None
    """None: the base."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """A version on which a copy of some requests runs; its answers are dropped."""

    adapter: AdapterRef
    adapter_id: str
    """The row of the adapter whose alias says so."""
    alias: str
    share: float
    """Of the requests, in (0, 1]."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A request keeps it to its end, whatever becomes of the names meanwhile."""

    adapter: AdapterRef | None
    """None: the base."""
    fallback: Fallback | None = None
    """For a load that fails before the first token. None: there is none, or it is bound already."""
    shadow: Shadow | None = None
    fell_back_from: AdapterRef | None = None
    """What was asked for, where `adapter` is its fallback."""
    fell_back_for: str = ""
    """The code of the error that `fell_back_from` would have been refused with."""
    owners: Mapping[TenantId, str] = field(default_factory=lambda: MappingProxyType({}))
    """The names of the other tenants whose adapters these are, as the request said them: ``OWNER/NAME``."""


BASE = Binding(None)


@dataclass(frozen=True, slots=True)
class Target:
    """A version that a route may lead to."""

    ref: AdapterRef
    created_at: datetime
    state: str
    checks: tuple[Mapping[str, Any], ...]
    base_digest: Digest
    """The base that the version was made for."""
    served: BaseSpec
    """The one that this server has."""

    @property
    def is_of_another_base(self) -> bool:
        return self.base_digest != self.served.digest

    @property
    def is_servable(self) -> bool:
        return self.state != QUARANTINED and not self.is_of_another_base

    def refusal(self) -> AdapterUnavailable:
        """Return why a version that isn't servable isn't served.

        `AdapterOfAnotherBase`, whatever was found of it on that one, or `AdapterQuarantined`.
        """
        if self.is_of_another_base:
            return other_base_error(self.ref.name, self.ref.version, self.base_digest, self.checks, self.served)
        return quarantine_error(self.ref.name, self.ref.version, self.checks)


@dataclass(frozen=True, slots=True)
class SplitTarget:
    """One of a split's versions."""

    target: Target
    weight: float


@dataclass(frozen=True, slots=True)
class Route:
    """Where a name leads, as long as nobody changes it: all that binding a request takes, without a look into the database."""

    adapter_id: str
    alias: str
    """Empty: the name says the version itself."""
    main: Target
    """Of a split, the version with the largest weight."""
    split: tuple[SplitTarget, ...] = ()
    """Of a split, in the order of the versions."""
    fallback: Target | None = None
    is_base_fallback: bool = False
    """Whether the base answers where the version can't; `fallback` is None then."""
    shadow: Target | None = None
    shadow_share: float = 0.0

    @property
    def has_fallback(self) -> bool:
        """Whether something answers for the main version while it isn't servable."""
        return self._fallback_of(self.main) is not None

    def choose(self, sticky: str | None, draw: Callable[[], float]) -> Target:
        """The version for one request; who says the same `sticky` gets the same one on every server, as long as the split stands.

        Args:
            draw: uniform in [0, 1); asked where nothing is sticky.
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
        """What one request is bound to.

        Raises:
            AdapterQuarantined, AdapterOfAnotherBase: its version isn't served, nor is a fallback.
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
    """In [0, 1): of these three alone."""
    sha = hashlib.sha256()
    # a lone surrogate, which no client can send as JSON, would have no other bytes
    for frame in (_TAG, adapter_id.encode(), alias.encode(), sticky.encode("utf-8", "surrogatepass")):
        sha.update(len(frame).to_bytes(8, "big"))
        sha.update(frame)
    return (int.from_bytes(sha.digest()[:8], "big") >> 11) / (1 << 53)
