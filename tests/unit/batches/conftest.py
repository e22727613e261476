from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve.batches.batches import Batches
from loraserve.batches.records import BatchRecord, FileRecord, LineAnswer, LineRequest, NewBatch
from loraserve.batches.runner import BatchRunner
from loraserve.batches.stored_files import StoredFiles
from loraserve.db.session import Database
from loraserve.errors import InvalidRequest, ModelNotFound
from loraserve.registry.registry import Registry
from loraserve.tenancy.billing.meter import CollectedUsage, UsageEvent
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.types import BaseSpec, TenantId

ENDPOINT = "/v1/completions"


@dataclass
class FakeHandler:
    """Answers each line with its prompt, and remembers which it was asked."""

    authenticator: Authenticator
    asked: list[str] = field(default_factory=list)
    answers: dict[str, list[LineAnswer]] = field(default_factory=dict)
    """Answers by custom id that come before the usual one."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    is_open_now: bool = True
    num_live: int = 0
    most_live: int = 0

    def is_ready(self) -> bool:
        return True

    def is_open(self) -> bool:
        return self.is_open_now

    def read(self, endpoint: str, data: bytes) -> LineRequest:
        try:
            value = json.loads(data)
        except ValueError:
            raise InvalidRequest("The body is not valid JSON.") from None
        return LineRequest(value["custom_id"], json.dumps(value["body"]).encode(), value["body"]["model"])

    async def check_model(self, batch: BatchRecord, model: str) -> None:
        if model != "sql":
            raise ModelNotFound("There is no such model.")

    async def run(self, batch: BatchRecord, request: LineRequest) -> LineAnswer:
        caller = await self.authenticator.in_background(batch.tenant, batch.created_by)
        self.asked.append(request.custom_id)
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        try:
            await self.gate.wait()
        finally:
            self.num_live -= 1
        if self.answers.get(request.custom_id):
            return self.answers[request.custom_id].pop(0)
        return answer_of(caller.tenant, request.custom_id)


def answer_of(tenant: TenantId, custom_id: str, status: int = 200) -> LineAnswer:
    usage = CollectedUsage()
    usage.record(UsageEvent(tenant, "", "sql", 1, 1, 5, 0, 3, 1_700_000_000.0))
    return LineAnswer(status, f"req_{custom_id}", json.dumps({"said": custom_id}).encode(), usage.totals)


def refused(retry_after_s: float = 0.05, *, pauses_batch: bool = False) -> LineAnswer:
    return LineAnswer(503, "req", b"{}", {}, retry_after_s, pauses_batch)


@dataclass
class Place:
    """Files and batches of one server, over a database and a store that outlive it."""

    database: Database
    registry: Registry
    authenticator: Authenticator
    handler: FakeHandler
    files: StoredFiles
    batches: Batches
    runner: BatchRunner

    def another(self) -> Place:
        """Another server on the same database."""
        handler = replace(self.handler, asked=[], gate=asyncio.Event(), num_live=0)
        handler.gate.set()
        return make_place(self.database, self.registry, self.authenticator, handler)

    async def upload(self, tenant: TenantId, data: bytes) -> FileRecord:
        async with self.files.stage(tenant, None) as staged:
            staged.write(data)
            return await self.files.add(tenant, staged, "in.jsonl", ttl_s=None, actor="test")

    async def create(self, tenant: TenantId, data: bytes, **how: Any) -> BatchRecord:
        file = await self.upload(tenant, data)
        return await self.batches.create(tenant, NewBatch(file.id, ENDPOINT, "24h", **how), actor="key")

    async def until(self, batch: BatchRecord, check: Callable[[BatchRecord], bool]) -> BatchRecord:
        async with asyncio.timeout(60):
            while not check(found := await self.batches.get(batch.tenant, batch.id)):
                await asyncio.sleep(0.02)
        return found

    async def end(self, batch: BatchRecord) -> BatchRecord:
        return await self.until(batch, lambda found: found.has_ended)

    async def lines(self, batch: BatchRecord, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        file = await self.files.get(batch.tenant, file_id)
        return [json.loads(line) for line in bytes(self.registry.store.read(file.blob)).splitlines()]


def make_place(database: Database, registry: Registry, authenticator: Authenticator, handler: FakeHandler) -> Place:
    files = StoredFiles(database, registry.store, registry.uploads)
    batches = Batches(database)
    runner = BatchRunner(
        database, registry.store, batches, throttle=registry.uploads.throttle, meter=None, max_requests=4
    )
    return Place(database, registry, authenticator, handler, files, batches, runner)


def input_of(num: int, **body: Any) -> bytes:
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": ENDPOINT, "body": {"model": "sql", "prompt": "x", **body}}
        for number in range(1, num + 1)
    ]
    return b"\n".join(json.dumps(line).encode() for line in lines) + b"\n"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    yield database
    await database.dispose()


@pytest.fixture
async def place(database: Database, tmp_path: Path, small_base: BaseSpec) -> AsyncIterator[Place]:
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    registry = Registry(database, LocalStore(tmp_path / "blobs"), lambda: small_base)
    handler = FakeHandler(authenticator)
    handler.gate.set()
    place = make_place(database, registry, authenticator, handler)
    yield place
    handler.gate.set()
    await place.runner.close()


@pytest.fixture
def make_tenant(place: Place) -> Callable[..., Awaitable[TenantId]]:
    async def make(name: str, **how: Any) -> TenantId:
        return (await place.authenticator.tenants.create(name, actor="test", **how)).id

    return make


@pytest.fixture
async def acme(make_tenant: Callable[..., Awaitable[TenantId]]) -> TenantId:
    return await make_tenant("acme")


@pytest.fixture
async def globex(make_tenant: Callable[..., Awaitable[TenantId]]) -> TenantId:
    return await make_tenant("globex")
