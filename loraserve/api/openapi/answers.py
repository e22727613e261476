"""Models of the answers of inference routes, probes and errors.

The routes themselves write dicts, for speed.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class Health(_Answer):
    status: Literal["ok", "unavailable"]
    detail: str | None = None
    """Description of what is waited for; only while it isn't ok."""


class PromptDetails(_Answer):
    cached_tokens: int


class TokenUsage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: PromptDetails | None = None
    """All of the answer's tokens; only where it was kept, and the request asked for that."""
    cost: str = ""
    """Exact, as decimal text. It is there where the tenant has prices, as is `currency`."""
    currency: str = ""


class ListedLogprobs(_Answer):
    """Lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(_Answer):
    index: int
    stop_reason: int | str | None
    """The stop token or string that ended it, or ``timeout``."""
    token_ids: list[int] = Field(default=[])
    """Tokens of the answer; only with return_token_ids, as `prompt_token_ids`."""


class PromptTokenLogprob(_Answer):
    logprob: float
    rank: int | None
    """Null: more tokens are likelier than were asked for."""
    decoded_token: str


class CompletionChoice(_Choice):
    finish_reason: Literal["stop", "length"]
    text: str
    logprobs: ListedLogprobs | None
    prompt_token_ids: list[int] = Field(default=[])
    prompt_logprobs: list[dict[str, PromptTokenLogprob] | None] | None = None
    """Log probabilities by the token's id; only if asked for."""


class Completion(_Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage


class CalledFunction(_Answer):
    name: str
    arguments: str
    """JSON as the model wrote it."""


class ToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    """Text of the answer; null if it has only tool calls or reasoning."""
    refusal: None
    reasoning_content: str = ""
    """Reasoning before the answer; missing if there is none."""
    reasoning: str = ""
    tool_calls: list[ToolCall] = Field(default=[])


class ChatToken(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(_Answer):
    content: list[ChatTokenLogprobs]
    refusal: None


class ChatChoice(_Choice):
    finish_reason: Literal["stop", "length", "tool_calls"]
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] = Field(default=[])
    prompt_logprobs: list[dict[str, PromptTokenLogprob] | None] | None = None


class InputDetails(_Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(_Answer):
    reasoning_tokens: int


class ResponseUsage(_Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    cost: str = ""
    currency: str = ""


class OutputText(_Answer):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[str] = Field(default=[])
    logprobs: list[ChatTokenLogprobs] = Field(default=[])


class OutputItem(_Answer):
    """A message, reasoning, or a call of a function."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["completed", "incomplete"]
    role: str = ""
    content: list[OutputText] = Field(default=[])
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class IncompleteDetails(_Answer):
    reason: Literal["max_output_tokens", "timeout"]


class ModelResponse(_Answer):
    """A response, with what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    incomplete_details: IncompleteDetails | None
    error: None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    """Whether it was stored, and so can be continued."""
    temperature: float
    top_p: float
    top_logprobs: int
    truncation: Literal["disabled"]
    user: str | None


class ContentBlock(_Answer):
    """Text, thinking, or the use of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default={})


class MessageUsage(_Answer):
    input_tokens: int
    """Prompt tokens that weren't cached."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cost: str = ""
    currency: str = ""


class Message(_Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageErrorDetail(_Answer):
    type: str
    message: str
    code: str
    param: str | None


class MessageError(_Answer):
    """Anthropic's error."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None


class PromptToken(_Answer):
    id: int
    text: str
    logprob: float | None
    """Null: nothing predicts the first token."""


class CandidateToken(_Answer):
    id: int
    text: str
    logprob: float | None
    special: bool


class GeneratedToken(CandidateToken):
    skipped: Literal[False]
    alternative_tokens: list[CandidateToken] = Field(default=[])
    """Likeliest tokens; only with return_k_alternatives."""


class GeneratedSequence(_Answer):
    generated_text: str
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    """Null: the likeliest token was always taken."""
    prefill: list[PromptToken]
    tokens: list[GeneratedToken]
    top_tokens: list[list[CandidateToken]] = Field(default=[])
    """Likeliest tokens at each place; only with top_n_tokens."""


class GeneratedDetails(_Answer):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: Literal[0]
    seed: int | None
    prefill: list[PromptToken]
    tokens: list[GeneratedToken]
    top_tokens: list[list[CandidateToken]] = Field(default=[])
    best_of_sequences: list[GeneratedSequence] = Field(default=[])


class Generated(_Answer):
    generated_text: str
    details: GeneratedDetails | None = None


class GenerateError(_Answer):
    """LoRAX's and TGI's error."""

    error: str
    error_type: str
    code: str
    param: str | None


class Embedding(_Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or float32 in little-endian order as base64."""


class Embeddings(_Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: TokenUsage


class Score(_Answer):
    index: int
    object: Literal["score"]
    score: float


class Scores(_Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    scoring: Literal["classification_head", "cosine"]
    """What the scores were made by: the adapter's head, or the cosine of the texts' vectors."""
    data: list[Score]
    usage: TokenUsage


class RerankedDocument(_Answer):
    text: str


class RerankResult(_Answer):
    index: int
    document: RerankedDocument | None = None
    """Absent if return_documents is false."""
    relevance_score: float


class Reranking(_Answer):
    """The best first."""

    id: str
    model: str
    scoring: Literal["classification_head", "cosine"]
    results: list[RerankResult]
    usage: TokenUsage


class Tokens(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None
    """Tokens as text; only with return_token_strs."""


class Text(_Answer):
    prompt: str


class ErrorDetail(_Answer):
    message: str
    type: str
    param: str | None
    code: str


class Error(_Answer):
    """OpenAI's envelope."""

    error: ErrorDetail


class ProblemDetail(_Answer):
    detail: str
    field: str | None


class Problem(_Answer):
    """RFC 9457's problem document."""

    type: Literal["about:blank"]
    title: str
    status: int
    detail: str
    code: str
    """Stable, for programs."""
    errors: list[ProblemDetail]
    """Errors, an entry per thing that is wrong."""
    request_id: str | None
    received: int = 0
    """Offset of the next piece; only with ``upload_offset_mismatch``."""
