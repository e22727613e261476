"""The routes of trainers and sidecars over the whole application; only the engine stands still."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from trainer import Connect, Trainer
from whole_app import ADMIN_KEY, app, bearer, client, model_dir, services, started

from loraserve.api.services import Services
from loraserve.types import TenantId

__all__ = ["app", "client", "model_dir", "services", "started"]


@pytest.fixture
async def connect(client: httpx2.AsyncClient, services: Services) -> Connect:
    async def run(name: str) -> Trainer:
        admin = bearer(ADMIN_KEY)
        made = await client.post("/api/v1/tenants", json={"name": name}, headers=admin)
        assert made.status_code == 201
        key = (await client.post(f"/api/v1/tenants/{name}/keys", json={"name": "t"}, headers=admin)).json()["key"]
        return Trainer(client, bearer(key), TenantId(made.json()["id"]))

    return run


@pytest.fixture
async def acme(connect: Connect) -> Trainer:
    return await connect("acme")


@pytest.fixture
async def globex(connect: Connect) -> Trainer:
    return await connect("globex")


@pytest.fixture
def admin(acme: Trainer) -> Trainer:
    """Acting for acme."""
    return replace(acme, headers=bearer(ADMIN_KEY) | {"x-tenant": "acme"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the operator allows."""
    return tmp_path / "lora"
