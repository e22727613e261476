"""Refusals of unknown routes and methods, which name the nearest route that exists."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from loraserve.errors import MethodNotAllowed, NotFound

_TENANT_PREFIX = "/t/{tenant}"
_TENANT_PATH = re.compile(r"/t/[^/]+(?=/|$)")
_ADAPTERS = "/api/v1/adapters/"
_MANAGEMENT = "/api/v1/"
_OF_OLLAMA = re.compile(r"(?:/t/[^/]+)?/api/(blobs|copy|create|delete|pull|push)(?:/.*)?")
_PUBLISHED = "Publish an adapter with: loraserve adapter push DIR --name NAME (or POST /api/v1/adapters/NAME/versions)."
_CURES = {
    "blobs": _PUBLISHED,
    "copy": "Give a version an alias with: loraserve adapter alias NAME ALIAS VERSION "
    "(or PUT /api/v1/adapters/NAME/aliases/ALIAS).",
    "create": _PUBLISHED,
    "delete": "Delete an adapter with: loraserve adapter delete NAME (or DELETE /api/v1/adapters/NAME).",
    "pull": f"{_PUBLISHED} The base is chosen when the server starts.",
    "push": "Download an adapter's files with: loraserve adapter pull NAME DIR "
    "(or GET /api/v1/adapters/NAME/versions/N/files/FILE).",
}
"""Ollama's routes that change models, and what does so here."""
_OF_OTHERS = re.compile(
    r"(?:/t/[^/]+)?/v1/(messages/batches|responses/compact|conversations|assistants|threads|fine_tuning|vector_stores"
    r"|uploads|images|audio|moderations|realtime)(?:/.*)?"
)
_WITHOUT = {
    "messages/batches": ("batches of messages", "POST /v1/batches runs a file of chats (POST /v1/files)."),
    "responses/compact": ("compaction of a conversation", "Send those items in input that are still needed."),
    "conversations": ("conversations", "Continue an answer by previous_response_id (POST /v1/responses)."),
    "assistants": ("assistants", "POST /v1/responses takes instructions and tools."),
    "threads": ("threads", "Continue an answer by previous_response_id (POST /v1/responses)."),
    "fine_tuning": ("training", f"Train with PEFT. {_PUBLISHED}"),
    "vector_stores": ("vector stores", "POST /v1/embeddings makes vectors for a store of yours."),
    "uploads": ("uploads in parts", "POST /v1/files takes the whole file."),
    "images": ("images", "This server's models write text."),
    "audio": ("sound", "This server's models read and write text."),
    "moderations": ("moderation", "A chat with a model that judges texts does it."),
    "realtime": ("realtime sessions", "POST /v1/chat/completions streams with stream: true."),
}
"""Routes of OpenAI's and Anthropic's that aren't here: what they are for, and what does so here."""
_MAX_COMPARED = 64
"""Characters of a path that are compared with routes: more would take longer, and show no more."""
_MAX_SHOWN = 128
_LIKENESS = 0.7
"""Likeness, by `difflib`, from which a route is taken for the one that was meant."""


class RouteTable:
    """Routes by path, to find the one that an unknown path is nearest to."""

    def __init__(self, app: FastAPI) -> None:
        self._methods: dict[str, set[str]] = {}
        for context in iter_route_contexts(app.routes):
            path = context.path_format or ""
            if not path.startswith(_TENANT_PREFIX):
                self._methods.setdefault(path, set()).update(context.methods or ())

    def not_found(self, method: str, path: str) -> NotFound:
        """Build the error of a path that no route has."""
        if (known := absent_route(method, path)) is not None:
            return known
        if (ollamas := _OF_OLLAMA.fullmatch(path)) is not None:
            return NotFound(
                f"There is no route {method} {_shown(path)}: models aren't changed by Ollama's API here.",
                hint=_CURES[ollamas[1]],
            )
        nearest = self._nearest(path)
        hint = "GET /api/v1/openapi.json lists all routes."
        if nearest is not None:
            methods = {method} if method in self._methods[nearest] else self._methods[nearest]
            prefix = _TENANT_PREFIX if _TENANT_PATH.match(path) and not nearest.startswith(_MANAGEMENT) else ""
            hint = f"Did you mean {_listed(methods)} {prefix}{nearest}? {hint}"
        if path.startswith(_ADAPTERS):
            hint = f"In a path, a slash of an adapter's name is %2F. {hint}"
        return NotFound(f"There is no route {method} {_shown(path)}.", hint=hint)

    def _nearest(self, path: str) -> str | None:
        own = _TENANT_PATH.sub("", path, count=1)[:_MAX_COMPARED].lower().rstrip("/")
        near = difflib.get_close_matches(own, self._methods, n=1, cutoff=_LIKENESS)
        return near[0] if near else None


def absent_route(method: str, path: str) -> NotFound | None:
    """Build the error of a route of OpenAI's or Anthropic's that isn't here; None: it is none."""
    found = _OF_OTHERS.fullmatch(path)
    if found is None:
        return None
    what, hint = _WITHOUT[found[1]]
    return NotFound(f"There is no route {method} {_shown(path)}: this server has no {what}.", hint=hint)


def not_allowed(method: str, path: str, allowed: Iterable[str]) -> MethodNotAllowed:
    """Build the error of a path whose routes take other methods."""
    return MethodNotAllowed(
        f"The route {_shown(path)} doesn't accept {method}.", hint=f"It accepts {_listed(allowed)}."
    )


def _shown(path: str) -> str:
    """Format a client's path as plain characters, cut to a bounded length."""
    text = quote(path[:_MAX_SHOWN], safe="/:@%")
    return text if len(path) <= _MAX_SHOWN and len(text) <= 2 * _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _listed(methods: Iterable[str]) -> str:
    return " or ".join(sorted(methods))
