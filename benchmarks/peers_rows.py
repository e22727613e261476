"""Rows of `make bench ARGS=peers`: turns of two contenders at the same work, and their tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import figures

BASE, MIXED = "base", "mixed"
MODES = (BASE, MIXED)
MODE_WORDS = {BASE: "base", MIXED: "an adapter each"}
SPECULATION_WORDS = {"auto": "default", "off": "off", "on": "on"}
WHERE = ("peer", "its format", "ours", "prompt", "requests", "adapters", "speculation")
HEADER = (
    *WHERE,
    "peer's tokens/s",
    "our tokens/s",
    "ours ÷ peer's",
    "of pairs",
    "others",
    "idle one",
    "dropped",
)
TTFT_HEADER = (*WHERE, "peer's p50 ms", "our p50 ms", "peer's last ms", "our last ms")
NOT_A_TIME = math.nan
MAX_OTHERS = 0.1
"""Cores beside which a turn doesn't count."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A peer in one of its formats, beside us in one of ours."""

    peer: str
    format: str
    ours: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One burst of one contender.

    Attributes:
        others: cores that everything but the two contenders and the load generator took.
        idle: cores that the contender took whose turn it wasn't.
        ttft_p50_ms: time to the first token of half of the requests; NaN where nothing is streamed.
        ttft_max_ms: of the last one.
    """

    tokens_per_s: float
    others: float
    idle: float
    ttft_p50_ms: float = NOT_A_TIME
    ttft_max_ms: float = NOT_A_TIME

    @staticmethod
    def of(burst: Mapping[str, Any], others: float, idle: float) -> Turn:
        """Return the turn of a burst's figures."""
        p50, last = burst.get("ttft_p50_ms", NOT_A_TIME), burst.get("ttft_max_ms", NOT_A_TIME)
        return Turn(burst["tokens_per_s"], others, idle, p50, last)


@dataclass(slots=True)
class Row:
    """All turns of a pair at one number of requests, or why there are none.

    Attributes:
        num_dropped: turns beside other work, which were taken again.
    """

    pair: Pair
    requests: int
    mode: str
    prompt_tokens: int = 64
    speculation: str = "auto"
    peer: list[Turn] = field(default_factory=list)
    ours: list[Turn] = field(default_factory=list)
    reason: str = ""
    num_dropped: int = 0

    @property
    def ratio(self) -> float:
        """Ours by the peer's, the best turn of each: what else runs only adds to the others."""
        if not self.peer or not self.ours:
            return float("nan")
        return best(self.ours) / best(self.peer)

    @property
    def pair_ratios(self) -> list[float]:
        """Ours by the peer's, of the turns that followed each other."""
        return [a.tokens_per_s / b.tokens_per_s for a, b in zip(self.ours, self.peer, strict=False)]

    @property
    def where(self) -> list[str]:
        pair, mode = self.pair, MODE_WORDS[self.mode]
        numbers = str(self.prompt_tokens), str(self.requests)
        return [pair.peer, pair.format, pair.ours, *numbers, mode, SPECULATION_WORDS[self.speculation]]

    def cells(self) -> list[str]:
        if self.reason:
            return [*self.where, f"not measured: {self.reason}", *[""] * 6]
        turns = [*self.peer, *self.ours]
        ratios = self.pair_ratios
        return [
            *self.where,
            speeds(self.peer),
            speeds(self.ours),
            f"**{self.ratio:.2f}**",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{statistics.median(turn.others for turn in turns):.2f}",
            f"{max(turn.idle for turn in turns):.2f}",
            str(self.num_dropped),
        ]

    def ttft_cells(self) -> list[str]:
        """Return times to first tokens, medians of the turns; nothing where none is measured."""
        if self.reason or any(math.isnan(turn.ttft_p50_ms) for turn in (*self.peer, *self.ours)):
            return []
        sides = (self.peer, self.ours)
        p50s = [statistics.median(turn.ttft_p50_ms for turn in turns) for turns in sides]
        lasts = [statistics.median(turn.ttft_max_ms for turn in turns) for turns in sides]
        return [*self.where, *(f"{number:.0f}" for number in (*p50s, *lasts))]


def best(turns: Sequence[Turn]) -> float:
    return max(turn.tokens_per_s for turn in turns)


def speeds(turns: Sequence[Turn]) -> str:
    """Return the best turn, and the median of all."""
    median = statistics.median(turn.tokens_per_s for turn in turns)
    return f"{best(turns):.1f} ({median:.1f})"


def tables(rows: Sequence[Row]) -> tuple[str, str]:
    """Return the table of tokens a second, and that of times to first tokens."""
    times = [cells for row in rows if (cells := row.ttft_cells())]
    return figures.table(HEADER, [row.cells() for row in rows]), figures.table(TTFT_HEADER, times)
