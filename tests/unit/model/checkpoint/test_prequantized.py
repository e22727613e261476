"""A checkpoint that is quantized already computes what transformers computes with the float weights
that it means.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loraserve.config import EngineConfig
from loraserve.demo.pack import base_dir
from loraserve.engine.worker.rounding import measure
from loraserve.errors import ConfigError, MissingTensor, ModelError, UnexpectedTensor
from loraserve.model.checkpoint.files import open_checkpoint
from loraserve.model.checkpoint.prequantized import assemble
from loraserve.model.checkpoint.stored_weights import find_stored_weight
from loraserve.model.config.model_config import read_config
from loraserve.planning.base import plan_base
from loraserve_kernels.common.quantized import QuantizedWeight

from ..conftest import PagedRun, build_model, edit_json, load, random_tokens, reference_logits, save_model
from ..stored_quantized import WIDE, group, save_compressed, save_nf4

DATA = Path(__file__).parent / "data"
NAME = "model.layers.1.mlp.up_proj"
FP8_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8_BY_GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
INT8_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
INT8_STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
FP8_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}

# groups that are no whole channel of any linear
GROUPS_OF_8_BITS = {**WIDE, "hidden_size": 256}

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "int4-groups": ([group(4, "group", group_size=128)], {}),
    "int4-zero-points": ([group(4, "group", group_size=64, symmetric=False)], {}),
    "int4-groups-of-32": ([group(4, "group", group_size=32, actorder="weight")], {}),
    "int4-channels": ([group(4, "channel")], {}),
    "int4-channels-with-zero-points": ([group(4, "channel", symmetric=False)], {}),
    "int4-head-too": ([group(4, "group", group_size=64, symmetric=False)], {"ignore": []}),
    "fp8-channels": ([group(8, "channel", type="float")], {}),
    "fp8-tensor": ([group(8, "tensor", type="float")], {}),
    "fp8-dynamic-activations": ([group(8, "channel", type="float", input_activations=FP8_DYNAMIC)], {}),
    "fp8-static-activations": ([group(8, "tensor", type="float", input_activations=FP8_STATIC)], {}),
    "fp8-blocks": (
        [group(8, "block", type="float", block_structure=[128, 128], input_activations=FP8_BY_GROUP)],
        {"format": "float-quantized"},
    ),
    "fp8-head-too": ([group(8, "channel", type="float")], {"ignore": [], "format": "float-quantized"}),
    "int8-groups": ([group(8, "group", group_size=128)], {}),
    "int8-groups-of-32-bytes": ([group(8, "group", group_size=32)], {"format": "int-quantized"}),
    "int8-groups-with-zero-points": ([group(8, "group", group_size=64, symmetric=False)], {}),
    "int8-zero-points-in-bytes": ([group(8, "group", group_size=64, symmetric=False)], {"format": "naive-quantized"}),
    "int8-channels-with-zero-points": ([group(8, "channel", symmetric=False)], {}),
    "int8-channels": ([group(8, "channel")], {}),
    "int8-channels-in-bytes": ([group(8, "channel")], {"format": "int-quantized"}),
    "int8-tensor": ([group(8, "tensor")], {}),
    "int8-channels-head-too": ([group(8, "channel")], {"ignore": []}),
    "int8-preset": ([], {"preset": "W8A16"}),
    "int8-head-too": ([group(8, "group", group_size=128)], {"ignore": []}),
    "float-within-a-site": ([group(4, "group", group_size=128)], {"ignore": ["lm_head", "re:.*k_proj$", NAME]}),
    "two-formats": (
        [
            group(4, "group", group_size=32, targets=["re:.*self_attn.*"], symmetric=False),
            group(8, "channel", type="float", targets=["Linear"]),
        ],
        {},
    ),
}
FORMATS = {"int4": "int4", "int8": "int8", "fp8": "fp8", "float": "int4", "two": "fp8+int4"}


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize(("stored", "used"), [(96, 32), (192, 64), (128, 128)])
def test_stored_groups_are_cut_into_supported_groups(tmp_path: Path, num_bits: int, stored: int, used: int) -> None:
    sizes = {**WIDE, "hidden_size": 384, "intermediate_size": 384}
    groups = [group(num_bits, "group", group_size=stored, symmetric=False)]
    model = save_compressed(build_model(**sizes), tmp_path, groups)
    weight = assembled(tmp_path, NAME)
    assert weight.group_size == used
    assert torch.equal(weight.dequantize(torch.float32), model.get_submodule(NAME).weight)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_on_library_weights(tmp_path: Path, case: str) -> None:
    groups, options = CASES[case]
    sizes = GROUPS_OF_8_BITS if case.startswith("int8") else WIDE
    model = save_compressed(build_model("qwen2", **sizes), tmp_path, groups, **options)
    decoder = load(tmp_path, activation_dtype="float")
    token_ids = random_tokens(30)
    ours = PagedRun(decoder).logits(token_ids, [20, 5])
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-4)
    assert decoder.spec.quantization == FORMATS[case.split("-")[0]]
    assert decoder.spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("num_bits", [4, 8])
def test_inputs_ordered_by_activation_are_used_so(tmp_path: Path, num_bits: int) -> None:
    """``actorder: group`` of the library before 0.20: codes in the inputs' order, and g_idx."""
    groups = [group(num_bits, "group", group_size=32, symmetric=False)]
    model = save_compressed(build_model("qwen2", **WIDE), tmp_path, groups)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        path = name.removesuffix(".weight_packed")
        weight = model.get_submodule(path).weight
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
        codes = tensors[name].view(torch.uint8)
        if num_bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).view(len(codes), -1)
        codes = codes[:, order]
        if num_bits == 4:
            codes = codes[:, 0::2] | codes[:, 1::2] << 4
        tensors[name] = codes.contiguous().view(torch.int32)
        tensors[f"{path}.weight_g_idx"] = (order // 32).int()
        with torch.no_grad():
            weight.copy_(weight[:, order])
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    edit_json(tmp_path / "config.json", quantization_config=config)
    assert assembled(tmp_path, NAME).permutation is not None
    token_ids = random_tokens(30)
    decoder = load(tmp_path, activation_dtype="float")
    ours, expected = PagedRun(decoder).logits(token_ids, [30]), reference_logits(model, token_ids)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def test_half_precision_scales_are_used_unchanged(tmp_path: Path) -> None:
    base = build_model(**WIDE).to(torch.bfloat16)
    model = save_compressed(base, tmp_path, [group(4, "group", group_size=64, symmetric=False)])
    token_ids = random_tokens(30)
    ours = PagedRun(load(tmp_path, activation_dtype="float")).logits(token_ids, [30])
    # rotary frequencies in float32
    reference = build_model(**WIDE)
    reference.load_state_dict(model.state_dict())
    torch.testing.assert_close(ours, reference_logits(reference, token_ids), rtol=0, atol=1e-4)


def assembled(directory: Path, path: str) -> QuantizedWeight:
    """The weight of one linear, as the loader hands it on."""
    config, checkpoint = read_config(directory), open_checkpoint(directory)
    shape = config.module_shapes[path.rsplit(".", 1)[1]]
    stored = find_stored_weight(config.quantization, path, shape, checkpoint.tensors)
    assert stored is not None
    names = frozenset(f"{path}.{suffix}" for suffix in stored.tensors)
    parts = {entry.name.removeprefix(f"{path}."): tensor for entry, tensor, _ in checkpoint.read(names)}
    return assemble(stored, parts)


@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized", "naive-quantized"])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_int8_codes_and_scales_are_used_unchanged(tmp_path: Path, format: str, strategy: str) -> None:
    # 130 inputs don't fill the last word of four codes
    sizes = {**WIDE, "hidden_size": 130, "head_dim": 32, "num_attention_heads": 2}
    model = save_compressed(build_model(**sizes), tmp_path, [group(8, strategy)], format=format)
    for name in ("self_attn.k_proj", "mlp.down_proj"):
        weight = assembled(tmp_path, f"model.layers.1.{name}")
        assert weight.codes.min() == -128 or weight.codes.max() == 127
        expected = model.get_submodule(f"model.layers.1.{name}").weight
        assert torch.equal(weight.dequantize(torch.float32), expected)
    decoder, token_ids = load(tmp_path, activation_dtype="float"), random_tokens(30)
    ours, expected = PagedRun(decoder).logits(token_ids, [30]), reference_logits(model, token_ids)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert (decoder.spec.quantization, decoder.spec.arithmetic) == ("int8", "w8a16+fp32")


@pytest.mark.parametrize("asked", ["auto", "int8"])
@pytest.mark.parametrize(("bits", "strategy"), [(8, "channel"), (8, "group"), (4, "group")])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_stored_codes_take_activations_in_groups(
    tmp_path: Path, bits: int, strategy: str, is_symmetric: bool, asked: str
) -> None:
    sizes = {"group_size": 32} if strategy == "group" else {}
    model = save_compressed(build_model(**WIDE), tmp_path, [group(bits, strategy, symmetric=is_symmetric, **sizes)])
    token_ids, expected = random_tokens(30), reference_logits(model, random_tokens(30))
    whole = load(tmp_path, activation_dtype="float")
    assert whole.spec.arithmetic == f"w{bits}a16+fp32"
    torch.testing.assert_close(PagedRun(whole).logits(token_ids, [30]), expected, rtol=0, atol=1e-4)
    rounded = load(tmp_path, activation_dtype=asked)
    assert rounded.spec.arithmetic in (f"w{bits}a8-g32-o2+w{bits}a8-g32+fp32", f"w{bits}a16+fp32")
    assert rounded.spec.digest == whole.spec.digest
    # this model of noise forgives little
    errors = (PagedRun(rounded).logits(token_ids, [30]) - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < 0.05
    assert "g32" not in rounded.spec.arithmetic or errors.max() > 1e-3


@pytest.mark.parametrize(("asked", "arithmetics"), [("auto", {"w8a16"}), ("int8", {"w8a8-row", "w8a7-row"})])
def test_channels_unfit_for_groups_keep_whole_rows(tmp_path: Path, asked: str, arithmetics: set[str]) -> None:
    sizes = {**WIDE, "hidden_size": 144, "intermediate_size": 144, "head_dim": 36, "num_attention_heads": 4}
    save_compressed(build_model(**sizes), tmp_path, [group(8, "channel")])
    assert load(tmp_path, activation_dtype=asked).spec.arithmetic.removesuffix("+fp32") in arithmetics


@pytest.mark.parametrize(
    ("activations", "asked", "arithmetic"),
    [
        (INT8_DYNAMIC, "auto", {"w8a8-row+fp32", "w8a7-row+fp32"}),
        (INT8_DYNAMIC, "float", {"w8a16+fp32"}),
        (INT8_STATIC, "auto", {"w8a8-g32-o2+w8a8-g32+fp32"}),
        (INT8_STATIC, "float", {"w8a16+fp32"}),
        ({**INT8_STATIC, "symmetric": False}, "auto", {"w8a8-g32-o2+w8a8-g32+fp32"}),
    ],
    ids=["by token", "by token in float", "static", "static in float", "static with zeros"],
)
def test_int8_activations_are_rounded_where_calibrated_so(
    tmp_path: Path, activations: dict[str, Any], asked: str, arithmetic: set[str]
) -> None:
    groups = [group(8, "channel", input_activations=activations)]
    model = save_compressed(build_model(**WIDE), tmp_path, groups, format="int-quantized")
    decoder, token_ids = load(tmp_path, activation_dtype=asked), random_tokens(30)
    assert decoder.spec.arithmetic in arithmetic
    expected = reference_logits(model, token_ids)
    errors = (PagedRun(decoder).logits(token_ids, [30]) - expected).norm(dim=1) / expected.norm(dim=1)
    is_rounded = "w8a16" not in decoder.spec.arithmetic
    assert errors.max() < (0.1 if is_rounded else 1e-5)
    assert (errors.max() > 1e-3) == is_rounded


@pytest.mark.parametrize(("asked", "arithmetic"), [("auto", {"w8a8-row-h64", "w8a7-row-h64"}), ("float", {"w8a16"})])
def test_int8_rounding_rounds_activations_unless_float_requested(
    tmp_path: Path, asked: str, arithmetic: set[str]
) -> None:
    save_model(build_model(**WIDE), tmp_path)
    assert load(tmp_path, quantize="int8", activation_dtype=asked).spec.arithmetic in arithmetic


@pytest.mark.parametrize(
    ("groups", "base"),
    [
        ([], "none"),
        ([group(8, "channel", type="float")], "fp8"),
    ],
    ids=["floats", "fp8"],
)
def test_rounded_activations_are_refused_without_suitable_weight(
    tmp_path: Path, groups: list[dict[str, Any]], base: str
) -> None:
    model = build_model(**{**WIDE, "hidden_size": 256})
    if groups:
        save_compressed(model, tmp_path, groups)
    else:
        save_model(model, tmp_path)
    with pytest.raises(ConfigError, match=rf"--activation-dtype int8: no linear of this base \({base}\)"):
        load(tmp_path, activation_dtype="int8")
    with pytest.raises(ConfigError, match="--activation-dtype int8: no linear"):
        plan_base(EngineConfig(model_dir=str(tmp_path), model_id="b", store_url="", activation_dtype="int8"), "cpu")


def test_stored_quantized_checkpoint_loses_only_by_activations(tmp_path: Path) -> None:
    """A trained model: of noise, rounding means little."""
    trained = AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32)
    save_compressed(trained, tmp_path, [group(8, "channel")])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base_dir() / name, tmp_path)
    config = EngineConfig(model_dir=str(tmp_path), model_id="base", store_url="")
    asked = measure(msgspec.structs.replace(config, activation_dtype="float"))
    assert (asked.quantization, asked.arithmetic) == ("int8", "w8a16+fp32")
    assert asked.total.top1_agreement == 1.0
    assert asked.total.max_difference < 1e-4
    rounded = measure(config)
    assert rounded.weights.max_difference < 1e-4
    assert rounded.activations.max_difference > 0.01


