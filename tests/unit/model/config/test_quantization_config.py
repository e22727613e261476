from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.quantization_config import QuantizationMethod

from loraserve.errors import ModelError
from loraserve.model.config.quantization_config import (
    METHODS,
    REFUSED,
    Layout,
    QuantizationConfig,
    Scheme,
    parse_quantization,
)

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8_INPUT: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
Q, UP, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head"


def compressed(
    weights: dict[str, Any] | None, *, group: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **(group or {})}},
        "ignore": ["lm_head"],
        **changes,
    }


def parse(value: Any) -> QuantizationConfig:
    config = parse_quantization({"quantization_config": value})
    assert config is not None
    return config


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_config_without_quantization_means_float_checkpoint(config: dict[str, Any]) -> None:
    assert parse_quantization(config) is None


def test_ignored_linears_are_float() -> None:
    config = parse(compressed(INT4, ignore=["lm_head", "re:.*q_proj", "re:mlp", "model.layers.0"]))
    assert config.scheme(UP) == Scheme("int4", Layout.PACKED, 128)
    assert config.scheme(HEAD) is None
    assert config.scheme(Q) is None
    # a name is a whole path; an expression is one that the path begins with
    assert config.scheme("model.lm_head") is not None
    assert config.scheme("my_q_proj_too") is None
    assert parse(compressed(INT4, ignore=["Linear"])).scheme(UP) is None


def test_target_paths_precede_expressions_and_classes() -> None:
    groups = {
        "all": {"targets": ["Linear"], "weights": INT4},
        "attention": {"targets": ["re:.*self_attn"], "weights": {**INT4, "group_size": 32}},
        "one": {"targets": [Q], "weights": {**INT4, "group_size": 64}},
    }
    config = parse(compressed(INT4, config_groups=groups))
    sizes = [scheme.group_size for scheme in map(config.scheme, (Q, Q.replace("q_", "k_"), UP)) if scheme]
    assert sizes == [64, 32, 128]


def test_untargeted_linear_is_float() -> None:
    assert parse(compressed(INT4, group={"targets": ["re:.*mlp", "LlamaAttention"]})).scheme(Q) is None


@pytest.mark.parametrize(
    ("weights", "changes", "scheme"),
    [
        (INT4, {}, Scheme("int4", Layout.PACKED, 128)),
        ({**INT4, "symmetric": False}, {}, Scheme("int4", Layout.PACKED, 128, is_symmetric=False)),
        ({**INT4, "strategy": None, "group_size": -1}, {}, Scheme("int4", Layout.PACKED)),
        ({**INT4, "actorder": "static"}, {}, Scheme("int4", Layout.PACKED, 128)),
        ({**INT4, "actorder": "group"}, {}, Scheme("int4", Layout.PACKED, 128, is_reordered=True)),
        (INT8, {}, Scheme("int8", Layout.PACKED)),
        (INT8, {"format": "int-quantized"}, Scheme("int8", Layout.NAIVE)),
        ({**INT8, "strategy": "tensor"}, {"format": "naive-quantized"}, Scheme("int8", Layout.NAIVE)),
        ({**INT4, "num_bits": 8}, {}, Scheme("int8", Layout.PACKED, 128)),
        ({**INT4, "num_bits": 8, "group_size": 32}, {"format": "int-quantized"}, Scheme("int8", Layout.NAIVE, 32)),
        ({**INT8, "symmetric": False}, {}, Scheme("int8", Layout.PACKED, is_symmetric=False)),
        (FP8, {"format": "float-quantized"}, Scheme("fp8", Layout.NAIVE)),
        (FP8, {"format": "naive-quantized"}, Scheme("fp8", Layout.NAIVE)),
        (FP8, {"format": "mixed-precision", "group": {"format": "float-quantized"}}, Scheme("fp8", Layout.NAIVE)),
        (FP8, {"format": "float-quantized", "group": {"input_activations": FP8_INPUT}}, Scheme("fp8", Layout.NAIVE)),
        (
            FP8,
            {"format": "float-quantized", "group": {"input_activations": {**FP8_INPUT, "dynamic": False}}},
            Scheme("fp8", Layout.NAIVE, has_input_scale=True),
        ),
        (INT4, {"sparsity_config": {"format": "dense"}, "transform_config": {}}, Scheme("int4", Layout.PACKED, 128)),
    ],
)
def test_supported_settings_are_understood(weights: dict[str, Any], changes: dict[str, Any], scheme: Scheme) -> None:
    assert parse(compressed(weights, **changes)).scheme(UP) == scheme


def test_ignored_activation_rounding_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    parse(compressed(FP8, format="float-quantized"))
    assert not caplog.records
    parse(compressed(FP8, format="float-quantized", group={"input_activations": FP8_INPUT}))
    assert "group_0.input_activations asks for FP8 activations, which this server doesn't round" in caplog.text


