"""Weighted sums of adapters, and their identity whatever the order of the parts. No torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from loraserve.types import AdapterPart, Digest

_TAG = b"loraserve composition v1"


def merged(parts: Iterable[AdapterPart]) -> tuple[AdapterPart, ...]:
    """Merge parts of the same adapter, by digest, into one of the same sum.

    Those whose weights add up to nothing are left out. Neither the order of `parts` nor another
    tenant's adapter of the same digest changes a bit of the weights.
    """
    by_digest: dict[Digest, list[AdapterPart]] = {}
    for part in parts:
        by_digest.setdefault(part.adapter.digest, []).append(part)
    sums = (
        AdapterPart(adapter=same[0].adapter, weight=math.fsum(part.weight for part in same))
        for _, same in sorted(by_digest.items())
    )
    return tuple(part for part in sums if part.weight)


def composition_digest(parts: Iterable[AdapterPart]) -> Digest:
    """Hash the identity of a weighted sum.

    It is a SHA-256 over the digests of `merged` parts and their weights' bits, framed. Equal
    exactly where these are.
    """
    sha = hashlib.sha256()
    fields = [field for part in merged(parts) for field in (part.adapter.digest, part.weight.hex())]
    for frame in (_TAG, *(field.encode() for field in fields)):
        sha.update(len(frame).to_bytes(8, "big"))
        sha.update(frame)
    return Digest(sha.hexdigest())
