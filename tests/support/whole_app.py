"""The whole application over a real registry, store and tokenizer,
and requests to each of its routes.

The engine under it stands still. A conftest.py imports the fixtures `app`, `client`, `model_dir`,
`services` and `started`.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from fastapi import FastAPI
from safetensors.numpy import save
from shared_texts import template_of, tokenizer_of
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from adapters_store import LocalStore
from loraserve.api.app import create_app
from loraserve.api.scopes import declared_scopes
from loraserve.api.services import Services
from loraserve.conversations.stored_responses import StoredResponses
from loraserve.db.session import Database
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import Chunk
from loraserve.registry.registry import Registry
from loraserve.settings import Settings
from loraserve.tenancy.billing.meter import UsageMeter
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.text.chat_format import ChatFormat
from loraserve.types import (
    AdapterRef,
    AdapterResidency,
    BasePrecision,
    BaseSpec,
    Certificate,
    Digest,
    EngineStats,
    FinishReason,
    TenantId,
    TokenLogprobs,
)

ADMIN_KEY = "admin-key-of-the-contract-" + "x" * 20
SCOPES = ("inference", "adapters:read", "adapters:write", "keys:write", "metrics:read")
OPERATORS = ("admin", "metrics:read", "operator:read")
ROLES = ("operator:read", "metrics:read")
"""Scopes that no key of a tenant's has unless it was given them."""


@dataclass
class StillEngine:
    """Answers every request with one token, holds no adapter, and passes every adapter."""

    base: BaseSpec
    certificate: Certificate
    stats: EngineStats = field(default_factory=EngineStats)
    is_ready: bool = True
    is_live: bool = True
    status: str | None = None
    num_restarts: int = 0
    num_hangs: int = 0
    num_waiting_clients: int = 0
    discarded: list[Digest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        likeliest = TokenLogprobs(token_id=1, logprob=-0.5, top=((1, -0.5),))
        yield Chunk(
            text="a",
            token_ids=(1,),
            logprobs=None if request.params.logprobs is None else (likeliest,),
            prompt_logprobs=None,
            finish_reason=FinishReason.LENGTH,
            stop_reason=None,
            num_cached_tokens=0,
            queue_s=0.0,
            adapter_s=0.0,
            prefill_s=0.0,
            pooled=None if request.pooling is None else bytes(4 * self.base.hidden_size),
        )

    def forget_texts(self, owner: TenantId, name: str | None = None, version: int | None = None) -> None: ...

    async def warm(self, ref: AdapterRef) -> None: ...

    async def pin(self, ref: AdapterRef) -> None: ...

    async def unpin(self, ref: AdapterRef) -> None: ...

    async def measure_base(self) -> BasePrecision | str:
        return "this engine is a test's"

    async def verify(self, ref: AdapterRef) -> Certificate:
        return self.certificate

    async def residency(self, only: Collection[Digest] | None = None) -> tuple[AdapterResidency, ...]:
        return ()


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


@asynccontextmanager
async def open_services(
    folder: Path, base: BaseSpec, certificate: Certificate, model_dir: Path
) -> AsyncGenerator[Services, None]:
    """Open services over the registry, the store and the usage in `folder`."""
    tokenizer = tokenizer_of(model_dir)
    engine = StillEngine(msgspec.structs.replace(base, vocab_size=tokenizer.vocab_size), certificate)
    database = Database(f"sqlite:///{folder / 'registry.db'}")
    authenticator = Authenticator(database, admin_key=ADMIN_KEY)
    await authenticator.open()
    store = LocalStore(folder / "blobs")
    usage = UsageMeter(database, folder / "usage")
    write_small(folder / "lora" / "small")
    registry = Registry(
        database,
        store,
        lambda: engine.base,
        certify=engine.verify,
        pinning=engine,
        warm=engine.warm,
        lora_dir=str(folder / "lora"),
        on_ephemeral_unused=engine.discarded.append,
    )
    services = Services(
        settings=Settings(model=str(model_dir), data_dir=folder),
        engine=engine,  # type: ignore[arg-type]
        registry=registry,
        authenticator=authenticator,
        store=store,
        tokenizer=tokenizer,
        chat_format=ChatFormat(template_of(model_dir), tokenizer),
        usage=usage,
        responses=StoredResponses(database),
    )
    yield services
    await services.grammars.close()
    await services.templates.close()
    await usage.close()
    await database.dispose()


@pytest.fixture
def started(migrated_sqlite: Path, tmp_path: Path) -> Path:
    """The folder of the services, with a registry without rows."""
    shutil.copyfile(migrated_sqlite, tmp_path / "registry.db")
    return tmp_path


@pytest.fixture
async def services(
    small_base: BaseSpec, make_certificate: Callable[..., Certificate], model_dir: Path, started: Path
) -> AsyncIterator[Services]:
    async with open_services(started, small_base, make_certificate(), model_dir) as services:
        yield services


@pytest.fixture
def app(services: Services) -> FastAPI:
    return create_app(services)


def open_client(app: FastAPI) -> httpx2.AsyncClient:
    """Open a client without a key.

    Every request has the same id, so that answers can be compared byte for byte.
    """
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app), base_url="http://loraserve", headers={"x-request-id": "one"}
    )


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    async with open_client(app) as client:
        yield client


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    """With its parameters in braces."""
    scope: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def routes_of(app: FastAPI) -> tuple[Route, ...]:
    """Each method of each route on its own."""
    return tuple(
        Route(method, path, *scopes) for path, methods, scopes in declared_scopes(app) for method in sorted(methods)
    )


