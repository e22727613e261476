"""The bodies of the inference routes: OpenAI's fields and vLLM's, strictly typed.

What isn't here is `fields`' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from loraserve.limits import LIMITS
from loraserve.types import PoolingKind

_INT64 = 1 << 63
MAX_NAME_LENGTH = 2 * LIMITS.max_name_length + LIMITS.max_adapter_name_length + 2
"""Maximum length of OWNER/NAME@ALIAS."""
MAX_MODEL_LENGTH = 2048
"""Holds the longest id of a base and the longest sum."""


_CACHE = {
    "type": "object",
    "properties": {"ttl": {"type": "number", "exclusiveMinimum": 0, "maximum": LIMITS.max_result_cache_ttl_s}},
    "required": ["ttl"],
    "additionalProperties": False,
}


def _check_not_all(value: Any) -> Any:
    """Refuse vLLM's -1 in words.

    Raises:
        ValueError: all tokens of the vocabulary are requested.
    """
    if value == -1 and not isinstance(value, bool):
        raise ValueError("-1, all tokens of the vocabulary, isn't supported: send a number of likeliest tokens")
    return value


def _drop_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


_NOT_ALL = BeforeValidator(_check_not_all)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)

    refused: ClassVar[Mapping[str, str]] = {}
    """Fields beside those that `fields` refuses on every route, and what to do without each."""

    def synonyms(self) -> Mapping[str, Mapping[str, object]]:
        """Return what was sent under other servers' names: the name → the fields that it means."""
        return {}


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class WeightedAdapter(_Body):
    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    weight: float = Field(default=1.0, allow_inf_nan=False)


class SamplingBody(_Body):
    """Fields that every route that generates has in common."""

    model: str = Field(min_length=1, max_length=MAX_MODEL_LENGTH)
    adapters: list[Annotated[WeightedAdapter, BeforeValidator(_drop_nulls)]] | None = Field(
        default=None, max_length=LIMITS.max_composition_terms
    )
    """A sum of adapters, in place of the one that `model` would name."""
    user: str | None = None
    """End user: during a split, the same user stays on the same version.

    It is hashed, and not kept.
    """
    stream: bool = False

    min_tokens: int = Field(default=0, ge=0, lt=1 << 31)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    """0 and -1: all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    # checked by `sampling`, which has clearer messages than a union, without keys of the caller's
    logit_bias: Any = None
    stop: Any = None
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64)
    stop_token_ids: list[int] = Field(default=[], max_length=LIMITS.max_stop_token_ids)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: Literal[True] = True
    """Default of a byte-level decoder, which does nothing else."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Lower runs first among the tenant's own requests; below 0 takes an admin key."""
    timeout: float | None = Field(default=None, gt=0, le=LIMITS.max_request_timeout_s)
    """Seconds from its arrival, after which it ends with what there is."""
    return_tokens_as_token_ids: bool = False
    """Show tokens in logprobs as ``token_id:7``."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=1 << 31)
    """Tokens of the prompt's end that are kept; -1: as many as fit."""
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1, max_length=LIMITS.max_allowed_token_ids)
    bad_words: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=LIMITS.max_bad_words)
    thinking_token_budget: int | None = Field(default=None, ge=-1, lt=1 << 31)
    """Tokens of reasoning after which it is ended; -1: any number."""
    # the adapter, as SGLang's and LoRAX's clients name it along with the base's id in `model`
    lora_path: Any = None
    adapter_id: str | None = Field(default=None, max_length=MAX_MODEL_LENGTH)

    # what the answer has to be: read by `structured_output`
    structured_outputs: Any = None


class InferenceBody(SamplingBody):
    """Fields that completions and chat have in common."""

    n: int = Field(default=1, ge=1, le=LIMITS.max_n)
    stream_options: Annotated[StreamOptions, BeforeValidator(_drop_nulls)] = StreamOptions()

    max_tokens: int | None = Field(default=None, ge=-1, lt=1 << 31)
    """-1: as many as there is room for."""
    return_token_ids: bool = False
    truncation_side: Literal["left", "right"] = "left"
    """End of a prompt longer than `truncate_prompt_tokens` that is cut off."""
    cache: Annotated[Any, WithJsonSchema(_CACHE)] = None
    """Whether the answer may be one that was kept, and be kept: read by `sampling`."""
    prompt_logprobs: Annotated[int | None, _NOT_ALL] = Field(default=None, ge=0, le=LIMITS.max_completion_logprobs)

    logprob_token_ids: list[int] = Field(default=[], max_length=LIMITS.max_logprob_token_ids)
    """Tokens whose log probabilities are shown with each, in the place of the likeliest."""

    # llama.cpp's names
    repeat_penalty: float | None = Field(default=None, gt=0, le=100)
    """`repetition_penalty`: of all tokens, whatever ``repeat_last_n`` says."""
    n_predict: int | None = Field(default=None, ge=-1, lt=1 << 31)
    """`max_tokens`."""

    # what the answer has to be: read by `structured_output`
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_whitespace_pattern: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    json_schema: Any = None
    structural_tag: Any = None

    def synonyms(self) -> Mapping[str, Mapping[str, object]]:
        found: dict[str, Mapping[str, object]] = {}
        if self.repeat_penalty is not None:
            found["repeat_penalty"] = {"repetition_penalty": self.repeat_penalty}
        if self.n_predict is not None:
            found["n_predict"] = {"max_tokens": self.n_predict}
        return found


