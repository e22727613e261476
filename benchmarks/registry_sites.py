"""Registries of several sizes on one PostgreSQL server, and measuring them in turn."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import make_url

from benchmarks.registry_calls import Calls
from benchmarks.registry_rows import Filled, ListedStore, fill, make_registry
from benchmarks.registry_timing import MAX_BIND_ROWS, Timed, time_binds, time_call, time_pass
from benchmarks.serving import say, serve
from loraserve.db import migrate
from loraserve.db.session import Database

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "postgres.sh"
DEMO_BASE = ROOT / "loraserve" / "demo" / "pack" / "base"
PLANNED_VERSIONS = 1_000_000
"""Versions for which a smaller registry's statements are explained: PostgreSQL rightly reads a
small table whole.
"""
VERSIONS_PER_TENANT = 500
NUM_COLD_BINDS, NUM_AT_ONCE = 200, 16
COLD = "bind, the database just started"


@dataclass(slots=True)
class Server:
    """A PostgreSQL server."""

    url: str
    folder: str | None = None
    """Folder of a throwaway server."""
    is_kept: bool = False
    databases: list[str] = field(default_factory=list)

    def restart(self) -> bool:
        """Restart a throwaway server, whose buffers are empty then; return whether it is one."""
        if self.folder is None:
            return False
        subprocess.run([SCRIPT, "restart", self.folder], check=True, stdout=subprocess.DEVNULL)
        return True

    def kept(self, num_versions: int) -> Path | None:
        """Return the file that says what was written; None if the server goes after the run."""
        return Path(self.folder) / f"filled-{num_versions}.pickle" if self.is_kept and self.folder else None

    async def create(self, name: str, template: str | None = None) -> str:
        """Create a database without tables, or a copy of an unused one; return its URL."""
        await execute(self.url, f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
        self.databases.append(name)
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)


@contextmanager
def postgres(keep: Path | None) -> Iterator[Server]:
    """A server; with `keep`, one that stays in that folder with its rows, or that an earlier run
    left there.
    """
    given = os.environ.get("LORASERVE_TEST_POSTGRES_URL")
    if given and keep is None:
        server = Server(given)
        try:
            yield server
        finally:
            for name in server.databases:
                asyncio.run(execute(given, f"DROP DATABASE {name} WITH (FORCE)"))
        return
    folder = tempfile.mkdtemp(prefix="loraserve-million-") if keep is None else str(keep)
    address = Path(folder) / "url"
    if address.is_file():
        yield Server(address.read_text(), folder, is_kept=True)
        return
    settings = "-c fsync=on -c shared_buffers=1GB -c max_wal_size=8GB -c maintenance_work_mem=256MB"
    environment = {**os.environ, "LORASERVE_TEST_POSTGRES_SETTINGS": settings}
    started = subprocess.run([SCRIPT, "start", folder], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    if keep is not None:
        address.write_text(started.stdout.strip())
    try:
        yield Server(started.stdout.strip(), folder, is_kept=keep is not None)
    finally:
        if keep is None:
            subprocess.run([SCRIPT, "stop", folder], check=True)


async def execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@dataclass(slots=True)
class Site:
    """A filled registry of one size, and what was measured of it."""

    url: str
    num_versions: int
    filled: Filled
    fill_s: float
    binds: dict[str, Timed] = field(default_factory=dict)
    calls: dict[str, Timed] = field(default_factory=dict)
    passes: dict[str, Timed] = field(default_factory=dict)
    sizes: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Name, rows, bytes of the rows and bytes of the indexes of each table."""

    @property
    def growth(self) -> float:
        """Times as many versions for which statements are planned."""
        return max(1.0, PLANNED_VERSIONS / self.num_versions)

    @property
    def all(self) -> list[Timed]:
        return [*self.binds.values(), *self.calls.values(), *self.passes.values()]

    def as_json(self, *, has_plans: bool) -> dict[str, Any]:
        parts = {"binds": self.binds, "calls": self.calls, "passes": self.passes}
        return {
            "num_versions": self.num_versions,
            "num_tenants": len(self.filled.tenants),
            "fill_s": self.fill_s,
            "num_rows": self.filled.num_rows,
            **{key: [one.as_json(has_plans=has_plans) for one in part.values()] for key, part in parts.items()},
            "sizes": self.sizes,
            "faults": [f"{self.num_versions:,} versions: {fault}" for one in self.all for fault in one.faults],
        }


