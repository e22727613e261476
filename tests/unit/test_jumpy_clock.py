"""The plug-in whose clocks jump: always forward, and by no more than what goes by."""

from __future__ import annotations

import itertools

import pytest
from jumpy_clock import JumpyClock
from stopped_clock import StoppedClock


@pytest.mark.parametrize("seed", range(5))
def test_jumps_are_forward_and_bounded(seed: int) -> None:
    real = StoppedClock(100.0)
    clock = JumpyClock(seed, real)
    seen = []
    for _ in range(5000):
        real.now_s += 0.01
        seen.append(clock.ahead_s())
    assert all(0 <= later - before <= 0.6 for before, later in itertools.pairwise(seen))
    assert 5 < seen[-1] < 50
    # some calls are late, by little
    late = [clock.late_s(0.1) for _ in range(1000)]
    assert 50 < sum(seconds > 0 for seconds in late) < 200
    assert max(late) <= 0.02
