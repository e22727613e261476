"""What GET /api/v1/openapi.json says of every route, against the routes themselves."""

from __future__ import annotations

from typing import Any

import httpx2
import orjson
import pytest
from fastapi import FastAPI
from whole_app import BODIES, World, api_routes_of, bearer

from loraserve.api.openapi.document import describe
from loraserve.api.openapi.operations import ANSWERS, CONDITIONAL, MORE_FORMS, MORE_STATUSES, NO_BODY, STORING
from loraserve.api.openapi.operations import BODIES as TOLD_BODIES

_documents: list[bytes] = []


@pytest.fixture
def document(app: FastAPI) -> dict[str, Any]:
    """A copy of the first application's: all have the same routes."""
    if not _documents:
        _documents.append(orjson.dumps(describe(app)))
    document: dict[str, Any] = orjson.loads(_documents[0])
    return document


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }


def test_every_route_is_described(app: FastAPI, document: dict[str, Any]) -> None:
    assert set(operations(document)) == {str(route) for route in api_routes_of(app)}


def test_each_route_declares_required_scope(app: FastAPI, document: dict[str, Any]) -> None:
    said = {route: operation["security"] for route, operation in operations(document).items()}
    for route in api_routes_of(app):
        expected = [] if route.scope == "open" else [{"key": [route.scope]}]
        assert said[str(route)] == expected


def test_each_route_with_body_describes_schema(document: dict[str, Any]) -> None:
    for route, operation in operations(document).items():
        has_body = route.startswith(("POST", "PUT", "PATCH")) and route.replace(" /t/{tenant}/", " /") not in NO_BODY
        assert ("requestBody" in operation) == has_body, route
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert content["schema"], route


def test_every_answer_has_a_form(document: dict[str, Any]) -> None:
    for route, operation in operations(document).items():
        answers = {status: answer for status, answer in operation["responses"].items() if status < "300"}
        assert answers, route
        for status, answer in operation["responses"].items():
            if status in ("204", "304"):
                assert "content" not in answer, route
                continue
            assert answer["content"], (route, status)
            assert all(content["schema"] for content in answer["content"].values()), (route, status)


def test_every_refusal_is_of_the_routes_kind(document: dict[str, Any]) -> None:
    for route, operation in operations(document).items():
        if not operation["security"]:
            continue
        media = "application/problem+json" if " /api/v1" in route else "application/json"
        refusals = {status: answer for status, answer in operation["responses"].items() if status >= "400"}
        assert refusals.keys() >= {"400", "401", "403", "404", "429", "500", "503"}, route
        assert {tuple(answer["content"]) for answer in refusals.values()} == {(media,)}, route


def test_every_name_in_a_path_is_a_parameter(document: dict[str, Any]) -> None:
    for route, operation in operations(document).items():
        named = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"}
        assert named == {part[1:-1] for part in route.split("/") if part.startswith("{")}, route


def test_each_route_has_description_and_unique_id(document: dict[str, Any]) -> None:
    found = operations(document)
    assert len({operation["operationId"] for operation in found.values()}) == len(found)
    for route, operation in found.items():
        assert operation["description"], route
        assert "Raises" not in operation["description"], route


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    found: set[str] = set()
    nodes: list[Any] = [document]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                found.add(node["$ref"].removeprefix("#/components/schemas/"))
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
    assert found <= schemas.keys()
    # nothing is there that nobody answers or takes
    assert schemas.keys() <= found


def test_fixed_length_list_is_described_by_portable_schema(document: dict[str, Any]) -> None:
    modules = document["components"]["schemas"]["Base"]["properties"]["modules"]
    assert modules["additionalProperties"] == {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 2,
    }


def test_extra_route_descriptions_cover_only_existing_routes(app: FastAPI) -> None:
    routes = {str(route) for route in api_routes_of(app)}
    told = {*TOLD_BODIES, *ANSWERS, *MORE_FORMS, *MORE_STATUSES, *NO_BODY, *CONDITIONAL, *STORING}
    assert told <= routes
    assert TOLD_BODIES.keys() == BODIES.keys()


async def test_the_description_is_answered_with_an_etag(client: httpx2.AsyncClient, app: FastAPI, world: World) -> None:
    headers = bearer(world.keys["adapters:read"])
    answer = await client.get("/api/v1/openapi.json", headers=headers)
    assert answer.json() == describe(app)
    assert answer.json()["openapi"].startswith("3.1")
    again = await client.get("/api/v1/openapi.json", headers=headers | {"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
