"""Web pages of other origins: none may call unless the operator names it, and then every answer
says so.
"""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from loraserve.api.services import Services
from loraserve.errors import EngineUnavailable
from loraserve.limits import LIMITS
from loraserve.settings import Settings

APP, OTHER = "https://app.example.org", "https://evil.example.org"
BODY = {"model": "sql", "prompt": "x", "max_tokens": 3}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}


@pytest.fixture
def origins() -> str | None:
    return APP


@pytest.fixture
async def services(services: Services, origins: str | None) -> Services:
    known = services.settings
    services.settings = Settings(model=known.model, data_dir=known.data_dir, cors_allow_origins=origins or ())
    return services


def cors(answer: httpx2.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


async def test_preflight_of_named_origin_needs_no_key(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url) as stranger:
        for path in ("/v1/chat/completions", "/generate_stream", "/api/v1/adapters", "/t/acme/v1/models"):
            answer = await stranger.options(path, headers={"origin": APP, **PREFLIGHT})
            assert answer.status_code == 200
            told = cors(answer)
            assert told["access-control-allow-origin"] == APP
            assert told["access-control-allow-headers"] == "authorization,x-stainless-os"
            assert "POST" in told["access-control-allow-methods"]
            assert "access-control-allow-credentials" not in told
            assert "Origin" in answer.headers["vary"]
        refused = await stranger.options("/v1/models", headers={"origin": OTHER, **PREFLIGHT})
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in cors(refused)


async def test_other_origins_hold_from_the_next_request_on(client: httpx2.AsyncClient, services: Services) -> None:
    async def allowed(origin: str) -> str | None:
        answer = await client.get("/v1/models", headers={"origin": origin})
        return cors(answer).get("access-control-allow-origin")

    assert (await allowed(APP), await allowed(OTHER)) == (APP, None)
    services.settings = services.settings.model_copy(update={"cors_allow_origins": (OTHER,)})
    assert (await allowed(APP), await allowed(OTHER)) == (None, OTHER)
    services.settings = services.settings.model_copy(update={"cors_allow_origins": ()})
    assert (await allowed(APP), await allowed(OTHER)) == (None, None)


async def test_answers_streams_and_errors_carry_cors_headers(url: str, client: httpx2.AsyncClient, engine: Any) -> None:
    headers = {"origin": APP}
    answers = [
        await client.post("/v1/completions", json=BODY, headers=headers),
        await client.post("/v1/completions", json=BODY | {"stream": True}, headers=headers),
        await client.post("/v1/completions", json=BODY | {"temperature": -1}, headers=headers),
        await client.get("/v1/nothing", headers=headers),
        await client.get("/v1/completions", headers=headers),
        # the guard's own
        await client.post("/v1/completions", content=b"x" * (LIMITS.max_body_bytes + 1), headers=headers),
        await client.get("/v1/models", headers=headers | {"authorization": "Bearer no"}),
    ]
    engine.fail_after, engine.failure = 0, EngineUnavailable("The engine is away.")
    answers.append(await client.post("/v1/completions", json=BODY, headers=headers))
    assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 405, 413, 401, 503]
    for answer in answers:
        told = cors(answer)
        assert told["access-control-allow-origin"] == APP
        assert "x-request-id" in told["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in told


async def test_unlisted_origin_gets_no_cors_headers(client: httpx2.AsyncClient) -> None:
    for headers in ({}, {"origin": OTHER}, {"origin": "null"}, {"origin": APP + ".evil.example"}):
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in cors(answer)


@pytest.mark.parametrize("origins", ["*"])
async def test_star_allows_all_origins_without_credentials(client: httpx2.AsyncClient, origins: str) -> None:
    answer = await client.post("/v1/completions", json=BODY, headers={"origin": OTHER, "cookie": "a=b"})
    assert cors(answer)["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in cors(answer)


@pytest.mark.parametrize("origins", [None])
async def test_without_the_setting_no_page_may_call(client: httpx2.AsyncClient, origins: None) -> None:
    assert cors(await client.post("/v1/completions", json=BODY, headers={"origin": APP})) == {}
    preflight = await client.options("/v1/completions", headers={"origin": APP, **PREFLIGHT})
    assert (preflight.status_code, cors(preflight)) == (405, {})
