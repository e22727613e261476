"""/v1/models and the models that other tenants lend: listed as OWNER/NAME, answering,
and gone like what never was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from loraserve.api.services import Services
from loraserve.registry.records import AliasTarget, SplitPart

MakeTenant = Callable[[str], Awaitable[Any]]
COMPLETION = {"prompt": "hello", "max_tokens": 2}


@pytest.fixture
async def borrower(url: str, make_tenant: MakeTenant) -> Any:
    """A client of a tenant that has nothing of its own."""
    globex = await make_tenant("globex")
    async with httpx2.AsyncClient(base_url=url, headers=globex.headers) as client:
        yield client


async def test_granted_adapter_is_listed_and_answers_like_original(
    client: httpx2.AsyncClient, borrower: httpx2.AsyncClient, services: Services, acme: Any
) -> None:
    before = await borrower.post("/v1/completions", json=COMPLETION | {"model": "acme/sql"})
    absent = await borrower.post("/v1/completions", json=COMPLETION | {"model": "acme/lqs"})
    assert before.status_code == absent.status_code == 404
    assert before.text == absent.text.replace("lqs", "sql")
    await services.registry.grants.create(acme.caller.tenant, "sql", "globex", actor="x")
    listed = (await borrower.get("/v1/models")).json()["data"]
    own = (await client.get("/v1/models")).json()["data"]
    assert listed == [own[0], own[1] | {"id": "acme/sql"}]
    assert listed[1]["owned_by"] == "acme"
    for name in ("acme/sql", "acme/sql@1", "acme/sql@live", "org/base:1:acme/sql"):
        assert (await borrower.get(f"/v1/models/{name}")).json() == listed[1] | {"id": name}
        answer = await borrower.post("/v1/completions", json=COMPLETION | {"model": name})
        assert (answer.status_code, answer.headers["x-loraserve-adapter"]) == (200, "acme/sql@1")
    assert (await borrower.get("/v1/models/sql")).status_code == 404
    await services.registry.grants.delete(acme.caller.tenant, "sql", "globex", actor="x")
    assert (await borrower.get("/v1/models")).json()["data"] == own[:1]
    assert (await borrower.post("/v1/completions", json=COMPLETION | {"model": "acme/sql"})).text == before.text


async def test_split_model_is_always_shown_with_same_version(
    client: httpx2.AsyncClient, services: Services, acme: Any, publish: Any
) -> None:
    await publish(seed=7)
    split = AliasTarget.over([SplitPart(1, 1), SplitPart(2, 1.5)])
    await services.registry.aliases.set(acme.caller.tenant, "sql", "live", split, actor="x")
    listed = (await client.get("/v1/models")).json()["data"][1]
    for _ in range(8):
        assert (await client.get("/v1/models/sql")).json()["root"] == listed["root"]
