"""The server: its base and models, its bounds, its audit log, and its health."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from loraserve.contract.result import ALWAYS, OPTIONAL, Result, one_of


class BasePrecision(Result):
    """Cost of rounding a base: its next tokens on a text, compared with the float base's."""

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
    """Linear → (out_features, in_features): what an adapter's tensors must fit."""
    module_paths: dict[str, str] = Field(default_factory=dict)
    """Linear → its path in a layer."""
    module_layers: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Linear → the layers that have it, of those that only some have."""
    layers_path: Annotated[str | None, ALWAYS] = None
    has_recurrent_state: bool = False
    """Whether layers keep a state of all tokens before: prefixes are reused up to a snapshot of it.
    """
    dtype: str
    quantization: str
    """Format of the linears' weights."""
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
    """Cost of rounding it; None: it isn't measured yet, or nothing is (`precision_note`)."""
    precision_note: str = ""
    """Reason why nothing is measured: it is served as it is stored, or there is no float base."""
    has_chat_template: bool = False
    """Whether it takes messages; otherwise prompts alone, but for versions with a template."""
    generation_defaults: dict[str, int | float] = Field(default_factory=dict)
    """Defaults of fields that requests don't send, out of its generation_config.json."""
    chat_template_file: str | None = None
    """Name of the file whose template chats have; None: they have the checkpoint's."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of chat templates that versions and requests may set otherwise."""


class Model(Result):
    """A model that `model=` may name. An adapter has `parent`, the base's id."""

    id: str
    object: Annotated[str, one_of("model")] = "model"
    created: int
    owned_by: str
    root: Annotated[str | None, ALWAYS] = None
    parent: str | None = None
    """Id of the base; None: this is the base."""
    max_model_len: Annotated[int | None, ALWAYS] = None


class ModelList(Result):
    object: Annotated[str, one_of("list")] = "list"
    data: list[Model]


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


class Health(Result):
    status: Annotated[str, one_of("ok", "unavailable")]
    detail: Annotated[str | None, OPTIONAL, ALWAYS] = None
    """Description of what is waited for; only while it isn't ok."""
    database: Annotated[str | None, OPTIONAL, one_of("unavailable")] = None
    """``unavailable`` while the database is away, and known keys and names are served on."""


class ServerVersion(Result):
    version: str


class PauseStatus(Result):
    status: Annotated[str, one_of("paused", "resumed")]


class IsPaused(Result):
    is_paused: bool


class LoraUpdate(Result):
    """Outcome of SGLang's load or unload of an adapter."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]
    """Adapter of the request and its path, while it is loaded."""
