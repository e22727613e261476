"""The registry with a million versions in PostgreSQL: what each call takes, and how it is planned.

    python -m benchmarks.million              # 1,000,000 versions of 2,000 tenants
    python -m benchmarks.million --quick      # 20,000 of 200

A throwaway PostgreSQL (tests/postgres.sh, with fsync), or a database of the server that
LORASERVE_TEST_POSTGRES_URL names, is filled by COPY with copies of the rows that the product wrote
(`benchmarks.registry_rows`). Then the product's own classes are called and timed, their statements
are recorded and explained (`benchmarks.query_plans`). The run fails if a call that answers a
request reads a table from one end to the other, or more rows than it may.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import make_url

from benchmarks import figures, reporting
from benchmarks.figures import percentile
from benchmarks.query_plans import Plan, explain, recording
from benchmarks.registry_calls import Call, Calls, Pass
from benchmarks.registry_rows import Filled, ListedStore, fill, make_registry
from benchmarks.serving import say
from loraserve.db import migrate
from loraserve.db.session import Database
from loraserve.limits import LIMITS

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "postgres.sh"
SMALL = 200_000
"""Versions below which PostgreSQL rightly reads tables whole."""
NUM_BINDS, NUM_AT_ONCE = 4000, 16
KEPT = "filled.pickle"
"""File beside a kept server's data: its URL, and what was written."""


@dataclass(slots=True)
class Server:
    """A PostgreSQL server, and a database of it for this run."""

    url: str
    folder: str | None = None
    """Folder of a throwaway server."""

    def restart(self) -> bool:
        """Restart a throwaway server, whose buffers are empty then; return whether it is one."""
        if self.folder is None:
            return False
        subprocess.run([SCRIPT, "restart", self.folder], check=True, stdout=subprocess.DEVNULL)
        return True


