from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import httpx2
import msgspec
import pytest
from fastapi import APIRouter

from loraserve import __version__
from loraserve.api import app as application
from loraserve.api import management, scopes
from loraserve.api.app import create_app
from loraserve.api.services import Services
from loraserve.errors import ConfigError
from loraserve.limits import Limits
from loraserve.types import AdapterResidency, Digest, Tier

ADMIN = {"authorization": "Bearer admin-key-of-the-tests-" + "x" * 20}


async def test_models_are_the_base_and_the_tenants_adapters(client: httpx2.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    base, sql = body["data"]
    assert (base["id"], base["root"], base["parent"], base["max_model_len"]) == ("org/base:1", "org/base:1", None, 256)
    assert (sql["id"], sql["parent"], sql["owned_by"], sql["object"]) == ("sql", "org/base:1", "acme", "model")
    assert sql["root"].startswith("sha256:")
    assert sql["created"] > 1_700_000_000


SPELLINGS = (
    "/v1/chat/completions/",
    "/chat/completions",
    "/chat/completions/",
    "/v1/v1/chat/completions",
    "/openai/v1/chat/completions",
    "/openai/deployments/sql/chat/completions?api-version=2024-10-21",
)


async def test_route_is_found_by_each_spelling(client: httpx2.AsyncClient, subtests: pytest.Subtests) -> None:
    body = {"model": "sql", "messages": [{"role": "user", "content": "x"}]}
    for prefix, path in itertools.product(("", "/t/acme"), SPELLINGS):
        with subtests.test(prefix=prefix, path=path):
            assert (await client.post(prefix + path, json=body)).json()["object"] == "chat.completion"


async def test_alias_answers_for_unknown_model(client: httpx2.AsyncClient, services: Services, engine: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    names = ("claude-sonnet-4-5", "claude-sonnet-4-5[1m]", "gpt-4o", "sql")
    for name in names[:-1]:
        assert (await client.post("/v1/messages", json={"model": name, **body})).status_code in (400, 404)
    aliases = ("claude-*=sql", "gpt-?o=org/base:1", "sql=org/base:1", "lost-*=nobody")
    services.settings = services.settings.model_copy(update={"model_aliases": aliases})
    for path in ("/v1/messages", "/v1/chat/completions"):
        for name in names:
            answer = (await client.post(path, json={"model": name, **body})).json()
            assert answer["model"] == name
    # a model of the tenant's own goes first
    found = [None if one.adapter is None else one.adapter.name for one in engine.seen]
    assert found == ["sql", "sql", None, "sql"] * 2
    embedded = await client.post("/v1/embeddings", json={"model": "gpt-4o", "input": "x"})
    assert embedded.status_code == 200
    # a field for an adapter names one that exists
    services.settings = services.settings.model_copy(update={"model_aliases": ("*=org/base:1",)})
    wrong = await client.post("/v1/chat/completions", json={"model": "org/base:1", "lora_path": "other", **body})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "lora_path")
    services.settings = services.settings.model_copy(update={"model_aliases": aliases})
    for name in ("other", "lost-1"):
        refused = await client.post("/v1/chat/completions", json={"model": name, **body})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_only_inference_routes_have_spellings(client: httpx2.AsyncClient, acme: Any) -> None:
    for path in ("/models", "/models/", "/v1/models/", "/v1/models/sql/"):
        assert (await client.get(path)).status_code == 200, path
    for path in ("/chat", "/files", "/v1/v1/files", "/x/models", "/openai/v1/audio"):
        assert (await client.get(path)).status_code == 404, path
    # Azure's header
    del client.headers["authorization"]
    assert (await client.get("/v1/models", headers={"api-key": acme.key})).status_code == 200
    refused = await client.get("/v1/models", headers={"api-key": "x" * 600})
    assert (refused.status_code, "api-key header" in refused.text) == (401, True)


@pytest.mark.parametrize("model", ["org/base:1", "sql", "sql@1", "sql@live", "org/base:1:sql"])
async def test_model_is_found_by_each_name(client: httpx2.AsyncClient, model: str) -> None:
    response = await client.get(f"/v1/models/{model}")
    assert response.status_code == 200
    assert response.json()["id"] == model


async def test_foreign_adapter_reads_like_absent_adapter(
    client: httpx2.AsyncClient, make_tenant: Callable[[str], Awaitable[Any]], publish: Callable[..., Any]
) -> None:
    globex = await make_tenant("globex")
    await publish("theirs", 1, tenant=globex)
    answers = []
    for name in ("theirs", "absent"):
        for response in (
            await client.get(f"/v1/models/{name}"),
            await client.post("/v1/completions", json={"model": name, "prompt": "x"}),
        ):
            assert response.status_code == 404
            answers.append(response.content.replace(name.encode(), b"NAME"))
    assert len(set(answers)) == 1
    assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["org/base:1", "sql"]


KEYED_ROUTES = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/sql"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/t/acme/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
)
BAD_KEYS = (
    None,
    "Bearer sk-lora-wrong",
    "Bearer",
    "Basic abc",
    "Basic eDp5",
    "Basic eA==",
    "Bearer " + "x" * 5000,
    "Bearer é",
)


