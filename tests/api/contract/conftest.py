"""The whole application over a real registry, store, keys and tokenizer, and two tenants of which one must not learn of the other."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from fastapi import FastAPI
from sqlalchemy import update
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers
from whole_app import ADMIN_KEY, SCOPES, StillEngine, World, bearer

from adapters_store import LocalStore
from loraserve.api.app import create_app
from loraserve.api.services import Services
from loraserve.db.models import ApiKey, OperationRow
from loraserve.db.session import Database, utc_now
from loraserve.registry.service import Registry
from loraserve.settings import Settings
from loraserve.tenancy.auth import Authenticator
from loraserve.tenancy.usage import UsageMeter
from loraserve.text.chat_template import ChatTemplate
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import BaseSpec, Certificate

Push = Callable[[str, str, int], Awaitable[None]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text half of a model: bytes as tokens, and a chat template."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HFTokenizer(models.BPE(vocab={char: id_ for id_, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(
        "{%- for message in messages -%}{{ message.role }}: {{ message.content }}\n{% endfor -%}"
    )
    return path


@pytest.fixture
async def services(
    small_base: BaseSpec,
    make_certificate: Callable[..., Certificate],
    model_dir: Path,
    migrated_sqlite: Path,
    tmp_path: Path,
) -> AsyncIterator[Services]:
    tokenizer = Tokenizer(model_dir)
    base = msgspec.structs.replace(small_base, vocab_size=tokenizer.vocab_size)
    engine = StillEngine(base, make_certificate())
    shutil.copyfile(migrated_sqlite, tmp_path / "registry.db")
    database = Database(f"sqlite:///{tmp_path / 'registry.db'}")
    authenticator = Authenticator(database, admin_key=ADMIN_KEY)
    await authenticator.open()
    store = LocalStore(tmp_path / "blobs")
    usage = UsageMeter(database, tmp_path / "usage")
    yield Services(
        settings=Settings(model=str(model_dir), data_dir=tmp_path),
        engine=engine,  # type: ignore[arg-type]
        registry=Registry(database, store, lambda: engine.base, certify=engine.verify, pinning=engine),
        authenticator=authenticator,
        store=store,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(model_dir, tokenizer),
        usage=usage,
    )
    await usage.close()
    await database.dispose()


@pytest.fixture
def app(services: Services) -> FastAPI:
    return create_app(services)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """Without a key. Every request has the same id, so that answers can be compared byte for byte."""
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app), base_url="http://loraserve", headers={"x-request-id": "one"}
    ) as client:
        yield client


@pytest.fixture
def push(client: httpx2.AsyncClient, make_upload: Callable[..., tuple[bytes, bytes]]) -> Push:
    """A function that publishes the adapter of a seed, with a tenant's key."""

    async def run(key: str, name: str, seed: int) -> None:
        config, weights = make_upload(seed)
        files = {"config": ("adapter_config.json", config), "weights": ("adapter_model.safetensors", weights)}
        answer = await client.post(f"/api/v1/adapters/{name}/versions", files=files, headers=bearer(key))
        assert answer.status_code == 201, answer.text

    return run


@pytest.fixture
async def world(
    client: httpx2.AsyncClient, services: Services, push: Push, make_upload: Callable[..., tuple[bytes, bytes]]
) -> World:
    """acme with adapters, versions, aliases, a grant, a deleted adapter, an upload and an operation; globex with nothing but keys."""
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
    made = await make_key("acme")
    keys = {"acme": made["key"], "globex": (await make_key("globex"))["key"], "admin": ADMIN_KEY}
    for scope in SCOPES:
        keys[scope] = (await make_key("globex", scopes=[scope]))["key"]
    expired = await make_key("globex", expires_at="2100-01-01T00:00:00Z")
    keys["expired"] = expired["key"]
    revoked = await make_key("globex")
    keys["revoked"] = revoked["key"]
    await call("DELETE", f"/tenants/globex/keys/{revoked['id']}", admin)

    acme = bearer(keys["acme"])
    for name, seed in (("acmesql", 0), ("acmesql", 1), ("acmeold", 2)):
        await push(keys["acme"], name, seed)
    await call("DELETE", "/adapters/acmeold", acme)
    aim = {"version": 1, "shadow": {"version": 2, "share": 0.5}}
    await call("PUT", "/adapters/acmesql/aliases/acmecan", acme, json=aim)
    await call("PUT", "/adapters/acmesql/grants/hooli", acme)
    _, weights = make_upload(3)
    sha256 = hashlib.sha256(weights).hexdigest()
    upload = await call("POST", "/uploads", acme, json={"sha256": sha256, "size": len(weights)})
    operation = "01" + "ACME" * 6
    await _let_pass(services, expired["id"], ids["acme"], operation)
    things = {
        "name": "acmesql",
        "number": "1",
        "alias": "acmecan",
        "file": "adapter_config.json",
        "upload_id": upload["id"],
        "operation_id": operation,
        "model": "acmesql",
        "tenant": "acme",
        "key_id": made["id"],
        "sha256": sha256,
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