def test_rounded_activations_are_refused_on_a_gpu(tmp_path: Path) -> None:
    save_model(build_model(**WIDE), tmp_path)
    config = EngineConfig(model_dir=str(tmp_path), model_id="b", store_url="", quantize="int8", activation_dtype="int8")
    with pytest.raises(ConfigError, match="--activation-dtype int8 is for CPUs"):
        plan_base(config, "cuda")


def test_int8_weight_preset_has_groups_of_128(tmp_path: Path) -> None:
    save_compressed(build_model(**GROUPS_OF_8_BITS), tmp_path, [], preset="W8A16")
    weight = assembled(tmp_path, NAME)
    assert (weight.format, weight.group_size, weight.zeros) == ("int8", 128, None)


def test_int8_group_spanning_all_inputs_becomes_channel(tmp_path: Path) -> None:
    """The CPU's fast linear takes it."""
    save_compressed(build_model(**WIDE), tmp_path, [group(8, "group", group_size=128)])
    assert not assembled(tmp_path, NAME).has_groups


@pytest.mark.parametrize("kind", ["nested", "plain"])
def test_bitsandbytes_nf4_matches_bitsandbytes_logits(kind: str) -> None:
    """`data` holds a model of one layer that transformers 5.23 with bitsandbytes 0.50.2 quantized
    on a CPU (bnb_4bit_quant_type nf4, with and without bnb_4bit_use_double_quant) and saved with
    save_pretrained; and the logits that transformers computes of the tokens below with the linears'
    weights replaced by what bitsandbytes.functional.dequantize_4bit gives in float32.
    """
    directory = DATA / f"bitsandbytes-nf4-{kind}"
    decoder = load(directory)
    ours = PagedRun(decoder).logits([(7 * i + 3) % 24 for i in range(20)], [13])
    expected = load_file(directory / "expected-logits")["logits"]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert decoder.spec.quantization == "nf4"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_nested": True},
        {"block_size": 128},
        {"block_size": 4096, "is_nested": True},
        {"storage": torch.bfloat16},
        {"storage": torch.float32, "is_nested": True},
    ],
    ids=["plain", "nested", "blocks-of-128", "blocks-over-rows", "as-bfloat16", "nested-as-float32"],
)
def test_nf4_logits_equal_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    model = save_nf4(tmp_path, **options)
    decoder, token_ids = load(tmp_path), random_tokens(30)
    torch.testing.assert_close(
        PagedRun(decoder).logits(token_ids, [20]), reference_logits(model, token_ids), rtol=0, atol=1e-4
    )
    assert decoder.spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("is_nested", [False, True])
