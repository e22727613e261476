"""Requests that are generated from the application's own description: none may break the server,
and each answer is as described.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import requests
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from whole_app import ADMIN_KEY, OPERATORS, World, api_routes_of, bearer, send

from loraserve.api.openapi.document import describe

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NUM_REQUESTS = {(True, True): 10, (True, False): 3, (False, True): 8, (False, False): 2}
FEW_REQUESTS = {(True, True): 2, (True, False): 1, (False, True): 2}
"""The number of requests to each route, by (is as described, names things that are there)."""

NOTHING_TO_DO = {
    # its mode has to be keep
    "POST /pause": None,
    "POST /t/{tenant}/pause": None,
    "DELETE /api/v1/adapters/{name}/versions/{number}": "conflict",
    "DELETE /api/v1/tenants/{tenant}/keys/{key_id}": "key_not_found",
    "POST /api/v1/tenants/{tenant}/keys/{key_id}/rotate": "key_not_found",
    # the same as without the tenant, which was sent before
    "DELETE /t/{tenant}/v1/responses/{response_id}": None,
    "PATCH /api/v1/uploads/{upload_id}": "invalid_value",
    "DELETE /t/{tenant}/v1/files/{file_id}": None,
    "POST /api/v1/adapters/{name}/aliases/{alias}/rollback": "conflict",
    "POST /api/v1/adapters/{name}/pulls": "permission_denied",
    "POST /api/v1/adapters/{name}/restore": "already_exists",
    "POST /api/v1/adapters/{name}/versions": "upload_not_found",
    "POST /api/v1/adapters/{name}/versions/{number}/restore": "already_exists",
    "POST /api/v1/tenants": "already_exists",
}
"""What the routes say for which the world has nothing to do: it isn't deleted, not moved before,
or an alias's; or it was deleted by the other path a moment before.
"""


def generated(app: FastAPI, world: World, num_requests: dict[tuple[bool, bool], int]) -> Iterator[tuple[str, int, Any]]:
    """Yield (route, how many, strategy of requests to it), what deletes last."""
    schema = schemathesis.openapi.from_dict(describe(app))
    operations = [found.ok() for found in schema.get_all_operations()]
    # a tenant that nothing here belongs to, so that the others' keys go on working
    things = world.things | {"tenant": "hooli"}
    for operation in sorted(operations, key=lambda operation: (operation.method == "delete", -len(operation.path))):
        names = {part[1:-1] for part in operation.path.split("/") if part.startswith("{")}
        own = {
            name: "acme" if operation.path.startswith("/t/") and name == "tenant" else things[name] for name in names
        }
        for (is_described, is_there), number in num_requests.items():
            if (not is_there and not names) or (not is_described and not operation.definition.raw["parameters"]):
                continue
            mode = GenerationMode.POSITIVE if is_described else GenerationMode.NEGATIVE
            strategy = operation.as_strategy(mode, path_parameters=own if is_there else None)
            yield operation.label, number, strategy


def each(strategy: Any, number: int, check: Callable[[Any], None]) -> None:
    """Call `check` with so many of the strategy's, the same in every run."""

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(strategy)
    def run(case: Any) -> None:
        check(case)

    run()


