"""The server's base, its bounds, and its audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from loraserve.sdk.call import Result


class BasePrecision(Result):
    """What rounding costs a base: its next tokens on a text, compared with the float base's."""

    num_positions: int
    top1_agreement: float
    """The part of positions at which both have the same likeliest token."""
    mean_divergence: float
    """The mean Kullback-Leibler divergence from the float base, in nats."""
    perplexity_ratio: float
    """Perplexity of the text, in terms of the float base's."""
    measured_at: datetime
    advice: str = ""
    """Flags that keep more of the base's answers; empty where rounding costs little."""


class Base(Result):
    """The resident base model, with the shapes that an adapter must have."""

    id: str
    digest: str
    architecture: str
    implementation: str = "native"
    """Code that computes the layers: native, or transformers."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    modules: dict[str, tuple[int, int]]
    """Linear → (out_features, in_features)."""
    has_recurrent_state: bool = False
    """Whether layers keep a state of all tokens before: then prefixes aren't cached."""
    dtype: str
    quantization: str
    arithmetic: str = ""
    """Arithmetic of linears: ``w8a8-row-h64`` (int8 weights, activations rounded to int8 by row,
    both rotated by Hadamard blocks of 64 inputs),
    ``w8a16``, ``w4a16``, ``fp32`` …; several joined by ``+``.
    """
    kernels: str = ""
    """Kernels that multiply so."""
    instructions: str = ""
    """The widest instruction sets that those may use."""
    device: str = ""
    """cpu or cuda. Empty, like the three above: the server is of a release that doesn't say."""
    num_parameters: int
    size_bytes: int
    precision: BasePrecision | None = None
    """What rounding costs it; None: it isn't measured yet, or nothing is (`precision_note`)."""
    precision_note: str = ""
    """Reason why nothing is measured."""
    generation_defaults: dict[str, int | float] = Field(default_factory=dict)
    """Defaults of fields that requests don't send, out of its generation_config.json."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of chat templates that versions and requests may set otherwise."""


class Limits(Result):
    """The server's bounds by name: read them as attributes, or all with `model_dump`."""


class AuditEntry(Result):
    """Something that was done."""

    id: int
    at: datetime
    tenant: str | None
    actor: str
    """The key's id, or the server's own doing."""
    action: str
    target: str
    detail: dict[str, Any] = Field(default_factory=dict)
