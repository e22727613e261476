"""The KV cache's blocks: who holds them, and which of them answer a later prompt's prefix.

Only bookkeeping lives here; the bytes are the runner's tensors. Everything runs on the step's thread.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NewType

from loraserve.types import Digest, TenantId

BlockId = NewType("BlockId", int)
PrefixKey = NewType("PrefixKey", bytes)
"""Names one block's content *and* everything before it: a hash chained from the prefix root."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An adapter, and the first token that it acts on: the keys and values of those before it are the base's."""

    adapter: Digest
    start: int


def prefix_root(tenant: TenantId, base: Digest, kv_dtype: str) -> PrefixKey:
    """Return the key that a tenant's prefixes start from, as long as no adapter acts. Nothing that a client chooses goes in: two tenants never share a prefix."""
    return _key(b"loraserve.kv.root", tenant.encode(), base.encode(), kv_dtype.encode())


def activate_key(parent: PrefixKey, activation: Activation) -> PrefixKey:
    """Return the key that blocks are chained from once an adapter acts, after everything that ``parent`` names.

    It names the adapter's version and the token, not the block: the same tokens may have been computed by the base up to there, or up to the next.
    """
    return _key(b"loraserve.kv.activation", parent, activation.adapter.encode(), activation.start.to_bytes(8, "little"))


def extend_key(parent: PrefixKey, token_ids: Sequence[int]) -> PrefixKey:
    """Return the key of the block that holds ``token_ids`` after everything that ``parent`` names."""
    # of one length for one parent's blocks, so the frame of each token can be spared
    return PrefixKey(sha256(b"loraserve.kv.block" + parent + array("q", token_ids).tobytes()).digest())


def _key(tag: bytes, *parts: bytes) -> PrefixKey:
    """Each part is framed by its length, so that no two tuples of parts run together to the same bytes; tags tell roots, activations and blocks apart."""
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


class KVCache:
    """A fixed number of blocks, each free, held by one or more sequences, or idle but kept for prefix hits.

    Invariants (`check`):
        free + idle + held == num_blocks; a block is in one of the three.
        A block in the prefix index is idle or held, never free.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.prefix_tokens_hit = 0
        self.prefix_tokens_queried = 0
        self._free: deque[BlockId] = deque(BlockId(i) for i in range(num_blocks))
        self._holders = [0] * num_blocks
        self._by_key: dict[PrefixKey, BlockId] = {}
        self._cached: dict[BlockId, _CachedBlock] = {}
        # Least recently released first: what is evicted next.
        self._idle: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def allocate(self, count: int) -> list[BlockId] | None:
        """Take ``count`` blocks for one holder, evicting idle prefix blocks as needed; None (and no change) if there aren't as many."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def parent_key(
        self, root: PrefixKey, activation: Activation | None, keys: Sequence[PrefixKey], index: int
    ) -> PrefixKey:
        """Return the key that a sequence's block number ``index`` is chained from.

        Blocks that lie wholly before the activation are chained from the root like the base's own, and shared with them; the one that holds its first token, and
        all after it, from the adapter.

        Args:
            root: the tenant's.
            activation: None where every token is the base's.
            keys: those of the blocks before it, at least.
        """
        parent = keys[index - 1] if index else root
        if activation is not None and index == activation.start // self.block_size:
            return activate_key(parent, activation)
        return parent

    def match_prefix(
        self, root: PrefixKey, token_ids: Sequence[int], max_tokens: int, activation: Activation | None = None
    ) -> tuple[list[BlockId], list[PrefixKey]]:
        """Hold and return the cached blocks that start ``token_ids``, at most ``max_tokens`` tokens' worth, with their keys.

        A hit is believed only after the block's parent and token ids were compared, not for its hash alone.

        Args:
            root: the tenant's.
            activation: None where every token is the base's.
        """
        blocks: list[BlockId] = []
        keys: list[PrefixKey] = []
        if not self.enable_prefix_cache:
            return blocks, keys
        self.prefix_tokens_queried += len(token_ids)
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
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1
        self.prefix_tokens_hit += len(blocks) * self.block_size
        return blocks, keys

    def publish(self, block: BlockId, parent: PrefixKey, token_ids: Sequence[int]) -> PrefixKey:
        """Offer a full, computed block to later prompts and return its key. Its parent is `parent_key`'s.

        When another block already has this content, that one stays the answer and this one is freed with its holder.
        """
        content = tuple(token_ids)
        key = extend_key(parent, content)
        if self.enable_prefix_cache and key not in self._by_key and block not in self._cached:
            self._by_key[key] = block
            self._cached[block] = _CachedBlock(key, parent, content)
        return key

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give back one hold on each block. Later blocks of a prefix become evictable before earlier ones."""
        for block in reversed(blocks):
            if self._holders[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was held")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._cached:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def check(self) -> list[str]:
        """Return every broken invariant, in words; empty when all hold."""
        problems = []
        held = sum(1 for count in self._holders if count > 0)
        if len(self._free) + len(self._idle) + held != self.num_blocks:
            problems.append(
                f"free {len(self._free)} + idle {len(self._idle)} + held {held} != num_blocks {self.num_blocks}"
            )
        if len(set(self._free)) != len(self._free):
            problems.append("a block is in the free list twice")
        if any(self._holders[b] for b in self._free) or any(self._holders[b] for b in self._idle):
            problems.append("a free or idle block has holders")
        if any(b in self._cached for b in self._free):
            problems.append("a free block is in the prefix index")
        if {e.key: b for b, e in self._cached.items()} != self._by_key:
            problems.append("the prefix index and the cached blocks disagree")
        return problems

    def _forget(self, block: BlockId) -> None:
        entry = self._cached.pop(block, None)
        if entry is not None:
            del self._by_key[entry.key]
