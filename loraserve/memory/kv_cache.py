"""The KV cache's blocks: who holds them, and which of them answer a later prompt's prefix.

Only bookkeeping lives here; the bytes are the runner's tensors. Everything runs on the step's thread.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import NewType

from loraserve.errors import InvariantViolation
from loraserve.memory.arena import Lease, Tenure
from loraserve.memory.cost_estimate import Pace
from loraserve.memory.popularity import NEVER, Uses
from loraserve.types import Digest, TenantId

NUM_OFFERED = 8
"""Of the idle blocks, the least recently released ones among which the least valuable is looked for."""
REMEMBERED_BLOCKS = 4096
"""Of the last cached blocks, at least, by which it is judged how likely a new one is to be hit."""
ASSUMED_PREFILL_S = 1e-3
"""A token, until some are measured."""

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


@dataclass(frozen=True, slots=True)
class RentedBlocks:
    """How KV blocks lie in the pages of an arena. What is rented at once is called a group.

    Attributes:
        lease: the KV cache's.
        block_num_bytes: what a block takes.
        blocks_per_group: where pages have places a group is a page, and so many blocks: page p has the blocks from ``p * blocks_per_group`` on.
        pages_per_group: where pages are only counted a group is one block, which takes so many.
        when_given_back: told of groups whose bytes nobody needs any more.
    """

    lease: Lease
    block_num_bytes: int
    blocks_per_group: int = 1
    pages_per_group: int = 1
    when_given_back: Callable[[Sequence[int]], None] | None = None

    @property
    def num_groups(self) -> int:
        """Those that the arena holds, were they all."""
        return self.lease.arena.num_pages // self.pages_per_group

    def rent(self, vacant: list[int]) -> int:
        """A group more, whose pages are free; where places don't matter, one of the vacant."""
        if self.lease.arena.has_places:
            return self.lease.take(1)[0]
        self.lease.rent(self.pages_per_group)
        return vacant.pop()

    def give_back(self, groups: Sequence[int], vacant: list[int]) -> None:
        """The pages of these groups are free."""
        if self.lease.arena.has_places:
            self.lease.put_back(groups)
        else:
            self.lease.give_back(len(groups) * self.pages_per_group)
            vacant.extend(groups)
        if self.when_given_back is not None:
            self.when_given_back(groups)


