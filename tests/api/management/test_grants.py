"""Grants over HTTP, by their owner alone."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from .conftest import make_key

CALLS = [
    ("GET", "/adapters/{name}/grants"),
    ("GET", "/adapters/{name}/grants/globex"),
    ("PUT", "/adapters/{name}/grants/globex"),
    ("DELETE", "/adapters/{name}/grants/globex"),
]


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_foreign_grants_get_same_404_bytes_as_absent(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, method: str, path: str
) -> None:
    await push(acme, "sql")
    await acme.put("/adapters/sql/grants/globex")

    async def refused(name: str) -> tuple[int, bytes]:
        response = await globex.request(method, path.format(name=name), headers={"x-request-id": "the-same"})
        return response.status_code, response.content.replace(name.encode(), b"NAME")

    assert (await refused("sql"))[0] == 404
    assert await refused("sql") == await refused("lqs")


async def test_grant_is_made_read_listed_and_revoked(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient
) -> None:
    await push(acme, "sql")
    made = await acme.put("/adapters/sql/grants/globex")
    assert (made.status_code, made.headers["location"]) == (201, "/api/v1/adapters/sql/grants/globex")
    assert {name: made.json()[name] for name in ("adapter", "tenant")} == {"adapter": "sql", "tenant": "globex"}
    again = await acme.put("/adapters/sql/grants/globex")
    assert (again.status_code, again.json()) == (200, made.json())
    read = await acme.get("/adapters/sql/grants/globex")
    assert (read.json(), read.headers["etag"]) == (made.json(), made.headers["etag"])
    assert (await acme.get("/adapters/sql/grants")).json() == {"data": [made.json()], "next_cursor": None}
    assert (await acme.delete("/adapters/sql/grants/globex")).status_code == 204
    gone = await acme.get("/adapters/sql/grants/globex")
    assert (gone.status_code, gone.json()["code"]) == (404, "grant_not_found")


async def test_grant_to_absent_tenant_reads_like_real_grant(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient
) -> None:
    await push(acme, "sql")

    async def told(name: str) -> list[tuple[int, object, object]]:
        path, said = f"/adapters/sql/grants/{name}", []
        for method in ("GET", "PUT", "PUT", "GET", "DELETE", "GET"):
            response = await acme.request(method, path)
            body = response.json() if response.content else {}
            shape = {key: str(value).replace(name, "NAME") for key, value in body.items() if not key.endswith("_at")}
            shape.pop("request_id", None)
            headers = sorted(set(response.headers) - {"date"})
            said.append((response.status_code, shape, headers))
        return said

    assert await told("globex") == await told("nobody-1")
    malformed = await acme.put("/adapters/sql/grants/NOT-A-NAME")
    assert (malformed.status_code, malformed.json()["code"]) == (404, "tenant_not_found")


async def test_grantee_cannot_manage_adapter(push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient) -> None:
    await push(acme, "sql")
    await acme.put("/adapters/sql/grants/globex")
    for name in ("sql", "acme%2Fsql", "acme/sql"):
        for path in ("", "/versions", "/versions/1", "/aliases/live", "/versions/1/files/adapter_config.json"):
            assert (await globex.get(f"/adapters/{name}{path}")).status_code == 404
    assert (await globex.get("/adapters")).json()["data"] == []
    assert (await globex.delete("/adapters/sql/versions/1")).status_code == 404


async def test_grants_need_the_right_to_change_adapters(
    push: Any, admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, connect: Any
) -> None:
    await push(acme, "sql")
    reader = connect(await make_key(admin, "initech", scopes=["adapters:read", "inference"]))
    for method, path in CALLS:
        response = await reader.request(method, path.format(name="sql"))
        assert (response.status_code, response.json()["code"]) == (403, "permission_denied")


async def test_admin_grants_for_named_tenant(
    push: Any, admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient
) -> None:
    await push(acme, "sql")
    assert (await admin.put("/adapters/sql/grants/globex")).status_code == 404
    assert (await admin.put("/adapters/sql/grants/globex", headers={"X-Tenant": "acme"})).status_code == 201
