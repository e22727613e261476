"""Compute the lines of batches by the routes that answer clients, in the tenant's name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Scope

from loraserve.api.http.json_body import parse_json
from loraserve.api.scopes import COLLECTED_USAGE, GIVEN_CALLER
from loraserve.api.services import Services
from loraserve.batches.records import BatchRecord, LineAnswer, LineRequest
from loraserve.errors import InvalidRequest, Overloaded
from loraserve.limits import LIMITS
from loraserve.registry.model_name import parse_terms
from loraserve.tenancy.billing.meter import CollectedUsage

ENDPOINTS: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": frozenset({"stream"}),
    "/v1/completions": frozenset({"stream"}),
    "/v1/responses": frozenset({"stream"}),
    "/v1/embeddings": frozenset(),
    "/v1/score": frozenset(),
    "/v1/rerank": frozenset(),
}
"""Routes that lines can be for, each with the fields that would make of its one answer something
else. Another route that answers one JSON body with one is added here.
"""
_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_MAX_KV_USE = 0.9
"""Part of the KV blocks in use at which no line begins."""
_MAX_SLOT_USE = 0.75
"""Part of the engine's sequences that run at which no line begins: the rest is for clients."""
_DEFAULT_RETRY_S = 1.0
_WORTH_RETRYING = (429, 503)
_OF_ONE_LINE = "adapter_not_ready"
"""Code of a refusal for now that doesn't affect other lines."""


class BatchLines:
    """The `LineHandler` of a server."""

    def __init__(self, services: Services, app: ASGIApp) -> None:
        self._services = services
        self._app = app

    def is_ready(self) -> bool:
        return self._services.engine.is_ready

    def is_open(self) -> bool:
        engine, services = self._services.engine, self._services
        if not engine.is_ready or services.is_closed:
            return False
        stats = engine.stats
        is_full = stats.num_kv_blocks_used > _MAX_KV_USE * stats.num_kv_blocks
        is_busy = stats.num_running >= max(1, _MAX_SLOT_USE * services.settings.max_num_seqs)
        # a client's prompt that is being computed isn't in the engine's queue any more
        is_waited_for = engine.num_waiting_clients > 0 and stats.num_waiting > 0
        return not (is_full or is_busy or is_waited_for)

    def read(self, endpoint: str, data: bytes) -> LineRequest:
        value = parse_json(data)
        if not isinstance(value, dict) or value.keys() - _FIELDS:
            raise InvalidRequest(f"The line should be an object of {', '.join(sorted(_FIELDS))}, and nothing else.")
        custom_id, body = value.get("custom_id"), value.get("body")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= LIMITS.max_custom_id_length:
            raise InvalidRequest(
                f"custom_id should be a string of 1 to {LIMITS.max_custom_id_length} characters.", param="custom_id"
            )
        if value.get("method") != "POST":
            raise InvalidRequest('method should be "POST".', param="method")
        if value.get("url") != endpoint:
            raise InvalidRequest(f"url should be the batch's endpoint, {endpoint}.", param="url")
        if not isinstance(body, dict):
            raise InvalidRequest("body should be an object.", param="body")
        model = body.get("model")
        if not isinstance(model, str) or not model:
            raise InvalidRequest("body.model should be the name of a model.", param="body.model")
        for name in ENDPOINTS.get(endpoint, ()):
            if body.get(name):
                raise InvalidRequest(f"body.{name} isn't possible in a batch.", param=f"body.{name}")
        return LineRequest(custom_id, json.dumps(body, ensure_ascii=False).encode(), model)

    async def check_model(self, batch: BatchRecord, model: str) -> None:
        services = self._services
        caller = await services.authenticator.in_background(batch.tenant, batch.created_by)
        for term in parse_terms(model, services.engine.base.id):
            await services.registry.check_model(caller.tenant, term.adapter)

    async def run(self, batch: BatchRecord, request: LineRequest) -> LineAnswer:
        collected = CollectedUsage()
        try:
            caller = await self._services.authenticator.in_background(batch.tenant, batch.created_by)
        except Overloaded as error:
            return LineAnswer(503, "", b"null", {}, error.retry_after_s, pauses_batch=True)
        answer = _Answer()
        scope = _scope(batch.endpoint, request.body)
        scope.update({GIVEN_CALLER: caller, COLLECTED_USAGE: collected})
        await self._app(scope, _Sender(request.body).receive, answer.send)
        return answer.as_line(collected)


@dataclass(slots=True)
class _Sender:
    """Client that has sent its whole body and stays."""

    body: bytes | None

    async def receive(self) -> Message:
        if self.body is None:
            await asyncio.Event().wait()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}


@dataclass(slots=True)
class _Answer:
    """Answer of a route, as it comes."""

    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")

    def as_line(self, collected: CollectedUsage) -> LineAnswer:
        request_id, body = self.headers.get("x-request-id", ""), bytes(self.body) or b"null"
        if self.status not in _WORTH_RETRYING or self.headers.get("x-should-retry") == "false":
            return LineAnswer(self.status, request_id, body, collected.totals)
        wait_ms = self.headers.get("retry-after-ms", "")
        retry_after_s = int(wait_ms) / 1000 if wait_ms.isdigit() else _DEFAULT_RETRY_S
        return LineAnswer(self.status, request_id, body, {}, retry_after_s, pauses_batch=_code(body) != _OF_ONE_LINE)


def _code(body: bytes) -> Any:
    try:
        return orjson.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None


def _scope(path: str, body: bytes) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
