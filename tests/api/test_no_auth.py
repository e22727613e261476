"""A server without keys (--no-auth): whose its requests are, and which are refused."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from whole_app import ADMIN_KEY, app, bearer, client, model_dir, services, started

from loraserve.api.services import Services
from loraserve.settings import Settings

__all__ = ["app", "client", "model_dir", "services", "started"]

WHOAMI = "/api/v1/whoami"
PAGE = "http://localhost:3000"


@pytest.fixture
def local(app: FastAPI, services: Services) -> httpx2.AsyncClient:
    """Client on the server's machine."""
    known = services.settings
    services.settings = Settings(model=known.model, data_dir=known.data_dir, auth=False, cors_allow_origins=(PAGE,))
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1:8000")


async def who(client: httpx2.AsyncClient, **headers: str) -> Any:
    answer = await client.get(WHOAMI, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_request_without_key_is_admin_of_default(local: httpx2.AsyncClient) -> None:
    me = await who(local)
    assert (me["tenant"], me["is_admin"], me["sees_all"], me["key_id"]) == ("default", True, True, "no-auth")
    assert (await local.post("/api/v1/tenants", json={"name": "acme"})).status_code == 201
    audit = (await local.get("/api/v1/audit")).json()["data"]
    assert next(row["actor"] for row in audit if row["action"] == "tenant.create") == "no-auth"
    assert (await who(local, **{"x-tenant": "acme"}))["tenant"] == "acme"
    body = {"model": "org/base:1", "prompt": "x", "max_tokens": 1}
    for headers in ({}, bearer("EMPTY"), {"x-api-key": "none"}, {"authorization": "Basic eA=="}):
        assert (await local.post("/v1/completions", json=body, headers=headers)).status_code == 200


async def test_valid_key_acts_for_tenant(local: httpx2.AsyncClient) -> None:
    await local.post("/api/v1/tenants", json={"name": "acme"})
    key = (await local.post("/api/v1/tenants/acme/keys", json={"name": "ci"})).json()["key"]
    me = await who(local, **bearer(key))
    assert (me["tenant"], me["is_admin"]) == ("acme", False)
    assert (await who(local, **bearer(ADMIN_KEY)))["key_id"] == "admin"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:8000"},
        {"host": "localhost@evil.example"},
        {"host": ""},
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_foreign_page_is_refused_without_key(local: httpx2.AsyncClient, headers: dict[str, str]) -> None:
    for path in (WHOAMI, "/v1/models", "/metrics"):
        answer = await local.get(path, headers=headers)
        assert answer.status_code == 403, answer.text
        assert "--no-auth" in answer.text
    assert (await local.get(WHOAMI, headers=headers | bearer(ADMIN_KEY))).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:8000"},
        {"host": "[::1]:8000"},
        {"origin": "http://127.0.0.1:8000"},
        {"host": "localhost:81", "origin": "http://localhost:81"},
        {"origin": PAGE, "sec-fetch-site": "same-site"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ],
)
async def test_own_and_allowed_pages_need_no_key(local: httpx2.AsyncClient, headers: dict[str, str]) -> None:
    assert (await local.get(WHOAMI, headers=headers)).status_code == 200


async def test_page_of_console_says_whether_keys_are_needed(
    client: httpx2.AsyncClient, local: httpx2.AsyncClient, services: Services
) -> None:
    assert 'data-auth="none"' in (await local.get("/console/")).text
    services.settings = services.settings.model_copy(update={"auth": True})
    assert 'data-auth="key"' in (await client.get("/console/")).text
    assert (await local.get(WHOAMI)).status_code == 401
