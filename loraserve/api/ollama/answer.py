"""Answers to chats and prompts as Ollama has them: whole, or lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from loraserve.api.errors import ollama_envelope
from loraserve.api.http.json_body import dump_json, dump_text
from loraserve.api.http.sse import event_frame
from loraserve.api.inference.chat.choice import Call, ChatChoice, parse_arguments
from loraserve.api.inference.chat.turn import ChatAnswer, ChatTurn
from loraserve.text.tool_parsers.parser import ArgumentsDelta, CallStart, Delta, ReasoningDelta, TextDelta
from loraserve.types import FinishReason

if TYPE_CHECKING:
    from loraserve.api.http.request_record import InferenceRecord, RequestRecord
    from loraserve.engine_client.client import Chunk
    from loraserve.errors import LoraserveError

NDJSON = "application/x-ndjson"
STOP, LENGTH, LOAD, UNLOAD = "stop", "length", "load", "unload"
"""Values of ``done_reason``."""
_COSTS = ("cost", "currency")


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece of an answer, or all of it.

    Attributes:
        calls: whole ones, each with its number.
    """

    text: str = ""
    thinking: str = ""
    calls: Sequence[tuple[int, Call]] = ()


Content = Callable[[Piece], dict[str, Any]]
"""Builds the fields that hold a piece."""


def message_content(piece: Piece) -> dict[str, Any]:
    """Build the field of a chat's answer."""
    message: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.thinking:
        message["thinking"] = piece.thinking
    if piece.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "function": {"index": index, "name": call.name, "arguments": parse_arguments(call.arguments)},
            }
            for index, call in piece.calls
        ]
    return {"message": message}


def response_content(piece: Piece) -> dict[str, Any]:
    """Build the fields of a prompt's answer."""
    return {"response": piece.text} | ({"thinking": piece.thinking} if piece.thinking else {})


def head(model: str, created_s: float) -> dict[str, Any]:
    """Build the fields that every answer and line begin with.

    Args:
        model: name under which it was requested.
    """
    return {"model": model, "created_at": datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")}


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def costs_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Select the cost of a usage, which it has where the tenant has prices."""
    return {name: usage[name] for name in _COSTS if name in usage}


def load_seconds(record: InferenceRecord) -> float:
    """Compute how long the request waited for its adapter."""
    return max((choice.adapter_s for choice in record.choices), default=0.0)


class OllamaAnswer(ChatAnswer):
    """Answer to a chat or a prompt.

    Args:
        opening: fields that the answer and each line begin with.
        content: builds the fields that hold what is generated.
    """

    media_type = NDJSON
    # the last line is marked as done
    ending = b""

    def __init__(self, turn: ChatTurn, record: RequestRecord, opening: Mapping[str, Any], content: Content) -> None:
        super().__init__(turn)
        self._record, self._opening, self._content = record, opening, content
        self._calls = _WholeCalls(turn.choices[0])
        self._frame = b""
        """Frame of the lines that add text alone; empty until there is one."""

    def ping(self) -> bytes:
        return _line(self._part(Piece()))

    def whole(self) -> dict[str, Any]:
        choice = self.turn.choices[0]
        piece = Piece(choice.text, choice.reasoning, tuple(enumerate(choice.calls)))
        logprobs = {"logprobs": choice.logprobs} if self.turn.body.logprobs else {}
        return {**self._opening, **self._content(piece), **self._end(), **logprobs}

    def render(self, index: int, chunk: Chunk) -> bytes:
        choice = self.turn.choices[index]
        if choice.is_plain and not self.turn.body.logprobs:
            choice.read(chunk)
            if not chunk.text:
                return b""
            self._frame = self._frame or event_frame(lambda text: self._part(Piece(text)), _line)
            return self._frame % dump_text(chunk.text)
        logprobs = choice.logprobs_of(chunk)
        pieces = self._calls.pieces(choice.read(chunk), is_last=chunk.finish_reason is not None)
        if logprobs and not pieces:
            # tokens whose text is held back
            pieces = [Piece()]
        parts = list(map(self._part, pieces))
        if logprobs:
            parts[0]["logprobs"] = logprobs
        return b"".join(map(_line, parts))

    async def closing(self) -> bytes:
        return _line({**self._opening, **self._content(Piece()), **self._end()})

    def failure(self, error: LoraserveError) -> bytes:
        return _line(ollama_envelope(error))

    def _part(self, piece: Piece) -> dict[str, Any]:
        """Build a line before the last."""
        return {**self._opening, **self._content(piece), "done": False}

    def _end(self) -> dict[str, Any]:
        """Build the fields of an answer's end: the reason, counts and times."""
        usage, record = self.turn.usage.as_dict(), self.turn.generation.record
        # those of a fallback follow the failed ones
        made = record.choices[-1]
        ended_s = time.monotonic() if made.ended_s is None else made.ended_s
        first_s = ended_s if made.first_s is None else made.first_s
        return {
            "done": True,
            "done_reason": LENGTH if self.turn.choices[0].finish_reason is FinishReason.LENGTH else STOP,
            "total_duration": nanoseconds(ended_s - self._record.started_s),
            "load_duration": nanoseconds(load_seconds(record)),
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": nanoseconds(made.prefill_s),
            "eval_count": usage["completion_tokens"],
            "eval_duration": nanoseconds(ended_s - first_s),
            **costs_of(usage),
        }


class _WholeCalls:
    """Collect a stream's deltas to pieces: a call is one only once it is whole."""

    def __init__(self, choice: ChatChoice) -> None:
        self._choice = choice
        self._open: int | None = None

    def pieces(self, deltas: Sequence[Delta], *, is_last: bool) -> list[Piece]:
        """Convert the deltas.

        Args:
            is_last: whether nothing follows them.
        """
        found: list[Piece] = []
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    found += [*self._close(), Piece(text)]
                case ReasoningDelta(text):
                    found += [*self._close(), Piece(thinking=text)]
                case CallStart(index, _):
                    found += self._close()
                    self._open = index
                case ArgumentsDelta():
                    pass
        return found + self._close() if is_last else found

    def _close(self) -> list[Piece]:
        index, self._open = self._open, None
        return [] if index is None else [Piece(calls=((index, self._choice.calls[index]),))]


def _line(payload: Mapping[str, Any]) -> bytes:
    return dump_json(payload) + b"\n"
