"""The architectures that the one decoder can be.

Each is a row of a table; nothing else differs between them. All are decoders with RMSNorm, rotary
positions, grouped-query attention and a gated MLP, as `transformers` computes them under the same
class names. A row says what a row's checkpoint has beyond that, and what its config means where it
is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from loraserve.errors import UnknownArchitecture


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
            the config's field that says so.
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
    shared: str | None = None
    shared_gate: str = ""
    shared_intermediate_size: str = ""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Row of the table.

    Attributes:
        name: as in config.json's ``architectures``.
        model_type: as in config.json, for configs that name no architecture.
        qkv_bias, o_bias, mlp_bias: whether these linears have biases; a string names the config's
            field that says so.
        has_qk_norm: whether queries and keys pass an RMSNorm before they're rotated.
        is_qk_norm_whole: whether that is one over all heads together rather than one per head.
        is_qk_norm_after_rope: whether they pass it after they're rotated.
        window: which layers have a sliding window.
        window_pattern: of `Window.BY_PATTERN`; a string names the config's field that says so.
        has_layers_without_rope: whether ``no_rope_layers``, or else ``no_rope_layer_interval``,
            says which layers have rotary positions.
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


_COMMON: Mapping[str, object] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    # None: hidden_size / num_attention_heads
    "head_dim": None,
    # None: num_attention_heads
    "num_key_value_heads": None,
    "sliding_window": None,
}
_QWEN: Mapping[str, object] = {
    **_COMMON,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA: Mapping[str, object] = {
    **_COMMON,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}

_GLM: Mapping[str, object] = {
    **_COMMON,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
}
_FUSED_GATE_UP: Mapping[str, str] = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    # PEFT knows the fused linear alone: `adapters.tensor_names` takes it apart
    "gate_proj": "mlp.gate_up_proj[gate_proj]",
    "up_proj": "mlp.gate_up_proj[up_proj]",
    "down_proj": "mlp.down_proj",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="LlamaForCausalLM",
            model_type="llama",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            defaults={**_COMMON, "attention_bias": False, "mlp_bias": False},
        ),
        Architecture(
            name="MistralForCausalLM",
            model_type="mistral",
            window=Window.EVERY_LAYER,
            defaults={**_COMMON, "num_key_value_heads": 8, "sliding_window": 4096},
        ),
        Architecture(
            name="MinistralForCausalLM",
            model_type="ministral",
            window=Window.BY_TYPE_OR_ALL,
            defaults={**_COMMON, "num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None},
        ),
        Architecture(
            name="Ministral3ForCausalLM",
            model_type="ministral3",
            window=Window.EVERY_LAYER,
            has_query_scale=True,
            defaults={**_COMMON, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        ),
        Architecture(
            name="SeedOssForCausalLM",
            model_type="seed_oss",
            qkv_bias="attention_bias",
            o_bias="attention_out_bias",
            mlp_bias="mlp_bias",
            defaults={
                **_COMMON,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "attention_bias": True,
                "attention_out_bias": False,
                "mlp_bias": False,
            },
        ),
        Architecture(
            name="Ernie4_5ForCausalLM",
            model_type="ernie4_5",
            qkv_bias="use_bias",
            o_bias="use_bias",
            mlp_bias="use_bias",
            is_rope_interleaved=True,
            defaults={
                **_COMMON,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "tie_word_embeddings": True,
                "use_bias": False,
            },
        ),
        Architecture(
            name="HeliumForCausalLM",
            model_type="helium",
            qkv_bias="attention_bias",
            mlp_bias="mlp_bias",
            is_rope_interleaved=True,
            defaults={
                **_COMMON,
                "num_key_value_heads": 20,
                "head_dim": 128,
                "rms_norm_eps": 1e-8,
                "rope_theta": 100_000.0,
                "attention_bias": False,
                "mlp_bias": False,
            },
        ),
        Architecture(
            name="GlmForCausalLM",
            model_type="glm",
            qkv_bias="attention_bias",
            is_rope_interleaved=True,
            has_partial_rope=True,
            fused_paths={"gate_up": "mlp.gate_up_proj"},
            module_paths=_FUSED_GATE_UP,
            defaults=_GLM,
        ),
        Architecture(
            name="Glm4ForCausalLM",
            model_type="glm4",
            qkv_bias="attention_bias",
            is_rope_interleaved=True,
            has_partial_rope=True,
            attention_out_norm="post_self_attn_layernorm.weight",
            mlp_out_norm="post_mlp_layernorm.weight",
            fused_paths={"gate_up": "mlp.gate_up_proj"},
            module_paths=_FUSED_GATE_UP,
            defaults=_GLM,
        ),
        Architecture(
            name="HunYuanDenseV1ForCausalLM",
            model_type="hunyuan_v1_dense",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            has_qk_norm=True,
            is_qk_norm_after_rope=True,
            has_rope_alpha=True,
            # of the first checkpoints: norms that may be absent, and keys that layers share
            refused={"use_qk_norm": True, "use_cla": False},
            q_norm="self_attn.query_layernorm.weight",
            k_norm="self_attn.key_layernorm.weight",
            defaults={**_COMMON, "rms_norm_eps": 1e-5, "attention_bias": False},
        ),
        Architecture(
            name="Qwen2ForCausalLM",
            model_type="qwen2",
            qkv_bias=True,
            window=Window.BY_LAYER_TYPE,
            defaults=_QWEN,
        ),
        Architecture(
            name="Qwen3ForCausalLM",
            model_type="qwen3",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            has_qk_norm=True,
            window=Window.BY_LAYER_TYPE,
            defaults={**_QWEN, "attention_bias": False, "head_dim": 128},
        ),
        Architecture(
            name="GraniteForCausalLM",
            model_type="granite",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            embedding_multiplier="embedding_multiplier",
            residual_multiplier="residual_multiplier",
            attention_multiplier="attention_multiplier",
            logits_divisor="logits_scaling",
            defaults={
                **_COMMON,
                "attention_bias": False,
                "mlp_bias": False,
                "embedding_multiplier": 1.0,
                "residual_multiplier": 1.0,
                "attention_multiplier": 1.0,
                "logits_scaling": 1.0,
            },
        ),
        Architecture(
            name="Olmo2ForCausalLM",
            model_type="olmo2",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            has_qk_norm=True,
            is_qk_norm_whole=True,
            attention_norm=None,
            attention_out_norm="post_attention_layernorm.weight",
            mlp_norm=None,
            mlp_out_norm="post_feedforward_layernorm.weight",
            defaults={**_COMMON, "attention_bias": False, "rms_norm_eps": 1e-5},
        ),
        Architecture(
            name="Olmo3ForCausalLM",
            model_type="olmo3",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            has_qk_norm=True,
            is_qk_norm_whole=True,
            window=Window.BY_PATTERN,
            window_pattern=4,
            # only the layers without a window are stretched
            has_local_rope=True,
            local_theta="rope_theta",
            attention_norm=None,
            attention_out_norm="post_attention_layernorm.weight",
            mlp_norm=None,
            mlp_out_norm="post_feedforward_layernorm.weight",
            defaults={
                **_COMMON,
                "attention_bias": False,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "sliding_window": 4096,
                "layer_types": None,
            },
        ),
        Architecture(
            name="Exaone4ForCausalLM",
            model_type="exaone4",
            has_qk_norm=True,
            window=Window.BY_PATTERN_IF_SET,
            window_pattern="sliding_window_pattern",
            is_rope_in_windows_only=True,
            attention_norm=None,
            attention_out_norm="post_attention_layernorm.weight",
            mlp_norm=None,
            mlp_out_norm="post_feedforward_layernorm.weight",
            defaults={
                **_COMMON,
                "num_key_value_heads": 32,
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "layer_types": None,
            },
        ),
        Architecture(
            name="SmolLM3ForCausalLM",
            model_type="smollm3",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            window=Window.WITHOUT_ROPE,
            has_layers_without_rope=True,
            defaults={
                **_COMMON,
                "num_key_value_heads": 4,
                "attention_bias": False,
                "mlp_bias": False,
                "rope_theta": 2_000_000.0,
                "tie_word_embeddings": True,
                "use_sliding_window": False,
                "layer_types": None,
                "no_rope_layers": None,
                "no_rope_layer_interval": 4,
            },
        ),
        Architecture(
            name="GemmaForCausalLM",
            model_type="gemma",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            is_embedding_scaled=True,
            # "gelu" of the first configs is the approximation too
            activation_names={"gelu": "gelu_pytorch_tanh"},
            norm_offset=1.0,
            refused={"use_bidirectional_attention": False},
            defaults={
                **_GEMMA,
                "hidden_act": "gelu_pytorch_tanh",
                "num_key_value_heads": 16,
            },
        ),
        Architecture(
            name="VaultGemmaForCausalLM",
            model_type="vaultgemma",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            window=Window.BY_PATTERN,
            window_pattern=2,
            query_scalar="query_pre_attn_scalar",
            is_embedding_scaled=True,
            attention_cap="attn_logit_softcapping",
            logits_cap="final_logit_softcapping",
            activation="hidden_activation",
            norm_offset=1.0,
            mlp_norm="pre_feedforward_layernorm.weight",
            defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
        Architecture(
            name="Gemma2ForCausalLM",
            model_type="gemma2",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            window=Window.BY_PATTERN,
            window_pattern=2,
            query_scalar="query_pre_attn_scalar",
            is_embedding_scaled=True,
            attention_cap="attn_logit_softcapping",
            logits_cap="final_logit_softcapping",
            activation="hidden_activation",
            norm_offset=1.0,
            refused={"use_bidirectional_attention": False},
            attention_out_norm="post_attention_layernorm.weight",
            mlp_norm="pre_feedforward_layernorm.weight",
            mlp_out_norm="post_feedforward_layernorm.weight",
            defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
        Architecture(
            name="Gemma3ForCausalLM",
            model_type="gemma3_text",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            has_qk_norm=True,
            window=Window.BY_PATTERN,
            window_pattern="sliding_window_pattern",
            has_local_rope=True,
            query_scalar="query_pre_attn_scalar",
            is_embedding_scaled=True,
            logits_cap="final_logit_softcapping",
            activation="hidden_activation",
            norm_offset=1.0,
            # transformers reads no cap of the scores here
            refused={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
            attention_out_norm="post_attention_layernorm.weight",
            mlp_norm="pre_feedforward_layernorm.weight",
            mlp_out_norm="post_feedforward_layernorm.weight",
            defaults={
                **_GEMMA,
                "final_logit_softcapping": None,
                "sliding_window_pattern": 6,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
            },
        ),
        Architecture(
            name="Phi3ForCausalLM",
            model_type="phi3",
            window=Window.EVERY_LAYER,
            fused_paths={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
            rope_names={"su": "longrope", "yarn": "longrope"},
            has_partial_rope=True,
            module_paths={
                # PEFT knows the fused linears alone: `adapters.tensor_names` takes them apart
                "q_proj": "self_attn.qkv_proj[q_proj]",
                "k_proj": "self_attn.qkv_proj[k_proj]",
                "v_proj": "self_attn.qkv_proj[v_proj]",
                "o_proj": "self_attn.o_proj",
                "gate_proj": "mlp.gate_up_proj[gate_proj]",
                "up_proj": "mlp.gate_up_proj[up_proj]",
                "down_proj": "mlp.down_proj",
            },
            defaults={**_COMMON, "rms_norm_eps": 1e-5},
        ),
        Architecture(
            name="MixtralForCausalLM",
            model_type="mixtral",
            window=Window.EVERY_LAYER,
            experts=ExpertPaths(
                router="block_sparse_moe.gate",
                experts="block_sparse_moe.experts",
                gate="w1",
                up="w3",
                down="w2",
                num_experts=("num_local_experts",),
                intermediate_size="intermediate_size",
                is_normed=True,
            ),
            defaults={
                **_COMMON,
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 8,
                "rope_theta": 1_000_000.0,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
        ),
        Architecture(
            name="OlmoeForCausalLM",
            model_type="olmoe",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            has_qk_norm=True,
            is_qk_norm_whole=True,
            refused={"clip_qkv": None},
            experts=ExpertPaths(
                router="mlp.gate",
                experts="mlp.experts",
                gate="gate_proj",
                up="up_proj",
                down="down_proj",
                num_experts=("num_experts", "num_local_experts"),
                intermediate_size="intermediate_size",
                is_normed="norm_topk_prob",
            ),
            defaults={
                **_COMMON,
                "attention_bias": False,
                "rms_norm_eps": 1e-5,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
            },
        ),
        Architecture(
            name="Qwen2MoeForCausalLM",
            model_type="qwen2_moe",
            qkv_bias="qkv_bias",
            # every layer has experts, and none a window
            refused={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
            experts=ExpertPaths(
                router="mlp.gate",
                experts="mlp.experts",
                gate="gate_proj",
                up="up_proj",
                down="down_proj",
                num_experts=("num_experts", "num_local_experts"),
                intermediate_size="moe_intermediate_size",
                is_normed="norm_topk_prob",
                shared="mlp.shared_expert",
                shared_gate="mlp.shared_expert_gate",
                shared_intermediate_size="shared_expert_intermediate_size",
            ),
            defaults={
                **_COMMON,
                "num_key_value_heads": 16,
                "qkv_bias": True,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "norm_topk_prob": False,
            },
        ),
        Architecture(
            name="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            has_qk_norm=True,
            # every layer has experts, and none a window
            refused={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
            experts=ExpertPaths(
                router="mlp.gate",
                experts="mlp.experts",
                gate="gate_proj",
                up="up_proj",
                down="down_proj",
                # of checkpoints, and as transformers 5 writes it
                num_experts=("num_experts", "num_local_experts"),
                intermediate_size="moe_intermediate_size",
                is_normed="norm_topk_prob",
            ),
            defaults={
                **_COMMON,
                "num_key_value_heads": 4,
                "attention_bias": False,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
            },
        ),
    )
}


def find_architecture(names: object, model_type: object) -> Architecture:
    """Return the row for a config's ``architectures`` and ``model_type``.

    Raises:
        UnknownArchitecture: none fits; the message names what was found and what there is.
    """
    found = names[0] if isinstance(names, list) and names else None
    if found is None:
        by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES.values()}
        if isinstance(model_type, str) and model_type in by_type:
            return by_type[model_type]
    elif isinstance(found, str) and found in ARCHITECTURES:
        return ARCHITECTURES[found]
    what = f'"{found}"' if found is not None else f'null (model_type is "{model_type}")'
    raise UnknownArchitecture(
        f"config.json names the architecture {what[:200]}; expected one of {', '.join(ARCHITECTURES)}.",
        hint="Choose a base model of one of these architectures.",
    )
