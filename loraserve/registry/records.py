"""What the registry tells of its things: values, without a session behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from loraserve.types import AdapterRef, Digest, TenantId

READY = "ready"
QUARANTINED = "quarantined"
"""Its last certificate failed, or its stored bytes were found damaged: it isn't served, and no alias is moved to it."""
CHECKED = "checked"
"""The state of a dry run's result."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version. Immutable but for `aliases`, and for what a verification or a read finds: `state`, and the certificate and the damage among `checks`.

    A damaged one that is pushed again may get other blobs, of the same digest.
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
    created_at: datetime
    checks: tuple[Mapping[str, Any], ...]
    revision: int
    """The adapter's: it grows with everything that may change this record."""

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
    num_versions: int
    """Those that aren't deleted."""
    latest_version: int | None
    """The highest of them."""
    created_at: datetime
    updated_at: datetime
    revision: int


@dataclass(frozen=True, slots=True)
class AliasRecord:
    adapter: str
    name: str
    version: int
    revision: int
    """Never the same for two states of the alias."""
    updated_at: datetime


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
