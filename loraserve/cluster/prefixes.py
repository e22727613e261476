"""Hashes of the beginnings of prompts, by which requests find the replica that computed them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from loraserve.types import Digest, TenantId

TOKENS_PER_PREFIX = 64
"""Tokens by which one hashed beginning is longer than the one before."""
_MAX_PREFIXES = 16


def prefix_hashes(tenant: TenantId, digest: Digest | None, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return a hash of each beginning of a prompt, of its tenant and adapter, the shortest first.

    A part that isn't full has none, and no more than `_MAX_PREFIXES` have one.
    """
    num = min(len(token_ids) // TOKENS_PER_PREFIX, _MAX_PREFIXES)
    if not num:
        return ()
    state = hashlib.blake2b(f"{tenant}\0{digest or ''}\0".encode(), digest_size=8)
    hashes = []
    for start in range(0, num * TOKENS_PER_PREFIX, TOKENS_PER_PREFIX):
        state.update(array("q", token_ids[start : start + TOKENS_PER_PREFIX]).tobytes())
        hashes.append(int.from_bytes(state.digest()))
    return tuple(hashes)