async def test_every_route_needs_a_good_key(url: str, subtests: pytest.Subtests) -> None:
    async with httpx2.AsyncClient(base_url=url) as client:
        for (method, path), key in itertools.product(KEYED_ROUTES, BAD_KEYS):
            headers = {} if key is None else {"authorization": key.encode()}
            with subtests.test(method=method, path=path, key=key):
                response = await client.request(method, path, headers=headers, content=b"{not json")
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/ping"])
async def test_health_needs_no_key(url: str, engine: Any, path: str) -> None:
    async with httpx2.AsyncClient(base_url=url) as client:
        assert (await client.get(path)).status_code == 200
        engine.is_live = engine.is_ready = False
        assert (await client.get(path)).status_code == 503


async def test_a_draining_server_lives_but_is_not_ready(client: httpx2.AsyncClient, services: Services) -> None:
    services.is_draining = True
    assert (await client.get("/readyz")).status_code == 503
    assert (await client.get("/livez")).status_code == 200
    assert (await client.post("/v1/completions", json={"model": "sql", "prompt": "x"})).status_code == 200
    services.is_closed = True
    refused = await client.post("/v1/completions", json={"model": "sql", "prompt": "x"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"] == "5"


async def test_a_tenants_prefix_serves_the_same_routes(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/t/acme/v1/models")).json() == (await client.get("/v1/models")).json()
    response = await client.post("/t/acme/v1/completions", json={"model": "sql", "prompt": "x"})
    assert response.headers["x-loraserve-adapter"] == "sql@1"
    messages = [{"role": "user", "content": "x"}]
    assert (
        await client.post("/t/acme/v1/chat/completions", json={"model": "sql", "messages": messages})
    ).status_code == 200


async def test_a_key_opens_no_other_tenants_prefix(
    client: httpx2.AsyncClient, make_tenant: Callable[[str], Awaitable[Any]]
) -> None:
    await make_tenant("globex")
    answers = [await client.get(f"/t/{name}/v1/models") for name in ("globex", "nobody")]
    answers += [await client.get("/v1/models", headers={"x-tenant": name}) for name in ("globex", "nobody")]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.content for answer in answers}) == 1


async def test_an_admin_acts_for_a_tenant(client: httpx2.AsyncClient) -> None:
    for path, headers in (("/t/acme/v1/models", ADMIN), ("/v1/models", ADMIN | {"x-tenant": "acme"})):
        ids = [model["id"] for model in (await client.get(path, headers=headers)).json()["data"]]
        assert ids == ["org/base:1", "sql"]
    assert len((await client.get("/v1/models", headers=ADMIN)).json()["data"]) == 1


async def test_admin_naming_two_tenants_is_refused(
    client: httpx2.AsyncClient, make_tenant: Callable[[str], Awaitable[Any]]
) -> None:
    await make_tenant("globex")
    refused = await client.get("/t/acme/v1/models", headers=ADMIN | {"x-tenant": "globex"})
    assert refused.status_code == 400
    assert "X-Tenant" in refused.json()["error"]["message"]
    assert (await client.get("/t/acme/v1/models", headers=ADMIN | {"x-tenant": "acme"})).status_code == 200


async def test_a_key_without_the_scope_is_forbidden(client: httpx2.AsyncClient, services: Services, acme: Any) -> None:
    made = await services.authenticator.keys.create(
        acme.caller.tenant, name="read", actor="test", scopes=["adapters:read"]
    )
    response = await client.get("/v1/models", headers={"authorization": f"Bearer {made.secret}"})
    assert response.status_code == 403
    assert response.json()["error"]["type"] == "permission_error"
    assert (await client.get("/metrics")).status_code == 403


async def test_metrics_count_served_requests(client: httpx2.AsyncClient) -> None:
    await client.post("/v1/completions", json={"model": "sql", "prompt": "list", "max_tokens": 5})
    text = (await client.get("/metrics", headers=ADMIN)).text
    for line in (
        'loraserve_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0',
        "loraserve_prompt_tokens_total 4.0",
        "loraserve_generation_tokens_total 5.0",
        "loraserve_time_to_first_token_seconds_count 1.0",
        "loraserve_time_per_output_token_seconds_count 1.0",
        'loraserve_completions_total{reason="length"} 1.0',
        'loraserve_adapters_resident{tier="device"} 0.0',
        'vllm:lora_requests_info{max_lora="64",running_lora_adapters="",waiting_lora_adapters=""}',
    ):
        assert line in text


async def test_lora_requests_info_names_waiting_and_running_adapters(
    client: httpx2.AsyncClient,
    services: Services,
    engine: Any,
    acme: Any,
    make_tenant: Callable[[str], Awaitable[Any]],
    publish: Callable[..., Awaitable[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    globex = await make_tenant("globex")
    await publish("sql", tenant=globex)
    may_begin, may_end, generate = asyncio.Event(), asyncio.Event(), engine.generate

    async def held(request: Any) -> AsyncGenerator[Any, None]:
        if request.tenant == globex.caller.tenant:
            await may_begin.wait()
        async with aclosing(generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                await may_end.wait()

    monkeypatch.setattr(engine, "generate", held)

    async def info() -> str:
        text = (await client.get("/metrics", headers=ADMIN)).text
        return next(line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{"))

    async def says(running: str, waiting: str, max_lora: int = 64) -> None:
        labels = f'max_lora="{max_lora}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
        async with asyncio.timeout(10):
            while f"{{{labels}}}" not in (line := await info()):
                assert line
                await asyncio.sleep(0.01)

    body = {"prompt": "list", "max_tokens": 5}
    requests = [
        asyncio.create_task(client.post("/v1/completions", json=body | {"model": model}, headers=one.headers))
        for one, model in ((acme, "sql"), (acme, "sql@1"), (acme, engine.base.id), (globex, "org/base:1:sql"))
    ]
    await says("sql,sql@1", "org/base:1:sql")
    # what fits, once there is an adapter to measure
    engine.stats = msgspec.structs.replace(engine.stats, device_adapters=3, max_device_adapters=40)
    may_begin.set()
    await says("org/base:1:sql,sql,sql@1", "", max_lora=40)
    may_end.set()
    assert [(await request).status_code for request in requests] == [200] * 4
    await says("", "", max_lora=40)


async def test_adapters_in_memory_are_named_as_requested(
    client: httpx2.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.api.metrics.routing.MAX_AGE_S", 0.0)
    await client.post("/v1/completions", json={"model": "sql@1", "prompt": "list", "max_tokens": 1})
    digest = engine.seen[-1].adapter.digest
    row = AdapterResidency(
        digest=digest,
        tier=Tier.HOST,
        device_bytes=0,
        host_bytes=9,
        num_pins=0,
        is_pinned=False,
        last_used_s=1.0,
    )
    for tier, level in ((Tier.HOST, "cpu"), (Tier.DEVICE, "gpu")):
        engine.resident = {digest: msgspec.structs.replace(row, tier=tier)}
        text = (await client.get("/metrics", headers=ADMIN)).text
        assert (
            f'vllm:lora_adapter_loaded{{adapter_name="sql@1",level="{level}",pinned="false",tenant="acme"}} 1.0' in text
        )
    engine.resident = {}
    assert "vllm:lora_adapter_loaded{" not in (await client.get("/metrics", headers=ADMIN)).text
    # probes and metrics don't ask the engine for what no request has named
    assert engine.num_residency_queries == 3


async def test_same_name_of_two_tenants_is_two_adapters(
    client: httpx2.AsyncClient,
    engine: Any,
    acme: Any,
    make_tenant: Callable[[str], Awaitable[Any]],
    publish: Callable[..., Awaitable[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loraserve.api.metrics.routing.MAX_AGE_S", 0.0)
    globex = await make_tenant("globex")
    await publish("sql", 7, tenant=globex)
    row = AdapterResidency(
        digest=Digest(""), tier=Tier.DEVICE, device_bytes=9, host_bytes=9, num_pins=0, is_pinned=False, last_used_s=1.0
    )
    tiers = {}
    # a router sends what the client sent; with the owner before it, a name is one adapter's alone
    for tenant, model, tier in (
        (acme, "sql", Tier.DEVICE),
        (acme, "acme/sql", Tier.DEVICE),
        (globex, "sql", Tier.HOST),
    ):
        body = {"model": model, "prompt": "list", "max_tokens": 1}
        answer = await client.post("/v1/completions", json=body, headers=tenant.headers)
        assert answer.status_code == 200
        tiers[engine.seen[-1].adapter.digest] = tier
    assert len(tiers) == 2
    engine.resident = {digest: msgspec.structs.replace(row, digest=digest, tier=tier) for digest, tier in tiers.items()}
    text = (await client.get("/metrics", headers=ADMIN)).text
    found = {line for line in text.splitlines() if line.startswith("vllm:lora_adapter_loaded{")}
    assert found == {
        f'vllm:lora_adapter_loaded{{adapter_name="{name}",level="{level}",pinned="false",tenant="{tenant}"}} 1.0'
        for name, level, tenant in (("sql", "gpu", "acme"), ("acme/sql", "gpu", "acme"), ("sql", "cpu", "globex"))
    }


async def test_tokenize_and_detokenize_are_inverse(client: httpx2.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"model": "sql", "prompt": "é<|eos|>!"})).json()
    assert tokens["count"] == len(tokens["tokens"]) == 4
    assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "é<|eos|>!"}


async def test_messages_can_be_tokenized(client: httpx2.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["token_strs"] == ["<|user|>", "h", "i", "Ċ", "<|assistant|>"]


async def test_a_continued_message_can_be_tokenized(client: httpx2.AsyncClient, services: Services) -> None:
    messages = [{"role": "user", "content": "list"}, {"role": "assistant", "content": "The tickets: "}]
    body = {"messages": messages, "continue_final_message": True}
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert services.tokenizer.decode(tokens, skip_special_tokens=False) == "<|user|>list\n<|assistant|>The tickets: "


async def test_unknown_route_and_wrong_method_get_error_envelopes(client: httpx2.AsyncClient) -> None:
    absent = await client.get("/v1/nothing?SECRETMARKER", headers={"x-any": "SECRETMARKER"})
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "not_found")
    assert "SECRETMARKER" not in absent.text
    wrong = await client.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    message = wrong.json()["error"]["message"]
    assert message == "The route /v1/completions doesn't accept GET. It accepts POST."
    problem = await client.get("/api/v1/absent")
    assert problem.headers["content-type"] == "application/problem+json"
    assert problem.json()["code"] == "not_found"


NEAREST = {
    "GET /v1/model": "GET /v1/models",
    "POST /v1/chat/completion": "POST /v1/chat/completions",
    "POST /V1/Completions": "POST /v1/completions",
    "POST /t/acme/v1/completion": "POST /t/{tenant}/v1/completions",
    "POST /api/v1/adapter/sql/version": "POST /api/v1/adapters/{name}/versions",
    "DELETE /v1/completion": "POST /v1/completions",
    "GET /generate_streams": "POST /generate_stream",
}


async def test_unknown_route_is_reported_with_nearest_route(client: httpx2.AsyncClient) -> None:
    for route, nearest in NEAREST.items():
        method, path = route.split()
        answer = await client.request(method, path)
        assert answer.status_code == 404, route
        body = answer.json()
        text = body.get("detail") or body["error"]["message"]
        assert text.startswith(f"There is no route {route}. Did you mean {nearest}?"), text
    far = (await client.get("/nothing/of/the/kind")).json()["error"]["message"]
    assert far == "There is no route GET /nothing/of/the/kind. GET /api/v1/openapi.json lists all routes."


@pytest.mark.parametrize(
    ("method", "path", "cure"),
    [
        ("POST", "/v1/messages/batches", "/v1/batches"),
        ("GET", "/t/acme/v1/messages/batches/b-1/results", "/v1/batches"),
        ("POST", "/v1/responses/compact", "in input"),
        ("POST", "/v1/conversations", "previous_response_id"),
        ("POST", "/v1/audio/speech", "text"),
        ("POST", "/v1/fine_tuning/jobs", "adapter push"),
    ],
)
async def test_absent_route_of_openai_names_cure(client: httpx2.AsyncClient, method: str, path: str, cure: str) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith(f"There is no route {method} {path}: this server has no ")
    assert cure in message


async def test_an_unknown_route_is_shown_plain_and_short(client: httpx2.AsyncClient) -> None:
    odd = (await client.get("/v1/%3Cb%3E%0A%22%C3%A9")).json()["error"]["message"]
    assert odd.startswith("There is no route GET /v1/%3Cb%3E%0A%22%C3%A9.")
    long = (await client.get("/v1/" + "x" * 4000)).json()["error"]["message"]
    assert len(long) < 300
    assert "xxx…" in long


async def test_ping_accepts_post_and_version_requires_key(url: str, client: httpx2.AsyncClient) -> None:
    assert (await client.post("/ping", content=b"{}")).json() == {"status": "ok"}
    assert (await client.get("/version")).json() == {"version": __version__}
    async with httpx2.AsyncClient(base_url=url) as stranger:
        for path in ("/version", "/tokenizer_info"):
            assert (await stranger.get(path)).status_code == 401


async def test_tokenizer_info_contains_config_plain_tokens_and_template(
    client: httpx2.AsyncClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
        "added_tokens_decoder": {"7": {"content": "<|x|>", "special": True}},
        # transformers' word for none
        "model_max_length": 1000000000000000019884624838656,
        "name_or_path": "/home/someone/model",
        "vocab_file": "/home/someone/vocab.json",
        "chat_template": "an older one",
    }
    monkeypatch.setattr(services.tokenizer, "config", config)
    info = (await client.get("/tokenizer_info")).json()
    assert info == {
        "bos_token": "<s>",
        "added_tokens_decoder": {"7": "<|x|>"},
        "model_max_length": 1000000000000000019884624838656,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": (services.tokenizer.model_dir / "chat_template.jinja").read_text(),
    }
    assert (await client.get("/t/acme/tokenizer_info")).json() == info


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/redoc", "/v1/model/"])
async def test_the_frameworks_own_routes_are_not_there(client: httpx2.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


async def test_application_with_unscoped_route_does_not_start(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = APIRouter()

    @router.get("/bare")
    async def bare() -> None: ...

    monkeypatch.setattr(management, "router", router, raising=False)
    # this application's routes are no other's
    monkeypatch.setattr(application, "_routes", application._routes.__wrapped__)
    with pytest.raises(ConfigError, match=r"\['GET'\] /api/v1/bare"):
        create_app(services)


async def test_each_route_declares_single_scope(services: Services) -> None:
    declared = {path: found for path, _, found in scopes.declared_scopes(create_app(services))}
    assert declared["/v1/completions"] == {"inference"}
    assert declared["/t/{tenant}/v1/chat/completions"] == {"inference"}
    assert declared["/metrics"] == {"metrics:read"}
    assert declared["/livez"] == {"open"}
    assert all(len(found) == 1 for found in declared.values())


@pytest.mark.parametrize("limits", [Limits(max_body_bytes=1000, max_upload_bytes=5000)])
async def test_only_an_upload_may_be_large(client: httpx2.AsyncClient, limits: Limits) -> None:
    body = b"x" * 4000
    for method, path in (
        ("PUT", "/api/v1/adapters/sql/aliases/live"),
        ("POST", "/api/v1/tenants"),
        ("POST", "/v1/completions"),
    ):
        assert (await client.request(method, path, content=body)).status_code == 413
    assert (await client.post("/api/v1/adapters/sql/versions", content=body)).status_code == 400
    assert (await client.post("/api/v1/adapters/sql/versions", content=body * 2)).status_code == 413
