"""Counts that other processes read."""

from __future__ import annotations

import os

from loraserve.engine.parallel.rank_counts import RankCounts, RankProgress
from loraserve.model.parallel.traffic import Traffic
from loraserve.types import RankTraffic


def test_counts_of_rank_are_visible_to_all_ranks() -> None:
    ours = RankCounts()
    theirs = RankCounts(os.dup(ours.descriptor))
    traffic = Traffic(theirs.row(1))
    with traffic.summing(100):
        pass
    for _ in range(2):
        with traffic.transferring(8):
            pass
    first, second = ours.read(2)
    assert first == RankTraffic()
    assert (second.sum_bytes, second.transfer_bytes) == (100, 16)
    assert second.sum_s > 0 < second.transfer_s
    for counts in (ours, theirs):
        counts.close()
    # what was mapped stays
    assert ours.read(2)[1] == second


def test_rank_0_sees_progress_of_all_ranks() -> None:
    counts = RankCounts()
    progress = [RankProgress(counts.row(rank)) for rank in (1, 2)]
    seen = [counts.num_moves()]
    for one in (*progress, progress[0]):
        one.tick()
        seen.append(counts.num_moves())
    assert seen == [0, 1, 2, 3]
    counts.close()