def test_older_key_means_the_same() -> None:
    assert parse_quantization({"compression_config": compressed(INT4)}) == parse(compressed(INT4))


@pytest.mark.parametrize("changes", [{}, {"quant_method": None}, {"load_in_8bit": False}])
def test_nf4_of_bitsandbytes_is_understood(changes: dict[str, Any]) -> None:
    assert parse({**NF4, **changes}).scheme(UP) == Scheme("nf4", Layout.BITSANDBYTES)


@pytest.mark.parametrize("method", ["new-method", None, 4])
def test_unknown_method_is_named_with_supported_methods(method: object) -> None:
    with pytest.raises(
        ModelError, match=r"quantization_config\.quant_method is .*; only compressed-tensors,"
    ) as raised:
        parse({"quant_method": method, "bits": 4})
    assert raised.value.hint is not None
    assert "bitsandbytes NF4" in raised.value.hint


@pytest.mark.parametrize("method", [*REFUSED, "HQQ", "quip-sharp"])
def test_unreadable_method_is_named_with_remedy(method: str) -> None:
    with pytest.raises(ModelError, match=rf'quant_method is "{method}": .* aren\'t read') as raised:
        parse({"quant_method": method, "bits": 4})
    assert raised.value.hint is not None
    assert raised.value.hint.startswith("Give the float checkpoint")


