"""Snapshots of recurrent states at the ends of cached KV blocks: which there are, and whose.

A recurrent state can't go back to where a shared prefix ends, so a prefix is reused only up to a
block at whose end the state was copied. Only bookkeeping lives here; the bytes are the runner's
tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

from loraserve.errors import InvariantViolation
from loraserve.memory.kv.prefix_cache import BlockId

Snapshot = NewType("Snapshot", int)
"""Number of a place for the recurrent state of all layers."""


@dataclass(frozen=True, slots=True)
class ResumedState:
    """Snapshot that a sequence begins from.

    Attributes:
        block: the cached block at whose end it was made.
        num_tokens: tokens that the state has seen.
    """

    block: BlockId
    snapshot: Snapshot
    num_tokens: int


class StateSnapshots:
    """Places that are free, reserved for a running prompt, or kept with a cached block.

    Kept ones are evicted in the order of their last use when a place is needed, but those that a
    request is about to begin from.

    Attributes:
        num_snapshots: places.
        num_evictions: kept snapshots whose place was given to another.
    """

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_evictions = 0
        # the lowest last
        self._free = [Snapshot(i) for i in range(num_snapshots - 1, -1, -1)]
        # least recently used first
        self._kept: OrderedDict[BlockId, Snapshot] = OrderedDict()
        self._pins: Counter[BlockId] = Counter()

    @property
    def num_kept(self) -> int:
        """Snapshots that later prompts may begin from."""
        return len(self._kept)

    def depth(self, blocks: Sequence[BlockId]) -> int:
        """Count the leading blocks of a prefix up to the last that has a snapshot."""
        return next((i for i in range(len(blocks), 0, -1) if blocks[i - 1] in self._kept), 0)

    def pin(self, block: BlockId, num_tokens: int) -> ResumedState:
        """Keep a block's snapshot until `unpin`, and return it.

        Args:
            num_tokens: tokens up to the block's end.
        """
        self._pins[block] += 1
        self._kept.move_to_end(block)
        return ResumedState(block, self._kept[block], num_tokens)

    def unpin(self, block: BlockId) -> None:
        """Undo one `pin`."""
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]

    def reserve(self) -> Snapshot | None:
        """Take a place for a new snapshot; None if each is reserved or pinned."""
        if self._free:
            return self._free.pop()
        block = next((block for block in self._kept if block not in self._pins), None)
        if block is None:
            return None
        self.num_evictions += 1
        return self._kept.pop(block)

    def keep(self, block: BlockId, snapshot: Snapshot) -> None:
        """Keep a reserved snapshot with a cached block; free it where the block has one."""
        if block in self._kept:
            self._free.append(snapshot)
            self._kept.move_to_end(block)
        else:
            self._kept[block] = snapshot

    def free(self, snapshots: Iterable[Snapshot]) -> None:
        """Give back reserved places."""
        self._free.extend(snapshots)

    def forget(self, block: BlockId) -> None:
        """Free the snapshot of a block that is evicted, if it has one.

        Raises:
            InvariantViolation: a request is about to begin from it.
        """
        if block in self._pins:
            raise InvariantViolation(f"Block {block} is evicted, and a request begins from the state at its end.")
        if block in self._kept:
            self._free.append(self._kept.pop(block))

    def check(self, reserved: Iterable[Snapshot]) -> list[str]:
        """List the broken invariants, in words; empty when all hold.

        Args:
            reserved: the places that requests have.
        """
        problems = []
        if sorted([*self._free, *self._kept.values(), *reserved]) != list(range(self.num_snapshots)):
            problems.append("a snapshot's place is free and held, or held twice, or lost")
        if not self._pins.keys() <= self._kept.keys():
            problems.append("a snapshot is pinned and isn't kept")
        return problems