class CompletionBody(InferenceBody):
    prompt: Any
    best_of: int | None = Field(default=None, ge=1, le=LIMITS.max_n)
    echo: bool = False
    logprobs: Annotated[int | None, _NOT_ALL] = Field(default=None, ge=0, le=LIMITS.max_completion_logprobs)
    n_probs: int = Field(default=0, ge=0, le=LIMITS.max_completion_logprobs)
    """llama.cpp's name of `logprobs`; 0: none."""
    add_special_tokens: bool = True

    def synonyms(self) -> Mapping[str, Mapping[str, object]]:
        return {**super().synonyms(), **({"n_probs": {"logprobs": self.n_probs}} if self.n_probs else {})}


class ChatBody(InferenceBody):
    messages: Any
    max_completion_tokens: int | None = Field(default=None, ge=-1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: Annotated[int, _NOT_ALL] = Field(default=0, ge=0, le=LIMITS.max_chat_top_logprobs)
    n_probs: int = Field(default=0, ge=0, le=LIMITS.max_chat_top_logprobs)
    """llama.cpp's name of `logprobs` with so many `top_logprobs`; 0: none."""
    # checked by `chat.tools`, which has clearer messages than a union
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    modalities: list[Literal["text"]] = ["text"]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer continues the last message, in place of a new one."""
    add_special_tokens: bool = False
    """A chat template writes the special tokens itself."""
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=32)
    reasoning_effort: str | None = Field(default=None, max_length=32)
    """Variable of the chat template.

    A template that doesn't read it ignores it, and the answer's header says so.
    """
    verbosity: Literal["low", "medium", "high"] | None = None
    """Another; medium, OpenAI's default, needs no template that reads it."""
    # what other clients send for it: read by `chat.thinking`
    reasoning: Any = None
    thinking: Any = None
    enable_thinking: bool | None = None
    think: Any = None
    echo: bool = False
    """The answer begins with the last message's text, if that is the assistant's."""

    def synonyms(self) -> Mapping[str, Mapping[str, object]]:
        found = super().synonyms()
        if self.n_probs:
            found = {**found, "n_probs": {"logprobs": True, "top_logprobs": self.n_probs}}
        return found


class PoolingBody(_Body):
    """Fields that embeddings, scores and rerankings have in common."""

    n: ClassVar[int] = 1
    """Vectors of an input."""
    model: str = Field(min_length=1, max_length=MAX_MODEL_LENGTH)
    adapters: list[Annotated[WeightedAdapter, BeforeValidator(_drop_nulls)]] | None = Field(
        default=None, max_length=LIMITS.max_composition_terms
    )
    """A sum of adapters, as in `InferenceBody`; so are the next three."""
    user: str | None = None
    priority: int = Field(default=0, ge=-1000, le=1000)
    timeout: float | None = Field(default=None, gt=0, le=LIMITS.max_request_timeout_s)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=1 << 31)
    """Tokens that a longer input is cut to; -1: the model's context."""
    truncation_side: Literal["left", "right"] = "right"
    """End of a longer input that is cut off."""
    pooling: PoolingKind = Field(default=PoolingKind.LAST, strict=False)
    """Hidden states that a vector is made of. A classification head reads the last token's."""
    use_activation: bool = True
    """Whether vectors are normalized, and a head's numbers made probabilities."""


_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_MANY = {"type": "array", "minItems": 1, "maxItems": LIMITS.max_pooled_inputs}
_OBJECT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
# checked by `inputs` and `scoring`, which have clearer messages than a union
Inputs = Annotated[
    Any, WithJsonSchema({"anyOf": [_TEXT, {**_MANY, "items": _TEXT}, _TOKENS, {**_MANY, "items": _TOKENS}]})
]
Texts = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _OBJECT, {**_MANY, "items": {"anyOf": [_TEXT, _OBJECT]}}]})]


class EmbeddingBody(PoolingBody):
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    """Numbers of a vector that are kept, before it is normalized."""
    normalize: bool = True
    add_special_tokens: bool = True
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "little"
    """Byte order of base64, which is every client's own."""


class ScoreBody(PoolingBody):
    """Two texts or lists of texts, by any of the pairs of names that vLLM has for them."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankBody(PoolingBody):
    query: str = Field(min_length=1)
    documents: Texts
    top_n: int = Field(default=0, ge=0)
    """Most results; 0: all."""
    return_documents: bool = True


class TokenizeBody(_Body):
    model: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL_LENGTH)
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=32)
    return_token_strs: bool = False


class DetokenizeBody(_Body):
    model: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL_LENGTH)
    tokens: list[int]
