"""The architectures that the one decoder can be, as `transformers` computes them under their names.

Nothing but a row differs between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from loraserve.errors import UnknownArchitecture
from loraserve.model.config.architecture import Architecture, ExpertPaths, Window

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

_GLM_DEFAULTS: Mapping[str, object] = {
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
    # PEFT adapts the fused linear alone: `adapters.tensor_names` takes it apart
    "gate_proj": "mlp.gate_up_proj[gate_proj]",
    "up_proj": "mlp.gate_up_proj[up_proj]",
    "down_proj": "mlp.down_proj",
}

_GLM = Architecture(
    name="GlmForCausalLM",
    model_type="glm",
    qkv_bias="attention_bias",
    is_rope_interleaved=True,
    has_partial_rope=True,
    fused_paths={"gate_up": "mlp.gate_up_proj"},
    module_paths=_FUSED_GATE_UP,
    defaults=_GLM_DEFAULTS,
)
_OLMO2 = Architecture(
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
)
_GEMMA2 = Architecture(
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
)
_QWEN_EXPERTS = ExpertPaths(
    router="mlp.gate",
    experts="mlp.experts",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    # of checkpoints, and as transformers 5 writes it
    num_experts=("num_experts", "num_local_experts"),
    intermediate_size="moe_intermediate_size",
    is_normed="norm_topk_prob",
)

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
        _GLM,
        replace(
            _GLM,
            name="Glm4ForCausalLM",
            model_type="glm4",
            attention_out_norm="post_self_attn_layernorm.weight",
            mlp_out_norm="post_mlp_layernorm.weight",
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
        _OLMO2,
        replace(
            _OLMO2,
            name="Olmo3ForCausalLM",
            model_type="olmo3",
            window=Window.BY_PATTERN,
            window_pattern=4,
            # only the layers without a window are stretched
            has_local_rope=True,
            local_theta="rope_theta",
            defaults={
                **_OLMO2.defaults,
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
        replace(
            _GEMMA2,
            name="VaultGemmaForCausalLM",
            model_type="vaultgemma",
            refused={},
            attention_out_norm=None,
            mlp_out_norm=None,
        ),
        _GEMMA2,
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
                # PEFT adapts the fused linears alone: `adapters.tensor_names` takes them apart
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
            experts=replace(_QWEN_EXPERTS, intermediate_size="intermediate_size"),
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
            experts=replace(
                _QWEN_EXPERTS,
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
            experts=_QWEN_EXPERTS,
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
    """Find the row for a config's ``architectures`` and ``model_type``.

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
