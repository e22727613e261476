"""/api/tags, ps, show, version and embeddings, as Ollama's clients read them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest

from loraserve import __version__
from loraserve.api.services import Services
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports
from loraserve.types import AdapterResidency, Tier

pytestmark = pytest.mark.usefixtures("no_leaks")

BASE = "org/base:1"


async def models_of(client: httpx2.AsyncClient, path: str = "/api/tags") -> dict[str, dict[str, Any]]:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    models = answer.json()["models"]
    assert [model["name"] for model in models] == [model["model"] for model in models]
    return {model["name"]: model for model in models}


async def test_tags_list_models_with_latest_tag(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    await publish("team:poet", 1)
    await publish("sql:latest", 2)
    found = await models_of(client)
    assert list(found) == [BASE, "sql:latest", "sql:latest:latest", "team:poet"]
    plain = (await client.get("/v1/models")).json()["data"]
    assert len(plain) == len(found)
    for listed, model in zip(found.values(), plain, strict=True):
        adapter = model["parent"] is not None
        assert listed["digest"] == (model["root"].removeprefix("sha256:") if adapter else engine.base.digest)
        assert listed["details"]["parent_model"] == (BASE if adapter else "")
        assert listed["details"]["family"] == engine.base.architecture
    version = (await client.get("/api/v1/adapters/sql/versions/1")).json()
    assert found["sql:latest"]["size"] == version["size_bytes"]
    assert found[BASE]["size"] == engine.base.size_bytes
    assert datetime.fromisoformat(found["sql:latest"]["modified_at"]).year > 2020


async def test_tags_list_granted_adapter_by_owner(
    url: str, services: Services, acme: Any, client: httpx2.AsyncClient, make_tenant: Callable[[str], Awaitable[Any]]
) -> None:
    globex = await make_tenant("globex")
    async with httpx2.AsyncClient(base_url=url, headers=globex.headers) as borrower:
        assert list(await models_of(borrower)) == [BASE]
        await services.registry.grants.create(acme.caller.tenant, "sql", "globex", actor="x")
        assert list(await models_of(borrower)) == [BASE, "acme/sql:latest"]
        body = {"model": "acme/sql:latest", "prompt": "x", "stream": False, "options": {"num_predict": 2}}
        answer = await borrower.post("/api/generate", json=body)
        assert (answer.status_code, answer.json()["eval_count"]) == (200, 2)
        shown = await borrower.post("/api/show", json={"model": "acme/sql:latest"})
        assert shown.status_code == 200
        assert (await borrower.post("/api/show", json={"model": "sql"})).status_code == 404


async def test_granted_adapter_hides_own_template(
    url: str,
    services: Services,
    acme: Any,
    client: httpx2.AsyncClient,
    publish: Callable[..., Any],
    make_tenant: Callable[[str], Awaitable[Any]],
) -> None:
    await publish("poet", 1, chat_template=b"{% for message in messages %}SECRET {{ message.content }}{% endfor %}")
    assert "SECRET" in (await client.post("/api/show", json={"model": "poet"})).json()["template"]
    globex = await make_tenant("globex")
    await services.registry.grants.create(acme.caller.tenant, "poet", "globex", actor="x")
    async with httpx2.AsyncClient(base_url=url, headers=globex.headers) as borrower:
        shown = (await borrower.post("/api/show", json={"model": "acme/poet"})).json()
    assert shown["template"] == ""
    assert shown["details"]["parent_model"] == BASE


async def test_show_describes_base_and_adapter(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    config = b'{"temperature": 0.25, "repetition_penalty": 1.5, "max_new_tokens": 7}'
    version = await publish("sql", 1, generation_config=config)
    for body in ({"model": "sql:latest"}, {"name": "sql"}, {"model": f"sql@{version}"}):
        answer = await client.post("/api/show", json=body | {"verbose": True})
        assert answer.headers["x-loraserve-ignored"] == "verbose"
        shown = answer.json()
        lines = {tuple(line.split()) for line in shown["parameters"].splitlines()}
        assert lines == {("temperature", "0.25"), ("repeat_penalty", "1.5"), ("num_predict", "7")}
        assert f"FROM {BASE}\nADAPTER sql@{version}\nPARAMETER temperature 0.25" in shown["modelfile"]
        assert shown["model_info"]["general.type"] == "adapter"
    shown = (await client.post("/api/show", json={"model": BASE})).json()
    family = engine.base.architecture
    assert shown["model_info"][f"{family}.context_length"] == engine.base.max_model_len
    assert shown["model_info"]["general.architecture"] == family
    assert "message.content" in shown["template"]
    assert shown["capabilities"][0] == "completion"
    assert (shown["parameters"], shown["modelfile"]) == ("", f"FROM {BASE}")


async def test_ps_lists_base_and_own_loaded_adapters(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.api.ollama.models._SNAPSHOT_S", 0.0)
    await publish("poet", 1)
    assert list(await models_of(client, "/api/ps")) == [BASE]
    tags = await models_of(client)
    for name, tier in (("sql:latest", Tier.DEVICE), ("poet:latest", Tier.HOST)):
        digest = tags[name]["digest"]
        engine.resident[digest] = AdapterResidency(
            digest=digest,
            tier=tier,
            device_bytes=500 if tier is Tier.DEVICE else 0,
            host_bytes=400,
            num_pins=0,
            is_pinned=False,
            last_used_s=0.0,
        )
    # in memory by another tenant's use
    assert list(await models_of(client, "/api/ps")) == [BASE]
    for name in ("sql", "poet"):
        await client.post("/api/generate", json={"model": name, "prompt": "x", "stream": False})
    found = await models_of(client, "/api/ps")
    assert [(name, model["size"], model["size_vram"]) for name, model in found.items()] == [
        (BASE, engine.base.size_bytes, 0),
        ("poet:latest", 400, 0),
        ("sql:latest", 500, 0),
    ]
    for model in found.values():
        assert datetime.fromisoformat(model["expires_at"]).year == 9999
        assert model["context_length"] == engine.base.max_model_len


async def test_ps_reports_bytes_of_gpu(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.base = msgspec.structs.replace(engine.base, device="cuda", size_bytes=1000)
    assert (await models_of(client, "/api/ps"))[BASE]["size_vram"] == 1000


async def test_version_is_comparable(client: httpx2.AsyncClient) -> None:
    body = (await client.get("/api/version")).json()
    assert body["loraserve"] == __version__
    # as Open WebUI compares it
    assert tuple(map(int, body["version"].split("."))) >= (0, 6, 4)


async def test_embed_returns_vector_for_each_input(client: httpx2.AsyncClient, services: Any) -> None:
    answer = await client.post("/api/embed", json={"model": "sql:latest", "input": ["hello", "hi"]})
    body = answer.json()
    assert (body["model"], body["prompt_eval_count"]) == ("sql:latest", 7)
    assert 0 < body["load_duration"] < body["total_duration"]
    plain = (await client.post("/v1/embeddings", json={"model": "sql", "input": ["hello", "hi"]})).json()
    np.testing.assert_array_equal(body["embeddings"], [item["embedding"] for item in plain["data"]])
    one = (await client.post("/api/embed", json={"model": "sql", "input": "hi", "dimensions": 3})).json()
    assert [len(vector) for vector in one["embeddings"]] == [3]
    assert np.linalg.norm(one["embeddings"]) == pytest.approx(1, abs=1e-6)
    assert answer.headers["x-loraserve-adapter"] == "sql@1"
    [billed] = await UsageReports(services.usage).all(UsageQuery(group_by=("adapter",)))
    assert (billed.amounts.num_requests, billed.amounts.prompt_tokens) == (3, 16)


async def test_long_input_is_cut_unless_refused(client: httpx2.AsyncClient, engine: Any) -> None:
    text = "x" * (engine.base.max_model_len + 40)
    answer = await client.post("/api/embed", json={"model": "sql", "input": text})
    assert answer.json()["prompt_eval_count"] == engine.base.max_model_len
    refused = await client.post("/api/embed", json={"model": "sql", "input": text, "truncate": False})
    assert (refused.status_code, refused.json()["code"]) == (400, "context_length_exceeded")


async def test_empty_input_has_no_vector(client: httpx2.AsyncClient, engine: Any) -> None:
    for value in ("", [], None):
        answer = await client.post("/api/embed", json={"model": "sql", "input": value, "keep_alive": "1h"})
        assert answer.json() == {"model": "sql", "embeddings": []}
        assert answer.headers["x-loraserve-ignored"] == "keep_alive"
    assert (await client.post("/api/embeddings", json={"model": "sql"})).json() == {"embedding": []}
    assert (await client.post("/api/embed", json={"model": "absent"})).status_code == 404
    assert engine.seen == []


async def test_older_embeddings_are_of_any_length(client: httpx2.AsyncClient) -> None:
    body = {"model": "sql", "prompt": "hello", "options": {"num_ctx": 128}}
    answer = await client.post("/api/embeddings", json=body)
    vector = answer.json()["embedding"]
    assert answer.headers["x-loraserve-ignored"] == "options.num_ctx"
    plain = {"model": "sql", "input": "hello", "normalize": False}
    expected = (await client.post("/v1/embeddings", json=plain)).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(vector, expected)


async def test_admin_acts_for_tenant_in_path(url: str, client: httpx2.AsyncClient, services: Services) -> None:
    async with httpx2.AsyncClient(base_url=f"{url}/t/acme", headers={"authorization": "Bearer " + ADMIN}) as admin:
        assert "sql:latest" in await models_of(admin)
        body = {"model": "sql", "messages": [{"role": "user", "content": "x"}], "stream": False}
        assert (await admin.post("/api/chat", json=body)).json()["done"] is True


ADMIN = "admin-key-of-the-tests-" + "x" * 20
