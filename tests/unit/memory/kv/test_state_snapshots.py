"""Snapshots of recurrent states: a cached prefix is used up to the last block that has one."""

from __future__ import annotations

import pytest

from loraserve.errors import InvariantViolation
from loraserve.memory.kv.block_pool import BlockPool
from loraserve.memory.kv.prefix_cache import BlockId
from loraserve.memory.kv.state_snapshots import StateSnapshots

from .test_block_pool import ROOT, publish_all


def cached_pool(num_blocks: int, num_snapshots: int) -> tuple[BlockPool, StateSnapshots, list[BlockId]]:
    """Return a pool with four cached blocks of four tokens, idle."""
    snapshots = StateSnapshots(num_snapshots)
    kv = BlockPool(num_blocks, 4, snapshots=snapshots)
    blocks = kv.allocate(4)
    assert blocks is not None
    publish_all(kv, blocks, list(range(16)))
    kv.release(blocks)
    return kv, snapshots, blocks


def keep(snapshots: StateSnapshots, block: BlockId) -> int:
    place = snapshots.reserve()
    assert place is not None
    snapshots.keep(block, place)
    return place


@pytest.mark.parametrize(("kept", "used"), [([], 0), ([0], 1), ([1], 2), ([0, 2], 3), ([3], 4)])
def test_prefix_ends_at_deepest_snapshot(kept: list[int], used: int) -> None:
    kv, snapshots, blocks = cached_pool(8, 4)
    for index in kept:
        keep(snapshots, blocks[index])
    match = kv.match_prefix(ROOT, list(range(17)), 16)
    assert (match.blocks, len(match.keys), match.num_found) == (blocks[:used], used, 4)
    assert kv.num_held == used
    kv.release(match.blocks)
    assert [*kv.check(), *snapshots.check([])] == []


def test_evicted_block_frees_snapshot() -> None:
    kv, snapshots, blocks = cached_pool(4, 1)
    keep(snapshots, blocks[3])
    assert snapshots.num_kept == 1
    kv.allocate(4)
    assert snapshots.num_kept == 0
    assert snapshots.reserve() == 0


def test_longest_unused_snapshot_gives_place() -> None:
    _, snapshots, blocks = cached_pool(8, 3)
    places = [keep(snapshots, block) for block in blocks[:3]]
    assert snapshots.pin(blocks[0], 4).snapshot == places[0]
    snapshots.unpin(blocks[0])
    assert snapshots.reserve() == places[1]
    assert snapshots.num_evictions == 1
    assert [snapshots.depth([block]) for block in blocks] == [1, 0, 1, 0]
    assert snapshots.check([places[1]]) == []
    assert snapshots.check([]) != []


def test_pinned_snapshot_keeps_place() -> None:
    _, snapshots, blocks = cached_pool(8, 2)
    for block in blocks[:2]:
        keep(snapshots, block)
    for block in (blocks[0], blocks[0], blocks[1]):
        snapshots.pin(block, 4)
    assert snapshots.reserve() is None
    with pytest.raises(InvariantViolation, match="begins from the state"):
        snapshots.forget(blocks[0])
    snapshots.unpin(blocks[0])
    assert snapshots.reserve() is None
    snapshots.unpin(blocks[0])
    assert snapshots.reserve() is not None
    assert snapshots.depth(blocks[:1]) == 0


def test_block_keeps_first_snapshot() -> None:
    _, snapshots, blocks = cached_pool(8, 2)
    first = keep(snapshots, blocks[0])
    second = keep(snapshots, blocks[0])
    assert snapshots.pin(blocks[0], 4).snapshot == first
    assert snapshots.num_kept == 1
    assert snapshots.reserve() == second
