"""Completions in OpenAI's and in LoRAX's shapes, and tokens of a text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loraserve.contract.result import ALWAYS, OPTIONAL, Result, one_of
from loraserve.contract.usage import Usage


class CompletionLogprobs(Result):
    """Lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: Annotated[list[dict[str, float] | None] | None, ALWAYS] = None
    text_offset: Annotated[list[int] | None, ALWAYS] = None


class PromptLogprob(Result):
    logprob: float
    rank: int | None = None
    """None: more tokens are likelier than were asked for."""
    decoded_token: str


class CompletionChoice(Result):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Annotated[str | None, one_of("stop", "length")] = None
    stop_reason: int | str | None = None
    """The stop token or string that ended it, or ``timeout``."""
    token_ids: list[int] | None = None
    """Tokens of the answer; only with return_token_ids, as `prompt_token_ids`."""
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """Log probabilities of the prompt's tokens, by id; only if asked for."""


class Completion(Result):
    """An answer of `/v1/completions`, and each chunk of its stream.

    A last chunk with usage has no choices.
    """

    id: str
    object: Annotated[str, one_of("text_completion")] = "text_completion"
    created: int
    model: str
    system_fingerprint: Annotated[str | None, ALWAYS] = None
    """The base and its arithmetic: where it differs, the same seed may give another answer."""
    choices: list[CompletionChoice]
    usage: Annotated[Usage | None, ALWAYS] = None


class PromptToken(Result):
    id: int
    text: str
    logprob: float | None
    """None: nothing predicts the first token."""


class CandidateToken(Result):
    id: int
    text: str
    logprob: float | None
    special: bool


class GeneratedToken(CandidateToken):
    skipped: Literal[False]
    alternative_tokens: Annotated[list[CandidateToken], OPTIONAL] = Field(default_factory=list)
    """Likeliest tokens; only with return_k_alternatives."""


class GeneratedSequence(Result):
    generated_text: str
    finish_reason: Annotated[str, one_of("length", "eos_token", "stop_sequence")]
    generated_tokens: int
    seed: int | None
    """None: the likeliest token was always taken."""
    prefill: list[PromptToken]
    tokens: list[GeneratedToken]
    top_tokens: Annotated[list[list[CandidateToken]], OPTIONAL] = Field(default_factory=list)
    """Likeliest tokens at each place; only with top_n_tokens."""


class GeneratedDetails(Result):
    finish_reason: Annotated[str, one_of("length", "eos_token", "stop_sequence")]
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: Literal[0]
    seed: int | None
    prefill: list[PromptToken]
    tokens: list[GeneratedToken]
    top_tokens: Annotated[list[list[CandidateToken]], OPTIONAL] = Field(default_factory=list)
    best_of_sequences: Annotated[list[GeneratedSequence], OPTIONAL] = Field(default_factory=list)


class Generated(Result):
    """An answer of LoRAX's and TGI's `/generate`."""

    generated_text: str
    details: Annotated[GeneratedDetails | None, OPTIONAL] = None


class Tokens(Result):
    """An answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None
    """Tokens as text; only with return_token_strs."""


class Text(Result):
    """An answer of `/detokenize`."""

    prompt: str
