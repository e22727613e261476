"""Paths of requests as their routes have them.

Encoded slashes belong to a name: ``/adapters/Qwen%2FMy-LoRA/versions``. A server decodes a
request's path before it is routed, so that a slash of a name would separate it.
`keep_encoded_slashes` leaves such slashes encoded, and the convertors of `NAME` and `MODEL` decode
what they match.

Inference routes have other spellings. OpenAI's and Anthropic's clients append ``/chat/completions``
or ``/v1/messages`` to a base URL, with or without ``/v1`` in it; Azure's name a deployment, whose
model is in the body as well.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.convertors import Convertor, register_url_convertor
from starlette.types import Scope

NAME = "{name:adapter_name}"
"""Part of a route's path that is an adapter's name, in one segment."""
MODEL = "{model:model_name}"
"""Remainder of a route's path that is a model's name, with encoded or plain slashes."""

RESPONSE = "{response_id:response_id}"
"""Part of a route's path that is a stored response's id."""

_KEPT = re.compile("(%2[Ff]|%25)")
_TENANT = r"(?P<tenant>/t/[^/]+)?"
_ROUTES = r"(?P<route>chat/completions|completions|embeddings|messages(?:/count_tokens)?|models|responses)"
_UNVERSIONED = re.compile(rf"{_TENANT}/{_ROUTES}/?")
_AZURE = re.compile(rf"{_TENANT}/openai/(?:v1|deployments/[^/]+)/{_ROUTES}/?")
_REPEATED = re.compile(rf"{_TENANT}/v1/v1/{_ROUTES}/?")


def keep_encoded_slashes(scope: Scope) -> None:
    """Decode the request's path again, except for its slashes.

    In the new path each ``%`` begins ``%2F`` or ``%25``, so that it can be decoded in one way only.
    """
    raw_path: bytes = scope.get("raw_path") or b""
    if b"%" in raw_path:
        pieces = _KEPT.split(raw_path.decode("latin-1"))
        # every second one is what separates the others
        for index, piece in enumerate(pieces):
            pieces[index] = piece.upper() if index % 2 else unquote(piece).replace("%", "%25")
        scope["path"] = "".join(pieces)


def respell_path(scope: Scope) -> None:
    """Write the path of an inference route as its route has it; leave any other path.

    ``/chat/completions``, ``/v1/v1/chat/completions``, ``/v1/chat/completions/`` and
    ``/openai/deployments/NAME/chat/completions`` are ``/v1/chat/completions``.
    """
    path: str = scope["path"]
    if path.startswith("/v1/") and path[-1] != "/" and not path.startswith("/v1/v1/"):
        return
    found = _UNVERSIONED.fullmatch(path) or _AZURE.fullmatch(path) or _REPEATED.fullmatch(path)
    if found is not None:
        scope["path"] = f"{found['tenant'] or ''}/v1/{found['route']}"
    elif "/v1/" in path and path[-1] == "/" and not path.startswith("/api/"):
        scope["path"] = path.rstrip("/")


def _decoded(text: str) -> str:
    return _KEPT.sub(lambda found: "%" if found[0] == "%25" else "/", text)


class _AdapterName(Convertor[str]):
    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return _decoded(value)

    def to_string(self, value: str) -> str:
        return value.replace("%", "%25").replace("/", "%2F")


class _ModelName(_AdapterName):
    regex = ".*"


class _ResponseId(Convertor[str]):
    # a route of its own: /responses/input_tokens
    regex = "(?!input_tokens(?:/|$))[^/]+"

    def convert(self, value: str) -> str:
        return _decoded(value)

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("response_id", _ResponseId())
register_url_convertor("adapter_name", _AdapterName())
register_url_convertor("model_name", _ModelName())
