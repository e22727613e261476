from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from loraserve.errors import ModelError, UnknownArchitecture
from loraserve.model.config.model_config import ModelConfig, parse_config, read_config
from loraserve.model.config.ropes import RopeType

from ..conftest import CONFIGS, SMALL, edit_json

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return parse_config({**LLAMA, **changes}, generation or {})


def parse_qwen2(**changes: Any) -> ModelConfig:
    return parse(architectures=["Qwen2ForCausalLM"], num_key_value_heads=4, **changes)


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_saved_by_transformers_is_read(kind: str, tmp_path: Path) -> None:
    name = CONFIGS[kind].__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    source = CONFIGS[kind](**SMALL, architectures=[name], pad_token_id=0)
    source.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config.architecture.name == name
    assert config.architecture.model_type == source.model_type
    assert (config.num_heads, config.num_kv_heads, config.num_layers) == (4, 2, 3)
    assert config.head_dim == getattr(source, "head_dim", None) or 12
    assert config.eos_token_ids == (2,)


def test_absent_fields_take_transformers_defaults() -> None:
    config = parse()
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope.theta == 10_000.0
    assert not config.is_tied
    assert not config.has_qkv_bias


def test_unnamed_architecture_is_found_by_model_type() -> None:
    assert (
        parse(architectures=None, model_type="mistral", num_key_value_heads=2).architecture.name == "MistralForCausalLM"
    )


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], ["x" * 10_000], None, "LlamaForCausalLM", [3]])
def test_unknown_architecture_error_lists_supported_architectures(names: Any) -> None:
    with pytest.raises(UnknownArchitecture, match="expected one of LlamaForCausalLM, MistralForCausalLM"):
        parse(architectures=names)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"]
)
def test_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != field}
    with pytest.raises(ModelError, match=f"no {field}"):
        parse_config(config, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, 'hidden_size is "64"'),
        ({"hidden_size": True}, "hidden_size is true"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": 1 << 40}, "vocab_size is"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"attention_bias": "yes"}, 'attention_bias is "yes"'),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"num_attention_heads": 5}, "isn't a multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "isn't a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "ntk_alpha", "alpha": 2.0}}, "rope_scaling.rope_type is"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor is"),
        ({"rope_parameters": {"rope_type": ["llama3"]}}, "rope_parameters.rope_type is"),
        ({"rope_parameters": "llama3"}, "rope_parameters is"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "rope_parameters.factor is"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "no rope_parameters.low_freq_factor"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "must differ",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}}, "rope_parameters.truncate is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5"),
        ({"eos_token_id": "</s>"}, "eos_token_id is"),
        ({"eos_token_id": [2, -1]}, "eos_token_id is"),
    ],
)
def test_odd_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**changes)


def test_older_rope_scaling_goes_before_rope_parameters() -> None:
    config = parse(rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=500.0, rope_parameters={"factor": 2.0})
    assert config.rope.type is RopeType.LINEAR
    assert config.rope.factor == 4.0
    assert config.rope.theta == 500.0


def test_theta_in_rope_parameters_takes_precedence() -> None:
    assert parse(rope_parameters={"rope_theta": 7e5}, rope_theta=1e4).rope.theta == 7e5


def test_stretched_rope_bounds_context_growth() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse(rope_scaling=yarn).max_stretched_len == 1024
    assert parse(rope_scaling=yarn).max_model_len == 256
    assert parse(rope_scaling={**yarn, "original_max_position_embeddings": 64}).max_stretched_len == 256
    assert parse().max_stretched_len == 256


def test_eos_tokens_of_two_config_files_end_sequence() -> None:
    assert parse({"eos_token_id": [5, 7]}, eos_token_id=3).eos_token_ids == (5, 7, 3)
    assert parse({"eos_token_id": 5}, eos_token_id=[5]).eos_token_ids == (5,)
    assert parse().eos_token_ids == ()


def test_mistral_has_window_in_every_layer() -> None:
    name = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert parse(**name, sliding_window=32).sliding_windows == (32, 32, 32)
    assert parse(**name, sliding_window=None).sliding_windows == (None, None, None)
    assert parse(**name).sliding_windows == (4096, 4096, 4096)
    with pytest.raises(ModelError, match="layer_types"):
        parse(**name, sliding_window=32, layer_types=["full_attention", "sliding_attention", "full_attention"])


def test_qwen_has_windows_only_in_configured_layers() -> None:
    window = {"sliding_window": 32, "max_window_layers": 2}
    assert parse_qwen2(**window).sliding_windows == (None, None, None)
    assert parse_qwen2(**window, use_sliding_window=True).sliding_windows == (None, None, 32)
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert parse_qwen2(**window, use_sliding_window=True, layer_types=types).sliding_windows == (32, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "expected a list of 3"),
        ({"layer_types": ["full_attention", "full_attention", "chunked_attention"]}, r"layer_types\[2\] is"),
        ({"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "use_sliding_window is off"),
        ({"max_window_layers": "all"}, "max_window_layers is"),
    ],
)
def test_odd_window_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_qwen2(**{"use_sliding_window": True, "sliding_window": 8, **changes})


def parse_smollm3(**changes: Any) -> ModelConfig:
    return parse(architectures=["SmolLM3ForCausalLM"], **changes)