def test_methods_of_transformers_are_read_or_refused() -> None:
    """Methods of few checkpoints on the hub are refused with the list of what is read."""
    rare = {"gemma", "metal", "fouroversix", "sinq"}
    known = {*REFUSED, *METHODS, *rare}
    assert {method.value for method in QuantizationMethod} <= known


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
}
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("value", "scheme"),
    [
        (GPTQ, Scheme("int4", Layout.GPTQ, 128, zero_offset=1)),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, Scheme("int4", Layout.GPTQ, 128)),
        ({**GPTQ, "format": "gptq_v2"}, Scheme("int4", Layout.GPTQ, 128)),
        ({**GPTQ, "group_size": -1, "bits": 8}, Scheme("int8", Layout.GPTQ, zero_offset=1)),
        (
            {**GPTQ, "sym": False, "desc_act": True},
            Scheme("int4", Layout.GPTQ, 128, is_symmetric=False, zero_offset=1, is_reordered=True),
        ),
        ({**GPTQ, "dynamic": {r"-:.*mlp": {}}}, Scheme("int4", Layout.GPTQ, 128, zero_offset=1)),
        ({**GPTQ, "dynamic": {r".*mlp": {"bits": 8}}}, Scheme("int8", Layout.GPTQ, 128, zero_offset=1)),
        (AWQ, Scheme("int4", Layout.AWQ, 128, is_symmetric=False)),
        ({**AWQ, "version": "GEMM", "zero_point": False}, Scheme("int4", Layout.AWQ, 128)),
        (AUTO_ROUND, Scheme("int4", Layout.GPTQ, 128, zero_offset=1)),
        ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, Scheme("int4", Layout.AWQ, 128)),
        (
            {**AUTO_ROUND, "packing_format": "auto_round:gptq:exllamav2"},
            Scheme("int4", Layout.GPTQ, 128, zero_offset=1),
        ),
        ({**AUTO_ROUND, "packing_format": None, "backend": "auto_round"}, Scheme("int4", Layout.GPTQ, 128)),
        ({**AUTO_ROUND, "packing_format": None, "backend": "auto"}, Scheme("int4", Layout.GPTQ, 128, zero_offset=1)),
        (
            {**AUTO_ROUND, "extra_config": {UP: {"bits": 8, "sym": False}}},
            Scheme("int8", Layout.GPTQ, 128, is_symmetric=False, zero_offset=1),
        ),
        (BLOCKS, Scheme("fp8", Layout.FP8, 128, block_rows=128)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Scheme("fp8", Layout.FP8, has_input_scale=True)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Scheme("fp8", Layout.FP8)),
        (
            compressed({**FP8, "strategy": "block", "block_structure": [128, 128]}, format="float-quantized"),
            Scheme("fp8", Layout.NAIVE, 128, block_rows=128),
        ),
    ],
)
def test_packed_settings_are_understood(value: dict[str, Any], scheme: Scheme) -> None:
    assert parse(value).scheme(UP) == scheme


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({**GPTQ, "bits": 3}, "bits is 3; only 4 or 8 bits"),
        ({**GPTQ, "bits": 2}, "bits is 2; only 4 or 8 bits"),
        ({**GPTQ, "bits": None}, "w_bit is null"),
        ({**GPTQ, "group_size": 16}, "group_size is 16; only -1 or a multiple of 32"),
        ({**GPTQ, "group_size": True}, "group_size is true"),
        ({**GPTQ, "sym": 1}, "sym is 1; only true or false"),
        ({**GPTQ, "checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"; only "gptq" or "gptq_v2"'),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is true"),
        ({**GPTQ, "pack_dtype": "int16"}, 'pack_dtype is "int16"'),
        ({**GPTQ, "rotation": "hadamard"}, "rotation is"),
        ({**GPTQ, "dynamic": {".*mlp": {"bits": 2}}}, r"dynamic\[\.\*mlp\]\.bits is 2"),
        ({**GPTQ, "dynamic": {".*mlp": {"adapter": {"rank": 8}}}}, r"dynamic\[\.\*mlp\]\.adapter is"),
        ({**GPTQ, "dynamic": {"+:(": {}}}, r"dynamic\.\+:\( is .*; only a regular expression"),
        ({**AWQ, "version": "gemv"}, 'version is "gemv"; only "gemm"'),
        ({**AWQ, "version": "gemv_fast"}, 'version is "gemv_fast"'),
        ({**AWQ, "version": None, "format": "llm-awq"}, 'format is "llm-awq"'),
        ({**AWQ, "backend": "llm-awq"}, 'backend is "llm-awq"'),
        ({**AWQ, "bits": 8}, "bits is 8; only 4 bits"),
        (
            {**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"},
            'packing_format is "auto_round:llm_compressor"',
        ),
        ({**AUTO_ROUND, "packing_format": "auto_round:fp8"}, 'packing_format is "auto_round:fp8"'),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, 'data_type is "mx_fp"'),
        ({**AUTO_ROUND, "act_bits": 8}, "act_bits is 8; only 16"),
        ({**AUTO_ROUND, "bits": 2}, "bits is 2"),
        ({**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 3}}}, r"extra_config\[lm_head\]\.bits is 3"),
        ({**AUTO_ROUND, "extra_config": {"a": {"bits": 4, "data_type": "fp8"}}}, r"extra_config\[a\]\.data_type is"),
        ({**BLOCKS, "weight_block_size": [128]}, "weight_block_size is"),
        ({**BLOCKS, "weight_block_size": [128, 48]}, "weight_block_size is .*; only a multiple of 32 inputs"),
        ({**BLOCKS, "fmt": "e5m2"}, 'fmt is "e5m2"'),
        ({**BLOCKS, "expert_dtype": "fp4"}, 'expert_dtype is "fp4"'),
        ({**BLOCKS, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
    ],
)
def test_unreadable_packed_settings_are_named(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        parse(value)
    assert raised.value.hint


INT8_INPUT: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


@pytest.mark.parametrize(
    ("weights", "changes", "inputs", "is_rounded"),
    [
        (INT8, {"format": "int-quantized"}, {}, True),
        (INT4, {}, {}, True),
        (INT8, {"format": "int-quantized"}, {"strategy": "tensor", "dynamic": False}, False),
        (INT8, {"format": "int-quantized"}, {"symmetric": False}, False),
        ({**INT8, "strategy": "group", "group_size": 128}, {}, {}, False),
    ],
    ids=["by token", "int4", "static", "asymmetric", "groups"],
)
def test_int8_activations_are_rounded_as_calibrated_or_not(
    weights: dict[str, Any],
    changes: dict[str, Any],
    inputs: dict[str, Any],
    is_rounded: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = parse(compressed(weights, group={"input_activations": {**INT8_INPUT, **inputs}}, **changes))
    scheme = config.scheme(UP)
    assert scheme is not None
    assert scheme.has_rounded_inputs == is_rounded
    assert scheme.has_input_scale == (inputs.get("dynamic") is False)
    assert ("asks for int8 activations" in caplog.text) == (not is_rounded)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("gptq", "quantization_config is \"gptq\"; expected an object"),
        ({**NF4, "load_in_4bit": False, "load_in_8bit": True}, "load_in_8bit is true; only NF4"),
        ({**NF4, "load_in_4bit": False}, "load_in_4bit is false; only NF4"),
        ({**NF4, "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is \"fp4\""),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit_quant_type is null"),
        # what rounds activations in other ways
        (compressed(INT8, group={"input_activations": {**FP8_INPUT, "type": "int", "num_bits": 4}}),
            "input_activations is"),
        (compressed(INT4, group={"input_activations": FP8_INPUT}), "input_activations is"),
        (compressed(FP8, format="float-quantized", group={"input_activations": {**FP8_INPUT, "num_bits": 4}}),
            "input_activations is"),
        (compressed(FP8, format="float-quantized", group={"input_activations": {**FP8_INPUT, "strategy": "channel"}}),
            "input_activations.strategy is"),
        (compressed(INT4, group={"output_activations": FP8_INPUT}), "output_activations is"),
        (compressed(INT4, kv_cache_scheme=FP8_INPUT), "kv_cache_scheme is"),
        (compressed(INT4, transform_config={"config_groups": {"u": {}}}), "u.type is"),
        (compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is"),
        (compressed(INT4, quantization_status="frozen"), "quantization_status is \"frozen\""),
        # other ways to store weights
        (compressed(INT4, format="marlin-24"), "quantization_config.format is \"marlin-24\""),
        (compressed(INT4, format="mixed-precision"), "format is \"mixed-precision\""),
        (compressed(INT4, format=None), "format is null"),
        (compressed(INT4, group={"format": "nvfp4-pack-quantized"}), "group_0.format is \"nvfp4-pack-quantized\""),
        (compressed({**FP8, "num_bits": 4}, format="nvfp4-pack-quantized"), "format is"),
        (compressed(FP8), "num_bits is 8; only int4 or int8 in pack-quantized"),
        (compressed(INT4, format="int-quantized"), "num_bits is 4; only int4 or int8 in pack-quantized"),
        (compressed({**INT4, "num_bits": 3}), "num_bits is 3"),
        (compressed({**INT4, "num_bits": 4.0}), "num_bits is 4.0"),
        (compressed({**INT4, "type": "uint"}), "type is \"uint\""),
        (compressed({**INT8, "strategy": "tensor", "symmetric": False}),
            "strategy is \"tensor\"; only channel or group with asymmetric int8"),
        (compressed({**FP8, "symmetric": False}, format="float-quantized"), "symmetric is false; only true with fp8"),
        (compressed({**INT4, "symmetric": 0}), "symmetric is 0"),
        (compressed({**INT4, "group_size": 16}), "group_size is 16; only a multiple of 32"),
        (compressed({**INT4, "group_size": None}), "group_size is null"),
        (compressed({**INT4, "group_size": "128"}), "group_size is \"128\""),
        (compressed({**INT4, "strategy": "tensor"}), "strategy is \"tensor\"; only channel or group"),
        (compressed({**INT8, "strategy": "group", "group_size": 48}), "group_size is 48; only a multiple of 32"),
        (compressed({**INT8, "strategy": "block"}), "strategy is \"block\"; only channel, group or tensor with int8"),
        (compressed({**FP8, "strategy": "group", "group_size": 128}, format="float-quantized"),
            "strategy is \"group\"; only channel, block or tensor with fp8"),
        (compressed({**FP8, "strategy": "block", "block_structure": [128, 48]}, format="float-quantized"),
            "block_structure is .*; only a multiple of 32 inputs"),
        (compressed({**FP8, "strategy": "block"}, format="float-quantized"), "block_structure is null"),
        (compressed({**FP8, "block_structure": [128, 128]}, format="float-quantized"), "block_structure is"),
        (compressed({**INT8, "actorder": "group"}), "actorder is \"group\"; only null or \"weight\" without groups"),
        (compressed({**INT4, "actorder": "random"}), "actorder is \"random\""),
        (compressed({**INT4, "actorder": True}), "actorder is true"),
        (compressed({**INT4, "dynamic": True}), "dynamic is true"),
        (compressed(None), "weights is null; expected an object"),
        (compressed(INT4, config_groups={"W4A16": ["Linear"]}), "config_groups.W4A16 is"),
        (compressed(INT4, config_groups=None), "config_groups is null; expected an object"),
        (compressed(INT4, group={"targets": ["Embedding"]}), "targets is .*Embedding"),
        (compressed(INT4, group={"targets": "Linear"}), "targets is \"Linear\"; expected a list of strings"),
        (compressed(INT4, ignore=["re:("]), "isn't a regular expression"),
    ],
)  # fmt: skip
def test_unsupported_computation_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(value)


def test_identity_distinguishes_differently_read_configs() -> None:
    values = [
        compressed(INT4),
        compressed({**INT4, "symmetric": False}),
        compressed({**INT4, "group_size": 64}),
        compressed(INT8),
        compressed(INT4, ignore=[]),
        compressed(INT4, group={"targets": ["re:.*mlp"]}),
        NF4,
        GPTQ,
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        {**GPTQ, "dynamic": {".*mlp": {"bits": 8}}},
        AWQ,
        BLOCKS,
        {**BLOCKS, "weight_block_size": [64, 128]},
        {"quant_method": "fp8"},
    ]
    identities = [parse(value).identity() for value in values]
    assert all(a != b for i, a in enumerate(identities) for b in identities[:i])
    # how it was calibrated is nothing to the function
    assert parse(compressed({**INT4, "observer": "mse"}, version="0.9")).identity() == identities[0]
