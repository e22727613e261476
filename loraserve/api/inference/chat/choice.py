"""A choice of a chat: its chunks joined into a message, or converted to deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loraserve.api.inference.context import InferenceContext
from loraserve.api.inference.generation import finish_reason
from loraserve.api.inference.logprobs import chat_logprobs
from loraserve.api.inference.schemas import ChatBody
from loraserve.text.chat_format import AnswerParser, ChatAnswerFormat
from loraserve.text.tool_parsers.parser import ArgumentsDelta, CallStart, Delta, ReasoningDelta, TextDelta
from loraserve.types import FinishReason

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk
    from loraserve.types import TokenLogprobs

TOOL_CALLS = "tool_calls"
"""Finish reason of an answer with tool calls."""


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class ChatChoice:
    """Collect one choice's chunks.

    Args:
        answer_format: format of its text; None: all of it is content.

    Attributes:
        prompt_logprobs: log probabilities of the prompt's tokens, as far as they came.
    """

    def __init__(
        self, context: InferenceContext, body: ChatBody, index: int, answer_format: ChatAnswerFormat | None
    ) -> None:
        self._context, self._body, self._index = context, body, index
        self._format = answer_format
        self._parser: AnswerParser | None = None if answer_format is None else answer_format.parser()
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def add(self, chunk: Chunk) -> None:
        """Take a chunk of an answer in one piece."""
        if self._parser is None:
            self._texts.append(chunk.text)
        else:
            for delta in self._read(self._parser, chunk):
                self._take(delta)
        self._token_ids.extend(chunk.token_ids)
        self._logprobs.extend(self._chunk_logprobs(chunk))
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        self._finish_reason = self._reason(chunk)
        self._stop_reason = chunk.stop_reason

    def whole(self) -> dict[str, Any]:
        """Return the choice in one piece."""
        whole: dict[str, Any] = {
            "index": self._index,
            "message": self._message(),
            "logprobs": {"content": self._logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._body.return_token_ids:
            whole["token_ids"] = self._token_ids
        return whole

    def opening(self) -> dict[str, Any]:
        """Return the first delta, which holds the role."""
        part: dict[str, Any] = {
            "index": self._index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            part["prompt_token_ids"] = list(self._context.prompt_of(self._index).token_ids)
        return part

    def parts_of(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the deltas of this chunk: what it adds, and the end if it is the last."""
        logprobs = self._chunk_logprobs(chunk)
        has_tokens = bool(logprobs or (self._body.return_token_ids and chunk.token_ids))
        if self._parser is None:
            deltas: list[dict[str, Any]] = [{"content": chunk.text}] if chunk.text or has_tokens else []
        else:
            # tokens whose text is held back have an empty delta
            deltas = [self._take(delta) for delta in self._read(self._parser, chunk)] or [{}] * has_tokens
        parts = [self._part(delta, logprobs if number == 0 else []) for number, delta in enumerate(deltas)]
        if parts and self._body.return_token_ids:
            for number, part in enumerate(parts):
                part["token_ids"] = list(chunk.token_ids) if number == 0 else []
        if chunk.finish_reason is not None:
            parts.append(
                {
                    "index": self._index,
                    "delta": {},
                    "logprobs": None,
                    "finish_reason": self._reason(chunk),
                    "stop_reason": chunk.stop_reason,
                }
            )
        return parts

    def _part(self, delta: dict[str, Any], logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": None,
        }

    def _read(self, parser: AnswerParser, chunk: Chunk) -> Sequence[Delta]:
        deltas = parser.push(chunk.text) if chunk.text else []
        return deltas if chunk.finish_reason is None else [*deltas, *parser.finish()]

    def _take(self, delta: Delta) -> dict[str, Any]:
        """Add a delta to the message, and return it as OpenAI's streams have it."""
        match delta:
            case TextDelta(text):
                self._texts.append(text)
                return {"content": text}
            case ReasoningDelta(text):
                self._reasoning.append(text)
                return {"reasoning_content": text, "reasoning": text}
            case CallStart(index, name):
                call = _Call(self._new_call_id(), name)
                self._calls.append(call)
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]}
            case ArgumentsDelta(index, text):
                self._calls[index].arguments.append(text)
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _new_call_id(self) -> str:
        self._context.services.metrics.tool_calls.inc()
        tools = None if self._format is None else self._format.tools
        return "" if tools is None else tools.new_call_id()

    def _message(self) -> dict[str, Any]:
        content: str | None = "".join(self._texts)
        if not content and (self._calls or self._reasoning):
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._calls:
            message[TOOL_CALLS] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in self._calls
            ]
        return message

    def _reason(self, chunk: Chunk) -> str | None:
        if self._calls and chunk.finish_reason is FinishReason.STOP:
            return TOOL_CALLS
        return finish_reason(chunk)

    def _chunk_logprobs(self, chunk: Chunk) -> list[dict[str, Any]]:
        if not self._body.logprobs or not chunk.logprobs:
            return []
        return chat_logprobs(
            self._context.services.tokenizer,
            chunk.logprobs,
            self._body.top_logprobs,
            as_ids=self._body.return_tokens_as_token_ids,
        )
