"""The optional fields of an inference request: OpenAI's, then vLLM's, by their own names.

Omitted ones take the server's default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from loraserve.errors import closest

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Message = Mapping[str, Any]
ExtraBody = Mapping[str, Any] | None
Limits = Mapping[str, int | float | None]
"""Bounds of a tenant, by name."""


class StreamOptions(TypedDict, total=False):
    include_usage: bool | None
    continuous_usage_stats: bool | None


class WeightedAdapter(TypedDict):
    """A term of a sum of adapters."""

    name: str
    """`NAME`, `NAME@ALIAS` or `NAME@VERSION`."""
    weight: NotRequired[float | None]
    """1 where it isn't said."""


class SamplingFields(TypedDict, total=False):
    adapters: Sequence[WeightedAdapter] | None
    """A sum of adapters, with the base's id as `model`;
    the same as writing it as `model`: ``a+0.5*b``.
    """
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    n: int | None
    stop: str | Sequence[str] | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[str, float] | None
    stream_options: StreamOptions | None
    user: str | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    ignore_eos: bool | None
    min_tokens: int | None
    skip_special_tokens: bool | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    priority: int | None
    add_special_tokens: bool | None
    return_token_ids: bool | None
    return_tokens_as_token_ids: bool | None
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    thinking_token_budget: int | None


class CompletionFields(SamplingFields, total=False):
    logprobs: int | None
    echo: bool | None
    best_of: int | None
    suffix: str | None


class ChatFields(SamplingFields, total=False):
    max_completion_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    echo: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


class ResponseFields(TypedDict, total=False):
    adapters: Sequence[WeightedAdapter] | None
    instructions: str | None
    previous_response_id: str | None
    store: bool | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    user: str | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    text: Mapping[str, Any] | None
    reasoning: Mapping[str, Any] | None
    include: Sequence[str] | None
    top_logprobs: int | None
    metadata: Mapping[str, str] | None
    structured_outputs: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    priority: int | None


class PoolingFields(TypedDict, total=False):
    adapters: Sequence[WeightedAdapter] | None
    user: str | None
    pooling: Literal["mean", "last", "cls"] | None
    """Hidden states that a vector is made of; the last token's where it isn't said."""
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None
    use_activation: bool | None
    priority: int | None


class EmbeddingFields(PoolingFields, total=False):
    dimensions: int | None
    encoding_format: Literal["float", "base64"] | None
    normalize: bool | None
    add_special_tokens: bool | None


class RerankFields(PoolingFields, total=False):
    top_n: int | None
    return_documents: bool | None


def merge(
    required: Mapping[str, Any], fields: Mapping[str, Any], known: type[Any], extra_body: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the request's body.

    Raises:
        TypeError: a field that `known` (one of the classes above) doesn't have, as for any misspelt
            argument.
    """
    names = known.__annotations__.keys()
    for name in fields:
        if name not in names:
            found = closest(name, names)
            guess = "" if found is None else f" Did you mean {found}?"
            raise TypeError(
                f"create() has no argument {name!r}.{guess} Pass fields that this client doesn't have in extra_body=."
            )
    return {**required, **fields, **(extra_body or {})}