def explain(error: BaseException) -> str:
    """The error with those in it, and the request."""
    inner = [explain(one) for one in getattr(error, "exceptions", ())]
    return " | ".join([f"{type(error).__name__}: {error}", *inner, *getattr(error, "__notes__", ())])


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_requests",
    [pytest.param(FEW_REQUESTS, id="hundreds"), pytest.param(NUM_REQUESTS, id="thousands", marks=pytest.mark.campaign)],
)
async def test_generated_requests_are_answered_as_described(
    client: httpx2.AsyncClient, app: FastAPI, world: World, num_requests: dict[tuple[bool, bool], int]
) -> None:
    loop = asyncio.get_running_loop()
    failures: dict[str, list[str]] = {}
    statuses: dict[str, set[int]] = {}

    async def transmit(prepared: requests.PreparedRequest) -> httpx2.Response:
        headers = [
            (name.encode("latin-1"), value if isinstance(value, bytes) else value.encode("latin-1"))
            for name, value in prepared.headers.items()
            if name.lower() != "content-length"
        ]
        return await client.request(
            prepared.method or "", prepared.url or "", headers=headers, content=prepared.body or b""
        )

    def check(case: Any) -> None:
        security = case.operation.definition.raw["security"]
        key = ADMIN_KEY if security in [[{"key": [scope]}] for scope in OPERATORS] else world.keys["acme"]
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = world.things["model"]
        prepared = requests.Request(**case.as_transport_kwargs(base_url="http://loraserve")).prepare()
        # Most that name a tenant are told that there is no such tenant, and no more.
        if world.things["name"] in case.formatted_path:
            prepared.headers.pop("X-Tenant", None)
        prepared.headers.update(bearer(key))
        answer = asyncio.run_coroutine_threadsafe(transmit(prepared), loop).result()
        statuses.setdefault(case.operation.label, set()).add(answer.status_code)
        # the document describes a stream's text, and schemathesis compares each event with that
        is_stream = answer.headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson"))
        checks = [check for check in CHECKS if check is not response_schema_conformance] if is_stream else CHECKS
        case.validate_response(answer, checks=checks)

    def run() -> None:
        for label, number, strategy in generated(app, world, num_requests):
            try:
                each(strategy, number, check)
            except Exception as error:
                failures.setdefault(label, []).append(explain(error))

    await asyncio.to_thread(run)
    assert failures == {}
    # what was sent was understood often enough to be answered; what these name isn't there
    statuses = {label: seen for label, seen in statuses.items() if "load_lora_adapter" not in label}
    assert len({label for label, seen in statuses.items() if min(seen) < 400}) > len(statuses) * 2 / 3


async def test_successful_requests_match_described_responses(
    client: httpx2.AsyncClient, app: FastAPI, world: World
) -> None:
    schema = schemathesis.openapi.from_dict(describe(app))
    described = {operation.label: operation for operation in (found.ok() for found in schema.get_all_operations())}
    refused = {}
    for route in sorted(api_routes_of(app), key=lambda route: (route.method == "DELETE", route.path.count("/") < 6)):
        things = world.things | {"tenant": "acme" if route.path.startswith("/t/") else "hooli"}
        key = ADMIN_KEY if route.scope in OPERATORS else world.keys["acme"]
        headers = {"x-tenant": "acme"} if key == ADMIN_KEY else {}
        answer = await send(client, route, things, bearer(key) | headers)
        operation = described[str(route)]
        assert str(answer.status_code) in operation.definition.raw["responses"], (route, answer.status_code)
        operation.validate_response(answer)
        if answer.status_code >= 400:
            refused[str(route)] = answer.json().get("code")
    assert refused == NOTHING_TO_DO


async def test_upload_and_published_version_match_described_responses(
    client: httpx2.AsyncClient, app: FastAPI, world: World, make_upload: Callable[..., tuple[bytes, bytes]]
) -> None:
    schema = schemathesis.openapi.from_dict(describe(app))
    config, weights = make_upload(3)
    acme, root = bearer(world.keys["acme"]), "/api/v1"
    upload, size = f"{root}/uploads/{world.things['upload_id']}", len(weights)
    piece = acme | {"content-range": f"bytes 0-{size - 1}/{size}"}
    sent = await client.patch(upload, content=weights, headers=piece)
    assert sent.json()["is_complete"] is True
    schema["/api/v1/uploads/{upload_id}"]["PATCH"].validate_response(sent)
    publish, body = f"{root}/adapters/acmesql/versions", {"config": json.loads(config), "blob": world.things["sha256"]}
    operation = schema["/api/v1/adapters/{name}/versions"]["POST"]
    for status in (201, 200):
        published = await client.post(publish, json=body, headers=acme)
        assert published.status_code == status
        operation.validate_response(published)
    moved = await client.post(f"{root}/adapters/acmesql/aliases/live/rollback", headers=acme)
    assert moved.status_code == 200
    schema["/api/v1/adapters/{name}/aliases/{alias}/rollback"]["POST"].validate_response(moved)
