"""Marker of a store: the registry that it belongs to, and what is known of the store's contents."""

from __future__ import annotations

import json
from dataclasses import dataclass

from adapters_store.base import MAX_MARKER_BYTES

_FORMAT = "loraserve-store-1"


@dataclass(frozen=True, slots=True)
class Marker:
    """Marker of a store: the registry that it belongs to, and the last stamp."""

    registry: str
    stamp: str
    written_at: str

    @classmethod
    def parse(cls, data: bytes) -> Marker | None:
        """Parse a marker; return None if `data` isn't one."""
        try:
            found = json.loads(data) if len(data) <= MAX_MARKER_BYTES else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            return None
        fields = [found.get(name) for name in ("registry", "stamp", "written_at")]
        if not all(isinstance(field, str) and 0 < len(field) <= 64 and field.isprintable() for field in fields):
            return None
        return cls(*map(str, fields))

    def encode(self) -> bytes:
        fields = {"registry": self.registry, "stamp": self.stamp, "written_at": self.written_at}
        return json.dumps({"format": _FORMAT, **fields}).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class StoreContents:
    """Number of a store's blobs, as this registry counts them."""

    num_blobs: int
    num_published: int
    """Blobs of versions, deleted ones included."""
    num_listed: int
    """Other blobs of uploads or candidates for collection."""

    @property
    def num_unknown(self) -> int:
        return self.num_blobs - self.num_published - self.num_listed

    @property
    def is_provably_ours(self) -> bool:
        """Whether this registry must have made the blobs although the store has no marker.

        All blobs must be known and most of them published. Candidates for collection prove nothing:
        an empty or foreign registry that ran here with an older version may have listed every blob.
        """
        return self.num_unknown == 0 and self.num_published > 0 and self.num_published >= self.num_listed


@dataclass(frozen=True, slots=True)
class Adoption:
    """Outcome of `StoreClaim.adopt`: what it did, or would do."""

    registry: str
    """Id of this registry."""
    marker: Marker | None
    """Previous marker of the store; None if it had none or an invalid one."""
    contents: StoreContents
    is_needed: bool
    """Whether the store isn't known to be this registry's yet."""
