"""Answers against `loraserve.contract`: nothing missing, nothing unknown, and one class for a
route's answer on both sides.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from shapes import closed, faults
from whole_app import ADMIN_KEY, BODIES, OPERATORS, World, api_routes_of, bearer, send

from loraserve import contract
from loraserve.api.metrics.version_traffic import Role
from loraserve.api.openapi.document import describe
from loraserve.contract.chat import ChatCompletionChunk
from loraserve.contract.completion import Completion
from loraserve.contract.residency import AdapterResidency
from loraserve.contract.result import Result, sent_as
from loraserve.contract.traffic import VersionTraffic
from loraserve.sdk import AsyncClient
from loraserve.sdk._async.transport import AsyncTransport
from loraserve.sdk.call import Call
from loraserve.types import Tier

JSON = ("application/json", "application/problem+json")
PREFIX = "#/components/schemas/"
FORMS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "POST /v1/completions": ({"logprobs": 1, "prompt_logprobs": 1, "return_token_ids": True, "echo": True},),
    "POST /v1/chat/completions": (
        {"logprobs": True, "top_logprobs": 1, "return_token_ids": True},
        {"prompt_logprobs": 1, "n": 2},
    ),
    "POST /v1/responses": ({"include": ["message.output_text.logprobs"], "tools": [], "metadata": {"a": "b"}},),
    "POST /api/chat": ({"logprobs": True, "top_logprobs": 1}, {"messages": []}),
    "POST /api/generate": ({"logprobs": True}, {"prompt": ""}),
    "POST /api/embed": ({"input": ""},),
    "POST /v1/embeddings": ({"encoding_format": "base64"},),
    "POST /v1/rerank": ({"return_documents": False},),
    "POST /tokenize": ({"return_token_strs": True},),
    "POST /generate": (
        {
            "parameters": {
                "details": True,
                "decoder_input_details": True,
                "return_k_alternatives": 1,
                "top_n_tokens": 1,
                "max_new_tokens": 1,
            }
        },
    ),
}
"""Fields of requests by which answers get their optional ones."""


def answer_schema(document: dict[str, Any], method: str, path: str, status: int) -> Any:
    """Return the schema of a route's JSON answer; None if it is described as something else."""
    content = document["paths"][path][method.lower()]["responses"][str(status)].get("content", {})
    return next((content[media]["schema"] for media in JSON if media in content), None)


@pytest.fixture
def document(app: FastAPI) -> dict[str, Any]:
    return closed(describe(app))


async def test_answers_have_exactly_fields_of_contract(
    client: httpx2.AsyncClient, app: FastAPI, world: World, document: dict[str, Any]
) -> None:
    wrong: dict[str, list[str]] = {}
    seen: set[str] = set()

    def check(method: str, path: str, answer: httpx2.Response) -> None:
        schema = answer_schema(document, method, path, answer.status_code)
        if schema is None or answer.headers.get("content-type", "").partition(";")[0] not in JSON:
            return
        seen.add(f"{method} {path}")
        if found := faults({"components": document["components"], "allOf": [schema]}, answer.json()):
            wrong.setdefault(f"{method} {path} {answer.status_code}", []).extend(found)

    for route in sorted(api_routes_of(app), key=lambda route: (route.method == "DELETE", route.path.count("/") < 6)):
        things = world.things | {"tenant": "acme" if route.path.startswith("/t/") else "hooli"}
        key = ADMIN_KEY if route.scope in OPERATORS else world.keys["acme"]
        headers = bearer(key) | ({"x-tenant": "acme"} if key == ADMIN_KEY else {})
        check(route.method, route.path, await send(client, route, things, headers))
        if route.method == "GET":
            # an admin sees fields that are null for a tenant
            headers = bearer(ADMIN_KEY) | ({} if route.path.startswith("/t/") else {"x-tenant": "acme"})
            check(route.method, route.path, await send(client, route, things, headers))
    admin = bearer(ADMIN_KEY) | {"x-tenant": "acme"}
    for label, forms in FORMS.items():
        method, _, path = label.partition(" ")
        for form in forms:
            body = BODIES[label]["json"] | form
            named = {"model": services_model(app)} if "model" in body else {}
            answer = await client.request(method, path, json=body | named, headers=admin)
            assert answer.status_code == 200, (label, answer.text)
            check(method, path, answer)
    for path in ("/v1/models/none", "/api/v1/adapters/none"):
        answer = await client.get(path, headers=admin)
        schema = answer_schema(
            document, "get", f"{path.removesuffix('none')}{{{'model' if 'models' in path else 'name'}}}", 404
        )
        assert not faults({"components": document["components"], "allOf": [schema]}, answer.json())
    assert wrong == {}
    assert len(seen) > 100


def services_model(app: FastAPI) -> str:
    model: str = app.state.services.engine.base.id
    return model


