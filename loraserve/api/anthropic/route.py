"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic answers them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.anthropic.body import FIELDS, ChatRequest, MessageBody, MessageTokensBody
from loraserve.api.anthropic.content import Event, MessageContent
from loraserve.api.errors import messages_envelope
from loraserve.api.http.sse import named_event
from loraserve.api.inference.chat.turn import ChatAnswer, ChatPrompt, ChatTurn
from loraserve.api.inference.fields import json_fields, parse_body, renamed
from loraserve.api.inference.quota import admitted_caller
from loraserve.contract.chat import MessageTokensCount
from loraserve.errors import LoraserveError
from loraserve.tenancy.identity.auth import Caller

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

router = APIRouter()


@router.post("/messages", response_model=None)
async def create_message(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Answer the messages with one of the assistant's.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full.
        RateLimited: the tenant's share is used up.
    """
    body, ignored = parse_body(MessageBody, raw)
    chat = ChatRequest(body)
    with renamed(chat.place, FIELDS):
        turn = await ChatTurn.begin(
            request,
            caller,
            chat.body,
            (*ignored, *chat.ignored),
            prefix="msg_",
            names=FIELDS,
            # Claude Code asks for 64,000 tokens of any model
            caps_tokens=True,
        )
    return await turn.respond(request, _MessageAnswer(turn, request.state.request_id))


@router.post("/messages/count_tokens")
async def count_tokens(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> MessageTokensCount:
    """Count the tokens of a message's prompt, however many they are.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
    """
    body, ignored = parse_body(MessageTokensBody, raw)
    chat = ChatRequest(body)
    with renamed(chat.place, FIELDS):
        read = await ChatPrompt.read(request, caller, chat.body, ignored, is_bounded=False)
    return MessageTokensCount(input_tokens=len(read.prompt.token_ids))


class _MessageAnswer(ChatAnswer):
    """Message of the assistant's, or its events."""

    # these clients recognize the last event by its name
    ending = b""

    def __init__(self, turn: ChatTurn, request_id: str) -> None:
        super().__init__(turn)
        self._content = MessageContent(turn.choices[0])
        self._request_id = request_id
        self._has_begun = False

    def add(self, index: int, chunk: Chunk) -> None:
        self._content.add(chunk)

    async def finish(self) -> None:
        self._content.finish()

    def whole(self) -> dict[str, Any]:
        content = self._content
        return _opened(self.turn) | {
            "content": content.blocks,
            "stop_reason": content.stop_reason,
            "stop_sequence": content.stop_sequence,
            "usage": _usage(self.turn),
        }

    def render(self, index: int, chunk: Chunk) -> bytes:
        begun: list[Event] = []
        if not self._has_begun:
            # with the first chunk: it says how many tokens of the prompt were cached
            self._has_begun = True
            begun = [("message_start", {"message": _opened(self.turn) | {"usage": _usage(self.turn)}}), ("ping", {})]
        return _frames([*begun, *self._content.add(chunk)])

    async def closing(self) -> bytes:
        content = self._content
        end = {"stop_reason": content.stop_reason, "stop_sequence": content.stop_sequence}
        delta = ("message_delta", {"delta": end, "usage": _usage(self.turn)})
        return _frames([*content.finish(), delta, ("message_stop", {})])

    def failure(self, error: LoraserveError) -> bytes:
        return named_event("error", messages_envelope(error, self._request_id))


def _opened(turn: ChatTurn) -> dict[str, Any]:
    """Build the message without what is generated."""
    return {
        "id": turn.context.id,
        "type": "message",
        "role": "assistant",
        "model": turn.body.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(turn: ChatTurn) -> dict[str, Any]:
    """Sum the usage so far. Cached tokens aren't among the input's, by Anthropic's rule."""
    usage = turn.usage.as_dict()
    cached = usage.pop("prompt_tokens_details")["cached_tokens"]
    del usage["total_tokens"]
    return {
        "input_tokens": usage.pop("prompt_tokens") - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.pop("completion_tokens"),
        # the cost, where the tenant has prices
        **usage,
    }


def _frames(events: Iterable[Event]) -> bytes:
    return b"".join(named_event(name, payload) for name, payload in events)
