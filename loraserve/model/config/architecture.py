"""Architecture of the decoder: what its checkpoint has, and what its config means.

All have RMSNorm, rotary positions, grouped-query attention and a gated MLP or experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Window(Enum):
    """Rule for the layers that attend to the last ``sliding_window`` positions only."""

    NONE = "none"
    EVERY_LAYER = "every layer, when sliding_window is set"
    BY_LAYER_TYPE = (
        "those that layer_types calls sliding_attention (or else those from max_window_layers on), "
        "when use_sliding_window is set"
    )
    BY_PATTERN = "those that layer_types calls sliding_attention, or else all but each window_pattern-th"
    BY_PATTERN_IF_SET = "so too, when sliding_window is set; else none"
    BY_TYPE_OR_ALL = "those that layer_types calls sliding_attention, or else all, when sliding_window is set"
    WITHOUT_ROPE = (
        "those that layer_types calls sliding_attention (or else those without rotary positions), "
        "when use_sliding_window is set"
    )


@dataclass(frozen=True, slots=True)
class ExpertPaths:
    """Names of a mixture of experts.

    They are its tensors in the checkpoint, and the config's fields of its sizes.

    Attributes:
        router: path inside a layer of the router's linear.
        experts: path inside a layer of the numbered experts.
        gate, up, down: an expert's linears.
        num_experts: fields of the number of experts; the first that is there counts.
        intermediate_size: field of an expert's.
        is_normed: whether the chosen experts' probabilities are scaled to sum to 1; a string names
            the config's field for it.
        parameters: path inside a layer of the module in which transformers 5 has all experts.
        shared: path inside a layer of the expert that all rows pass; None: there is none.
        shared_gate: of the linear whose sigmoid its output is multiplied with.
        shared_intermediate_size: field of its size.
    """

    router: str
    experts: str
    gate: str
    up: str
    down: str
    num_experts: tuple[str, ...]
    intermediate_size: str
    is_normed: bool | str
    parameters: str = "mlp.experts"
    shared: str | None = None
    shared_gate: str = ""
    shared_intermediate_size: str = ""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Architecture of a decoder.

    Attributes:
        name: as in config.json's ``architectures``.
        model_type: as in config.json, for configs that name no architecture.
        qkv_bias, o_bias, mlp_bias: whether these linears have biases; a string names the config's
            field for it.
        has_qk_norm: whether queries and keys pass an RMSNorm before they're rotated.
        is_qk_norm_whole: whether that is one over all heads together rather than one per head.
        is_qk_norm_after_rope: whether they pass it after they're rotated.
        window: which layers have a sliding window.
        window_pattern: of `Window.BY_PATTERN`; a string names the config's field for it.
        has_layers_without_rope: whether ``no_rope_layers``, or else ``no_rope_layer_interval``,
            lists the layers that have rotary positions.
        has_local_rope: whether layers with a window turn by a rope of their own.
        local_theta: field of its theta.
        is_rope_in_windows_only: whether layers without a window aren't rotated where
            ``sliding_window`` is set.
        is_rope_interleaved: whether neighbouring elements of a head turn together, rather than
            those half a head apart.
        embedding_multiplier: field of what embeddings are multiplied with; None: 1. So for the next
            ones.
        residual_multiplier: what is added to the residual stream.
        attention_multiplier: the scores; None: head_dim ** -0.5, or that of `query_scalar`.
        query_scalar: field of what stands for head_dim there.
        logits_divisor: field of what logits are divided by.
        is_embedding_scaled: whether embeddings are multiplied with the root of hidden_size.
        attention_cap, logits_cap: fields of what scores and logits are softly kept below: cap *
            tanh(x / cap).
        activation: field of the gate's.
        activation_names: what it calls a function by another name than transformers' own.
        norm_offset: what is added to the weights of norms.
        refused: fields that must be absent, null, or this.
        defaults: what absent fields of the config mean. A field that isn't here must be there.
        embedding, norm, head: names of the tensors around the layers.
        layers: where the layers are in the checkpoint.
        attention_norm, mlp_norm: names inside a layer, of what the residual stream passes before;
            None: nothing.
        attention_out_norm, mlp_out_norm: of what the outputs pass before they are added to it;
            None: nothing.
        q_norm, k_norm: names inside a layer.
        module_paths: linear's short name → its path inside a layer.
        fused_paths: site → path inside a layer of the one linear that the checkpoint holds for all
            of the site's.
        rope_names: what its configs call a rope type by another name than transformers' own.
        has_rope_alpha: whether a ``dynamic`` rope with an ``alpha`` stretches theta by that.
        has_partial_rope: whether it may be that only the first elements of a head turn.
        has_query_scale: whether queries are scaled by their position past the context before it was
            stretched, which isn't implemented: that context is served.
        experts: where each layer has a mixture of experts; None: they have MLPs.
    """

    name: str
    model_type: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    has_qk_norm: bool = False
    is_qk_norm_whole: bool = False
    is_qk_norm_after_rope: bool = False
    window: Window = Window.NONE
    window_pattern: int | str = 1
    has_layers_without_rope: bool = False
    has_local_rope: bool = False
    local_theta: str = "rope_local_base_freq"
    is_rope_in_windows_only: bool = False
    is_rope_interleaved: bool = False
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    attention_multiplier: str | None = None
    query_scalar: str | None = None
    logits_divisor: str | None = None
    is_embedding_scaled: bool = False
    attention_cap: str | None = None
    logits_cap: str | None = None
    activation: str = "hidden_act"
    activation_names: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    refused: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layers: str = "model.layers"
    fused_paths: Mapping[str, str] = field(default_factory=dict)
    rope_names: Mapping[str, str] = field(default_factory=dict)
    has_rope_alpha: bool = False
    has_partial_rope: bool = False
    has_query_scale: bool = False
    experts: ExpertPaths | None = None
    attention_norm: str | None = "input_layernorm.weight"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm.weight"
    mlp_out_norm: str | None = None
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    module_paths: Mapping[str, str] = field(
        default_factory=lambda: {
            "q_proj": "self_attn.q_proj",
            "k_proj": "self_attn.k_proj",
            "v_proj": "self_attn.v_proj",
            "o_proj": "self_attn.o_proj",
            "gate_proj": "mlp.gate_proj",
            "up_proj": "mlp.up_proj",
            "down_proj": "mlp.down_proj",
        }
    )
