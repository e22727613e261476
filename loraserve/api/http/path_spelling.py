"""Other spellings of the inference routes' paths, as clients and people type them.

OpenAI's and Anthropic's clients append ``/chat/completions`` or ``/v1/messages`` to a base URL,
with or without ``/v1`` in it; Azure's name a deployment, whose model is in the body as well.
"""

from __future__ import annotations

import re

from starlette.types import Scope

_TENANT = r"(?P<tenant>/t/[^/]+)?"
_ROUTES = r"(?P<route>chat/completions|completions|embeddings|messages(?:/count_tokens)?|models|responses)"
_UNVERSIONED = re.compile(rf"{_TENANT}/{_ROUTES}/?")
_AZURE = re.compile(rf"{_TENANT}/openai/(?:v1|deployments/[^/]+)/{_ROUTES}/?")
_REPEATED = re.compile(rf"{_TENANT}/v1/v1/{_ROUTES}/?")


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
