"""Strict checks of JSON against the shapes of `loraserve.contract`."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from loraserve.contract.result import Result


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its objects closed: an unknown field is a fault."""
    schema = json.loads(json.dumps(schema))
    nodes: list[Any] = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if node.get("type") == "object" and isinstance(node.get("properties"), dict) and node["properties"]:
                node.setdefault("additionalProperties", False)
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
    return schema


def faults(schema: dict[str, Any], value: Any) -> list[str]:
    """Return what is missing, unknown or of another type, each with its place."""
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(value)]


def faults_of(shape: type[Result], value: Any) -> list[str]:
    """Return how an answer differs from the shape in which the server sends it."""
    return faults(closed(shape.model_json_schema(mode="serialization")), value)