async def make_site(server: Server, num_versions: int, folder: Path, num_tenants: int | None = None) -> Site:
    """Return a registry that is filled now, or was by an earlier run.

    Args:
        num_tenants: None: one for each `VERSIONS_PER_TENANT` versions.
    """
    kept = server.kept(num_versions)
    if kept is not None and kept.is_file():
        found: Site = pickle.loads(kept.read_bytes())
        return found
    url = await server.create(f"million_{uuid.uuid4().hex}")
    await migrate.upgrade(url)
    say(f"writing {num_versions:,} versions …")
    began = time.perf_counter()
    database, store = Database(url), ListedStore(folder / f"first-{num_versions}")
    num_tenants = num_tenants or max(20, num_versions // VERSIONS_PER_TENANT)
    filled = await fill(url, database, make_registry(database, store), num_versions, num_tenants)
    await database.dispose()
    store.close()
    site = Site(url, num_versions, filled, time.perf_counter() - began)
    say(f"  {sum(filled.num_rows.values()):,} rows in {site.fill_s:.0f} s")
    if kept is not None:
        kept.write_bytes(pickle.dumps(site))
    return site


@asynccontextmanager
async def opened(site: Site, folder: Path) -> AsyncIterator[tuple[Calls, asyncpg.Connection]]:
    """The calls on a registry, and a connection that explains its statements."""
    root = folder / f"{site.num_versions}-{uuid.uuid4().hex}"
    database, store = Database(site.url), ListedStore(root / "blobs")
    store.num_versions = site.num_versions
    connection = await asyncpg.connect(site.url)
    try:
        calls = Calls(site.url, database, store, site.filled, root)
        await calls.open()
        yield calls, connection
    finally:
        await connection.close()
        await database.dispose()
        store.close()


async def measure(server: Server, sites: list[Site], folder: Path, *, num_rounds: int, num_binds: int) -> None:
    """Time binds and calls of all sizes in turn, then passes over everything."""
    for site in sites:
        if await asyncio.to_thread(server.restart):
            async with opened(site, folder) as (calls, connection):
                await _bind(site, calls, COLD, 1, NUM_COLD_BINDS, connection)
    async with AsyncExitStack() as stack:
        open_sites = [(site, *await stack.enter_async_context(opened(site, folder))) for site in sites]
        for number in range(num_rounds):
            say(f"round {number + 1} of {num_rounds}")
            for site, calls, connection in open_sites[:: 1 if number % 2 == 0 else -1]:
                for at_once in (1, NUM_AT_ONCE):
                    name = f"bind, {at_once} at once" if at_once > 1 else "bind"
                    count = num_binds // num_rounds
                    await _bind(site, calls, f"{name}, looked up", at_once, count, connection)
                    await _bind(site, calls, f"{name}, cached", at_once, count, connection, is_cached=True)
            every = [calls.all() for _, calls, _ in open_sites]
            names = list(dict.fromkeys(call.name for some in every for call in some))
            for name in names:
                for (site, _, connection), some in zip(open_sites, every, strict=True):
                    for call in some:
                        if call.name == name:
                            timed = site.calls.setdefault(name, Timed(name, call.max_rows))
                            count = max(1, call.times // num_rounds)
                            await time_call(timed, call, count, connection, growth=site.growth)
        for site, calls, connection in open_sites:
            site.sizes = await table_sizes(connection)
            for one in calls.passes():
                timed = await time_pass(one, connection, growth=site.growth, earlier=site.passes)
                site.passes[one.name] = timed
                say(f"  {site.num_versions:,} versions, {one.name}: {timed.times_s[0]:.1f} s")


async def _bind(
    site: Site,
    calls: Calls,
    name: str,
    at_once: int,
    count: int,
    connection: asyncpg.Connection,
    *,
    is_cached: bool = False,
) -> None:
    timed = site.binds.setdefault(name, Timed(name, MAX_BIND_ROWS))
    await time_binds(timed, calls, at_once, count, connection, is_cached=is_cached, growth=site.growth)


async def table_sizes(connection: asyncpg.Connection) -> list[tuple[str, int, int, int]]:
    query = """SELECT relname, GREATEST(reltuples, 0)::bigint, pg_table_size(oid), pg_indexes_size(oid) FROM pg_class
        WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND reltuples >= 1000
        ORDER BY pg_total_relation_size(oid) DESC"""
    return [tuple(row) for row in await connection.fetch(query)]


async def count_transactions(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        query = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        return int(await connection.fetchval(query))
    finally:
        await connection.close()


async def idle_transactions_per_s(server: Server, idle_s: float) -> float:
    """Return the transactions per second of an idle server."""
    url = await server.create(f"idle_{uuid.uuid4().hex}")
    with serve(DEMO_BASE, "none", flags=("--database-url", url)):
        # what a start looks at once is over
        await asyncio.sleep(10)
        before, began = await count_transactions(url), time.monotonic()
        await asyncio.sleep(idle_s)
        # its own are among them, and one of the first count
        return (await count_transactions(url) - before - 1) / (time.monotonic() - began)
