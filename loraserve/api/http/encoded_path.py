"""Paths with encoded slashes, which belong to a name: ``/adapters/Qwen%2FMy-LoRA/versions``.

A server decodes a request's path before it is routed, so that a slash of a name would separate it.
`keep_encoded_slashes` leaves such slashes encoded, and the convertors of `NAME` and `MODEL` decode
what they match.
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

_KEPT = re.compile("(%2[Ff]|%25)")


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


register_url_convertor("adapter_name", _AdapterName())
register_url_convertor("model_name", _ModelName())