@contextmanager
def postgres(keep: Path | None) -> Iterator[Server]:
    """A server; with `keep`, one that stays in that folder with its rows, or that an earlier run
    left there.
    """
    given = os.environ.get("LORASERVE_TEST_POSTGRES_URL")
    if given and keep is None:
        name = f"million_{uuid.uuid4().hex}"
        asyncio.run(_execute(given, f"CREATE DATABASE {name}"))
        try:
            yield Server(make_url(given).set(database=name).render_as_string(hide_password=False))
        finally:
            asyncio.run(_execute(given, f"DROP DATABASE {name} WITH (FORCE)"))
        return
    kept = None if keep is None else keep / KEPT
    if kept is not None and kept.is_file():
        yield Server(pickle.loads(kept.read_bytes())[0], str(keep))
        return
    folder = tempfile.mkdtemp(prefix="loraserve-million-") if keep is None else str(keep)
    settings = "-c fsync=on -c shared_buffers=1GB -c max_wal_size=8GB -c maintenance_work_mem=256MB"
    environment = {**os.environ, "LORASERVE_TEST_POSTGRES_SETTINGS": settings}
    started = subprocess.run([SCRIPT, "start", folder], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield Server(started.stdout.strip(), folder)
    finally:
        if keep is None:
            subprocess.run([SCRIPT, "stop", folder], check=True)


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@dataclass(slots=True)
class Timed:
    """What a call took, and what the database did for it."""

    name: str
    times_s: list[float] = field(default_factory=list)
    num_statements: int = 0
    database_s: float = 0.0
    plans: list[Plan] = field(default_factory=list)
    max_rows: int | None = None
    """Rows that it may read; None: as many as it likes, since it is about all of them."""

    @property
    def rows_read(self) -> int:
        return sum(plan.rows_read for plan in self.plans)

    @property
    def faults(self) -> list[str]:
        if self.max_rows is None:
            return []
        found = [f"{self.name} reads all of {', '.join(plan.seq_scans)}" for plan in self.plans if plan.seq_scans]
        if self.rows_read > self.max_rows:
            found.append(f"{self.name} reads {self.rows_read:,} rows; {self.max_rows:,} would do")
        return found

    def row(self) -> list[str]:
        p50, p99 = (percentile(self.times_s, one) for one in (50, 99))
        is_one = len(self.times_s) == 1
        scans = sorted({table for plan in self.plans for table in plan.seq_scans})
        return [
            self.name,
            figures.ms(p50) if p50 < 1 else f"{1e3 * p50:,.0f}",
            "–" if is_one else figures.ms(p99) if p99 < 1 else f"{1e3 * p99:,.0f}",
            f"{self.num_statements:,}",
            figures.ms(self.database_s),
            f"{self.rows_read:,}",
            ", ".join(scans) or "–",
        ]

    def as_json(self) -> dict[str, Any]:
        worst = max(self.plans, key=lambda plan: plan.rows_read, default=None)
        return {
            "name": self.name,
            "p50_s": percentile(self.times_s, 50),
            "p99_s": percentile(self.times_s, 99),
            "num_calls": len(self.times_s),
            "num_statements": self.num_statements,
            "database_s": self.database_s,
            "rows_read": self.rows_read,
            "seq_scans": sorted({table for plan in self.plans for table in plan.seq_scans}),
            "longest_statement": None if worst is None else worst.statement,
        }


HEADER = ["call", "p50 ms", "p99 ms", "statements", "in the database ms", "rows read", "tables read whole"]


@dataclass(slots=True)
class Result:
    filled: Filled
    fill_s: float
    calls: list[Timed]
    passes: list[Timed]
    binds: list[Timed]
    sizes: list[tuple[str, int, int, int]]
    """Of each table: name, rows, bytes of the rows, bytes of the indexes."""

    @property
    def faults(self) -> list[str]:
        return [fault for one in (*self.binds, *self.calls, *self.passes) for fault in one.faults]


async def time_call(call: Call, connection: asyncpg.Connection, *, is_small: bool) -> Timed:
    timed = Timed(call.name, max_rows=call.max_rows)
    for number in range(call.times):
        action = call.make(number)
        with recording() as recorder:
            began = time.perf_counter()
            await action()
            timed.times_s.append(time.perf_counter() - began)
    timed.num_statements, timed.database_s = len(recorder.statements), recorder.seconds
    timed.plans = [await explain(connection, one, is_small=is_small) for one in recorder.statements]
    return timed


async def time_pass(one: Pass, connection: asyncpg.Connection, *, is_small: bool) -> Timed:
    """A pass over everything, once; its first statements of each kind are explained."""
    timed = Timed(one.name, max_rows=one.max_rows)
    with recording() as recorder:
        began = time.perf_counter()
        await one.run()
        timed.times_s.append(time.perf_counter() - began)
    timed.num_statements, timed.database_s = len(recorder.statements), recorder.seconds
    kinds = {statement.text: statement for statement in reversed(recorder.statements)}
    timed.plans = [await explain(connection, statement, is_small=is_small) for statement in kinds.values()]
    return timed


async def time_binds(name: str, calls: Calls, num_at_once: int, *, is_cached: bool, count: int) -> Timed:
    """Bind names that are drawn by the size of their tenants, so many at once."""
    timed = Timed(name, max_rows=64)
    drawn = iter(calls.draw_binds(count))
    if is_cached:
        asked = calls.draw_binds(1) * count
        await calls.bind(asked[0])
        drawn = iter(asked)
    with recording() as recorder:

        async def work() -> None:
            for one in drawn:
                began = time.perf_counter()
                await calls.bind(one)
                timed.times_s.append(time.perf_counter() - began)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_once):
                group.create_task(work())
    timed.num_statements = round(len(recorder.statements) / count)
    timed.database_s = recorder.seconds / count
    return timed


async def _sizes(connection: asyncpg.Connection) -> list[tuple[str, int, int, int]]:
    query = """SELECT relname, GREATEST(reltuples, 0)::bigint, pg_table_size(oid), pg_indexes_size(oid) FROM pg_class
        WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND reltuples >= 1000
        ORDER BY pg_total_relation_size(oid) DESC"""
    return [tuple(row) for row in await connection.fetch(query)]


