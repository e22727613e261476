"""The content of cached KV blocks: which prefix each answers, and what keeping it is worth."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NewType

from loraserve.memory.eviction import NEVER, CostEstimate, Uses
from loraserve.types import Digest, TenantId

REMEMBERED_BLOCKS = 4096
"""Cached blocks from which the probability of a new one's reuse is estimated, at least."""
ASSUMED_PREFILL_S = 1e-3
"""Seconds to compute a token, until some are measured."""

BlockId = NewType("BlockId", int)
PrefixKey = NewType("PrefixKey", bytes)
"""Name of one block's content *and* everything before it: a hash chained from the prefix root."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An adapter and the first token that it acts on; the KV before is the base's."""

    adapter: Digest
    start: int


def prefix_root(tenant: TenantId, base: Digest, kv_dtype: str) -> PrefixKey:
    """Hash the key that a tenant's prefixes start from, as long as no adapter acts.

    Nothing that a client chooses goes in: two tenants never share a prefix.
    """
    return _key(b"loraserve.kv.root", tenant.encode(), base.encode(), kv_dtype.encode())


def activate_key(parent: PrefixKey, activation: Activation) -> PrefixKey:
    """Hash the key that blocks are chained from once an adapter acts, after ``parent``'s content.

    It names the adapter's version and the token, not the block: the same tokens may have been
    computed by the base up to there, or up to the next.
    """
    return _key(b"loraserve.kv.activation", parent, activation.adapter.encode(), activation.start.to_bytes(8, "little"))


def extend_key(parent: PrefixKey, token_ids: Sequence[int]) -> PrefixKey:
    """Hash the key of the block that holds ``token_ids`` after all that ``parent`` names."""
    # all blocks with one parent have one length, so the tokens need no framing
    return PrefixKey(sha256(b"loraserve.kv.block" + parent + array("q", token_ids).tobytes()).digest())


def _key(tag: bytes, *parts: bytes) -> PrefixKey:
    """Hash a tag and parts, each framed by its length.

    No two tuples of parts give the same bytes, and tags separate roots, activations and blocks.
    """
    hasher = sha256(tag)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return PrefixKey(hasher.digest())


@dataclass(frozen=True, slots=True)
class _CachedBlock:
    key: PrefixKey
    parent: PrefixKey
    token_ids: tuple[int, ...]


class PrefixCache:
    """The index of full, computed blocks by their content. `BlockPool` decides which of them stay.

    Attributes:
        prefill_cost: seconds per token to compute what is cached, as the engine measures it.
        num_tokens_hit: prompt tokens found in cached blocks.
        num_tokens_queried: prompt tokens looked up.
    """

    def __init__(
        self, block_size: int, *, is_enabled: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.block_size = block_size
        self.is_enabled = is_enabled
        self.prefill_cost = CostEstimate(ASSUMED_PREFILL_S)
        self.num_tokens_hit = 0
        self.num_tokens_queried = 0
        self._clock = clock
        self._by_key: dict[PrefixKey, BlockId] = {}
        self._cached: dict[BlockId, _CachedBlock] = {}
        self._uses: dict[BlockId, Uses] = {}
        # cached blocks that were released first, and again; the prior is one reuse in ten
        self._num_first, self._num_reused = 10.0, 1.0

    def __contains__(self, block: object) -> bool:
        return block in self._cached

    def parent_key(
        self, root: PrefixKey, activation: Activation | None, keys: Sequence[PrefixKey], index: int
    ) -> PrefixKey:
        """Choose the key that a sequence's block number ``index`` is chained from.

        Blocks that lie wholly before the activation are chained from the root, as the base's own
        are, and shared with them; the block that holds its first token, and all after it, are
        chained from the adapter.

        Args:
            root: the tenant's.
            activation: None where every token is the base's.
            keys: the keys of the blocks before it, at least.
        """
        parent = keys[index - 1] if index else root
        if activation is not None and index == activation.start // self.block_size:
            return activate_key(parent, activation)
        return parent

    def find(
        self, root: PrefixKey, token_ids: Sequence[int], max_tokens: int, activation: Activation | None
    ) -> tuple[list[BlockId], list[PrefixKey]]:
        """Find the cached blocks that start ``token_ids``, with their keys.

        They hold ``max_tokens`` tokens at most.

        A block's parent and token ids are compared too: a hash alone is no proof.
        """
        blocks: list[BlockId] = []
        keys: list[PrefixKey] = []
        if not self.is_enabled:
            return blocks, keys
        for index, start in enumerate(range(0, max_tokens - self.block_size + 1, self.block_size)):
            parent = self.parent_key(root, activation, keys, index)
            content = tuple(token_ids[start : start + self.block_size])
            key = extend_key(parent, content)
            block = self._by_key.get(key)
            if block is None:
                break
            entry = self._cached[block]
            if entry.token_ids != content or entry.parent != parent:
                break
            blocks.append(block)
            keys.append(key)
        return blocks, keys

    def note_lookup(self, num_tokens: int, num_found: int) -> None:
        """Count the lookup of a sequence that begins to run, once for all its lookups."""
        if self.is_enabled:
            self.num_tokens_queried += num_tokens
            self.num_tokens_hit += num_found

    def publish(self, block: BlockId, parent: PrefixKey, token_ids: Sequence[int]) -> PrefixKey:
        """Offer a full, computed block to later prompts and return its key.

        When another block already has this content, that one stays the answer and this one is freed
        with its holder.
        """
        content = tuple(token_ids)
        key = extend_key(parent, content)
        if self.is_enabled and key not in self._by_key and block not in self._cached:
            self._by_key[key] = block
            self._cached[block] = _CachedBlock(key, parent, content)
        return key

    def block_of(self, key: PrefixKey) -> BlockId | None:
        """Return the block that answers a key; None: none does."""
        return self._by_key.get(key)

    def note_uses(self, blocks: Sequence[BlockId], *, is_use: bool) -> None:
        """Count a use of each cached block that is being released.

        A block that was released before was used again; a new one counts as the share of new blocks
        that are. All blocks get one time and one probability, so none is worth less than a block
        behind it.

        Args:
            is_use: False counts new blocks alone.
        """
        now_s, expected = self._clock(), min(1.0, self._num_reused / self._num_first)
        for block in reversed(blocks):
            if block not in self._cached or not (is_use or block not in self._uses):
                continue
            if block in self._uses:
                self._num_reused += 1
                self._uses[block] = self._uses[block].used(now_s)
                continue
            self._num_first += 1
            self._uses[block] = NEVER.used(now_s, expected)
            if self._num_first > 2 * REMEMBERED_BLOCKS:
                self._num_first, self._num_reused = self._num_first / 2, self._num_reused / 2

    def value(self, block: BlockId, now_s: float) -> float:
        """Compute the seconds to compute the block again × its uses per second."""
        return self._uses.get(block, NEVER).per_second(now_s) * self.prefill_cost.seconds_per_unit * self.block_size

    def forget(self, block: BlockId) -> None:
        """Remove a cached block from the index."""
        self._uses.pop(block, None)
        del self._by_key[self._cached.pop(block).key]

    def check(self) -> list[str]:
        """List the broken invariants, in words; empty when all hold."""
        by_key = {entry.key: block for block, entry in self._cached.items()}
        if by_key != self._by_key or not self._uses.keys() <= self._cached.keys():
            return ["the prefix index and the cached blocks disagree"]
        return []
