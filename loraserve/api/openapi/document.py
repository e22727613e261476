"""Build the OpenAPI document from the routes' signatures and `operations`."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from loraserve.api import scopes
from loraserve.api.errors import MANAGEMENT_PREFIX
from loraserve.api.openapi import operations
from loraserve.api.openapi.operations import JSON, Content
from loraserve.contract.ollama.models import OllamaError
from loraserve.contract.result import Error, GenerateError, MessageError, Problem

Node = dict[str, Any]

_TENANT_PREFIX = "/t/{tenant}"
_PROBLEM = "application/problem+json"
_REFERENCE = "#/components/schemas/{model}"
_SECURITY = "key"

_SERVER = frozenset({"/livez", "/readyz", "/health", "/ping", "/version", "/metrics"})

# Refusals of the guard and of the key, which any route with one may give; 429: a rate or a quota.
_ANY = (400, 401, 403, 404, 408, 413, 429, 431, 500, 503)
_CHANGES = (409, 422)

_PROMPT: Node = {
    "description": "A text, or its tokens, or several of either.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ],
}
_MESSAGES: Node = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string"},
            "content": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
            },
            "name": {"type": "string"},
        },
        "required": ["role"],
    },
}
_STOP: Node = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_LOGIT_BIAS: Node = {
    "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}],
    "description": "Token id → the number that is added to its logit.",
}
_NULL: Node = {"type": "null"}
_SCHEMA: Node = {"type": "object", "description": "A JSON schema."}
_RESPONSE_FORMAT: Node = {
    "description": "What the answer has to be; text: anything.",
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {
                    "enum": ["text", "json_object", "json_schema", "structural_tag", "regex", "grammar"],
                },
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                        "schema": _SCHEMA,
                        "strict": {"type": ["boolean", "null"]},
                    },
                    "required": ["schema"],
                },
            },
            "required": ["type"],
        },
        _NULL,
    ],
}
_STRUCTURED_OUTPUTS: Node = {
    "description": "What the answer has to be, as vLLM says it: one of json, json_object, regex, choice, grammar"
    " and structural_tag.",
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "json": {"type": ["object", "string"]},
                "json_object": {"type": "boolean"},
                "regex": {"type": "string"},
                "choice": {"type": "array", "items": {"type": "string"}},
                "grammar": {"type": "string"},
                "structural_tag": {"type": ["object", "string"]},
                "disable_any_whitespace": {"type": "boolean"},
                "disable_additional_properties": {"type": "boolean"},
                "disable_number_bounds": {"type": "boolean"},
                "whitespace_pattern": {"type": "string"},
            },
        },
        _NULL,
    ],
}


def _also(name: str, *types: str) -> Node:
    return {"type": [*types, "null"], "description": f"As structured_outputs.{name}."}


_CHOICE: Node = {
    "anyOf": [{"type": "array", "items": {"type": "string"}}, _NULL],
    "description": "As structured_outputs.choice.",
}
_NAMES: Node = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        {"type": "null"},
    ],
    "description": "The adapter, or the same one for each prompt.",
}
# Fields that the models leave to code with better messages.
_FIELDS: Mapping[str, Node] = {
    "prompt": _PROMPT,
    "messages": _MESSAGES,
    "stop": _STOP,
    "logit_bias": _LOGIT_BIAS,
    "response_format": _RESPONSE_FORMAT,
    "structured_outputs": _STRUCTURED_OUTPUTS,
    "guided_json": _also("json", "object", "string"),
    "guided_json_object": _also("json_object", "boolean"),
    "guided_regex": _also("regex", "string"),
    "guided_choice": _CHOICE,
    "guided_grammar": _also("grammar", "string"),
    "guided_whitespace_pattern": _also("whitespace_pattern", "string"),
    "json_schema": _also("json", "object", "string"),
    "regex": _also("regex", "string"),
    "ebnf": _also("grammar", "string"),
    "grammar": _also("grammar", "string"),
    "structural_tag": _also("structural_tag", "object", "string"),
    "lora_path": _NAMES,
}


def describe(app: FastAPI) -> Node:
    """Describe every route of `app` in OpenAPI 3.1.

    Parameters, bodies, answers, errors and scopes are described.
    """
    document = get_openapi(
        title=app.title,
        version=app.version,
        description="Serve thousands of LoRA adapters from one resident base model.",
        routes=app.routes,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas.update(_schemas())
    document["components"]["securitySchemes"] = {
        _SECURITY: {"type": "http", "scheme": "bearer", "description": "A key: `sk-lora-…`."}
    }
    scope_of = {
        (context.path_format, method): next(iter(declared))
        for context, (_, methods, declared) in zip(
            iter_route_contexts(app.routes), scopes.declared_scopes(app), strict=True
        )
        for method in methods
    }
    _plain_lists(schemas)
    for path, item in document["paths"].items():
        for method, operation in item.items():
            _complete(operation, path, method.upper(), scope_of[path, method.upper()])
    return document


def _plain_lists(node: Any) -> None:
    """Describe alike items of a list of fixed length once: not every tool reads ``prefixItems``."""
    if isinstance(node, dict):
        items = node.get("prefixItems")
        if isinstance(items, list) and items and all(item == items[0] for item in items):
            del node["prefixItems"]
            node["items"] = items[0]
        for child in node.values():
            _plain_lists(child)
    elif isinstance(node, list):
        for child in node:
            _plain_lists(child)


def _complete(operation: Node, path: str, method: str, scope: str) -> None:
    """Add what the signature of the route didn't say."""
    key = f"{method} {path.removeprefix(_TENANT_PREFIX)}"
    is_open, is_management = scope == "open", path.startswith(MANAGEMENT_PREFIX)
    text: str = operation.get("description", "")
    text = text.partition("\n\nRaises")[0].partition("\nRaises")[0]
    operation["description"] = text or f"{operation['summary']}."
    operation["tags"] = [_tag(path)]
    operation["security"] = [] if is_open else [{_SECURITY: [scope]}]
    operation["parameters"] = _parameters(operation, key, path, is_open=is_open)
    body = operations.BODIES.get(key)
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _content(body)}
    operation["responses"] = dict(sorted(_responses(operation["responses"], key, is_management, is_open).items()))


