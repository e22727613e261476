"""Chats, generated texts and vectors in Ollama's shape. Durations are nanoseconds."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from loraserve.contract.chat import TokenLogprob
from loraserve.contract.result import ALWAYS, OPTIONAL, Result, one_of
from loraserve.contract.usage import Cost

_DONE_REASONS = one_of("stop", "length", "load", "unload")


class OllamaFunctionCall(Result):
    index: int
    name: str
    arguments: dict[str, Any]
    """The object that the model wrote; ``{"INVALID_JSON": text}`` where it wrote none."""


class OllamaToolCall(Result):
    id: str
    function: OllamaFunctionCall


class OllamaMessage(Result):
    role: Annotated[str, one_of("assistant")]
    content: str
    thinking: Annotated[str | None, OPTIONAL, ALWAYS] = None
    """Reasoning before the answer."""
    tool_calls: Annotated[list[OllamaToolCall] | None, OPTIONAL, ALWAYS] = None


class OllamaFigures(Result):
    """Counts and times at an answer's end; an answer that only loads a model has none."""

    total_duration: Annotated[int | None, OPTIONAL, ALWAYS] = None
    """Time from the request's headers to the answer's last token."""
    load_duration: Annotated[int | None, OPTIONAL, ALWAYS] = None
    """Time for which the request waited for its adapter."""
    prompt_eval_count: Annotated[int | None, OPTIONAL, ALWAYS] = None
    """Tokens of the prompt, cached ones included."""
    prompt_eval_duration: Annotated[int | None, OPTIONAL, ALWAYS] = None
    eval_count: Annotated[int | None, OPTIONAL, ALWAYS] = None
    """Tokens of the answer."""
    eval_duration: Annotated[int | None, OPTIONAL, ALWAYS] = None
    """Time from the first token to the last."""
    cost: Annotated[Cost | None, OPTIONAL, ALWAYS] = None
    """Price of the answer, where the tenant has prices."""
    currency: Annotated[str | None, OPTIONAL, ALWAYS] = None
    logprobs: Annotated[list[TokenLogprob] | None, OPTIONAL, ALWAYS] = None
    """Log probabilities of the tokens; only if requested."""


class OllamaChat(OllamaFigures):
    """An answer of `/api/chat`, or a line of its stream."""

    model: str
    created_at: datetime
    message: OllamaMessage
    done: bool
    done_reason: Annotated[str | None, OPTIONAL, _DONE_REASONS] = None
    """Reason of the end; only lines before it have none."""


class OllamaGeneration(OllamaFigures):
    """An answer of `/api/generate`, or a line of its stream."""

    model: str
    created_at: datetime
    response: str
    thinking: Annotated[str | None, OPTIONAL, ALWAYS] = None
    done: bool
    done_reason: Annotated[str | None, OPTIONAL, _DONE_REASONS] = None


class OllamaVectors(Result):
    """An answer of `/api/embed`, in the order of the inputs."""

    model: str
    embeddings: list[list[float]]
    total_duration: Annotated[int | None, OPTIONAL, ALWAYS] = None
    load_duration: Annotated[int | None, OPTIONAL, ALWAYS] = None
    prompt_eval_count: Annotated[int | None, OPTIONAL, ALWAYS] = None
    cost: Annotated[Cost | None, OPTIONAL, ALWAYS] = None
    currency: Annotated[str | None, OPTIONAL, ALWAYS] = None


class OllamaVector(Result):
    """An answer of `/api/embeddings`."""

    embedding: list[float]
