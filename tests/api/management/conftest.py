"""The management routes over the real application, registry, store and keys;
only the engine is a stand-in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from adapters_store import LocalStore
from loraserve.api.app import create_app
from loraserve.api.services import Services
from loraserve.conversations.stored_responses import StoredResponses
from loraserve.db.session import Database
from loraserve.registry.registry import Registry
from loraserve.settings import Settings
from loraserve.tenancy.billing.meter import UsageMeter
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.types import (
    AdapterRef,
    AdapterResidency,
    BasePrecision,
    BaseSpec,
    Certificate,
    Digest,
    EngineStats,
    TenantId,
    Tier,
)

ADMIN_KEY = "an admin key of enough characters"


@dataclass
class FakeEngine:
    """Holds what it is told to hold, by digest, as the engine does."""

    base: BaseSpec
    certificate: Certificate | Exception
    resident: dict[Digest, AdapterResidency] = field(default_factory=dict)
    forgotten: list[tuple[TenantId, str | None, int | None]] = field(default_factory=list)
    """Deleted tenants, adapters and versions whose texts are gone."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    stats: EngineStats = field(default_factory=EngineStats)
    is_ready: bool = True
    is_live: bool = True
    status: str | None = None
    num_restarts: int = 0
    num_hangs: int = 0

    async def warm(self, ref: AdapterRef) -> None:
        await self.gate.wait()
        self._put(ref, is_pinned=False)

    async def pin(self, ref: AdapterRef) -> None:
        self._put(ref, is_pinned=True)

    async def unpin(self, ref: AdapterRef) -> None:
        self._put(ref, is_pinned=False)

    async def measure_base(self) -> BasePrecision | str:
        return "this engine is a test's"

    async def verify(self, ref: AdapterRef) -> Certificate:
        if isinstance(self.certificate, Exception):
            raise self.certificate
        return self.certificate

    def forget_texts(self, owner: TenantId, name: str | None = None, version: int | None = None) -> None:
        self.forgotten.append((owner, name, version))

    async def residency(self, only: Collection[Digest] | None = None) -> tuple[AdapterResidency, ...]:
        return tuple(row for digest, row in self.resident.items() if only is None or digest in only)

    def _put(self, ref: AdapterRef, *, is_pinned: bool) -> None:
        self.resident[ref.digest] = AdapterResidency(
            digest=ref.digest,
            tier=Tier.DEVICE,
            device_bytes=96,
            host_bytes=0,
            num_pins=0,
            is_pinned=is_pinned,
            last_used_s=0.5,
        )


@pytest.fixture
def engine(small_base: BaseSpec, make_certificate: Callable[..., Certificate]) -> FakeEngine:
    engine = FakeEngine(small_base, make_certificate())
    engine.gate.set()
    return engine


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "blobs")


@pytest.fixture
async def services(engine: FakeEngine, store: LocalStore, database_url: str, tmp_path: Path) -> AsyncIterator[Services]:
    database = Database(database_url)
    authenticator = Authenticator(database, admin_key=ADMIN_KEY)
    await authenticator.open()
    usage = UsageMeter(database, tmp_path / "usage")
    services = Services(
        settings=Settings(model="tiny", data_dir=tmp_path),
        engine=engine,  # type: ignore[arg-type]
        registry=Registry(database, store, lambda: engine.base, certify=engine.verify, pinning=engine),
        authenticator=authenticator,
        store=store,
        tokenizer=SimpleNamespace(config={}),  # type: ignore[arg-type]
        chat_format=SimpleNamespace(template=SimpleNamespace(source="")),  # type: ignore[arg-type]
        usage=usage,
        responses=StoredResponses(database),
    )
    yield services
    await services.templates.close()
    await usage.close()
    await database.dispose()


@pytest.fixture
def app(services: Services) -> FastAPI:
    return create_app(services)


@pytest.fixture
async def connect(app: FastAPI) -> AsyncIterator[Callable[[str], httpx2.AsyncClient]]:
    """A function that makes a client with a key."""
    clients: list[httpx2.AsyncClient] = []

    def make(key: str) -> httpx2.AsyncClient:
        client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app),
            base_url="http://loraserve/api/v1",
            headers={"Authorization": f"Bearer {key}"},
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def admin(connect: Callable[[str], httpx2.AsyncClient]) -> httpx2.AsyncClient:
    return connect(ADMIN_KEY)


@pytest.fixture
async def acme(admin: httpx2.AsyncClient, connect: Callable[[str], httpx2.AsyncClient]) -> httpx2.AsyncClient:
    return connect(await make_key(admin, "acme"))


@pytest.fixture
async def globex(admin: httpx2.AsyncClient, connect: Callable[[str], httpx2.AsyncClient]) -> httpx2.AsyncClient:
    return connect(await make_key(admin, "globex"))


async def make_key(admin: httpx2.AsyncClient, tenant: str, **how: Any) -> str:
    assert (await admin.post("/tenants", json={"name": tenant})).status_code == 201
    made = await admin.post(f"/tenants/{tenant}/keys", json={"name": "test", **how})
    assert made.status_code == 201
    key: str = made.json()["key"]
    return key


Push = Callable[..., Awaitable[httpx2.Response]]


@pytest.fixture
def push(make_upload: Callable[..., tuple[bytes, bytes]]) -> Push:
    """A function that uploads the adapter of a seed."""

    async def run(
        client: httpx2.AsyncClient,
        name: str = "sql",
        seed: int = 0,
        *,
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        extras: dict[str, bytes] | None = None,
        **how: Any,
    ) -> httpx2.Response:
        config, weights = make_upload(seed, **how)
        files = {**(extras or {})} | {
            "config": ("adapter_config.json", config),
            "weights": ("adapter_model.safetensors", weights),
        }
        return await client.post(f"/adapters/{name}/versions", files=files, params=params, headers=headers)

    return run
