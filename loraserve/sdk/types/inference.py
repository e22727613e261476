"""Answers of inference: OpenAI's shapes, with vLLM's additions."""

from __future__ import annotations

from decimal import Decimal

from pydantic import Field

from loraserve.contract.result import Result
from loraserve.contract.server import Model as Model
from loraserve.contract.server import ModelList as ModelList


class PromptTokensDetails(Result):
    cached_tokens: int = 0


class Usage(Result):
    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    cost: Decimal | None = None
    """The exact cost by the tenant's prices; None: it has none."""
    currency: str | None = None


class CompletionLogprobs(Result):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class PromptLogprob(Result):
    logprob: float
    rank: int | None = None
    """None: more tokens are likelier than were asked for."""
    decoded_token: str


class CompletionChoice(Result):
    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """Log probabilities of the prompt's tokens, by id."""


class Completion(Result):
    """An answer of `/v1/completions`, and each chunk of its stream.

    A last chunk with usage has no choices.
    """

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class FunctionCall(Result):
    name: str | None = None
    arguments: str | None = None


class ToolCall(Result):
    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


class ChatMessage(Result):
    """A whole message, or what a chunk adds to one (`delta`)."""

    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    """Reasoning before the answer."""
    tool_calls: list[ToolCall] | None = None


class TopLogprob(Result):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChatLogprobs(Result):
    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class ChatChoice(Result):
    index: int
    message: ChatMessage
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Result):
    """An answer of `/v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class ChatChunkChoice(Result):
    index: int
    delta: ChatMessage
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(Result):
    """A piece of a streamed chat; the last one with usage has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