UNDESCRIBED = frozenset({"GET /", "GET /console", "GET /console/", "GET /console/assets/{release}/{file}", "HEAD /"})
"""Pages of the console and a probe, which are no part of the API."""


def api_routes_of(app: FastAPI) -> tuple[Route, ...]:
    return tuple(route for route in routes_of(app) if str(route) not in UNDESCRIBED)


@dataclass(frozen=True)
class World:
    """acme's things, and keys."""

    things: dict[str, str]
    """By the name of a path's parameter."""
    keys: dict[str, str]
    """``acme``, ``globex``, ``admin``, and globex's with one scope or that don't work."""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


SMALL_CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}


def small_weights(fill: float = 0.5) -> bytes:
    """An adapter of rank 1 for `small_base`."""
    a, b = np.full((1, 8), fill, np.float32), np.ones((8, 1), np.float32)
    prefix = "base_model.model.model.layers.{}.self_attn.q_proj"
    names = [prefix.format(layer) for layer in range(2)]
    return save({f"{name}.lora_A.weight": a for name in names} | {f"{name}.lora_B.weight": b for name in names})


def write_small(folder: Path, fill: float = 0.5) -> None:
    """Write the same as a folder of PEFT's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(SMALL_CONFIG))
    (folder / "adapter_model.safetensors").write_bytes(small_weights(fill))


BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/completions": {"json": {"model": "{model}", "prompt": "x", "max_tokens": 1}},
    "POST /v1/chat/completions": {
        "json": {"model": "{model}", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    },
    "POST /v1/messages": {
        "json": {"model": "{model}", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    },
    "POST /v1/messages/count_tokens": {"json": {"model": "{model}", "messages": [{"role": "user", "content": "x"}]}},
    "POST /v1/responses": {"json": {"model": "{model}", "input": "x", "max_output_tokens": 1}},
    "POST /v1/responses/input_tokens": {"json": {"model": "{model}", "input": "x"}},
    **{
        f"POST {path}": {"json": {"inputs": "x", "parameters": {"adapter_id": "{model}", "max_new_tokens": 1}}}
        for path in ("/", "/generate", "/generate_stream")
    },
    "POST /api/chat": {
        "json": {
            "model": "{model}",
            "messages": [{"role": "user", "content": "x"}],
            "stream": False,
            "options": {"num_predict": 1},
        }
    },
    "POST /api/generate": {"json": {"model": "{model}", "prompt": "x", "stream": False, "options": {"num_predict": 1}}},
    "POST /api/embed": {"json": {"model": "{model}", "input": "x"}},
    "POST /api/embeddings": {"json": {"model": "{model}", "prompt": "x"}},
    "POST /api/show": {"json": {"model": "{model}"}},
    "POST /v1/embeddings": {"json": {"model": "{model}", "input": "x"}},
    **{
        f"POST {path}": {"json": {"model": "{model}", "text_1": "x", "text_2": "y"}} for path in ("/v1/score", "/score")
    },
    **{
        f"POST {path}": {"json": {"model": "{model}", "query": "x", "documents": ["y"]}}
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    },
    "POST /v1/files": {
        "content": b"".join(
            b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % part
            for part in ((b"purpose", b"batch"), (b"file", b"{}"))
        )
        + b"--x--\r\n",
        "headers": {"content-type": "multipart/form-data; boundary=x"},
    },
    "POST /v1/batches": {
        "json": {"input_file_id": "{file_id}", "endpoint": "/v1/completions", "completion_window": "24h"}
    },
    "POST /tokenize": {"json": {"model": "{model}", "prompt": "x"}},
    "POST /detokenize": {"json": {"model": "{model}", "tokens": [1]}},
    "POST /v1/load_lora_adapter": {"json": {"lora_name": "live-{name}", "lora_path": "small"}},
    "POST /v1/unload_lora_adapter": {"json": {"lora_name": "live-{name}"}},
    "POST /load_lora_adapter": {"json": {"lora_name": "live-{name}", "lora_path": "small"}},
    "POST /load_lora_adapter_from_tensors": {
        "json": {
            "lora_name": "tensors-{name}",
            "load_inplace": True,
            "ephemeral": True,
            "config_dict": SMALL_CONFIG,
            "serialized_named_tensors": [base64.b64encode(small_weights()).decode()],
        }
    },
    "POST /unload_lora_adapter": {"json": {"lora_name": "live-{name}"}},
    "POST /api/v1/adapters/{name}/versions": {"json": {"config": {}, "blob": "{sha256}"}},
    "POST /api/v1/adapters/{name}/pulls": {"json": {"source": "s3://models/{name}"}},
    "PATCH /api/v1/adapters/{name}": {"json": {"notes": "x"}},
    "PATCH /api/v1/adapters/{name}/versions/{number}": {"json": {"notes": "x"}},
    "PUT /api/v1/adapters/{name}/aliases/{alias}": {"json": {"version": 1}},
    "PUT /api/v1/adapters/{name}/versions/{number}/evaluations/{sha256}": {
        "json": {"data_name": "{name}.jsonl", "num_lines": 2, "metrics": {"exact_match": 0.5}}
    },
    "POST /api/v1/uploads": {"json": {"sha256": "{sha256}", "size": 1}},
    "PATCH /api/v1/uploads/{upload_id}": {"content": b"x", "headers": {"content-range": "bytes 0-0/1"}},
    "POST /api/v1/tenants": {"json": {"name": "{tenant}"}},
    "PATCH /api/v1/tenants/{tenant}": {"json": {"weight": 2}},
    "POST /api/v1/tenants/{tenant}/keys": {"json": {"name": "another"}},
    "POST /api/v1/tenants/{tenant}/keys/{key_id}/rotate": {"json": {"overlap_s": 60}},
    "POST /api/v1/keys": {"json": {"name": "another"}},
    "POST /api/v1/keys/{key_id}/rotate": {"json": {"overlap_s": 60}},
    "POST /api/v1/admin-keys": {"json": {"name": "another", "role": "metrics:read"}},
    "POST /api/v1/admin-keys/{admin_key_id}/rotate": {"json": {"overlap_s": 60}},
    "POST /api/v1/compare": {
        "json": {"endpoint": "/v1/completions", "requests": [{"model": "{model}", "prompt": "x", "max_tokens": 1}]}
    },
}
"""What each route with a body is sent; braces stand for things of the world."""
WITHOUT_BODY = (
    "/pause",
    "/resume",
    "restore",
    "verify",
    "warm",
    "pin",
    "unpin",
    "rollback",
    "grants/{tenant}",
    "ping",
    "cancel",
)


def filled(path: str, things: dict[str, str]) -> str:
    """The path with a thing for each of its parameters."""
    for name, value in things.items():
        path = path.replace("{" + name + "}", value).replace("{" + name + ":path}", value)
    assert "{" not in path, f"{path} has a parameter that the world has nothing for"
    return path


async def send(
    client: httpx2.AsyncClient, route: Route, things: dict[str, str], headers: dict[str, str]
) -> httpx2.Response:
    """Call the route with a request that it can read, for these things."""
    path = filled(route.path, things)
    how = BODIES.get(str(route).replace(" /t/{tenant}/", " /"), {})
    if not how and route.method in ("POST", "PUT", "PATCH"):
        assert route.path.endswith(WITHOUT_BODY), f"{route} has no request in BODIES"
    headers = headers | how.get("headers", {})
    body = _filled(how["json"], things) if "json" in how else None
    return await client.request(route.method, path, json=body, content=how.get("content"), headers=headers)


def _filled(value: Any, things: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, things) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, things) for item in value]
    if isinstance(value, str):
        for name, thing in things.items():
            value = value.replace("{" + name + "}", thing)
    return value
