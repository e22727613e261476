"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.http.json_body import dump_text
from loraserve.api.http.sse import event, event_frame
from loraserve.api.inference.chat.choice import ChatChoice
from loraserve.api.inference.chat.turn import ChatAnswer, ChatTurn
from loraserve.api.inference.fields import json_fields, parse_body
from loraserve.api.inference.logprobs import prompt_logprobs
from loraserve.api.inference.messages import last_answer
from loraserve.api.inference.quota import admitted_caller
from loraserve.api.inference.schemas import ChatBody
from loraserve.tenancy.identity.auth import Caller
from loraserve.text.tool_parsers.parser import ArgumentsDelta, CallStart, Delta, ReasoningDelta, TextDelta
from loraserve.types import FinishReason

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

router = APIRouter()

_CHUNK = "chat.completion.chunk"
TOOL_CALLS = "tool_calls"
"""Finish reason of an answer with tool calls."""


@router.post("/chat/completions", response_model=None)
async def create_chat_completion(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Answer the messages n times. Everything is checked before the first byte of the answer.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full.
        RateLimited: the tenant's share is used up.
    """
    body, ignored = parse_body(ChatBody, raw)
    turn = await ChatTurn.begin(request, caller, body, ignored, prefix="chatcmpl-")
    return await turn.respond(request, _ChatCompletion(turn))


class _ChatCompletion(ChatAnswer):
    """Chat completion, or its chunks."""

    def __init__(self, turn: ChatTurn) -> None:
        super().__init__(turn)
        self._options = turn.body.stream_options
        self._echo = last_answer(turn.body.messages) if turn.body.echo else ""
        self._frames: dict[int, bytes] = {}
        """Choice → frame of its events that add text alone."""
        has_running_usage = self._options.include_usage and self._options.continuous_usage_stats
        self._can_fill = not has_running_usage and not turn.body.return_token_ids and not turn.body.logprobs

    def whole(self) -> dict[str, Any]:
        turn, body = self.turn, self.turn.body
        message = _head(turn, "chat.completion")
        message |= {
            "choices": [_choice(choice, body, self._echo) for choice in turn.choices],
            "usage": turn.usage.as_dict(),
            # vLLM's clients read both whether or not they were requested
            "prompt_logprobs": None,
            "prompt_token_ids": list(turn.prompt.token_ids) if body.return_token_ids else None,
        }
        if body.prompt_logprobs is not None:
            # the same for every choice
            entries = turn.choices[0].prompt_logprobs
            message["prompt_logprobs"] = prompt_logprobs(turn.context.tokenizer, entries, body.prompt_logprobs)
        return message

    def opening(self) -> bytes:
        turn = self.turn
        parts = [_opening(turn, choice) for choice in turn.choices]
        if self._echo:
            parts += [_delta_part(choice.index, {"content": self._echo}) for choice in turn.choices]
        return b"".join(event(_payload(turn, part)) for part in parts)

    def render(self, index: int, chunk: Chunk) -> bytes:
        choice = self.turn.choices[index]
        if self._can_fill and choice.is_plain and chunk.finish_reason is None:
            choice.read(chunk)
            if not chunk.text:
                return b""
            return (self._frames.get(index) or self._make_frame(index)) % dump_text(chunk.text)
        return b"".join(event(_payload(self.turn, part)) for part in _parts(choice, chunk, self.turn.body))

    def _make_frame(self, index: int) -> bytes:
        frame = event_frame(lambda text: _payload(self.turn, _delta_part(index, {"content": text})))
        self._frames[index] = frame
        return frame

    async def closing(self) -> bytes:
        if not self._options.include_usage:
            return b""
        return event(_head(self.turn, _CHUNK) | {"choices": [], "usage": self.turn.usage.as_dict()})


def _choice(choice: ChatChoice, body: ChatBody, echo: str) -> dict[str, Any]:
    """Return the choice in one piece, its text behind the echo."""
    return {
        "index": choice.index,
        "message": _message(choice, echo),
        "logprobs": _logprobs(choice.logprobs, body),
        "finish_reason": _finish_reason(choice),
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if body.return_token_ids else None,
    }


def _message(choice: ChatChoice, echo: str) -> dict[str, Any]:
    content: str | None = echo + choice.text
    reasoning = choice.reasoning
    if not content and (choice.calls or reasoning):
        content = None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if choice.calls:
        message[TOOL_CALLS] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def _payload(turn: ChatTurn, part: dict[str, Any]) -> dict[str, Any]:
    """Return what an event of a choice's part says."""
    options = turn.body.stream_options
    whole = {**_head(turn, _CHUNK), "choices": (part,)}
    if options.include_usage:
        whole["usage"] = turn.usage.as_dict() if options.continuous_usage_stats else None
    return whole


def _delta_part(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a chunk that has nothing but a delta."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _opening(turn: ChatTurn, choice: ChatChoice) -> dict[str, Any]:
    """Return the first delta, which holds the role."""
    part = _delta_part(choice.index, {"role": "assistant", "content": ""})
    if turn.body.return_token_ids:
        part["prompt_token_ids"] = list(turn.prompt.token_ids)
    return part


def _parts(choice: ChatChoice, chunk: Chunk, body: ChatBody) -> list[dict[str, Any]]:
    """Return the deltas of this chunk: what it adds, and the end if it is the last."""
    logprobs = choice.logprobs_of(chunk)
    deltas = [_delta(choice, delta) for delta in choice.read(chunk)]
    if not deltas and (logprobs or (body.return_token_ids and chunk.token_ids)):
        # tokens whose text is held back have an empty delta
        deltas = [{"content": ""} if choice.is_plain else {}]
    parts: list[dict[str, Any]] = []
    for number, delta in enumerate(deltas):
        part = _delta_part(choice.index, delta)
        part["logprobs"] = _logprobs(logprobs if number == 0 else [], body)
        if body.return_token_ids:
            part["token_ids"] = list(chunk.token_ids) if number == 0 else []
        parts.append(part)
    if chunk.finish_reason is not None:
        parts.append(
            {
                "index": choice.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": _finish_reason(choice),
                "stop_reason": choice.stop_reason,
            }
        )
    return parts


def _delta(choice: ChatChoice, delta: Delta) -> dict[str, Any]:
    """Return a delta as OpenAI's streams have it."""
    match delta:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": choice.calls[index].id, "type": "function", "function": function}
            return {TOOL_CALLS: [call]}
        case ArgumentsDelta(index, text):
            return {TOOL_CALLS: [{"index": index, "function": {"arguments": text}}]}


def _finish_reason(choice: ChatChoice) -> str | None:
    if choice.calls and choice.finish_reason is FinishReason.STOP:
        return TOOL_CALLS
    return None if choice.finish_reason is None else FinishReason(choice.finish_reason).value


def _logprobs(content: list[dict[str, Any]], body: ChatBody) -> dict[str, Any] | None:
    return {"content": content, "refusal": None} if body.logprobs else None


def _head(turn: ChatTurn, kind: str) -> dict[str, Any]:
    context = turn.context
    return {
        **{"id": context.id, "object": kind, "created": context.created, "model": turn.body.model},
        "system_fingerprint": context.services.engine.base.fingerprint,
    }