@pytest.mark.parametrize(
    ("path", "shape", "form"),
    [
        ("/v1/completions", Completion, {"logprobs": 1}),
        ("/v1/chat/completions", ChatCompletionChunk, {"logprobs": True, "top_logprobs": 1}),
    ],
)
async def test_chunks_have_only_fields_of_contract(
    client: httpx2.AsyncClient, app: FastAPI, world: World, path: str, shape: type[Result], form: dict[str, Any]
) -> None:
    more = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    body = BODIES[f"POST {path}"]["json"] | form | more | {"model": services_model(app)}
    answer = await client.post(path, json=body, headers=bearer(world.keys["acme"]))
    frames = [frame.removeprefix("data: ") for frame in answer.text.split("\n\n") if frame]
    assert frames[-1] == "[DONE]"
    assert len(frames) > 2
    for frame in frames[:-1]:
        shape.model_validate_json(frame, extra="forbid")


def test_answers_of_routes_are_classes_of_contract(document: dict[str, Any]) -> None:
    found: set[str] = set()
    nodes: list[Any] = [operation["responses"] for item in document["paths"].values() for operation in item.values()]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes.extend(node)
        elif isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix(PREFIX)
            if name and name not in found:
                found.add(name)
                nodes.append(document["components"]["schemas"][name])
            nodes.extend(node.values())
    known = {schema_name(cls) for cls in classes_of_contract()}
    assert found <= known
    assert len(found) > 80


def classes_of_contract() -> Iterator[type[Result]]:
    """Yield each shape of answers, with pages of each kind."""
    classes: list[type[Result]] = [Result]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if origin(cls).__module__.startswith(f"{contract.__name__}."):
            yield cls


def origin(cls: type[BaseModel]) -> type[BaseModel]:
    """Return the class, of ``Page[Version]`` ``Page``: its copies are of other modules."""
    return getattr(cls, "__pydantic_generic_metadata__", {}).get("origin") or cls


def schema_name(cls: type[BaseModel]) -> str:
    return re.sub(r"\W", "_", cls.__name__)


class _Sent(Exception):
    """A call was recorded."""


def sample(parameter: inspect.Parameter) -> Any:
    hint = str(parameter.annotation)
    if hint.startswith(("int", "float")):
        return 1
    if "Mapping" in hint and "Sequence" not in hint:
        return {"x": 1}
    return ["x"] if hint.startswith("Sequence") else "x"


async def sdk_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Call[Any]]:
    """Return the first call of each of the SDK's methods, by the method's name."""
    calls: list[Call[Any]] = []

    async def record(self: AsyncTransport, call: Call[Any], *_: Any, **__: Any) -> None:
        calls.append(call)
        raise _Sent

    monkeypatch.setattr(AsyncTransport, "send", record)
    found: dict[str, Call[Any]] = {}
    client = AsyncClient("http://server", api_key="key")
    holders: list[tuple[str, Any]] = [("client", client)]
    while holders:
        title, holder = holders.pop()
        for name in (name for name in dir(holder) if not name.startswith("_")):
            member = inspect.getattr_static(holder, name)
            if type(member).__module__.startswith("loraserve.sdk._async"):
                holders.append((f"{title}.{name}", member))
            elif inspect.isfunction(member):
                required = {
                    key: sample(parameter)
                    for key, parameter in inspect.signature(member).parameters.items()
                    if parameter.default is parameter.empty
                    and key != "self"
                    and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
                }
                calls.clear()
                try:
                    given = getattr(holder, name)(**required)
                    await (anext(given) if inspect.isasyncgen(given) else given)
                except Exception:
                    # those that read files first send nothing
                    pass
                if calls:
                    found[f"{title}.{name}"] = calls[0]
    return found


async def test_sdk_returns_class_declared_by_route(monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]) -> None:
    routes = sorted(document["paths"], key=lambda path: path.count("{"))
    declared = {schema_name(cls): cls for cls in classes_of_contract()}
    different, kinds = {}, set()
    for title, call in (await sdk_calls(monkeypatch)).items():
        kind = inspect.getclosurevars(call.read).nonlocals.get("kind")
        if kind is None:
            continue
        path = next(route for route in routes if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", route), call.path))
        responses = document["paths"][path][call.method.lower()]["responses"]
        status = next(status for status in responses if status.startswith("2"))
        schema = answer_schema(document, call.method, path, int(status))
        answered = declared[schema["$ref"].removeprefix(PREFIX)]
        # the page of residency has more than other pages
        if not issubclass(answered, kind):
            different[title] = f"{call.method} {path} answers {answered.__name__}, not {kind.__name__}"
        kinds.add(kind)
    assert different == {}
    assert len(kinds) > 25


def test_sdk_and_routes_define_no_answers() -> None:
    """Neither side has a model of its own that repeats a shape's fields."""
    names = {frozenset(cls.model_fields) for cls in classes_of_contract() if len(cls.model_fields) > 2}
    classes: list[type[BaseModel]] = [BaseModel]
    repeated = set()
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if (
            origin(cls).__module__.startswith(("loraserve.api.", "loraserve.sdk."))
            and frozenset(cls.model_fields) in names
        ):
            repeated.add(f"{cls.__module__}.{cls.__name__}")
    assert repeated == set()


def test_words_of_shapes_match_enums() -> None:
    tier, role = AdapterResidency.model_fields["tier"], VersionTraffic.model_fields["role"]
    assert sorted(sent_as(tier).words) == sorted(Tier)
    assert sorted(sent_as(role).words) == sorted(Role)