def _tag(path: str) -> str:
    if path.rpartition("/")[2].startswith(("load_lora", "unload_lora")):
        return "adapters"
    if "/v1/files" in path or "/v1/batches" in path:
        return "batches"
    if not path.startswith(MANAGEMENT_PREFIX):
        return "server" if path in _SERVER else "inference"
    return path.removeprefix(MANAGEMENT_PREFIX).split("/")[1].removesuffix(".json")


def _parameters(operation: Node, key: str, path: str, *, is_open: bool) -> list[Node]:
    parameters: list[Node] = list(operation.get("parameters", ()))
    if path.startswith(_TENANT_PREFIX):
        parameters.insert(0, _parameter("tenant", "The tenant to act for.", where="path"))
    if is_open:
        return parameters
    method = key.partition(" ")[0]
    if not path.startswith(_TENANT_PREFIX):
        parameters.append(_parameter("X-Tenant", "For an admin key: the tenant to act for."))
    if MANAGEMENT_PREFIX in path and method == "POST":
        parameters.append(
            _parameter(
                "Idempotency-Key", "Makes the request idempotent: sent again with this key, it gets the same answer."
            )
        )
    if MANAGEMENT_PREFIX in path and method == "GET":
        parameters.append(
            _parameter("If-None-Match", "ETags that the client has: 304 if the current state is among them.")
        )
    if key in operations.CONDITIONAL:
        parameters.append(
            _parameter("If-Match", "The ETag of the state to change: 412 if the current state is another one.")
        )
    if key == "PUT /api/v1/adapters/{name}/aliases/{alias}":
        parameters.append(_parameter("If-None-Match", "`*`: only if the alias doesn't exist yet; 412 if it does."))
    if key == "PATCH /api/v1/uploads/{upload_id}":
        piece = _parameter("Content-Range", "bytes FIRST-LAST/SIZE", is_required=True)
        piece["schema"]["pattern"] = "^bytes [0-9]{1,15}-[0-9]{1,15}/[0-9]{1,15}$"
        parameters.append(piece)
    return parameters


def _parameter(name: str, description: str, *, where: str = "header", is_required: bool = False) -> Node:
    schema = {"type": "string"}
    return {
        "name": name,
        "in": where,
        "required": is_required or where == "path",
        "description": description,
        "schema": schema,
    }


def _responses(given: Node, key: str, is_management: bool, is_open: bool) -> Node:
    usual = next(status for status in given if status.startswith("2"))
    answer = given[usual]
    if key in operations.ANSWERS:
        answer["content"] = _content(operations.ANSWERS[key])
    if key in operations.MORE_FORMS:
        answer["content"] |= _content(operations.MORE_FORMS[key])
    answer["description"] = HTTPStatus(int(usual)).phrase
    responses = {usual: answer}
    for status in operations.MORE_STATUSES.get(key, ()):
        responses[str(status)] = answer | {"description": HTTPStatus(status).phrase}
    if is_open:
        return responses | {"503": answer | {"description": "Not now."}}
    if is_management and key.startswith("GET "):
        responses["304"] = {"description": "Not modified: If-None-Match names the current state."}
    error: type[BaseModel] = GenerateError if key in operations.GENERATING else Error
    error = MessageError if key in operations.MESSAGES else error
    error = OllamaError if key in operations.OLLAMA else error
    for status in _errors(key, is_management):
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {_PROBLEM: _named(Problem)} if is_management else {JSON: _named(error)},
        }
    return responses


def _errors(key: str, is_management: bool) -> set[int]:
    found = set(_ANY)
    is_storing = key in operations.STORING
    if not is_management:
        # a version in quarantine or of another base; a timeout of the request's own
        is_generating = key in operations.CHATS or key in operations.GENERATING
        return found | {409} | ({504} if is_generating else set()) | ({507} if is_storing else set())
    if not key.startswith("GET "):
        found |= set(_CHANGES)
    if key in operations.CONDITIONAL:
        found.add(412)
    if is_storing:
        found.add(507)
    return found


def _content(content: Content) -> Node:
    return {
        media: {"schema": dict(kind)} if isinstance(kind, Mapping) else _named(kind) for media, kind in content.items()
    }


def _named(model: type[BaseModel]) -> Node:
    return {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}


def _schemas() -> Node:
    """Return the schemas of the models in `operations`, and of the models in them."""
    bodies = [kind for content in operations.BODIES.values() for kind in content.values() if isinstance(kind, type)]
    answers: list[type[BaseModel]] = [Error, GenerateError, MessageError, OllamaError, Problem]
    answers += [kind for content in operations.ANSWERS.values() for kind in content.values() if isinstance(kind, type)]
    _, read = models_json_schema([(model, "validation") for model in bodies], ref_template=_REFERENCE)
    _, written = models_json_schema([(model, "serialization") for model in answers], ref_template=_REFERENCE)
    schemas: Node = {**read["$defs"], **written["$defs"]}
    for model in bodies:
        properties = schemas[model.__name__]["properties"]
        for name, schema in _FIELDS.items():
            # {} and a title: anything
            if name in properties and "type" not in properties[name] and "anyOf" not in properties[name]:
                properties[name] = schema
    return schemas
