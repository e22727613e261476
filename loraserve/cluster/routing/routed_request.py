"""A request as a router sees it, and hashes of the beginnings of its prompt."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from loraserve.cluster.placement import PlacementRequest
from loraserve.types import Digest, RequestId, Struct, TenantId

TOKENS_PER_PREFIX = 64
"""Tokens by which one hashed beginning is longer than the one before."""
_MAX_PREFIXES = 16


class RoutedRequest(Struct, frozen=True):
    """A request on its way to a replica.

    Attributes:
        digest: of its adapter; None: it is for the base alone.
        num_bytes: of the adapter's files; 0: unknown.
        prefixes: hashes of the beginnings of its prompt, from the shortest to the longest, each of
            its tenant and adapter alone.
        tokens_per_prefix: tokens by which one beginning is longer than the one before.
        target: replica that it is for, and no other; None: any.
        node_id: machine whose memory has its adapter, for an ephemeral one; None: the store has it.
    """

    request_id: RequestId
    tenant: TenantId
    digest: Digest | None = None
    num_bytes: int = 0
    prefixes: tuple[int, ...] = ()
    tokens_per_prefix: int = 0
    target: str | None = None
    node_id: str | None = None

    @property
    def placement(self) -> PlacementRequest:
        """Fields that its place depends on."""
        prefix_key = str(self.prefixes[0]) if self.prefixes else None
        return PlacementRequest(self.tenant, self.digest, self.num_bytes, prefix_key)


def prefix_hashes(tenant: TenantId, digest: Digest | None, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Hash each beginning of a prompt, of its tenant and adapter, the shortest first.

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
