"""Every route × every kind of credential, generated from the application's own list of routes."""

from __future__ import annotations

import httpx2
import pytest
from fastapi import FastAPI
from whole_app import ADMIN_KEY, OPERATORS, ROLES, SCOPES, UNDESCRIBED, World, bearer, filled, routes_of, send

OPEN = {"GET /livez", "GET /readyz", "GET /health", "GET /ping", "POST /ping"}


async def statuses(client: httpx2.AsyncClient, app: FastAPI, world: World, headers: dict[str, str]) -> dict[str, int]:
    """What each route that needs a key answers."""
    return {
        str(route): (await send(client, route, world.things, headers)).status_code
        for route in routes_of(app)
        if route.scope != "open"
    }


def test_only_probes_and_console_are_open(app: FastAPI) -> None:
    assert {str(route) for route in routes_of(app) if route.scope == "open"} == OPEN | UNDESCRIBED


async def test_probes_answer_without_a_key(client: httpx2.AsyncClient, app: FastAPI) -> None:
    for route in OPEN:
        method, path = route.split()
        assert (await client.request(method, path)).status_code == 200


@pytest.mark.parametrize("key", ["none", "made up", "malformed", "revoked", "expired"])
async def test_invalid_key_opens_no_route(client: httpx2.AsyncClient, app: FastAPI, world: World, key: str) -> None:
    headers = {
        "none": {},
        "made up": bearer("sk-lora-" + "a" * 43),
        "malformed": {"authorization": world.keys["acme"]},
        "revoked": bearer(world.keys["revoked"]),
        "expired": bearer(world.keys["expired"]),
    }[key]
    answers = await statuses(client, app, world, headers)
    assert {route: status for route, status in answers.items() if status != 401} == {}


async def test_bad_keys_can_not_be_told_apart(client: httpx2.AsyncClient, app: FastAPI, world: World) -> None:
    for route in routes_of(app):
        if route.scope == "open":
            continue
        answers = {
            (await send(client, route, world.things, bearer(key))).content
            for key in ("sk-lora-" + "a" * 43, world.keys["revoked"], world.keys["expired"])
        }
        assert len(answers) == 1, route


@pytest.mark.parametrize("scope", SCOPES)
async def test_scope_opens_only_matching_routes(
    client: httpx2.AsyncClient, app: FastAPI, world: World, scope: str
) -> None:
    answers = await statuses(client, app, world, bearer(world.keys[scope]))
    scopes = {str(route): route.scope for route in routes_of(app)}
    refused = {route for route, status in answers.items() if status == 403}
    # acme's prefix is not this key's: a 404, once the scope is there
    assert refused == {route for route in answers if scopes[route] != scope}
    assert 401 not in answers.values()


async def test_a_tenants_key_opens_no_admin_route(client: httpx2.AsyncClient, app: FastAPI, world: World) -> None:
    answers = await statuses(client, app, world, bearer(world.keys["acme"]))
    admin = {str(route) for route in routes_of(app) if route.scope in OPERATORS}
    assert {route for route, status in answers.items() if status in (401, 403)} == admin


async def test_metrics_key_opens_only_metrics(client: httpx2.AsyncClient, app: FastAPI, world: World) -> None:
    answers = await statuses(client, app, world, bearer(world.keys["metrics:read"]))
    assert answers.pop("GET /metrics") == 200
    assert {route: status for route, status in answers.items() if status != 403} == {}


@pytest.mark.parametrize("tenant", [None, "acme"])
async def test_an_admin_key_opens_every_route(
    client: httpx2.AsyncClient, app: FastAPI, world: World, tenant: str | None
) -> None:
    headers = bearer(ADMIN_KEY) | ({} if tenant is None else {"x-tenant": tenant})
    answers = await statuses(client, app, world, headers)
    refused = {route: status for route, status in answers.items() if status in (401, 403) or status >= 500}
    # whose source this server's operator doesn't allow to anyone
    assert refused == {"POST /api/v1/adapters/{name}/pulls": 403}


OPENED = {
    "operator:read": {"operator:read", "adapters:read", "metrics:read"},
    "metrics:read": {"metrics:read"},
}
TENANTS_OWN = "GET /api/v1/adapters/{name}/versions/{number}/files/{file}"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("tenant", [None, "acme"])
async def test_role_opens_only_permitted_routes(
    client: httpx2.AsyncClient, app: FastAPI, world: World, role: str, tenant: str | None
) -> None:
    headers = bearer(world.keys[f"role {role}"]) | ({} if tenant is None else {"x-tenant": tenant})
    answers = await statuses(client, app, world, headers)
    scopes = {str(route): route.scope for route in routes_of(app)}
    opened = {route for route in answers if scopes[route] in OPENED[role]} - {TENANTS_OWN}
    assert {route for route, status in answers.items() if status == 403} == answers.keys() - opened
    # what it opens changes nothing
    assert {route.partition(" ")[0] for route in opened} == {"GET"}
    assert not {answers[route] for route in opened} & {401, 500, 503}
    if role == "operator:read" and tenant == "acme":
        assert {route: answers[route] for route in opened if answers[route] != 200} == {}


async def test_operator_reader_sees_all_tenants_without_secrets(client: httpx2.AsyncClient, world: World) -> None:
    headers = bearer(world.keys["role operator:read"])
    audit = (await client.get("/api/v1/audit?limit=200", headers=headers)).json()["data"]
    assert {entry["tenant"] for entry in audit} >= {"acme", "globex"}
    for path in ("/api/v1/admin-keys", "/api/v1/tenants/acme/keys"):
        text = (await client.get(path, headers=headers)).text
        assert not any(key in text for key in world.keys.values())
    metrics = bearer(world.keys["role metrics:read"])
    absent = await client.get("/metrics", headers=metrics | {"x-tenant": "nobody"})
    theirs = await client.get("/metrics", headers=metrics | {"x-tenant": "acme"})
    assert (absent.status_code, absent.content) == (theirs.status_code, theirs.content) == (404, theirs.content)


async def test_admin_key_cannot_act_for_absent_tenant(client: httpx2.AsyncClient, app: FastAPI, world: World) -> None:
    answers = await statuses(client, app, world, bearer(ADMIN_KEY) | {"x-tenant": "nobody"})
    assert {route: status for route, status in answers.items() if status != 404} == {}


async def test_path_accepts_only_declared_methods(client: httpx2.AsyncClient, app: FastAPI, world: World) -> None:
    taken: dict[str, set[str]] = {}
    for route in routes_of(app):
        taken.setdefault(route.path, set()).add(route.method)
    for path, methods in taken.items():
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} - methods:
            answer = await client.request(method, filled(path, world.things), headers=bearer(ADMIN_KEY))
            assert answer.status_code == 405, (method, path)
            assert set(answer.headers["allow"].split(", ")) == methods, (method, path)
            body = answer.json()
            # management and LoRAX's routes have their own forms
            code = body["code"] if "code" in body else body["error"]["code"]
            assert code == "method_not_allowed", (method, path)
