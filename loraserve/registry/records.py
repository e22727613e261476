"""Records of the registry: values that are independent of a database session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from loraserve.adapters.ir import SCORE
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS
from loraserve.types import AdapterRef, Digest, ExtraFile, TenantId, VersionExtras

READY = "ready"
QUARANTINED = "quarantined"
"""State of a version with a failed check: it isn't served, and no alias can move to it."""
OTHER_BASE = "other_base"
"""State that a server shows for a version of another base than its own; never stored,
because replicas may differ.
"""
CHECKED = "checked"
"""State of a dry run's result."""
MIN_SPLIT_WEIGHT, MAX_SPLIT_WEIGHT = 1e-3, 1e6
"""Bounds of a weight, so that sums of weights stay exact enough."""


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """Result of a version's evaluation on a file of data."""

    version: int
    data_sha256: str
    """SHA-256 of the file of data."""
    data_name: str
    num_lines: int
    metrics: Mapping[str, float]
    """Values by metric, of which more is better."""
    base_metrics: Mapping[str, float]
    """Values of the base in the same run; empty: it wasn't evaluated."""
    settings: Mapping[str, str]
    """Settings of the run on which its metrics depend, such as ``max_tokens``."""
    base_digest: Digest
    arithmetic: str
    """Arithmetic of the base's linears on the server."""
    created_at: datetime
    created_by: str
    """Id of the key."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """Version of an adapter. Only `aliases`, `state`, `checks` and the metadata change.

    A verification may move it to another base on request. A repair of a corrupt version may give it
    other blobs of the same digest.
    """

    tenant: TenantId
    name: str
    version: int | None
    """Number of the version; None for a dry run."""
    digest: Digest
    config_blob: Digest
    weights_blob: Digest
    state: str
    size_bytes: int
    rank: int
    target_modules: tuple[str, ...]
    dtype: str
    aliases: tuple[str, ...]
    """Aliases that point to the version, alone or in a split."""
    created_at: datetime
    checks: tuple[Mapping[str, Any], ...]
    revision: int
    """Revision of the adapter; grows with every change that may affect this record."""
    base_digest: Digest
    """Digest of the base that the version was made for and is served on."""
    extras: VersionExtras | None = None
    """Its files apart from the config and the weights; None: it has none."""
    notes: str | None = ""
    """Notes; None: they weren't requested."""
    tags: Mapping[str, str] = field(default_factory=dict)
    evaluation: EvaluationRecord | None = None
    """Newest evaluation; None: there is none."""
    created_by: str = ""
    """Id of the key that published it; empty for a dry run."""

    @property
    def ref(self) -> AdapterRef:
        """Reference that the engine needs; published versions only."""
        if self.version is None:
            raise ValueError("a dry run has no version to serve")
        return AdapterRef(
            tenant=self.tenant,
            name=self.name,
            version=self.version,
            digest=self.digest,
            config_blob=self.config_blob,
            weights_blob=self.weights_blob,
            has_head=SCORE in self.target_modules,
            extras=self.extras,
        )


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    name: str
    aliases: Mapping[str, int]
    """Version by alias; with a split, the one with the largest weight."""
    num_versions: int
    """Number of versions that aren't deleted."""
    latest_version: int | None
    """Highest number of a version that isn't deleted."""
    created_at: datetime
    updated_at: datetime
    revision: int
    num_versions_by_base: Mapping[str, int]
    """Number of versions by the digest of their base."""
    notes: str | None = ""
    """Notes; None: they weren't requested."""
    tags: Mapping[str, str] = field(default_factory=dict)
    fallback: str | None = None
    """Version number, alias or ``base`` that answers if the requested version can't;
    None for no fallback.
    """
    splits: Mapping[str, tuple[SplitPart, ...]] = field(default_factory=dict)
    """Splits of the aliases that have one."""