def test_smollm3_omits_rope_in_configured_layers() -> None:
    assert parse_smollm3().layer_ropes == (0, 0, 0)
    assert parse_smollm3(no_rope_layer_interval=2).layer_ropes == (0, None, 0)
    assert parse_smollm3(no_rope_layers=[0, 1, 0, 1]).layer_ropes == (None, 0, None)
    window = {"use_sliding_window": True, "sliding_window": 32, "no_rope_layers": [1, 0, 1]}
    assert parse_smollm3(**window).sliding_windows == (None, 32, None)
    assert parse_smollm3(no_rope_layers=[0, 1, 1]).identity() != parse_smollm3().identity()


@pytest.mark.parametrize("flags", [[], [1, 1], [1, 2, 1], "all"])
def test_odd_list_of_layers_without_positions_is_named(flags: Any) -> None:
    with pytest.raises(ModelError, match="no_rope_layers is"):
        parse_smollm3(no_rope_layers=flags)


GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 4, "head_dim": 16}


def test_gemma2_alternates_windows_unless_configured() -> None:
    assert parse(**GEMMA2).sliding_windows == (4096, None, 4096)
    types = ["full_attention", "full_attention", "sliding_attention"]
    assert parse(**GEMMA2, sliding_window=8, layer_types=types).sliding_windows == (None, None, 8)
    with pytest.raises(ModelError, match=r"layer_types\[0\] is sliding_attention"):
        parse(**GEMMA2, sliding_window=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true; only false is implemented"),
        ({"hidden_activation": "gelu"}, 'hidden_activation is "gelu"; only silu and gelu_pytorch_tanh'),
        ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
        ({"final_logit_softcapping": "30"}, 'final_logit_softcapping is "30"'),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ],
)
def test_odd_field_of_gemma2_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**GEMMA2, **changes)


GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 4, "head_dim": 16}


def test_gemma3_has_separate_rope_for_window_layers() -> None:
    config = parse(**GEMMA3, sliding_window_pattern=3, sliding_window=32)
    assert config.sliding_windows == (32, 32, None)
    assert config.layer_ropes == (1, 1, 0)
    assert [rope.theta for rope in config.ropes] == [1e6, 1e4]
    assert parse(**GEMMA3, rope_local_base_freq=50.0).identity() != parse(**GEMMA3).identity()


def test_context_growth_is_bounded_by_narrower_rope() -> None:
    config = parse(**GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert [rope.factor for rope in config.ropes] == [8.0, 1.0]
    assert config.max_stretched_len == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; only null is implemented"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "expected full_attention and sliding_attention in it"),
        ({"rope_parameters": {"sliding_attention": 3}}, "rope_parameters.sliding_attention is 3"),
        ({"rope_local_base_freq": 0.5}, "rope_local_base_freq is 0.5"),
    ],
)
def test_odd_field_of_gemma3_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**GEMMA3, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; expected at most 1"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 of heads of 16 elements is 3; expected an even"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor has 1 numbers; expected 8"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0]}},
            "long_factor has 1 numbers; expected 8",
        ),
        ({"rope_scaling": {"type": "su"}}, "short_factor is null"),
        ({"rope_scaling": {"type": "yarn", "short_factor": ["a"]}}, 'short_factor is "a"'),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_type is"),
    ],
)
def test_odd_ropes_of_phi3_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(architectures=["Phi3ForCausalLM"], **changes)


def test_identity_sees_caps_activation_and_scale() -> None:
    changes = [
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"hidden_activation": "silu"},
        {"query_pre_attn_scalar": 8},
    ]
    assert len({json.dumps(parse(**GEMMA2, **change).identity()) for change in [{}, *changes]}) == 5


def test_identity_sees_the_scales() -> None:
    granite = {"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.25}
    names = ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"]
    identities = [json.dumps(parse(**{**granite, name: 0.5}).identity()) for name in names]
    assert len({json.dumps(parse(**granite).identity()), *identities}) == 5


def test_qwen2_has_biases_only_on_qkv() -> None:
    config = parse_qwen2()
    biased = {module for module in config.module_shapes if config.has_bias(module)}
    assert biased == {"q_proj", "k_proj", "v_proj"}


def test_identity_sees_the_function_and_not_the_context() -> None:
    base = parse().identity()
    assert parse(max_position_embeddings=512, eos_token_id=9).identity() == base
    assert parse(rope_theta=1e6).identity() != base
    assert parse(rms_norm_eps=1e-5).identity() != base
    json.dumps(base)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"a":' * 100_000])
def test_non_object_config_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)


def test_eos_of_generation_config_json_is_read(tmp_path: Path) -> None:
    Qwen2Config(**SMALL, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    edit_json(tmp_path / "generation_config.json", eos_token_id=[11, 2])
    assert read_config(tmp_path).eos_token_ids == (11, 2)


def test_longrope_serves_original_context_unless_asked() -> None:
    longrope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = parse(
        architectures=["Phi3ForCausalLM"],
        rope_scaling=longrope,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
    )
    assert (config.max_model_len, config.max_stretched_len) == (64, 256)
    assert config.for_context(64) == config
    long = config.for_context(65)
    assert long.rope.short_factors == (4.0,) * 8
    assert long.identity() != config.identity()
    assert "long_factors" not in json.dumps(config.identity())
    assert config.rope.factor == 4.0
    assert config.rope.attention_factor == pytest.approx((1 + math.log(4) / math.log(64)) ** 0.5)
    plain = parse(architectures=["Phi3ForCausalLM"])
    assert "rotated" not in json.dumps(plain.identity())
    assert config.identity() != plain.identity()


def test_dynamic_rope_is_plain_within_context() -> None:
    config = parse(rope_scaling={"type": "dynamic", "factor": 2.0, "alpha": 1000.0})
    assert config.rope == parse().rope
    assert config.max_stretched_len == config.max_model_len
