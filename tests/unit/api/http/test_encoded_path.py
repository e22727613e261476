"""Paths whose encoded slashes belong to a name."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import compile_path

from loraserve.api.http.request_path import MODEL, NAME, keep_encoded_slashes

VERSIONS = f"/adapters/{NAME}/versions"


def routed(raw_path: str) -> str:
    """Return the path by which a request is routed."""
    scope: dict[str, Any] = {"path": unquote(raw_path), "raw_path": raw_path.encode()}
    keep_encoded_slashes(scope)
    return str(scope["path"])


def matched(route: str, raw_path: str) -> str | None:
    """Return the name that the route finds in the path; None: it doesn't match."""
    pattern, _, convertors = compile_path(route)
    found = re.match(pattern, routed(raw_path))
    if found is None:
        return None
    ((name, value),) = found.groupdict().items()
    return str(convertors[name].convert(value))


@given(st.text(min_size=1, max_size=20).filter(lambda name: "\n" not in name))
def test_encoded_name_is_read_whole(name: str) -> None:
    encoded = quote(name, safe="", errors="replace")
    expected = unquote(encoded)
    assert matched(VERSIONS, f"/adapters/{encoded}/versions") == expected
    assert matched(f"/models/{MODEL}", f"/models/{encoded}") == expected


@pytest.mark.parametrize(
    ("raw_path", "name"),
    [
        ("/adapters/Qwen%2FMy-LoRA/versions", "Qwen/My-LoRA"),
        ("/adapters/Qwen%2fMy-LoRA/versions", "Qwen/My-LoRA"),
        ("/adapters/x%3Av2/versions", "x:v2"),
        ("/adapters/x:v2/versions", "x:v2"),
        # decoded once
        ("/adapters/a%252Fb/versions", "a%2Fb"),
        ("/adapters/a%2%46b/versions", "a%2Fb"),
        ("/adapters/a%zz/versions", "a%zz"),
        ("/adapters/Qwen/My-LoRA/versions", None),
        ("/adapters%2Fx/versions", None),
        ("/adapters/x%2Fversions", None),
    ],
)
def test_slash_separates_only_where_plain(raw_path: str, name: str | None) -> None:
    assert matched(VERSIONS, raw_path) == name


def test_model_takes_plain_slashes_too() -> None:
    assert matched(f"/models/{MODEL}", "/models/Qwen/My-LoRA@3") == "Qwen/My-LoRA@3"


def test_path_without_encoding_stays_unchanged() -> None:
    scope: dict[str, Any] = {"path": "/root/x", "raw_path": b"/x"}
    keep_encoded_slashes(scope)
    assert scope["path"] == "/root/x"
