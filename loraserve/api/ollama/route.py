"""POST /api/chat and /api/generate, as Ollama answers them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.http.disconnect import while_connected
from loraserve.api.http.json_body import dump_json
from loraserve.api.inference.chat.turn import ChatTurn
from loraserve.api.inference.context import resolve_model
from loraserve.api.inference.fields import ignored_header, json_fields, renamed
from loraserve.api.inference.quota import admitted_caller
from loraserve.api.inference.schemas import ChatBody
from loraserve.api.inference.target import TargetSelector
from loraserve.api.ollama.answer import (
    LOAD,
    UNLOAD,
    Content,
    OllamaAnswer,
    Piece,
    head,
    message_content,
    response_content,
)
from loraserve.api.ollama.body import FIELDS, OllamaRequest
from loraserve.api.ollama.latest_tag import find_model
from loraserve.api.services import services_of
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import AdapterRef

router = APIRouter()

_LOAD_WAIT_S = 30.0
"""Time for which a request that only loads an adapter waits until it is on the device."""


@router.post("/chat", response_model=None)
async def chat(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Answer the messages, as a stream of lines unless `stream` is false.

    Without messages, load the model.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full.
        RateLimited: the tenant's share is used up.
    """
    return await _respond(request, caller, OllamaRequest.read_chat(raw), message_content)


@router.post("/generate", response_model=None)
async def generate(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Answer the prompt, as a stream of lines unless `stream` is false.

    The prompt is a user's message, or with `raw` the text as it is. Without it, load the model.

    Raises:
        LoraserveError: as /api/chat.
    """
    return await _respond(request, caller, OllamaRequest.read_generate(raw), response_content)


async def _respond(request: Request, caller: Caller, asked: OllamaRequest, content: Content) -> Response:
    services = services_of(request)
    opening = head(asked.body.model, services.clock())
    body = asked.body.model_copy(update={"model": await find_model(services, caller, asked.body.model)})
    if not asked.has_prompt:
        headers = {**await _load(request, caller, body, asked), **ignored_header(asked.ignored)}
        answer = {**opening, **content(Piece()), "done": True, "done_reason": UNLOAD if asked.is_unload else LOAD}
        return Response(dump_json(answer), headers=headers, media_type="application/json")
    with renamed(asked.place, asked.fields):
        turn = await ChatTurn.begin(
            request,
            caller,
            body,
            asked.ignored,
            prefix="ollama-",
            names=FIELDS,
            text=asked.text,
            # Ollama ends an answer where its context does
            caps_tokens=True,
        )
    return await turn.respond(request, OllamaAnswer(turn, request.state.record, opening, content))


async def _load(request: Request, caller: Caller, body: ChatBody, asked: OllamaRequest) -> dict[str, str]:
    """Bring the adapter to the device, and return the headers that name it.

    It takes no longer than `_LOAD_WAIT_S`; a load that does goes on. Nothing is unloaded: an idle
    adapter leaves memory once another needs the place.
    """
    services = services_of(request)
    model = await resolve_model(services, caller, body.model, body.adapters, user=body.user)
    adapter = model.binding.adapter
    if adapter is not None and not asked.is_unload:
        await while_connected(request, _warm(request, adapter))
    return TargetSelector(model.binding, services.engine.base.id, model.asked, tenant=model.tenant).headers()


async def _warm(request: Request, adapter: AdapterRef) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOAD_WAIT_S):
            await services_of(request).engine.warm(adapter)
