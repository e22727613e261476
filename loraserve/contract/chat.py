"""Chats in OpenAI's shape, and messages in Anthropic's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from loraserve.contract.completion import PromptLogprob
from loraserve.contract.result import ALWAYS, ALWAYS_NULL, OPTIONAL, STREAMED, Result, one_of
from loraserve.contract.usage import Cost, Usage


class FunctionCall(Result):
    name: Annotated[str | None, ALWAYS] = None
    arguments: Annotated[str | None, ALWAYS] = None
    """JSON as the model wrote it."""


class ToolCall(Result):
    index: Annotated[int | None, STREAMED] = None
    id: Annotated[str | None, ALWAYS] = None
    type: Annotated[str | None, one_of("function")] = None
    function: Annotated[FunctionCall | None, ALWAYS] = None


class ChatMessage(Result):
    """A whole message, or what a chunk adds to one (`delta`)."""

    role: Annotated[str | None, one_of("assistant")] = None
    content: str | None = None
    """Text of the answer; None if it has only tool calls or reasoning."""
    refusal: Annotated[str | None, ALWAYS_NULL] = None
    reasoning_content: Annotated[str | None, OPTIONAL, ALWAYS] = None
    """Reasoning before the answer."""
    reasoning: Annotated[str | None, OPTIONAL, ALWAYS] = None
    """The same under a newer name."""
    tool_calls: Annotated[list[ToolCall] | None, OPTIONAL, ALWAYS] = None


class TopLogprob(Result):
    token: str
    logprob: float
    bytes: Annotated[list[int] | None, ALWAYS] = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChatLogprobs(Result):
    content: Annotated[list[TokenLogprob] | None, ALWAYS] = None
    refusal: Annotated[list[TokenLogprob] | None, ALWAYS_NULL] = None


class ChatChoice(Result):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Annotated[str | None, one_of("stop", "length", "tool_calls")] = None
    stop_reason: int | str | None = None
    """The stop token or string that ended it, or ``timeout``."""
    token_ids: list[int] | None = None
    """Tokens of the answer; only with return_token_ids."""


class ChatCompletion(Result):
    """An answer of `/v1/chat/completions`."""

    id: str
    object: Annotated[str, one_of("chat.completion")] = "chat.completion"
    created: int
    model: str
    system_fingerprint: Annotated[str | None, ALWAYS] = None
    """The base and its arithmetic: where it differs, the same seed may give another answer."""
    choices: list[ChatChoice]
    usage: Annotated[Usage | None, ALWAYS] = None
    prompt_token_ids: list[int] | None = None
    """Tokens of the prompt; only with return_token_ids."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """Log probabilities of the prompt's tokens, by id; only if asked for."""


class ChatChunkChoice(Result):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Annotated[list[int] | None, OPTIONAL] = None
    prompt_token_ids: Annotated[list[int] | None, OPTIONAL] = None


class ChatCompletionChunk(Result):
    """A piece of a streamed chat; the last one with usage has no choices."""

    id: str
    object: Annotated[str, one_of("chat.completion.chunk")] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: Annotated[str | None, ALWAYS] = None
    """The base and its arithmetic: where it differs, the same seed may give another answer."""
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ContentBlock(Result):
    """Text, thinking, or the use of a tool."""

    type: Annotated[str, one_of("text", "thinking", "tool_use")]
    text: Annotated[str, OPTIONAL] = ""
    thinking: Annotated[str, OPTIONAL] = ""
    signature: Annotated[str, OPTIONAL] = ""
    id: Annotated[str, OPTIONAL] = ""
    name: Annotated[str, OPTIONAL] = ""
    input: Annotated[dict[str, Any], OPTIONAL] = Field(default_factory=dict)


class MessageUsage(Result):
    input_tokens: int
    """Prompt tokens that weren't cached."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cost: Annotated[Cost | None, OPTIONAL, ALWAYS] = None
    currency: Annotated[str | None, OPTIONAL, ALWAYS] = None


class Message(Result):
    """An answer of `/v1/messages`."""

    id: str
    type: Annotated[str, one_of("message")]
    role: Annotated[str, one_of("assistant")]
    model: str
    content: list[ContentBlock]
    stop_reason: Annotated[str, one_of("end_turn", "max_tokens", "stop_sequence", "tool_use")]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokensCount(Result):
    input_tokens: int
