"""The whole application over a real registry, store, keys and tokenizer, and two tenants of which
one must not learn of the other.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import update
from whole_app import (
    ADMIN_KEY,
    ROLES,
    SCOPES,
    World,
    app,
    bearer,
    client,
    model_dir,
    open_client,
    open_services,
    services,
)

from loraserve.api.app import create_app
from loraserve.api.services import Services
from loraserve.db.models import ApiKey, OperationRow
from loraserve.db.session import utc_now
from loraserve.tenancy.identity.keys import TENANT_SCOPES
from loraserve.types import BaseSpec, Certificate

__all__ = ["app", "client", "model_dir", "services"]

Upload = Callable[..., tuple[bytes, bytes]]
Push = Callable[[str, str, int], Awaitable[None]]


def pushing(client: httpx2.AsyncClient, make_upload: Upload) -> Push:
    async def run(key: str, name: str, seed: int) -> None:
        config, weights = make_upload(seed)
        files = {"config": ("adapter_config.json", config), "weights": ("adapter_model.safetensors", weights)}
        answer = await client.post(f"/api/v1/adapters/{name}/versions", files=files, headers=bearer(key))
        assert answer.status_code == 201, answer.text

    return run


@pytest.fixture
def push(client: httpx2.AsyncClient, make_upload: Upload) -> Push:
    """A function that publishes the adapter of a seed, with a tenant's key."""
    return pushing(client, make_upload)


@dataclass(frozen=True)
class BuiltWorld:
    """A world, and the folder of the services that it was built with, to copy."""

    folder: Path
    world: World


BuildOnce = Callable[[BaseSpec, Certificate, Upload], Awaitable[BuiltWorld]]


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path, model_dir: Path) -> BuildOnce:
    """A function that builds a world, the first time."""
    built: list[BuiltWorld] = []

    async def run(base: BaseSpec, certificate: Certificate, make_upload: Upload) -> BuiltWorld:
        if not built:
            folder = tmp_path_factory.mktemp("world")
            shutil.copyfile(migrated_sqlite, folder / "registry.db")
            async with (
                open_services(folder, base, certificate, model_dir) as services,
                open_client(create_app(services)) as client,
            ):
                world = await build_world(client, services, make_upload)
            built.append(BuiltWorld(folder, world))
        return built[0]

    return run


@pytest.fixture
async def built(
    request: pytest.FixtureRequest,
    build_once: BuildOnce,
    small_base: BaseSpec,
    make_certificate: Callable[..., Certificate],
    make_upload: Upload,
) -> BuiltWorld | None:
    """Return what the services begin with, for tests with the fixture `world`; None: nothing."""
    has_world = "world" in request.fixturenames
    return await build_once(small_base, make_certificate(), make_upload) if has_world else None


@pytest.fixture
def started(migrated_sqlite: Path, built: BuiltWorld | None, tmp_path: Path) -> Path:
    """The folder of a server's database and files, as the built world left them."""
    if built is None:
        shutil.copyfile(migrated_sqlite, tmp_path / "registry.db")
    else:
        shutil.copytree(built.folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def world(services: Services, built: BuiltWorld) -> World:
    """acme with adapters, versions, aliases, a grant, a deleted adapter, an upload and an
    operation; globex with nothing but keys.
    """
    return World(dict(built.world.things), dict(built.world.keys))


async def build_world(client: httpx2.AsyncClient, services: Services, make_upload: Upload) -> World:
    """Build what `world` says with requests, all but the operation and a key's expiry."""
    push = pushing(client, make_upload)
    admin = bearer(ADMIN_KEY)

    async def call(method: str, path: str, key: dict[str, str], **how: Any) -> Any:
        answer = await client.request(method, f"/api/v1{path}", headers=key, **how)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    async def make_key(tenant: str, **how: Any) -> Any:
        return await call("POST", f"/tenants/{tenant}/keys", admin, json={"name": "test", **how})

    ids = {
        name: (await call("POST", "/tenants", admin, json={"name": name}))["id"] for name in ("acme", "globex", "hooli")
    }
    own = await make_key("acme", scopes=sorted(TENANT_SCOPES))
    made = await make_key("acme")
    keys = {
        "acme": own["key"],
        "globex": (await make_key("globex", scopes=sorted(TENANT_SCOPES)))["key"],
        "admin": ADMIN_KEY,
    }
    for scope in SCOPES:
        keys[scope] = (await make_key("globex", scopes=[scope]))["key"]
    expired = await make_key("globex", expires_at="2100-01-01T00:00:00Z")
    keys["expired"] = expired["key"]
    revoked = await make_key("globex")
    keys["revoked"] = revoked["key"]
    await call("DELETE", f"/tenants/globex/keys/{revoked['id']}", admin)

    for role in ROLES:
        of_role = await call("POST", "/admin-keys", admin, json={"name": role, "role": role})
        keys[f"role {role}"] = of_role["key"]
    other = await call("POST", "/admin-keys", admin, json={"name": "other", "role": "metrics:read"})

    acme = bearer(keys["acme"])
    for name, seed in (("acmesql", 0), ("acmesql", 1), ("acmeold", 2)):
        await push(keys["acme"], name, seed)
    await call("DELETE", "/adapters/acmeold", acme)
    aim = {"version": 1, "shadow": {"version": 2, "share": 0.5}}
    await call("PUT", "/adapters/acmesql/aliases/acmecan", acme, json=aim)
    measured = {"data_name": "acme.jsonl", "num_lines": 2, "metrics": {"exact_match": 0.5}}
    await call("PUT", f"/adapters/acmesql/versions/1/evaluations/{'a' * 64}", acme, json=measured)
    await call("PUT", "/adapters/acmesql/grants/hooli", acme)
    _, weights = make_upload(3)
    sha256 = hashlib.sha256(weights).hexdigest()
    upload = await call("POST", "/uploads", acme, json={"sha256": sha256, "size": len(weights)})
    files, fields = {"file": ("acme.jsonl", b"{}")}, {"purpose": "batch"}
    file = (await client.post("/v1/files", headers=acme, files=files, data=fields)).json()
    new = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await client.post("/v1/batches", headers=acme, json=new)).json()
    operation = "01" + "ACME" * 6
    body = {"model": services.engine.base.id, "input": "acme's own", "max_output_tokens": 1}
    response = (await client.post("/v1/responses", json=body, headers=acme)).json()
    await _let_pass(services, expired["id"], ids["acme"], operation)
    things = {
        "name": "acmesql",
        "number": "1",
        "alias": "acmecan",
        "file": "adapter_config.json",
        "upload_id": upload["id"],
        "operation_id": operation,
        "response_id": response["id"],
        "file_id": file["id"],
        "batch_id": batch["id"],
        "model": "acmesql",
        "tenant": "acme",
        "key_id": made["id"],
        "admin_key_id": other["id"],
        "sha256": sha256,
        "release": "0123456789abcdef",
    }
    return World(things, keys)


async def _let_pass(services: Services, expired_key: str, tenant: str, operation: str) -> None:
    """The key's time is over, and the tenant has an operation that is done."""
    now = utc_now()
    async with services.registry.operations._database.write() as session:
        await session.execute(update(ApiKey).where(ApiKey.id == expired_key).values(expires_at=now - timedelta(days=1)))
        session.add(
            OperationRow(
                id=operation,
                tenant_id=tenant,
                kind="pull",
                target="acmesql",
                state="done",
                is_cancelling=False,
                progress={"bytes_done": 1, "bytes_total": 1},
                result={"version": 1},
                error=None,
                actor="test",
                created_at=now,
                updated_at=now,
            )
        )
