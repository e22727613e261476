"""kill -9 of the server in the middle of uploads and alias moves over HTTP: what was acknowledged
is there, and nothing half of anything.

LORASERVE_KILLS says how often (200 for the whole of it), LORASERVE_KILLS_SEED what else than usual
happens; the default run has fewer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from campaigns import default_and_campaign
from changing_worker import SHARED, Files, Worker, multipart, revision_of
from expected_state import LIVE
from forked_server import ForkedServer
from server_process import ADMIN_KEY
from sqlalchemy import Delete, delete, func, select

from adapters_store import LocalStore
from loraserve.db.models import AdapterVersion, AuditRow, Lease, Upload, UploadChunk
from loraserve.db.session import Database
from loraserve.types import BaseSpec

NUM_KILLS = int(os.environ.get("LORASERVE_KILLS", "20"))
"""The number of kills of a campaign; the default run has five."""
SEED = int(os.environ.get("LORASERVE_KILLS_SEED", "20261121"))
NUM_WORKERS = 4
MAX_LIFE_S = 0.25
GRACE_S = 1.0
"""Of the collector: longer than a publish takes here."""


@pytest.fixture
def make_files(make_upload: Callable[..., tuple[bytes, bytes]]) -> Callable[[], Files]:
    seeds = iter(range(1 << 30))

    def make() -> Files:
        seed = next(seeds)
        config, weights = make_upload(seed, rank=8)
        content = json.loads(config) | {"lora_alpha": 1 + seed / 64}
        # as the server writes one that came as JSON
        return Files(json.dumps(content, separators=(",", ":")).encode(), weights)

    return make


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """The server's blobs."""
    return LocalStore(tmp_path / "data" / "blobs")


@dataclass
class Tenant:
    """Workers that change one tenant's adapters, and the adapter whose alias all of them move."""

    workers: list[Worker]
    shared_moves: dict[int, int]
    """Revision → version, of every acknowledged move of that alias."""
    client: httpx2.AsyncClient
    rng: random.Random

    async def change_until_killed(self, server: ForkedServer, max_life_s: float) -> None:
        working = [asyncio.create_task(worker.work()) for worker in self.workers]
        await asyncio.sleep(self.rng.uniform(0, max_life_s))
        await asyncio.to_thread(server.kill)
        await asyncio.gather(*working)

    async def settle(self, store: LocalStore) -> None:
        """After a restart: everything is as it was acknowledged."""
        for worker in self.workers:
            await worker.settle(store)
        found = await self.client.get(f"/adapters/{SHARED}/aliases/{LIVE}")
        revision, version = revision_of(found), found.json()["version"]
        assert revision >= max(self.shared_moves), "an acknowledged move is lost"
        assert self.shared_moves.setdefault(revision, version) == version


@asynccontextmanager
async def tenant_of(
    server: ForkedServer, make_files: Callable[[], Files], *, is_restoring: bool = True
) -> AsyncIterator[Tenant]:
    rng = random.Random(SEED)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx2.AsyncClient(base_url=f"{server.url}/api/v1", headers=headers, timeout=30) as client:
        for _ in range(2):
            boundary, body = multipart(make_files())
            sent = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
            (await client.post(f"/adapters/{SHARED}/versions", content=body, headers=sent)).raise_for_status()
        found = await client.get(f"/adapters/{SHARED}/aliases/{LIVE}")
        moves = {revision_of(found): found.json()["version"]}
        workers = [
            Worker(number, client, random.Random(rng.random()), make_files, moves, is_restoring)
            for number in range(NUM_WORKERS)
        ]
        yield Tenant(workers, moves, client, rng)


@pytest.mark.parametrize("num_kills", default_and_campaign([5, NUM_KILLS], default=[5]))
async def test_acknowledged_changes_survive_each_kill_and_are_whole(
    num_kills: int,
    tmp_path: Path,
    small_base: BaseSpec,
    database_url: str,
    store: LocalStore,
    make_files: Callable[[], Files],
) -> None:
    with ForkedServer(tmp_path / "data", small_base, {"database_url": database_url}) as server:
        server.start()
        async with tenant_of(server, make_files) as tenant:
            for _ in range(num_kills):
                await tenant.change_until_killed(server, MAX_LIFE_S)
                await asyncio.to_thread(server.start)
                assert os.listdir(store.root / "staging") == []
                await tenant.settle(store)
        assert server.end(signal.SIGTERM) == 0
    assert sum(worker.num_acknowledged for worker in tenant.workers) >= 5 * num_kills
    versions, num_audited = await read_rows(database_url)
    assert num_audited == len(versions)
    for version in versions:
        # the deleted ones' too: they can be restored
        assert store.read(version.config_blob)
        assert store.read(version.weights_blob)


async def test_collector_removes_only_needless_bytes_after_kills(
    tmp_path: Path, small_base: BaseSpec, database_url: str, store: LocalStore, make_files: Callable[[], Files]
) -> None:
    settings = {"database_url": database_url, "retention_s": "0"}
    settings |= {"limits.gc_grace_s": str(GRACE_S), "limits.gc_interval_s": "0.05"}
    # what a killed server was deleting can be wanted again at once, and goes before the test ends
    settings |= {"limits.gc_mark_s": str(GRACE_S)}
    with ForkedServer(tmp_path / "data", small_base, settings) as server:
        server.start()
        async with tenant_of(server, make_files, is_restoring=False) as tenant:
            for _ in range(3):
                await tenant.change_until_killed(server, 3 * GRACE_S)
                # as after two minutes: the killed server's turn is over
                await run_on(database_url, delete(Lease))
                await asyncio.to_thread(server.start)
                await tenant.settle(store)
            for worker in tenant.workers[::2]:
                if worker.state.is_there:
                    await worker.delete()
            # of a publish that was acknowledged right before a kill, the upload is there still
            await run_on(database_url, delete(UploadChunk))
            await run_on(database_url, delete(Upload))
            versions, _ = await read_rows(database_url)
            gone = [version.weights_blob for version in versions if version.deleted_at is not None]
            assert gone
            deadline = time.monotonic() + 60
            while any(map(store.exists, gone)):
                assert time.monotonic() < deadline, "needless blobs are still there"
                await asyncio.sleep(0.1)
        assert server.end(signal.SIGTERM) == 0
    for version in versions:
        if version.deleted_at is None:
            assert store.read(version.config_blob)
            assert store.read(version.weights_blob)


async def run_on(database_url: str, statement: Delete) -> None:
    database = Database(database_url)
    async with database.write() as session:
        await session.execute(statement)
    await database.dispose()


async def read_rows(database_url: str) -> tuple[list[AdapterVersion], int]:
    """Every version's row, and how many lines of the audit say that one was published."""
    database = Database(database_url)
    async with database.read() as session:
        versions = list((await session.scalars(select(AdapterVersion))).all())
        session.expunge_all()
        audited = await session.scalar(select(func.count()).where(AuditRow.action == "version.publish"))
    await database.dispose()
    return versions, audited or 0
