"""Times of calls of a registry, and what its database did for them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from benchmarks import figures
from benchmarks.figures import percentile
from benchmarks.query_plans import Plan, Recorder, explain, recording
from benchmarks.registry_calls import Call, Calls, Pass

MAX_BIND_ROWS = 64


@dataclass(slots=True)
class Timed:
    """Times of a call, and the work of the database for it."""

    name: str
    max_rows: int | None = None
    """Rows that it may read; None: as many as it likes, since it is about all of them."""
    is_of_share: bool = False
    """Whether that is a share of all rows, so that reading a table whole is no fault by itself."""
    rounds_s: list[list[float]] = field(default_factory=list)
    """Times of its calls, by round."""
    num_items: int | None = None
    """Blobs or versions that a pass was about."""
    num_statements: int = 0
    database_s: float = 0.0
    plans: list[Plan] = field(default_factory=list)

    @property
    def times_s(self) -> list[float]:
        return [one for times in self.rounds_s for one in times]

    @property
    def rows_read(self) -> int:
        return sum(plan.rows_read for plan in self.plans)

    @property
    def seq_scans(self) -> list[str]:
        return sorted({table for plan in self.plans for table in plan.seq_scans})

    @property
    def faults(self) -> list[str]:
        if self.max_rows is None:
            return []
        is_whole = bool(self.seq_scans) and not self.is_of_share
        found = [f"{self.name} reads all of {', '.join(self.seq_scans)}"] if is_whole else []
        if self.rows_read > self.max_rows:
            found.append(f"{self.name} reads {self.rows_read:,} rows; {self.max_rows:,} would do")
        return found

    def note(self, recorder: Recorder, num_calls: int = 1) -> None:
        """Keep what the recorded statements are on average of so many calls."""
        self.num_statements = round(len(recorder.statements) / num_calls)
        self.database_s = recorder.seconds / num_calls

    def ratio(self, other: Timed) -> float:
        """Return how many times as long it took as `other`, at the median of rounds.

        In a round, the two followed each other.
        """
        pairs = zip(self.rounds_s, other.rounds_s, strict=True)
        return statistics.median(statistics.median(mine) / statistics.median(its) for mine, its in pairs)

    def row(self) -> list[str]:
        p50, p99 = (percentile(self.times_s, one) for one in (50, 99))
        return [
            self.name,
            _ms(p50),
            "–" if len(self.times_s) == 1 else _ms(p99),
            f"{self.num_statements:,}",
            _ms(self.database_s),
            f"{self.rows_read:,}",
            ", ".join(self.seq_scans) or "–",
        ]

    def as_json(self, *, has_plans: bool) -> dict[str, Any]:
        return {
            "name": self.name,
            "p50_s": percentile(self.times_s, 50),
            "p99_s": percentile(self.times_s, 99),
            "num_calls": len(self.times_s),
            "num_items": self.num_items,
            "num_statements": self.num_statements,
            "database_s": self.database_s,
            "rows_read": self.rows_read,
            "seq_scans": self.seq_scans,
            **({"plans": [plan.as_json() for plan in self.plans]} if has_plans else {}),
        }


HEADER = ["call", "p50 ms", "p99 ms", "statements", "in the database ms", "rows read", "tables read whole"]


def _ms(seconds: float) -> str:
    return figures.ms(seconds) if seconds < 1 else f"{1e3 * seconds:,.0f}"


async def time_call(timed: Timed, call: Call, num_calls: int, connection: asyncpg.Connection, *, growth: float) -> None:
    """Add a round of calls; the last one's statements are explained."""
    times = []
    for _ in range(num_calls):
        action = call.make()
        with recording() as recorder:
            began = time.perf_counter()
            await action()
            times.append(time.perf_counter() - began)
    timed.rounds_s.append(times)
    timed.note(recorder)
    timed.plans = [await explain(connection, one, growth=growth) for one in recorder.statements]


async def time_pass(one: Pass, connection: asyncpg.Connection, *, growth: float, earlier: Mapping[str, Timed]) -> Timed:
    """Time a pass over everything, once; explain the first statement of each kind.

    Args:
        earlier: passes before it, by name. Statements of one that it includes aren't explained
            again.
    """
    timed = Timed(one.name, one.max_rows, one.is_of_share)
    with recording() as recorder:
        began = time.perf_counter()
        timed.num_items = await one.run()
        timed.rounds_s.append([time.perf_counter() - began])
    timed.note(recorder)
    kinds = {statement.text: statement for statement in reversed(recorder.statements)}
    if one.includes is not None:
        for plan in earlier[one.includes].plans:
            kinds.pop(plan.statement, None)
    timed.plans = [await explain(connection, statement, growth=growth) for statement in kinds.values()]
    return timed


async def time_binds(
    timed: Timed,
    calls: Calls,
    num_at_once: int,
    count: int,
    connection: asyncpg.Connection | None,
    *,
    is_cached: bool,
    growth: float,
) -> None:
    """Add a round of binds of names that are drawn by the size of their tenants, so many at once.

    Args:
        connection: explains the last statement; None: nothing is explained.
    """
    calls.forget_routes()
    asked = calls.draw_binds(count)
    if is_cached:
        asked = asked[:1] * count
        await calls.bind(asked[0])
    drawn, times = iter(asked), []
    with recording() as recorder:

        async def work() -> None:
            for one in drawn:
                began = time.perf_counter()
                await calls.bind(one)
                times.append(time.perf_counter() - began)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(work())
    timed.rounds_s.append(times)
    timed.note(recorder, count)
    if connection is not None and not is_cached:
        timed.plans = [await explain(connection, one, growth=growth) for one in recorder.statements[-1:]]
