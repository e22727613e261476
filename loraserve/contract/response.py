"""Responses of OpenAI's API, and what is stored of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from loraserve.contract.chat import TokenLogprob
from loraserve.contract.result import ALWAYS, ALWAYS_NULL, OPTIONAL, Result, one_of
from loraserve.contract.usage import Cost, PromptTokensDetails, ReasoningDetails


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int = 0


class ResponseUsage(Result):
    input_tokens: int
    input_tokens_details: Annotated[InputTokensDetails | None, ALWAYS] = None
    output_tokens: int
    output_tokens_details: Annotated[ReasoningDetails | None, ALWAYS] = None
    total_tokens: int
    cost: Annotated[Cost | None, OPTIONAL, ALWAYS] = None
    """The exact cost by the tenant's prices; None: it has none."""
    currency: Annotated[str | None, OPTIONAL, ALWAYS] = None


class OutputPart(Result):
    type: Annotated[str, one_of("output_text", "reasoning_text")]
    text: str = ""
    annotations: Annotated[list[Any], OPTIONAL] = Field(default_factory=list)
    logprobs: Annotated[list[TokenLogprob], OPTIONAL] = Field(default_factory=list)


class OutputItem(Result):
    """A message, reasoning, or a call of a function."""

    id: str
    type: Annotated[str, one_of("message", "reasoning", "function_call")]
    status: Annotated[str | None, one_of("completed", "incomplete")] = None
    role: Annotated[str | None, OPTIONAL, one_of("assistant")] = None
    summary: Annotated[list[Any], OPTIONAL] = Field(default_factory=list)
    """Empty; only of reasoning."""
    content: Annotated[list[OutputPart], OPTIONAL] = Field(default_factory=list)
    call_id: Annotated[str | None, OPTIONAL, ALWAYS] = None
    name: Annotated[str | None, OPTIONAL, ALWAYS] = None
    arguments: Annotated[str | None, OPTIONAL, ALWAYS] = None


class IncompleteDetails(Result):
    reason: Annotated[str, one_of("max_output_tokens", "timeout")]


class ModelResponse(Result):
    """A response, with what was asked for; `store` says whether it can be continued."""

    id: str
    object: Annotated[str, one_of("response")] = "response"
    created_at: int
    completed_at: int | None = None
    status: Annotated[str, one_of("completed", "incomplete")]
    background: bool = False
    error: Annotated[dict[str, Any] | None, ALWAYS_NULL] = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: Annotated[int | None, ALWAYS_NULL] = None
    metadata: dict[str, str] = Field(default_factory=dict)
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = Field(default_factory=dict)
    service_tier: Annotated[str | None, one_of("default")] = None
    store: bool = False
    """Whether it was stored, and so can be continued."""
    temperature: Annotated[float | None, ALWAYS] = None
    text: dict[str, Any] = Field(default_factory=dict)
    """The format that was asked for."""
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_logprobs: int = 0
    top_p: Annotated[float | None, ALWAYS] = None
    truncation: Annotated[str | None, one_of("disabled")] = None
    usage: Annotated[ResponseUsage | None, ALWAYS] = None
    user: str | None = None

    @property
    def output_text(self) -> str:
        """Text of all messages."""
        messages = (item for item in self.output if item.type == "message")
        return "".join(part.text for item in messages for part in item.content)


class DeletedResponse(Result):
    id: str
    object: Annotated[str, one_of("response")]
    deleted: Literal[True]


class InputItems(Result):
    """A page of a response's own input items."""

    object: Annotated[str, one_of("list")]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Result):
    """Tokens of a response's prompt."""

    object: Annotated[str, one_of("response.input_tokens")] = "response.input_tokens"
    input_tokens: int