class KVCache:
    """Blocks that are free, held by one or more sequences, or idle but kept for prefix hits; or not there, while their pages are somebody else's.

    It rents pages when it has no free block, and gives them back when others want them: first those of free blocks, then those whose blocks are idle and worth
    less than what is idle elsewhere.

    Invariants (`check`):
        free + idle + held == blocks of the groups that are rented or its own; a block is in one of the three.
        A block in the prefix index is idle or held, never free.

    Attributes:
        prefill_pace: seconds per token to compute what is cached; whoever runs steps notes them.
        num_evictions_for: cached blocks that had to leave, by whom for.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        rented: RentedBlocks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            num_blocks: that block tables may name.
            rented: whose pages the first of them lie in; those behind are its own for good. None: all are.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.prefix_tokens_hit = 0
        self.prefix_tokens_queried = 0
        self.prefill_pace = Pace(ASSUMED_PREFILL_S)
        self.num_evictions_for: Counter[Tenure] = Counter()
        self.num_held = 0
        self._rented = rented
        self._clock = clock
        self._per_group = 1 if rented is None else rented.blocks_per_group
        self._num_rentable = 0 if rented is None else rented.num_groups
        num_groups = -(-num_blocks // self._per_group)
        # of free blocks: whole groups of them, its own and rented ones, and the rest
        self._own = OrderedDict.fromkeys(range(self._num_rentable, num_groups))
        self._empty: OrderedDict[int, None] = OrderedDict()
        self._free: OrderedDict[BlockId, None] = OrderedDict()
        # groups whose pages aren't rented, the lowest last; known only where pages have no places
        has_places = rented is not None and rented.lease.arena.has_places
        self._vacant = [] if has_places else list(range(self._num_rentable - 1, -1, -1))
        self._holders = [0] * num_blocks
        # of each group: blocks held, and blocks idle
        self._held_in = [0] * num_groups
        self._idle_in = [0] * num_groups
        # rented groups of which no block is held
        self._num_unheld = 0
        self._by_key: dict[PrefixKey, BlockId] = {}
        self._cached: dict[BlockId, _CachedBlock] = {}
        self._uses: dict[BlockId, Uses] = {}
        # cached blocks that were released for the first time, and again; one of ten is assumed to be
        self._num_first, self._num_reused = 10.0, 1.0
        # Least recently released first: where what is evicted next is looked for.
        self._idle: OrderedDict[BlockId, None] = OrderedDict()
        if rented is not None:
            rented.lease.join(self)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        here = len(self._free) + (len(self._own) + len(self._empty)) * self._per_group + len(self._idle)
        if self._rented is None:
            return here
        return here + self._rented.lease.num_obtainable // self._rented.pages_per_group * self._per_group

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_idle_pages(self) -> int:
        """Pages that would be given up to others: of rented groups of which no block is held."""
        return 0 if self._rented is None else self._num_unheld * self._rented.pages_per_group

    def least_value(self) -> float | None:
        """What the group that is given up first is worth: seconds to compute it anew × uses per second ÷ bytes. None if none would be."""
        if self._empty:
            return 0.0
        offer = self._offered_group()
        return None if offer is None else offer[0]

    def evict_least(self, cause: Tenure, num_wanted: int) -> None:
        """That group's pages are free; if its blocks were free already, those of as many such groups as are wanted.

        Args:
            cause: for whom.
            num_wanted: pages.

        Raises:
            InvariantViolation: no group would be given up.
        """
        if self._rented is None:
            raise InvariantViolation("A KV cache that rents no pages can't give any up.")
        if self._empty:
            count = max(1, -(-num_wanted // self._rented.pages_per_group))
            # of blocks that are used in turn, those that were free for the shortest time are used last
            groups = [self._empty.popitem()[0] for _ in range(min(count, len(self._empty)))]
        else:
            offer = self._offered_group()
            if offer is None:
                raise InvariantViolation("No KV block is idle, and one was to be evicted.")
            groups = [offer[1]]
            for block in self._blocks(groups[0]):
                self._free.pop(block, None)
                if block in self._idle:
                    self._evict(block, cause)
        self._num_unheld -= len(groups)
        self._rented.give_back(groups, self._vacant)

    def allocate(self, count: int) -> list[BlockId] | None:
        """Take ``count`` blocks for one holder, evicting what is idle here or elsewhere as needed; None (and no change) if there aren't as many."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            block = self._take_free()
            self._hold(block)
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
                self._idle_in[block // self._per_group] -= 1
                self._hold(block)
            else:
                self._holders[block] += 1
        return blocks, keys

    def note_lookup(self, num_tokens: int, num_found: int) -> None:
        """A sequence of so many tokens begins with so many that were found: counted once, however often it was looked for before it could begin."""
        if self.enable_prefix_cache:
            self.prefix_tokens_queried += num_tokens
            self.prefix_tokens_hit += num_found

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

    def release(self, blocks: Sequence[BlockId], *, is_use: bool = True) -> None:
        """Give back one hold on each block. Later blocks of a prefix become evictable before earlier ones.

        Args:
            is_use: whether having held them counts as a use of each: not if they were to be used and weren't yet.
        """
        # One time for all blocks of a prefix, and one likelihood: none is worth less than one behind it.
        # Most of what is cached is never hit: the next ones will be as often as those before them.
        now_s, expected = self._clock(), min(1.0, self._num_reused / self._num_first)
        for block in reversed(blocks):
            if self._holders[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was held")
            self._holders[block] -= 1
            if block in self._cached and (is_use or block not in self._uses):
                self._note_use(block, now_s, expected)
            if self._holders[block] == 0:
                self._unhold(block)

    def check(self) -> list[str]:
        """Return every broken invariant, in words; empty when all hold."""
        problems = []
        held = [block for block, count in enumerate(self._holders) if count > 0]
        free = [*self._free, *(block for group in (*self._own, *self._empty) for block in self._blocks(group))]
        num_groups = len(self._held_in) - self._num_rentable
        if self._rented is not None:
            num_groups += self._rented.lease.num_rented // self._rented.pages_per_group
        if len(free) + len(self._idle) + len(held) != num_groups * self._per_group:
            problems.append(
                f"free {len(free)} + idle {len(self._idle)} + held {len(held)} != {num_groups} groups of {self._per_group} blocks"
            )
        if len(held) != self.num_held:
            problems.append(f"{len(held)} blocks are held, and counted as {self.num_held}")
        if len({*free, *self._idle, *held}) != len(free) + len(self._idle) + len(held):
            problems.append("a block is two of free, idle and held, or free twice")
        if any(b in self._cached for b in free):
            problems.append("a free block is in the prefix index")
        if {e.key: b for b, e in self._cached.items()} != self._by_key or not self._uses.keys() <= self._cached.keys():
            problems.append("the prefix index and the cached blocks disagree")
        for what, blocks, counts in (("held", held, self._held_in), ("idle", [*self._idle], self._idle_in)):
            if Counter(block // self._per_group for block in blocks) != +Counter(dict(enumerate(counts))):
                problems.append(f"a group has other {what} blocks than it counts")
        return problems + self._check_groups(held)

    def _check_groups(self, held: Sequence[BlockId | int]) -> list[str]:
        if self._rented is None:
            return []
        blocks = [*held, *self._idle, *self._free]
        present = {block // self._per_group for block in blocks} | self._empty.keys()
        present = {group for group in present if group < self._num_rentable}
        problems = []
        if self._rented.lease.arena.has_places and present != self._rented.lease.pages:
            problems.append("KV blocks lie in pages that aren't the cache's, or it has pages without blocks")
        if not self._rented.lease.arena.has_places and (
            present & {*self._vacant} or len(present) + len(self._vacant) != self._num_rentable
        ):
            problems.append("a group of KV blocks is rented and vacant, or lost")
        if self._num_unheld != sum(self._held_in[group] == 0 for group in present):
            problems.append(f"groups without a held block are counted as {self._num_unheld}")
        if any(self._held_in[group] or self._idle_in[group] for group in self._empty):
            problems.append("a group of free blocks has one that isn't")
        return problems

    def _blocks(self, group: int) -> Iterator[BlockId]:
        first = group * self._per_group
        return (BlockId(block) for block in range(first, min(first + self._per_group, self.num_blocks)))

    def _take_free(self) -> BlockId:
        """A block that is in no state for now: a free one if there is; else of a group more; else what is worth least makes room, here or elsewhere."""
        if self._free:
            return self._free.popitem(last=False)[0]
        if self._own:
            return self._split(self._own.popitem(last=False)[0])
        if self._empty:
            return self._split(self._empty.popitem(last=False)[0])
        rented = self._rented
        while rented is not None and rented.lease.num_free < rented.pages_per_group:
            value, others = self._offered_block(), rented.lease.least_value_of_others()
            if others is None or (value is not None and value[0] <= others):
                rented = None
            else:
                rented.lease.evict_least_of_others(rented.pages_per_group - rented.lease.num_free)
        if rented is not None:
            self._num_unheld += 1
            return self._split(rented.rent(self._vacant))
        offer = self._offered_block()
        if offer is None:
            raise InvariantViolation("A KV block was to be had, and none is.")
        self._evict(offer[1], Tenure.KV)
        return offer[1]

    def _split(self, group: int) -> BlockId:
        """The first block of a group, all others of which are free."""
        first, *others = self._blocks(group)
        self._free.update(dict.fromkeys(others))
        return first

    def _hold(self, block: BlockId) -> None:
        group = block // self._per_group
        self._holders[block] = 1
        self.num_held += 1
        self._num_unheld -= self._held_in[group] == 0 and group < self._num_rentable
        self._held_in[group] += 1

    def _unhold(self, block: BlockId) -> None:
        """A block that had one holder is idle, or free."""
        group = block // self._per_group
        self.num_held -= 1
        self._held_in[group] -= 1
        self._num_unheld += self._held_in[group] == 0 and group < self._num_rentable
        if block in self._cached:
            self._idle[block] = None
            self._idle_in[group] += 1
            return
        if self._held_in[group] or self._idle_in[group]:
            self._free[block] = None
            return
        for other in self._blocks(group):
            self._free.pop(other, None)
        (self._empty if group < self._num_rentable else self._own)[group] = None

    def _note_use(self, block: BlockId, now_s: float, expected: float) -> None:
        """A block that was held once more was used again; one that was held for the first time is expected to be."""
        if block in self._uses:
            self._num_reused += 1
            self._uses[block] = self._uses[block].used(now_s)
            return
        self._num_first += 1
        self._uses[block] = NEVER.used(now_s, expected)
        if self._num_first > 2 * REMEMBERED_BLOCKS:
            self._num_first, self._num_reused = self._num_first / 2, self._num_reused / 2

    def _value(self, block: BlockId, now_s: float) -> float:
        """Seconds to compute the block anew × uses per second."""
        return self._uses.get(block, NEVER).per_second(now_s) * self.prefill_pace.seconds_per_unit * self.block_size

    def _offered_block(self) -> tuple[float, BlockId] | None:
        """Of the blocks that are idle the longest, the least valuable, with its value by byte; the longest idle of equals."""
        now_s, num_bytes = self._clock(), 1 if self._rented is None else self._rented.block_num_bytes
        offers = [(self._value(block, now_s) / num_bytes, block) for block in islice(self._idle, NUM_OFFERED)]
        return min(offers, key=lambda offer: offer[0], default=None)

    def _offered_group(self) -> tuple[float, int] | None:
        """The same of rented groups of which no block is held, and one is idle."""
        if self._rented is None:
            return None
        now_s, num_bytes = self._clock(), self._rented.block_num_bytes * self._per_group
        groups = (block // self._per_group for block in self._idle)
        unheld = (group for group in groups if not self._held_in[group] and group < self._num_rentable)
        offers = [
            (sum(self._value(block, now_s) for block in self._blocks(group) if block in self._idle) / num_bytes, group)
            for group in islice(unheld, NUM_OFFERED)
        ]
        return min(offers, key=lambda offer: offer[0], default=None)

    def _evict(self, block: BlockId, cause: Tenure) -> None:
        """An idle block is in no state for now, and out of the prefix index."""
        del self._idle[block]
        self._idle_in[block // self._per_group] -= 1
        self._uses.pop(block, None)
        del self._by_key[self._cached.pop(block).key]
        self.num_evictions_for[cause] += 1