async def measure(
    server: Server, num_versions: int, num_tenants: int, folder: Path, *, count: int, is_filled_only: bool = False
) -> Result | None:
    """Fill the database, and time binds, calls and passes."""
    await migrate.upgrade(server.url)
    database, store = Database(server.url), ListedStore(folder / "blobs")
    is_small = num_versions < SMALL
    kept = None if server.folder is None else Path(server.folder) / KEPT
    if kept is not None and kept.is_file():
        _, filled, fill_s = pickle.loads(kept.read_bytes())
    else:
        began = time.perf_counter()
        filled = await fill(server.url, database, make_registry(database, store), num_versions, num_tenants)
        fill_s = time.perf_counter() - began
        if kept is not None:
            kept.write_bytes(pickle.dumps((server.url, filled, fill_s)))
    store.num_versions = num_versions
    say(f"  {sum(filled.num_rows.values()):,} rows in {fill_s:.0f} s")
    if is_filled_only:
        await database.dispose()
        return None
    await database.dispose()
    binds = []
    is_restarted = await asyncio.to_thread(server.restart)
    database = Database(server.url)
    calls = Calls(server.url, database, store, filled, folder)
    await calls.open()
    connection = await asyncpg.connect(server.url)
    try:
        if is_restarted:
            binds.append(await time_binds("bind, the database just started", calls, 1, is_cached=False, count=200))
        for at_once in (1, NUM_AT_ONCE):
            name = f"bind, {at_once} at once" if at_once > 1 else "bind"
            binds.append(await time_binds(f"{name}, looked up", calls, at_once, is_cached=False, count=count))
            binds.append(await time_binds(f"{name}, cached", calls, at_once, is_cached=True, count=count))
        for timed in binds:
            say(f"  {timed.name}: p99 {1e3 * percentile(timed.times_s, 99):.2f} ms")
        sizes = await _sizes(connection)
        timed_calls = []
        for call in calls.all():
            timed_calls.append(await time_call(call, connection, is_small=is_small))
            say(f"  {call.name}: {1e3 * statistics.median(timed_calls[-1].times_s):.1f} ms")
        passes = []
        for one in calls.passes():
            passes.append(await time_pass(one, connection, is_small=is_small))
            say(f"  {one.name}: {passes[-1].times_s[0]:.1f} s")
    finally:
        await connection.close()
        await database.dispose()
        store.close()
    return Result(filled, fill_s, timed_calls, passes, binds, sizes)


def text(options: argparse.Namespace, result: Result) -> str:
    sizes = [
        [name, f"{rows:,}", figures.mib(table), figures.mib(indexes), f"{(table + indexes) / max(1, rows):,.0f}"]
        for name, rows, table, indexes in result.sizes
    ]
    tenant = result.filled.tenants[0][0]
    adapters = result.filled.adapters_of[tenant]
    faults = "".join(f"\n- **{fault}**" for fault in result.faults) or "\n- None."
    return f"""{options.versions:,} versions of {len(result.filled.tenants):,} tenants (by Zipf's law: the largest has \
{sum(one.num_versions for one in adapters):,} versions of {len(adapters):,} adapters, its first adapter \
{adapters[0].num_versions:,}); written in {result.fill_s:.0f} s. One process calls the registry's own classes; \
statements and their time are those of the last call, rows those that scans of the large tables returned or threw away \
for it.

## Binding a model name

{figures.table(HEADER[:5], [row[:5] for row in (one.row() for one in result.binds)])}

Looked up: each name is asked for the first time, one query each; a server asks again after \
{LIMITS.resolve_cache_s:g} s. {NUM_AT_ONCE} at once: as many tasks of one server, which looks up four unknown names \
at a time, two of a tenant.

## Calls

{figures.table(HEADER, [one.row() for one in result.calls])}

## Passes over everything

{figures.table(HEADER, [one.row() for one in result.passes])}

Of a pass, the rows are those of one statement of each kind.

## Bytes

{figures.table(["table", "rows", "MiB", "MiB of indexes", "bytes a row"], sizes)}

## Calls that read too much
{faults}"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=None, help="default: 1,000,000, with --quick 20,000")
    parser.add_argument("--tenants", type=int, default=None, help="default: 2,000, with --quick 200")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder in which the server and its rows stay for other runs")
    parser.add_argument("--fill", action="store_true", help="with --keep: write the rows, and measure nothing")
    options = parser.parse_args(arguments)
    options.versions = options.versions or (20_000 if options.quick else 1_000_000)
    options.tenants = options.tenants or (200 if options.quick else 2000)
    options.size = "postgres"
    machine = reporting.facts()
    with postgres(options.keep) as server, tempfile.TemporaryDirectory() as folder:
        say(f"writing {options.versions:,} versions …")
        result = asyncio.run(
            measure(
                server,
                options.versions,
                options.tenants,
                Path(folder),
                count=NUM_BINDS,
                is_filled_only=options.fill,
            )
        )
    if result is None:
        return
    numbers = {
        "fill_s": result.fill_s,
        "num_rows": result.filled.num_rows,
        "binds": [one.as_json() for one in result.binds],
        "calls": [one.as_json() for one in result.calls],
        "passes": [one.as_json() for one in result.passes],
        "sizes": result.sizes,
        "faults": result.faults,
    }
    title = "A registry of many versions in PostgreSQL"
    options.keep = None
    reporting.finish("million", title, text(options, result), machine, options, arguments, **numbers)
    if result.faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
