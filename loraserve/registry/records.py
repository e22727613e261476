"""What the registry tells of its things: values, without a session behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS
from loraserve.types import AdapterRef, Digest, TenantId

READY = "ready"
QUARANTINED = "quarantined"
"""Its last certificate failed, or its stored bytes were found damaged: it isn't served, and no alias is moved to it."""
OTHER_BASE = "other_base"
"""The state in which a server shows a version that was made for another base than its own. It is stored nowhere: replicas may differ."""
CHECKED = "checked"
"""The state of a dry run's result."""
MIN_SPLIT_WEIGHT, MAX_SPLIT_WEIGHT = 1e-3, 1e6
"""Weights count against each other; sums of them stay exact enough."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version. Immutable but for `aliases`, and for what a verification or a read finds: `state`, and the certificate and the damage among `checks`.

    A verification that was told to may move it to another base. A damaged one that is pushed again may get other blobs, of the same digest.
    """

    tenant: TenantId
    name: str
    version: int | None
    """None: a dry run of bytes that aren't published."""
    digest: Digest
    config_blob: Digest
    weights_blob: Digest
    state: str
    size_bytes: int
    rank: int
    target_modules: tuple[str, ...]
    dtype: str
    aliases: tuple[str, ...]
    """Those that lead there, alone or in a split."""
    created_at: datetime
    checks: tuple[Mapping[str, Any], ...]
    revision: int
    """The adapter's: it grows with everything that may change this record."""
    base_digest: Digest
    """The base that it was made for: it is served on that one alone."""
    notes: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def ref(self) -> AdapterRef:
        """What the engine needs of it. Only for a published version."""
        if self.version is None:
            raise ValueError("a dry run has no version to serve")
        return AdapterRef(
            tenant=self.tenant,
            name=self.name,
            version=self.version,
            digest=self.digest,
            config_blob=self.config_blob,
            weights_blob=self.weights_blob,
        )


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    name: str
    aliases: Mapping[str, int]
    """Version by alias; of a split, the one with the largest weight."""
    num_versions: int
    """Those that aren't deleted."""
    latest_version: int | None
    """The highest of them."""
    created_at: datetime
    updated_at: datetime
    revision: int
    num_versions_by_base: Mapping[str, int]
    """Parts of `num_versions`, by the digest of the base that the versions were made for."""
    notes: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    fallback: str | None = None
    """What answers when the version asked for can't: a version's number, an alias, or ``base``. None: nothing does."""
    splits: Mapping[str, tuple[SplitPart, ...]] = field(default_factory=dict)
    """How the traffic of aliases is shared, of those that share it."""


@dataclass(frozen=True, slots=True)
class SplitPart:
    """How much of an alias's traffic a version gets: its weight against the others'."""

    version: int
    weight: float


@dataclass(frozen=True, slots=True)
class ShadowPart:
    """A copy of `share` (in (0, 1]) of an alias's requests runs on `version`; its answers are dropped."""

    version: int
    share: float


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """Where an alias leads."""

    version: int
    """Of a split, the version with the largest weight."""
    split: tuple[SplitPart, ...] = ()
    """In the order of the versions; empty: all traffic goes to `version`."""

    @classmethod
    def over(cls, parts: Sequence[SplitPart]) -> AliasTarget:
        """A split; of the same weights in whatever order, the same one.

        Raises:
            InvalidRequest: too few or too many parts, a version twice, or a weight that is none.
        """
        if not 2 <= len(parts) <= LIMITS.max_split_versions:
            raise InvalidRequest(
                f"split has {len(parts)} parts; it should have 2 to {LIMITS.max_split_versions}.",
                param="split",
                hint="For one version alone, send version.",
            )
        if len({part.version for part in parts}) != len(parts):
            raise InvalidRequest("split names a version twice.", param="split", hint="Add up its weights.")
        for index, part in enumerate(parts):
            if not MIN_SPLIT_WEIGHT <= part.weight <= MAX_SPLIT_WEIGHT:
                raise InvalidRequest(
                    f"A weight should be between {MIN_SPLIT_WEIGHT:g} and {MAX_SPLIT_WEIGHT:g}.",
                    param=f"split.{index}.weight",
                )
        main = max(parts, key=lambda part: (part.weight, part.version))
        return cls(main.version, tuple(sorted(parts, key=lambda part: part.version)))

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> AliasTarget:
        """Back from `as_json`."""
        parts = tuple(SplitPart(part["version"], part["weight"]) for part in stored["split"] or ())
        return cls(stored["version"], parts)

    def as_json(self) -> dict[str, Any]:
        return {"version": self.version, "split": self.split_json()}

    def split_json(self) -> list[dict[str, Any]] | None:
        return [{"version": part.version, "weight": part.weight} for part in self.split] or None

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(part.version for part in self.split) or (self.version,)

    def __str__(self) -> str:
        """As the command line writes it."""
        if not self.split:
            return str(self.version)
        return ",".join(f"{part.version}={part.weight:g}" for part in self.split)


@dataclass(frozen=True, slots=True)
class AliasRecord:
    adapter: str
    name: str
    target: AliasTarget
    shadow: ShadowPart | None
    revision: int
    """Never the same for two states of the alias."""
    updated_at: datetime

    @property
    def version(self) -> int:
        """Of a split, the one with the largest weight."""
        return self.target.version


@dataclass(frozen=True, slots=True)
class Published:
    version: VersionRecord
    is_new: bool
    """False: a version with these bytes was there."""


@dataclass(frozen=True, slots=True)
class ServableAdapter:
    """An adapter that a bare name reaches."""

    name: str
    owner: str | None
    """The name of the tenant who granted it; None: it's the tenant's own."""
    owned_by: str
    """The name of the tenant whose it is."""
    created_at: datetime
    version: int
    """Of a split, the one with the largest weight."""
    digest: Digest

    @property
    def model(self) -> str:
        """What the tenant writes as ``model``."""
        return self.name if self.owner is None else f"{self.owner}/{self.name}"


@dataclass(frozen=True, slots=True)
class Precondition:
    """What must hold of an alias before it moves (``If-Match``, ``If-None-Match``).

    Args:
        revisions: it must be at one of these; None: at any, or absent.
        is_present: it must be there.
        is_absent: it must not be there.
    """

    revisions: frozenset[int] | None = None
    is_present: bool = False
    is_absent: bool = False


NO_CONDITION = Precondition()
