"""An adapter that another tenant granted, where tokens flow."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from loraserve.api.services import Services
from loraserve.errors import AdapterTooLarge
from loraserve.tenancy.identity.tenants import TenantChange


@pytest.fixture
async def grantee(make_tenant: Any) -> Any:
    return await make_tenant("globex")


@pytest.fixture
async def globex(url: str, grantee: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=url, headers=grantee.headers, timeout=10) as client:
        yield client


@pytest.fixture
async def grant(services: Services, acme: Any) -> Any:
    async def run(name: str = "sql", tenant: str = "globex") -> None:
        await services.registry.grants.create(acme.caller.tenant, name, tenant, actor="test")

    return run


async def ask(client: httpx2.AsyncClient, model: str) -> httpx2.Response:
    return await client.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 4})


async def test_granted_adapter_answers_under_owner_name(
    client: httpx2.AsyncClient, globex: httpx2.AsyncClient, grant: Any, engine: Any, acme: Any
) -> None:
    await grant()
    for model in ("acme/sql", "acme/sql@1", "acme/sql@live"):
        response = await ask(globex, model)
        assert (response.status_code, response.json()["model"]) == (200, model)
        # as whoever reads it would ask for it
        assert response.headers["x-loraserve-adapter"] == "acme/sql@1"
    request = engine.seen[-1]
    assert request.adapter.tenant == acme.caller.tenant
    # the engine charges, and keeps the prefixes of, who asked
    assert request.tenant != acme.caller.tenant


async def test_owner_reaches_own_adapter_by_plain_name(client: httpx2.AsyncClient) -> None:
    for model in ("sql", "acme/sql"):
        assert (await ask(client, model)).headers["x-loraserve-adapter"] == "sql@1"


async def test_adapter_sum_names_owners_of_parts(
    client: httpx2.AsyncClient, globex: httpx2.AsyncClient, grantee: Any, grant: Any, engine: Any, publish: Any
) -> None:
    await grant()
    await publish("own", 1, grantee)
    response = await ask(globex, "0.5*acme/sql+own")
    assert response.headers["x-loraserve-adapter"] == "own@1+0.5*acme/sql@1"
    assert (await ask(globex, response.headers["x-loraserve-adapter"])).status_code == 200
    engine.fail_after, engine.failure = 0, AdapterTooLarge(f"{engine.seen[0].adapter.parts[1].adapter.digest[:12]}…")
    assert (await ask(globex, "0.5*acme/sql+own")).json()["error"]["message"].endswith("… is acme/sql@1.")


async def test_adapter_without_grant_reads_as_absent(
    client: httpx2.AsyncClient, globex: httpx2.AsyncClient, grant: Any
) -> None:
    await grant()
    texts = set()
    for model in ("acme/other", "nobody/sql", "acme/sql@2", "sql"):
        response = await ask(globex, model)
        assert response.status_code == 404
        texts.add(response.text.replace(model, "MODEL"))
    assert len(texts) == 1
    assert (await ask(client, "globex/sql")).text.replace("globex/sql", "MODEL") in texts


async def test_revoked_grant_takes_effect_at_once(
    client: httpx2.AsyncClient, globex: httpx2.AsyncClient, grant: Any, services: Services, acme: Any
) -> None:
    assert (await ask(globex, "acme/sql")).status_code == 404
    await grant()
    assert (await ask(globex, "acme/sql")).status_code == 200
    await services.registry.grants.delete(acme.caller.tenant, "sql", "globex", actor="test")
    assert (await ask(globex, "acme/sql")).status_code == 404


async def test_restored_adapter_keeps_grants(
    client: httpx2.AsyncClient, globex: httpx2.AsyncClient, grant: Any, services: Services, acme: Any
) -> None:
    await grant()
    await services.registry.delete(acme.caller.tenant, "sql", actor="test")
    assert (await ask(globex, "acme/sql")).status_code == 404
    await services.registry.restorer.restore(acme.caller.tenant, "sql", actor="test")
    assert (await ask(globex, "acme/sql")).status_code == 200


async def test_grants_of_deleted_tenant_end_at_once(
    client: httpx2.AsyncClient, globex: httpx2.AsyncClient, grant: Any, services: Services
) -> None:
    await grant()
    assert (await ask(globex, "acme/sql")).status_code == 200
    await services.authenticator.tenants.delete("acme", actor="test")
    assert (await ask(globex, "acme/sql")).status_code == 404


async def test_granted_adapters_are_listed_under_owner_name(
    client: httpx2.AsyncClient, globex: httpx2.AsyncClient, grant: Any
) -> None:
    async def models(one: httpx2.AsyncClient) -> list[tuple[str, str]]:
        return [(model["id"], model["owned_by"]) for model in (await one.get("/v1/models")).json()["data"][1:]]

    assert await models(globex) == []
    await grant()
    assert await models(globex) == [("acme/sql", "acme")]
    assert await models(client) == [("sql", "acme")]
    assert (await globex.get("/v1/models/acme/sql")).json()["id"] == "acme/sql"


async def test_a_granted_adapter_is_within_the_grantees_share(
    client: httpx2.AsyncClient, globex: httpx2.AsyncClient, grant: Any, services: Services
) -> None:
    await grant()
    await services.authenticator.tenants.update("globex", TenantChange({"requests_per_minute": 1}), actor="test")
    assert (await ask(globex, "acme/sql")).status_code == 200
    assert (await ask(globex, "acme/sql")).status_code == 429
    assert (await ask(client, "sql")).status_code == 200
