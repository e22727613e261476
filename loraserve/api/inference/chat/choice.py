"""A choice of a chat: its chunks read into reasoning, text and tool calls, whatever shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loraserve.api.inference.context import InferenceContext
from loraserve.api.inference.logprobs import chat_logprobs
from loraserve.api.inference.schemas import ChatBody
from loraserve.text.chat_format import AnswerParser, ChatAnswerFormat
from loraserve.text.tool_parsers.parser import ArgumentsDelta, CallStart, Delta, ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk
    from loraserve.types import FinishReason, TokenLogprobs

_UNREADABLE = "INVALID_JSON"
"""Key under which arguments are that aren't a JSON object: cut off, or written wrongly."""


def parse_arguments(text: str) -> dict[str, Any]:
    """Parse a call's arguments to the object that they are."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_UNREADABLE: text}


@dataclass(slots=True)
class Call:
    """A tool call as far as it was read."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """Text of a JSON object, as the model wrote it."""
        return "".join(self.pieces)


class ChatChoice:
    """Read one choice's chunks.

    Args:
        answer_format: format of its text; None: all of it is content.

    Attributes:
        calls: its tool calls; a `CallStart` has its call here.
        token_ids, logprobs: those of the chunks that `add` took.
        prompt_logprobs: log probabilities of the prompt's tokens, as far as they came.
        num_reasoning_tokens: tokens up to the last piece of reasoning.
        finish_reason: why it ended; None while it continues.
        stop_reason: stop string or token that ended it, or ``timeout``.
    """

    def __init__(
        self, context: InferenceContext, body: ChatBody, index: int, answer_format: ChatAnswerFormat | None
    ) -> None:
        self.index = index
        self.calls: list[Call] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self.num_reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._context, self._body = context, body
        self._format = answer_format
        self._parser: AnswerParser | None = None if answer_format is None else answer_format.parser()
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._num_undecided_tokens = 0

    @property
    def is_plain(self) -> bool:
        """Whether all of its text is content: nothing reads it."""
        return self._parser is None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def add(self, chunk: Chunk) -> None:
        """Take a chunk of an answer in one piece."""
        self.read(chunk)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(self.logprobs_of(chunk))
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs

    def read(self, chunk: Chunk) -> Sequence[Delta]:
        """Read what the chunk adds to the answer; the calls that it begins are in `calls`."""
        deltas = self._deltas(chunk)
        self._num_undecided_tokens += len(chunk.token_ids)
        for delta in deltas:
            self._take(delta)
        self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
        return deltas

    def logprobs_of(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Format the log probabilities of the chunk's tokens; empty if none were requested."""
        if not self._body.logprobs or not chunk.logprobs:
            return []
        return chat_logprobs(
            self._context.tokenizer,
            chunk.logprobs,
            len(self._body.logprob_token_ids) or self._body.top_logprobs,
            has_own=bool(self._body.logprob_token_ids),
            as_ids=self._body.return_tokens_as_token_ids,
        )

    def _deltas(self, chunk: Chunk) -> Sequence[Delta]:
        if self._parser is None:
            return (TextDelta(chunk.text),) if chunk.text else ()
        deltas = self._parser.push(chunk.text) if chunk.text else []
        return deltas if chunk.finish_reason is None else [*deltas, *self._parser.finish()]

    def _take(self, delta: Delta) -> None:
        match delta:
            case TextDelta(text):
                self._texts.append(text)
            case ReasoningDelta(text):
                self._reasoning.append(text)
                self.num_reasoning_tokens += self._num_undecided_tokens
            case CallStart(_, name):
                self.calls.append(Call(self._new_call_id(), name))
            case ArgumentsDelta(index, text):
                self.calls[index].pieces.append(text)
        self._num_undecided_tokens = 0

    def _new_call_id(self) -> str:
        self._context.services.metrics.tool_calls.inc()
        tools = None if self._format is None else self._format.tools
        return "" if tools is None else tools.new_call_id()
