"""kill -9 of the server in the middle of uploads and alias moves over HTTP: what was acknowledged is there, and nothing half of anything.

LORASERVE_KILLS says how often (200 for the whole of it), LORASERVE_KILLS_SEED what else than usual happens; the default run has fewer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from changing_worker import SHARED, Files, Worker, multipart, revision_of
from expected_state import LIVE
from forked_server import ForkedServer
from server_process import ADMIN_KEY
from sqlalchemy import func, select

from adapters_store import LocalStore
from loraserve.db.models import AdapterVersion, AuditRow
from loraserve.db.session import Database
from loraserve.types import BaseSpec

NUM_KILLS = int(os.environ.get("LORASERVE_KILLS", "20"))
SEED = int(os.environ.get("LORASERVE_KILLS_SEED", "20261121"))
NUM_WORKERS = 4
MAX_LIFE_S = 0.25


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
def server(tmp_path: Path, small_base: BaseSpec, database_url: str) -> Iterator[ForkedServer]:
    with ForkedServer(tmp_path / "data", small_base, {"database_url": database_url}) as server:
        yield server


async def test_what_was_acknowledged_over_http_is_there_after_every_kill_and_nothing_is_there_by_half(
    server: ForkedServer, make_files: Callable[[], Files], database_url: str
) -> None:
    rng = random.Random(SEED)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    server.start()
    store = LocalStore(server.data_dir / "blobs")
    shared_moves: dict[int, int] = {}
    workers: list[Worker] = []
    async with httpx2.AsyncClient(base_url=f"{server.url}/api/v1", headers=headers, timeout=30) as client:
        for number in range(NUM_WORKERS):
            workers.append(Worker(number, client, random.Random(rng.random()), make_files, shared_moves))
        for _ in range(2):
            boundary, body = multipart(make_files())
            sent = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
            (await client.post(f"/adapters/{SHARED}/versions", content=body, headers=sent)).raise_for_status()
        found = await client.get(f"/adapters/{SHARED}/aliases/{LIVE}")
        shared_moves[revision_of(found)] = found.json()["version"]
        for _ in range(NUM_KILLS):
            working = [asyncio.create_task(worker.work()) for worker in workers]
            await asyncio.sleep(rng.uniform(0, MAX_LIFE_S))
            await asyncio.to_thread(server.kill)
            await asyncio.gather(*working)
            await asyncio.to_thread(server.start)
            assert os.listdir(server.data_dir / "blobs" / "staging") == []
            for worker in workers:
                await worker.settle(store)
            found = await client.get(f"/adapters/{SHARED}/aliases/{LIVE}")
            revision, version = revision_of(found), found.json()["version"]
            assert revision >= max(shared_moves), "an acknowledged move is lost"
            assert shared_moves.setdefault(revision, version) == version
    assert server.end(signal.SIGTERM) == 0
    assert sum(worker.num_acknowledged for worker in workers) >= 5 * NUM_KILLS
    await check_rows(database_url, store)


async def check_rows(database_url: str, store: LocalStore) -> None:
    """Every version's row, the deleted ones' too, has its blobs and its one line in the audit."""
    database = Database(database_url)
    async with database.read() as session:
        versions = (await session.scalars(select(AdapterVersion))).all()
        audited = await session.scalar(select(func.count()).where(AuditRow.action == "version.publish"))
    await database.dispose()
    for version in versions:
        assert store.read(version.config_blob)
        assert store.read(version.weights_blob)
    assert audited == len(versions)