def test_nf4_experts_equal_transformers(tmp_path: Path, is_nested: bool) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    model = save_nf4(tmp_path, kind="qwen3-moe", is_nested=is_nested, **sizes)
    decoder = load(tmp_path)
    assert decoder.spec.quantization == "nf4"
    token_ids = random_tokens(20)
    ours = PagedRun(decoder).logits(token_ids, [20])
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-4)


def test_weights_of_bitsandbytes_without_a_state_are_float(tmp_path: Path) -> None:
    model = save_nf4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(NAME)}
    kept[f"{NAME}.weight"] = model.get_submodule(NAME).weight.detach()
    save_file(kept, tmp_path / "model.safetensors")
    ours = PagedRun(load(tmp_path)).logits(random_tokens(30), [30])
    torch.testing.assert_close(ours, reference_logits(model, random_tokens(30)), rtol=0, atol=1e-4)


def test_codes_and_scales_across_shards_equal_single_file(tmp_path: Path) -> None:
    """A weight's codes in one shard, its scales and zero points in another."""
    save_compressed(build_model(**WIDE), tmp_path, [group(4, "group", group_size=64, symmetric=False)])
    whole = load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}, "c.safetensors": {}}
    for name, tensor in tensors.items():
        kind = "c" if name.endswith("zero_point") else "b" if name.endswith("packed") else "a"
        shards[f"{kind}.safetensors"][name] = tensor
    places = {name: file for file, content in shards.items() for name in content}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for file, content in shards.items():
        save_file(content, tmp_path / file)
    parts = load(tmp_path)
    token_ids = random_tokens(20)
    assert torch.equal(PagedRun(whole).logits(token_ids, [20]), PagedRun(parts).logits(token_ids, [20]))
    assert whole.spec.digest == parts.spec.digest


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("int4")
    save_compressed(build_model(**WIDE), directory, [group(4, "group", group_size=64, symmetric=False)])
    return directory


