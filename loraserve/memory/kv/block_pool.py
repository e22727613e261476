"""The KV cache's blocks: which are free, idle or held, and in which pages of the arena they lie.

Only bookkeeping lives here; the bytes are the runner's tensors. Everything runs on the step's
thread.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from loraserve.errors import InvariantViolation
from loraserve.memory.arena import ArenaClient, Owner
from loraserve.memory.kv.prefix_cache import Activation, BlockId, PrefixCache, PrefixKey
from loraserve.memory.kv.state_snapshots import StateSnapshots

MAX_VICTIM_CANDIDATES = 8
"""Number of the longest idle blocks, or groups, of which the least valuable is evicted."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Layout of KV blocks in the pages of an arena.

    Blocks whose pages are allocated together are a group.

    Attributes:
        client: the KV cache's client of the arena.
        block_num_bytes: bytes from one block to the next.
        blocks_per_group: blocks of a page in an indexed arena: page p has those from ``p *
            blocks_per_group`` on.
        pages_per_group: pages of a block in a counted arena.
        on_freed: called with the groups whose bytes are no longer needed.
    """

    client: ArenaClient
    block_num_bytes: int
    blocks_per_group: int = 1
    pages_per_group: int = 1
    on_freed: Callable[[Sequence[int]], None] | None = None

    @property
    def num_groups(self) -> int:
        """Groups of the whole arena."""
        return self.client.arena.num_pages // self.pages_per_group

    def allocate(self, unallocated: list[int]) -> int:
        """Allocate the pages of a group and return it; in a counted arena, one of `unallocated`."""
        if self.client.arena.is_indexed:
            return self.client.allocate_pages(1)[0]
        self.client.allocate(self.pages_per_group)
        return unallocated.pop()

    def free(self, groups: Sequence[int], unallocated: list[int]) -> None:
        """Free the pages of these groups."""
        if self.client.arena.is_indexed:
            self.client.free_pages(groups)
        else:
            self.client.free(len(groups) * self.pages_per_group)
            unallocated.extend(groups)
        if self.on_freed is not None:
            self.on_freed(groups)


class PrefixMatch(NamedTuple):
    """Cached blocks with which a sequence begins, held for it.

    Attributes:
        num_found: blocks whose keys and values were cached, those included that can't be used
            because no snapshot of recurrent states is behind them.
    """

    blocks: list[BlockId]
    keys: list[PrefixKey]
    num_found: int


class BlockPool:
    """Blocks that are free, held by sequences, or idle: kept for prefix hits alone.

    A group of blocks is *unallocated* (its pages are not the KV cache's), *free* (all its blocks
    are), *idle* (none is held) or *held*. Dedicated groups lie behind the arena and are always the
    KV cache's. Pages are allocated when no block is free, and freed when others need them: free
    groups first, then idle ones that are worth less than what is idle elsewhere.

    Invariants (`check`):
        free + idle + held == blocks of the groups that are allocated or dedicated; a block is in
        one of the three. A cached block is idle or held, never free.

    Attributes:
        prefix_cache: the content of cached blocks.
        snapshots: of recurrent states, at the ends of cached blocks; None: the base has none.
        num_evictions_for: cached blocks that were evicted, by the owner that needed their memory.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        layout: BlockLayout | None = None,
        snapshots: StateSnapshots | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a pool whose blocks are all free.

        Args:
            num_blocks: blocks that block tables may name.
            layout: how the first of them lie in an arena; those behind it are dedicated. None: all
                are dedicated.
            snapshots: None: no layer of the base is recurrent.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = PrefixCache(block_size, is_enabled=enable_prefix_cache, clock=clock)
        self.snapshots = snapshots
        self.num_evictions_for: Counter[Owner] = Counter()
        self.num_held = 0
        self._layout = layout
        self._clock = clock
        self._per_group = 1 if layout is None else layout.blocks_per_group
        self._num_arena_groups = 0 if layout is None else layout.num_groups
        num_groups = -(-num_blocks // self._per_group)
        # free blocks: those of free groups, dedicated or in the arena, and the rest
        self._free_dedicated = OrderedDict.fromkeys(range(self._num_arena_groups, num_groups))
        self._free_groups: OrderedDict[int, None] = OrderedDict()
        self._free: OrderedDict[BlockId, None] = OrderedDict()
        # the lowest last; an indexed arena has them itself
        is_indexed = layout is not None and layout.client.arena.is_indexed
        self._unallocated = [] if is_indexed else list(range(self._num_arena_groups - 1, -1, -1))
        self._holders = [0] * num_blocks
        # held blocks and idle blocks of each group
        self._held_in = [0] * num_groups
        self._idle_in = [0] * num_groups
        # allocated groups without a held block
        self._num_unheld = 0
        # least recently released first
        self._idle: OrderedDict[BlockId, None] = OrderedDict()
        if layout is not None:
            layout.client.register(self)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        num_free_groups = len(self._free_dedicated) + len(self._free_groups)
        here = len(self._free) + num_free_groups * self._per_group + len(self._idle)
        if self._layout is None:
            return here
        return here + self._layout.client.num_obtainable // self._layout.pages_per_group * self._per_group

    @property
    def num_idle(self) -> int:
        """Cached blocks without a holder."""
        return len(self._idle)

    @property
    def num_idle_pages(self) -> int:
        """Pages of allocated groups without a held block: those that can be freed for others."""
        return 0 if self._layout is None else self._num_unheld * self._layout.pages_per_group

    def victim_value(self) -> float | None:
        """Estimate the value of the group that is evicted first; None if there is none.

        The value is the seconds to compute it again × uses per second ÷ bytes.
        """
        if self._free_groups:
            return 0.0
        victim = self._victim_group()
        return None if victim is None else victim[0]

    def evict_victim(self, cause: Owner, num_pages: int) -> None:
        """Free the pages of the least valuable group; of free groups, as many as are needed.

        Args:
            cause: the owner that needs the pages.
            num_pages: pages needed.

        Raises:
            InvariantViolation: every group has a held block.
        """
        if self._layout is None:
            raise InvariantViolation("A KV cache without an arena has no pages to free.")
        if self._free_groups:
            count = max(1, -(-num_pages // self._layout.pages_per_group))
            # the most recently freed: the others are allocated from in turn
            groups = [self._free_groups.popitem()[0] for _ in range(min(count, len(self._free_groups)))]
        else:
            victim = self._victim_group()
            if victim is None:
                raise InvariantViolation("No KV block is idle, and one must be evicted.")
            groups = [victim[1]]
            for block in self._blocks(groups[0]):
                self._free.pop(block, None)
                if block in self._idle:
                    self._evict(block, cause)
        self._num_unheld -= len(groups)
        self._layout.free(groups, self._unallocated)

    def allocate(self, count: int) -> list[BlockId] | None:
        """Take ``count`` blocks for one holder, evicting what is idle here or elsewhere as needed.

        Return None, and change nothing, if there aren't as many.
        """
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            block = self._take_free()
            self._hold(block)
            blocks.append(block)
        return blocks

    def match_prefix(
        self, root: PrefixKey, token_ids: Sequence[int], max_tokens: int, activation: Activation | None = None
    ) -> PrefixMatch:
        """Hold and return the cached blocks that start ``token_ids``, with their keys.

        They hold ``max_tokens`` tokens at most. Where layers are recurrent, they end with one that
        has a snapshot.

        Args:
            root: the tenant's.
            activation: None where every token is the base's.
        """
        blocks, keys = self.prefix_cache.find(root, token_ids, max_tokens, activation)
        num_found = len(blocks)
        if self.snapshots is not None:
            depth = self.snapshots.depth(blocks)
            blocks, keys = blocks[:depth], keys[:depth]
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
                self._idle_in[block // self._per_group] -= 1
                self._hold(block)
            else:
                self._holders[block] += 1
        return PrefixMatch(blocks, keys, num_found)

    def release(self, blocks: Sequence[BlockId], *, is_use: bool = True) -> None:
        """Give back one hold on each block.

        Later blocks of a prefix become evictable before earlier ones.

        Args:
            is_use: whether having held them counts as a use of each: not if they were to be used
                and weren't yet.
        """
        self.prefix_cache.note_uses(blocks, is_use=is_use)
        for block in reversed(blocks):
            if self._holders[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was held")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._unhold(block)

    def check(self) -> list[str]:
        """List the broken invariants, in words; empty when all hold."""
        problems = []
        held = [block for block, count in enumerate(self._holders) if count > 0]
        free_groups = (*self._free_dedicated, *self._free_groups)
        free = [*self._free, *(block for group in free_groups for block in self._blocks(group))]
        num_groups = len(self._held_in) - self._num_arena_groups
        if self._layout is not None:
            num_groups += self._layout.client.num_allocated // self._layout.pages_per_group
        if len(free) + len(self._idle) + len(held) != num_groups * self._per_group:
            problems.append(
                f"free {len(free)} + idle {len(self._idle)} + held {len(held)} "
                f"!= {num_groups} groups of {self._per_group} blocks"
            )
        if len(held) != self.num_held:
            problems.append(f"{len(held)} blocks are held, and counted as {self.num_held}")
        if len({*free, *self._idle, *held}) != len(free) + len(self._idle) + len(held):
            problems.append("a block is in two of the states free, idle and held, or free twice")
        if any(block in self.prefix_cache for block in free):
            problems.append("a free block is in the prefix index")
        problems += self.prefix_cache.check()
        for what, blocks, counts in (("held", held, self._held_in), ("idle", [*self._idle], self._idle_in)):
            if Counter(block // self._per_group for block in blocks) != +Counter(dict(enumerate(counts))):
                problems.append(f"a group's count of {what} blocks is wrong")
        return problems + self._check_groups(held)

    def _check_groups(self, held: Sequence[BlockId | int]) -> list[str]:
        if self._layout is None:
            return []
        blocks = [*held, *self._idle, *self._free]
        present = {block // self._per_group for block in blocks} | self._free_groups.keys()
        present = {group for group in present if group < self._num_arena_groups}
        problems = []
        if self._layout.client.arena.is_indexed and present != self._layout.client.pages:
            problems.append("KV blocks lie in pages that aren't the cache's, or it has pages without blocks")
        if not self._layout.client.arena.is_indexed and (
            present & {*self._unallocated} or len(present) + len(self._unallocated) != self._num_arena_groups
        ):
            problems.append("a group of KV blocks is allocated and unallocated, or lost")
        if self._num_unheld != sum(self._held_in[group] == 0 for group in present):
            problems.append(f"groups without a held block are counted as {self._num_unheld}")
        if any(self._held_in[group] or self._idle_in[group] for group in self._free_groups):
            problems.append("a group of free blocks has one that isn't")
        return problems

    def _blocks(self, group: int) -> Iterator[BlockId]:
        first = group * self._per_group
        return (BlockId(block) for block in range(first, min(first + self._per_group, self.num_blocks)))

    def _take_free(self) -> BlockId:
        """Take a block out of every state.

        It is a free block, one of a free group, one of a newly allocated group, or an evicted one.

        A group is allocated for as long as the arena has free pages, or others have idle content
        that is worth less than this cache's own.
        """
        if self._free:
            return self._free.popitem(last=False)[0]
        for groups in (self._free_dedicated, self._free_groups):
            if groups:
                return self._split(groups.popitem(last=False)[0])
        layout = self._layout
        while layout is not None and layout.client.num_free < layout.pages_per_group:
            own, of_others = self._victim_block(), layout.client.victim_value_of_others()
            if of_others is None or (own is not None and own[0] <= of_others):
                layout = None
            else:
                layout.client.evict_victim_of_others(layout.pages_per_group - layout.client.num_free)
        if layout is not None:
            self._num_unheld += 1
            return self._split(layout.allocate(self._unallocated))
        victim = self._victim_block()
        if victim is None:
            raise InvariantViolation("A KV block was counted as available, and none can be allocated.")
        self._evict(victim[1], Owner.KV)
        return victim[1]

    def _split(self, group: int) -> BlockId:
        """Add all blocks of a group but the first to the free ones; return the first."""
        first, *others = self._blocks(group)
        self._free.update(dict.fromkeys(others))
        return first

    def _hold(self, block: BlockId) -> None:
        group = block // self._per_group
        self._holders[block] = 1
        self.num_held += 1
        self._num_unheld -= self._held_in[group] == 0 and group < self._num_arena_groups
        self._held_in[group] += 1

    def _unhold(self, block: BlockId) -> None:
        """Make a block that had one holder idle, or free."""
        group = block // self._per_group
        self.num_held -= 1
        self._held_in[group] -= 1
        self._num_unheld += self._held_in[group] == 0 and group < self._num_arena_groups
        if block in self.prefix_cache:
            self._idle[block] = None
            self._idle_in[group] += 1
            return
        if self._held_in[group] or self._idle_in[group]:
            self._free[block] = None
            return
        for other in self._blocks(group):
            self._free.pop(other, None)
        (self._free_groups if group < self._num_arena_groups else self._free_dedicated)[group] = None

    def _victim_block(self) -> tuple[float, BlockId] | None:
        """Find the least valuable of the longest idle blocks, with its value per byte."""
        now_s, num_bytes = self._clock(), 1 if self._layout is None else self._layout.block_num_bytes
        blocks = islice(self._idle, MAX_VICTIM_CANDIDATES)
        candidates = [(self.prefix_cache.value(block, now_s) / num_bytes, block) for block in blocks]
        return min(candidates, key=lambda candidate: candidate[0], default=None)

    def _victim_group(self) -> tuple[float, int] | None:
        """Find the least valuable of the longest idle groups, with its value per byte."""
        if self._layout is None:
            return None
        now_s, num_bytes, value = self._clock(), self._layout.block_num_bytes * self._per_group, self.prefix_cache.value
        groups = (block // self._per_group for block in self._idle)
        unheld = (group for group in groups if not self._held_in[group] and group < self._num_arena_groups)
        candidates = [
            (sum(value(block, now_s) for block in self._blocks(group) if block in self._idle) / num_bytes, group)
            for group in islice(unheld, MAX_VICTIM_CANDIDATES)
        ]
        return min(candidates, key=lambda candidate: candidate[0], default=None)

    def _evict(self, block: BlockId, cause: Owner) -> None:
        """Remove an idle block from the prefix cache; it is in no state for now."""
        del self._idle[block]
        self._idle_in[block // self._per_group] -= 1
        self.prefix_cache.forget(block)
        if self.snapshots is not None:
            self.snapshots.forget(block)
        self.num_evictions_for[cause] += 1
