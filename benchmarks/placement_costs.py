"""What a simulated replica's work costs: figures of this project's results, by their file."""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
STEPS, LOADS = "cpu-S-2026-11-23-quick.json", "churn-S-2026-11-23.json"
PROMPT_TOKENS = 64
"""Tokens of each prompt in `STEPS`."""


@dataclass(frozen=True, slots=True)
class Costs:
    step_points: tuple[tuple[int, float], ...]
    """Seconds between two tokens by the number of sequences, measured; lines in between."""
    prefill_s: float
    """Seconds per prompt token."""
    load_s: float
    """Seconds to read, verify and copy an adapter from the store."""
    promote_s: float
    """Seconds from the host to the device."""
    adapter_bytes: int

    @property
    def max_num_seqs(self) -> int:
        return self.step_points[-1][0]

    def step_s(self, num_running: int) -> float:
        """Return the seconds of a step with so many sequences and no prompt."""
        return _line(self.step_points, num_running)

    def capacity(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the requests a second of a replica with all slots in use."""
        full = self.max_num_seqs
        return 1 / (prompt_tokens * self.prefill_s + output_tokens * self.step_s(full) / full)


@cache
def _line(points: tuple[tuple[int, float], ...], x: int) -> float:
    place = min(max(bisect_left(points, (x, 0.0)), 1), len(points) - 1)
    (low, before), (high, after) = points[place - 1 : place + 1]
    return before + (after - before) * (x - low) / (high - low)


def measured() -> Costs:
    """Return the costs of a size-S base in float32 with an adapter of rank 16 for each request.

    A load from the host's memory has no measurement of its own: it is taken to cost what a load
    from the store does after reading and verifying, which is more than it does.
    """
    points = [point for point in _read(STEPS)["points"] if (point["system"], point["base"]) == _SERIES]
    steps = tuple((point["concurrency"], _of(point, "tpot_p50_ms") / 1e3) for point in points)
    first_s = _of(points[0], "ttft_p50_ms") / 1e3
    loads = _read(LOADS)
    read_s = statistics.median(loads["first_tokens"]["read_s"])
    load_s = statistics.median(loads["first_tokens"]["load_s"])
    return Costs(steps, first_s / PROMPT_TOKENS, load_s, load_s - read_s, loads["adapter_bytes"])


_SERIES = ("an adapter each", "none")


def _of(point: dict[str, Any], name: str) -> float:
    return statistics.median(run[name] for run in point["runs"])


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found