@dataclass(frozen=True, slots=True)
class SplitPart:
    """Weight of a version in an alias's traffic, relative to the other parts of the split."""

    version: int
    weight: float


@dataclass(frozen=True, slots=True)
class ShadowPart:
    """Shadow of an alias.

    Copies of `share` (in (0, 1]) of its requests run on `version`, and their answers are dropped.
    """

    version: int
    share: float


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """Target of an alias: a version or a split."""

    version: int
    """Version; with a split, the one with the largest weight."""
    split: tuple[SplitPart, ...] = ()
    """Parts of the split by version number; empty if all traffic goes to `version`."""

    @classmethod
    def over(cls, parts: Sequence[SplitPart]) -> AliasTarget:
        """Build the split over these parts, whose order doesn't matter.

        Raises:
            InvalidRequest: there are too few or too many parts, a version twice, or an invalid
                weight.
        """
        if not 2 <= len(parts) <= LIMITS.max_split_versions:
            raise InvalidRequest(
                f"split has {len(parts)} parts; it should have 2 to {LIMITS.max_split_versions}.",
                param="split",
                hint="For one version, send version instead.",
            )
        if len({part.version for part in parts}) != len(parts):
            raise InvalidRequest(
                "split names a version twice.", param="split", hint="Name it once, with the sum of its weights."
            )
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
        """Parse the result of `as_json`."""
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
        """Format the target in the command line's notation."""
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
    """Revision; differs between any two states of the alias."""
    updated_at: datetime

    @property
    def version(self) -> int:
        """Version; with a split, the one with the largest weight."""
        return self.target.version


@dataclass(frozen=True, slots=True)
class Published:
    version: VersionRecord
    is_new: bool
    """Whether the version is new; False if a version with these bytes existed."""


@dataclass(frozen=True, slots=True)
class ServableAdapter:
    """Adapter that a bare name reaches."""

    name: str
    owner: str | None
    """Name of the tenant that granted it; None for the tenant's own adapter."""
    owned_by: str
    """Name of the tenant that owns it."""
    created_at: datetime
    version: int
    """Version; with a split, the one with the largest weight."""
    digest: Digest
    size_bytes: int
    """Bytes of its files."""

    @property
    def model(self) -> str:
        """Value of ``model`` in the tenant's requests."""
        return self.name if self.owner is None else f"{self.owner}/{self.name}"


@dataclass(frozen=True, slots=True)
class Precondition:
    """Condition on an alias before it moves (``If-Match``, ``If-None-Match``).

    Args:
        revisions: allowed revisions; None: any, or none at all.
        is_present: the alias must exist.
        is_absent: the alias must not exist.
    """

    revisions: frozenset[int] | None = None
    is_present: bool = False
    is_absent: bool = False


NO_CONDITION = Precondition()


def extras_of(row: Any) -> VersionExtras | None:
    """Read the extra files of a row with `EXTRA_COLUMNS`; None if it has none."""
    extras = VersionExtras(
        chat_template=_file(row.chat_template_blob, row.chat_template_bytes),
        generation_config=_file(row.generation_config_blob, row.generation_config_bytes),
        tool_parser=row.tool_parser,
        reasoning_parser=row.reasoning_parser,
        chat_template_kwargs=row.chat_template_kwargs,
        tokenizer=_file(row.tokenizer_blob, row.tokenizer_bytes),
    )
    return None if extras == _NO_EXTRAS else extras


def blobs_of(row: Any) -> tuple[Digest, ...]:
    """List the blobs that hold the version of a row."""
    extras = extras_of(row) or _NO_EXTRAS
    return (Digest(row.config_blob), Digest(row.weights_blob), *(file.blob for file in extras.files))


_NO_EXTRAS = VersionExtras()


def _file(blob: str | None, num_bytes: int | None) -> ExtraFile | None:
    return None if blob is None else ExtraFile(blob=Digest(blob), num_bytes=num_bytes or 0)