@pytest.fixture
def directory(int4: Path, tmp_path: Path) -> Path:
    """A copy of an int4 checkpoint, to break."""
    return Path(shutil.copytree(int4, tmp_path / "model"))


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Set these tensors of `NAME`; None deletes."""
    path = directory / "model.safetensors"
    weights = {**load_file(path), **{f"{NAME}.{suffix}": tensor for suffix, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, path)


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_zero_point", "weight_shape"])
def test_digest_follows_every_part_of_a_weight(directory: Path, suffix: str) -> None:
    digest = load(directory).spec.digest
    part = load_file(directory / "model.safetensors")[f"{NAME}.{suffix}"]
    if suffix == "weight_shape":
        # the same numbers, stored otherwise
        part = part.int()
    else:
        part[3, 1] += 1
    change(directory, **{suffix: part})
    assert load(directory).spec.digest != digest


def test_digest_follows_the_config(directory: Path) -> None:
    """The same tensors of a square weight, read in groups of 64 or as channels … must not be one
    base.
    """
    save_compressed(build_model(**WIDE), directory / "a", [group(8, "channel", type="float")])
    digest = load(directory / "a").spec.digest
    config = json.loads((directory / "a" / "config.json").read_text())["quantization_config"]
    assert load(directory / "a", quantize="fp8").spec.digest == digest
    config["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    edit_json(directory / "a" / "config.json", quantization_config=config)
    # the scales are by channel still, and are used so
    assert load(directory / "a").spec.digest == digest
    config["ignore"].append("model.layers.7")
    edit_json(directory / "a" / "config.json", quantization_config=config)
    assert load(directory / "a").spec.digest != digest


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_zero_point", "weight_shape"])
def test_missing_part_is_named(directory: Path, suffix: str) -> None:
    change(directory, **{suffix: None})
    with pytest.raises(MissingTensor, match=f"lacks {NAME}.{suffix};"):
        load(directory)


@pytest.mark.parametrize("suffix", ["weight_g_idx", "weight", "weight_global_scale"])
def test_unexpected_weight_part_is_named(directory: Path, suffix: str) -> None:
    change(directory, **{suffix: torch.zeros(128)})
    with pytest.raises(UnexpectedTensor, match=f"holds {NAME}.{suffix}, which"):
        load(directory)


@pytest.mark.parametrize(
    ("suffix", "part", "message"),
    [
        ("weight_scale", torch.ones(2, 256), r"weight_scale has the shape \[2, 256\]; expected \[256, 2\]"),
        ("weight_scale", torch.ones(256, 1), r"expected \[256, 2\]"),
        ("weight_packed", torch.zeros(128, 32, dtype=torch.int32), r"weight_packed .* expected \[256, 16\]"),
        ("weight_zero_point", torch.zeros(256, 2, dtype=torch.int32), r"weight_zero_point .* expected \[32, 2\]"),
        ("weight_shape", torch.tensor([128, 256]), r"weight_shape says \[128, 256\]; expected \[256, 128\]"),
        ("weight_packed", torch.zeros(256, 16), "weight_packed is stored as F32; expected I32"),
        ("weight_scale", torch.zeros(256, 2, dtype=torch.float64), "weight_scale is stored as F64; expected F32 or"),
        ("weight_zero_point", torch.zeros(32, 2, dtype=torch.int8), "weight_zero_point is stored as I8"),
    ],
)
def test_ill_fitting_weight_part_is_named(directory: Path, suffix: str, part: torch.Tensor, message: str) -> None:
    change(directory, **{suffix: part})
    with pytest.raises(ModelError, match=message):
        load(directory)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -0.01])
def test_scales_not_finite_and_positive_are_refused(directory: Path, bad: float) -> None:
    scales = load_file(directory / "model.safetensors")[f"{NAME}.weight_scale"]
    scales[7, 1] = scales[200, 0] = bad
    change(directory, weight_scale=scales)
    with pytest.raises(ModelError, match=rf"{NAME}\.weight_scale has 2 of 512 scales that aren't finite and above 0"):
        load(directory)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_fp8_codes_are_refused(tmp_path: Path, code: int) -> None:
    # more rows than are looked at together
    sizes = {**WIDE, "intermediate_size": 1120}
    save_compressed(build_model(**sizes), tmp_path, [group(8, "channel", type="float")])
    codes = load_file(tmp_path / "model.safetensors")[f"{NAME}.weight"]
    codes.view(torch.uint8)[3, 5] = codes.view(torch.uint8)[1119, 127] = code
    change(tmp_path, weight=codes)
    with pytest.raises(ModelError, match=rf"{NAME}\.weight has 2 of 143360 FP8 codes that are NaN"):
        load(tmp_path)


@pytest.mark.parametrize("is_nested", [False, True])
def test_non_finite_nf4_scales_are_refused(tmp_path: Path, is_nested: bool) -> None:
    save_nf4(tmp_path, is_nested=is_nested)
    suffix = "weight.nested_absmax" if is_nested else "weight.absmax"
    scales = load_file(tmp_path / "model.safetensors")[f"{NAME}.{suffix}"]
    scales[1] = float("inf")
    change(tmp_path, **{suffix: scales})
    with pytest.raises(ModelError, match=rf"scales of {NAME} .* aren't all finite"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("shape", [256, 64], "expected nf4 of shape"),
        ("quant_type", "fp4", "expected nf4 of shape"),
        ("blocksize", 32, "blocks of 32 weights"),
        ("blocksize", 128, "absmax has 512 scales; expected 256"),
        ("blocksize", 0, "blocksize is 0"),
        ("blocksize", True, "blocksize is true"),
        ("nested_blocksize", 512, "nested_absmax has 2 scales"),
        ("nested_offset", None, "nested_offset is null"),
    ],
)
def test_nf4_state_contradicting_tensors_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    save_nf4(tmp_path, is_nested=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"{NAME}.weight.quant_state.bitsandbytes__nf4"
    state = {**json.loads(bytes(tensors[name].tolist())), key: value}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xff"])
def test_non_object_nf4_state_is_refused(tmp_path: Path, content: bytes) -> None:
    save_nf4(tmp_path)
    change(tmp_path, **{"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(content), dtype=torch.uint8)})
    with pytest.raises(ModelError, match="isn't a quantization state"):
        load(tmp_path)


def test_non_nf4_table_is_refused(tmp_path: Path) -> None:
    save_nf4(tmp_path)
    change(tmp_path, **{"weight.quant_map": torch.linspace(-1, 1, 16)})
    with pytest.raises(ModelError, match=r"quant_map isn't the table of NF4"):
        load(tmp_path)


def test_fp4_of_bitsandbytes_is_named(tmp_path: Path) -> None:
    save_nf4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    state = tensors.pop(f"{NAME}.weight.quant_state.bitsandbytes__nf4")
    change_to = {**tensors, f"{NAME}.weight.quant_state.bitsandbytes__fp4": state}
    save_file(change_to, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"bitsandbytes__fp4 means that this weight isn't NF4"):
        load(tmp_path)


@pytest.mark.parametrize("quantize", ["int8", "nf4", "fp8"])
def test_requesting_different_format_is_refused(int4: Path, quantize: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--quantize {quantize}: the checkpoint is quantized to int4 already by compr"
    ):
        load(int4, quantize=quantize)


def test_requesting_stored_format_changes_no_logits(int4: Path) -> None:
    decoder, asked = load(int4), load(int4, quantize="int4")
    token_ids = random_tokens(20)
    assert torch.equal(PagedRun(decoder).logits(token_ids, [20]), PagedRun(asked).logits(token_ids, [20]))
    assert decoder.spec == asked.spec


def test_weights_stay_packed(int4: Path) -> None:
    files = sum(path.stat().st_size for path in int4.glob("*.safetensors"))
    # scales are widened, and rotary tables added
    assert load(int4).spec.size_bytes < 1.2 * files


def test_width_unfit_for_groups_is_named(tmp_path: Path) -> None:
    save_nf4(tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=224)
    with pytest.raises(ModelError, match=r"down_proj has 224 inputs; NF4 is implemented for multiples of 64"):
        load(tmp_path)
    save_compressed(build_model(**WIDE), tmp_path / "int4", [group(4, "group", group_size=128)])
    edit_json(tmp_path / "int4" / "config.json", intermediate_size=224)
    with pytest.raises(ModelError, match=r"down_proj has 224 inputs, which isn't a multiple of its group_size, 128"):
        load(tmp_path / "int4")
    save_compressed(build_model(**{**WIDE, "intermediate_size": 200}), tmp_path / "channels", [group(4, "channel")])
    with pytest.raises(ModelError, match="down_proj has 200 inputs with a common int4 scale; only multiples of 32"):
        load(tmp_path / "channels")
    groups = [group(8, "channel", symmetric=False)]
    save_compressed(build_model(**{**WIDE, "intermediate_size": 200}), tmp_path / "int8", groups)
    with pytest.raises(ModelError, match="down_proj has 200 inputs with a common asymmetric int8 scale; only mult"):
        load(tmp_path / "int8")
