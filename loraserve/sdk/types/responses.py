"""Answers of `/v1/responses`."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from pydantic import Field

from loraserve.contract.result import Result
from loraserve.sdk.types.inference import PromptTokensDetails, TokenLogprob


class ReasoningDetails(Result):
    reasoning_tokens: int = 0


class ResponseUsage(Result):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: PromptTokensDetails | None = None
    output_tokens_details: ReasoningDetails | None = None
    cost: Decimal | None = None
    """The exact cost by the tenant's prices; None: it has none."""
    currency: str | None = None


class OutputPart(Result):
    type: str
    text: str = ""
    logprobs: list[TokenLogprob] = Field(default_factory=list)


class OutputItem(Result):
    """A message, reasoning, or a call of a function."""

    id: str
    type: str
    status: str | None = None
    role: str | None = None
    content: list[OutputPart] = Field(default_factory=list)
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class IncompleteDetails(Result):
    reason: str


class ModelResponse(Result):
    """A response; `store` says whether it can be continued."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    incomplete_details: IncompleteDetails | None = None
    previous_response_id: str | None = None
    store: bool = False
    usage: ResponseUsage | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def output_text(self) -> str:
        """Text of all messages."""
        messages = (item for item in self.output if item.type == "message")
        return "".join(part.text for item in messages for part in item.content)
