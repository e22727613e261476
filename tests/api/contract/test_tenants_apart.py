"""Every route, called for another tenant's things:
the answer is byte for byte the one for things that don't exist.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import httpx2
from fastapi import FastAPI
from whole_app import ADMIN_KEY, OPERATORS, Route, World, bearer, routes_of, send

ABSENT = {
    "name": "nonesql",
    "alias": "nonecan",
    "model": "nonesql",
    "tenant": "zzzz",
    "upload_id": "01" + "NNNN" * 6,
    "operation_id": "01" + "NNNN" * 6,
    "response_id": "resp_01" + "NNNN" * 6,
    "key_id": "01" + "NNNN" * 6,
    "file_id": "file-01" + "NNNN" * 6,
    "batch_id": "batch_01" + "NNNN" * 6,
    "sha256": "0" * 64,
}


TIMES = re.compile(rb'"(at|since)":"[^"]*"')


async def snapshot(client: httpx2.AsyncClient, app: FastAPI, world: World) -> dict[str, bytes]:
    """All that acme can read, but the time at which it does."""
    return {
        str(route): TIMES.sub(b"", (await send(client, route, world.things, bearer(world.keys["acme"]))).content)
        for route in routes_of(app)
        if route.method == "GET" and route.path.startswith("/api/v1") and route.scope.startswith("adapters")
        if route.path != "/api/v1/live"
    }


def said(answer: httpx2.Response, things: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
    """The whole answer, without the names that were asked for."""
    body = answer.content
    headers = {name: value for name, value in answer.headers.items() if name != "date"}
    for name, value in things.items():
        if name in ABSENT:
            body = body.replace(value.encode(), f"<{name}>".encode())
            headers = {key: text.replace(value, f"<{name}>") for key, text in headers.items()}
    return answer.status_code, body, headers


def is_a_tenants(route: Route) -> bool:
    return route.scope not in ("open", *OPERATORS)


async def test_foreign_resources_read_like_absent_resources(
    client: httpx2.AsyncClient, app: FastAPI, world: World
) -> None:
    before = await snapshot(client, app, world)
    globex = bearer(world.keys["globex"])
    absent = world.things | ABSENT
    for route in filter(is_a_tenants, routes_of(app)):
        if (
            str(route) in ("POST /api/v1/uploads", "POST /api/v1/keys")
            or (route.path.endswith("/v1/files") and route.method == "POST")
            or route.path.startswith(("/load_lora", "/v1/load_lora"))
        ):
            continue  # makes something of the caller's own, whoever else has such bytes
        if route.path == "/api/v1/live":
            continue  # has the time in it
        theirs = said(await send(client, route, world.things, globex), world.things)
        nobodys = said(await send(client, route, absent, globex), absent)
        assert theirs == nobodys, route
        if "{" in route.path:
            assert theirs[0] == 404, route
    assert await snapshot(client, app, world) == before


async def test_admin_acting_for_tenant_sees_no_foreign_resources(
    client: httpx2.AsyncClient, app: FastAPI, world: World
) -> None:
    before = await snapshot(client, app, world)
    headers = bearer(ADMIN_KEY) | {"x-tenant": "globex"}
    absent = world.things | ABSENT
    for route in routes_of(app):
        elsewhere = ("tenants/", "admin-keys/", "pulls", "/t/")
        if "{" not in route.path or any(part in route.path for part in elsewhere):
            continue
        theirs = said(await send(client, route, world.things, headers), world.things)
        nobodys = said(await send(client, route, absent, headers), absent)
        assert (theirs, theirs[0]) == (nobodys, 404), route
    assert await snapshot(client, app, world) == before


async def test_deleted_foreign_adapter_reads_like_absent_adapter(
    client: httpx2.AsyncClient, app: FastAPI, world: World
) -> None:
    globex = bearer(world.keys["globex"])
    theirs, nobodys = world.things | {"name": "acmeold"}, world.things | {"name": "noneold"}
    for route in filter(is_a_tenants, routes_of(app)):
        if "{name}" not in route.path:
            continue
        one, other = await send(client, route, theirs, globex), await send(client, route, nobodys, globex)
        assert one.content.replace(b"acmeold", b"noneold") == other.content, route


async def test_a_key_may_name_no_other_tenant(client: httpx2.AsyncClient, app: FastAPI, world: World) -> None:
    globex = bearer(world.keys["globex"])
    for route in filter(is_a_tenants, routes_of(app)):
        for_them = await send(client, route, world.things, globex | {"x-tenant": "acme"})
        for_nobody = await send(client, route, world.things, globex | {"x-tenant": "zzzz"})
        assert for_them.status_code == 404, route
        assert for_them.content == for_nobody.content, route


async def test_no_answer_to_a_tenant_names_anothers_things(
    client: httpx2.AsyncClient, app: FastAPI, world: World
) -> None:
    digest = (await client.get("/api/v1/adapters/acmesql/versions/1", headers=bearer(world.keys["acme"]))).json()[
        "digest"
    ]
    for route in filter(is_a_tenants, routes_of(app)):
        if route.method != "GET" or "{" in route.path:
            continue
        answer = await send(client, route, world.things, bearer(world.keys["globex"]))
        assert answer.status_code == 200, route
        for theirs in ("acme", digest, *(world.things[name] for name in ("upload_id", "operation_id", "sha256"))):
            assert theirs not in answer.text, route


async def test_partly_uploaded_foreign_bytes_start_from_zero(client: httpx2.AsyncClient, world: World) -> None:
    body = {"sha256": world.things["sha256"], "size": 2000}
    piece = {"content-range": "bytes 0-9/2000"}
    acme, globex = bearer(world.keys["acme"]), bearer(world.keys["globex"])
    theirs = await client.get(f"/api/v1/uploads/{world.things['upload_id']}", headers=acme)
    piece = {"content-range": f"bytes 0-9/{theirs.json()['size']}"}
    sent = await client.patch(
        f"/api/v1/uploads/{world.things['upload_id']}", content=b"0123456789", headers=acme | piece
    )
    assert sent.json()["received"] == 10
    begun = await client.post("/api/v1/uploads", json=body | {"size": theirs.json()["size"]}, headers=globex)
    assert (begun.status_code, begun.json()["received"]) == (201, 0)
    assert begun.json()["id"] != world.things["upload_id"]


async def test_a_tenants_key_is_no_key_of_anothers(client: httpx2.AsyncClient, world: World) -> None:
    admin, path = bearer(ADMIN_KEY), "/api/v1/tenants/globex/keys/"
    theirs = await client.delete(path + world.things["key_id"], headers=admin)
    nobodys = await client.delete(path + ABSENT["key_id"], headers=admin)
    assert (theirs.status_code, theirs.content) == (404, nobodys.content)
    still = await client.get("/api/v1/adapters", headers=bearer(world.keys["acme"]))
    assert still.status_code == 200


async def test_idempotency_key_is_scoped_to_tenant(client: httpx2.AsyncClient, world: World) -> None:
    body = {"sha256": "1" * 64, "size": 9}
    once = {"idempotency-key": "same"}
    mine = await client.post("/api/v1/uploads", json=body, headers=bearer(world.keys["acme"]) | once)
    other = await client.post("/api/v1/uploads", json=body | {"size": 8}, headers=bearer(world.keys["globex"]) | once)
    assert (mine.status_code, other.status_code) == (201, 201)
    assert mine.json()["id"] != other.json()["id"]


async def test_writes_to_namesake_adapter_leave_other_tenants_unchanged(
    client: httpx2.AsyncClient, app: FastAPI, world: World, push: Callable[..., Awaitable[None]]
) -> None:
    before = await snapshot(client, app, world)
    globex = bearer(world.keys["globex"])
    for seed in (5, 6):
        await push(world.keys["globex"], "acmesql", seed)
    aim = {"version": 1}
    made = await client.put("/api/v1/adapters/acmesql/aliases/acmecan", json=aim, headers=globex)
    assert made.status_code == 201
    granted = world.things | {"tenant": "hooli"}
    writes = [route for route in routes_of(app) if route.scope == "adapters:write"]
    # what is deleted can't be written to
    done = {
        str(route): (await send(client, route, granted, globex)).status_code
        for route in sorted(writes, key=lambda route: (route.method == "DELETE", -len(route.path)))
    }
    assert done["PATCH /api/v1/adapters/{name}"] == done["PUT /api/v1/adapters/{name}/aliases/{alias}"] == 200
    assert done["DELETE /api/v1/adapters/{name}/grants/{tenant}"] == done["DELETE /api/v1/adapters/{name}"] == 204
    assert await snapshot(client, app, world) == before


async def test_grantee_cannot_manage_granted_adapter(client: httpx2.AsyncClient, app: FastAPI, world: World) -> None:
    acme, globex = bearer(world.keys["acme"]), bearer(world.keys["globex"])
    granted = await client.put("/api/v1/adapters/acmesql/grants/globex", headers=acme)
    assert granted.status_code == 201
    before = await snapshot(client, app, world)
    absent = world.things | ABSENT
    for route in filter(is_a_tenants, routes_of(app)):
        if "{name}" not in route.path:
            continue
        theirs = said(await send(client, route, world.things, globex), world.things)
        assert theirs == said(await send(client, route, absent, globex), absent), route
        assert theirs[0] == 404, route
    assert await snapshot(client, app, world) == before
    used = {"model": "acme/acmesql", "prompt": "x", "max_tokens": 1}
    assert (await client.post("/v1/completions", json=used, headers=globex)).status_code == 200
