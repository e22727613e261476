"""Requests that take each row's likeliest token."""

from __future__ import annotations

from loraserve.types import SamplingParams

MIN_TEMPERATURE = 1e-5
"""Temperature up to which sampling is greedy."""


def has_penalties(params: SamplingParams) -> bool:
    """Check whether a token's choice depends on the tokens before it."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.bad_words)
        or params.thinking is not None
    )


def reads_logits_alone(params: SamplingParams) -> bool:
    """Check whether tokens are chosen by logits as the model gives them."""
    return not params.logit_bias and not params.allowed_token_ids and not has_penalties(params)
