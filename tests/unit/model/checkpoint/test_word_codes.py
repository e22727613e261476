"""GPTQ, AWQ, AutoRound and FP8 checkpoints compute what transformers computes with the float
weights that they mean.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_words import (
    awq_parts,
    fp8_blocks,
    gptq_parts,
    round_weight,
    save_awq,
    save_fp8,
    save_gptq,
    save_parts,
    shuffled_groups,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraserve.config import EngineConfig
from loraserve.demo.pack import base_dir
from loraserve.engine.worker.rounding import measure
from loraserve.errors import ConfigError, ModelError, ShapeMismatch, UnexpectedTensor
from loraserve.model.checkpoint.files import open_checkpoint
from loraserve.model.checkpoint.prequantized import assemble
from loraserve.model.checkpoint.stored_weights import find_stored_weight
from loraserve.model.config.model_config import read_config
from loraserve_kernels.common.quantized import QuantizedWeight

from ..conftest import PagedRun, build_model, edit_json, load, random_tokens, reference_logits
from ..stored_quantized import WIDE

NAME = "model.layers.1.mlp.up_proj"


def assembled(directory: Path, path: str = NAME) -> QuantizedWeight:
    config, checkpoint = read_config(directory), open_checkpoint(directory)
    shapes = {**config.module_shapes, "lm_head": (config.vocab_size, config.hidden_size)}
    stored = find_stored_weight(config.quantization, path, shapes[path.rsplit(".", 1)[-1]], checkpoint.tensors)
    assert stored is not None
    names = frozenset(f"{path}.{suffix}" for suffix in stored.tensors)
    parts = {entry.name.removeprefix(f"{path}."): tensor for entry, tensor, _ in checkpoint.read(names)}
    return assemble(stored, parts)


def assert_equal_logits(directory: Path, model: Any, quantization: str) -> None:
    decoder, token_ids = load(directory, activation_dtype="float"), random_tokens(30)
    ours = PagedRun(decoder).logits(token_ids, [20, 5])
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-4)
    assert decoder.spec.quantization == quantization
    assert decoder.spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("desc_act", [False, True], ids=["in-order", "desc-act"])
@pytest.mark.parametrize("sym", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_gptq_weight_equals_dequantized_codes(
    tmp_path: Path, group_size: int, bits: int, version: str, sym: bool, desc_act: bool
) -> None:
    options = {"bits": bits, "group_size": group_size, "sym": sym, "desc_act": desc_act, "version": version}
    model = save_gptq(build_model(**WIDE), tmp_path, **options)
    for path in (NAME, "model.layers.0.mlp.down_proj"):
        weight = assembled(tmp_path, path)
        assert torch.equal(weight.dequantize(torch.float32), model.get_submodule(path).weight)
        assert (weight.zeros is None) == sym
        assert (weight.permutation is None) == (not desc_act or group_size in (-1, weight.in_features))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"desc_act": True},
        {"desc_act": True, "sym": True, "bits": 8, "group_size": 64},
        {"bits": 8, "group_size": -1, "sym": True},
        {"bits": 4, "group_size": -1, "version": "gptq_v2"},
    ],
    ids=str,
)
def test_gptq_logits_equal_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    model = save_gptq(build_model("qwen2", **WIDE), tmp_path, **options)
    assert_equal_logits(tmp_path, model, f"int{options.get('bits', 4)}")


def test_gptq_dequantizes_as_the_library_does(tmp_path: Path) -> None:
    """The sums that AutoGPTQ's QuantLinear.forward makes of the file's tensors, in float32."""
    save_gptq(build_model(**WIDE), tmp_path, desc_act=True)
    tensors = load_file(tmp_path / "model.safetensors")
    qweight, qzeros, scales, g_idx = (tensors[f"{NAME}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx"))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    zeros = ((qzeros[:, :, None] >> shifts) & 15).reshape(scales.shape) + 1
    codes = ((qweight[:, None, :] >> shifts[:, None]) & 15).reshape(-1, qweight.shape[1])
    expected = scales.float()[g_idx.long()] * (codes - zeros[g_idx.long()])
    assert torch.equal(assembled(tmp_path).dequantize(torch.float32), expected.t())


def test_first_formats_zeros_carry_between_codes(tmp_path: Path) -> None:
    """A zero of 0 is written by borrowing from the next code of its word."""
    weight = build_model(**WIDE).get_submodule(NAME).weight.detach()
    codes = round_weight(weight, 4, 32, sym=False)
    codes.zeros[0, :8] = torch.tensor([0, 3, 0, 0, 15, 1, 0, 9], dtype=torch.int32)

    def make(path: str, _: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        return (gptq_parts(codes, 4), codes.weight) if path == NAME else None

    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    save_parts(build_model(**WIDE), tmp_path, make, config)
    assert torch.equal(assembled(tmp_path).dequantize(torch.float32), codes.weight)


def test_gptq_last_group_may_have_fewer_inputs(tmp_path: Path) -> None:
    sizes = {**WIDE, "intermediate_size": 224}
    model = save_gptq(build_model(**sizes), tmp_path, group_size=128, desc_act=True)
    weight = assembled(tmp_path, "model.layers.0.mlp.down_proj")
    assert weight.group_size == 32
    assert torch.equal(weight.dequantize(torch.float32), model.get_submodule("model.layers.0.mlp.down_proj").weight)
    assert_equal_logits(tmp_path, model, "int4")


def test_linears_with_several_orders_of_inputs_are_apart(tmp_path: Path) -> None:
    """q, k and v were ordered each by itself."""

    def make(path: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if path == "lm_head":
            return None
        g_idx = shuffled_groups(weight.shape[1], 32, seed=len(path) + ord(path[-6]))
        codes = round_weight(weight, 4, 32, sym=False, g_idx=g_idx)
        return gptq_parts(codes, 4), codes.weight

    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    model = save_parts(build_model("qwen2", **WIDE), tmp_path, make, config)
    assert_equal_logits(tmp_path, model, "int4")


def test_rows_of_reordered_weights_have_inputs_in_order(tmp_path: Path) -> None:
    """Certificates and DoRA read them."""
    model = save_gptq(build_model(**WIDE), tmp_path, desc_act=True)
    decoder = load(tmp_path)
    for module in ("k_proj", "down_proj"):
        path = f"model.layers.1.{'self_attn' if module == 'k_proj' else 'mlp'}.{module}"
        rows = torch.cat(list(decoder.weight_rows(1, module)))
        assert torch.equal(rows, model.get_submodule(path).weight)


@pytest.mark.parametrize("is_head_quantized", [False, True])
@pytest.mark.parametrize("layout", ["gptq", "awq", "fp8"])
def test_head_format_follows_stored_tensors(tmp_path: Path, layout: str, is_head_quantized: bool) -> None:
    save = {"gptq": save_gptq, "awq": save_awq, "fp8": save_fp8}[layout]
    sizes = {**WIDE, "vocab_size": 104}
    model = save(build_model(**sizes), tmp_path, is_quantized=lambda path: path != "lm_head" or is_head_quantized)
    assert_equal_logits(tmp_path, model, "fp8" if layout == "fp8" else "int4")


@pytest.mark.parametrize("layout", ["gptq", "awq", "fp8"])
def test_tied_head_is_the_float_embedding(tmp_path: Path, layout: str) -> None:
    save = {"gptq": save_gptq, "awq": save_awq, "fp8": save_fp8}[layout]
    model = save(build_model(**WIDE, tie_word_embeddings=True), tmp_path)
    assert_equal_logits(tmp_path, model, "fp8" if layout == "fp8" else "int4")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("layout", ["gptq", "awq", "fp8"])
def test_experts_in_words_equal_transformers(tmp_path: Path, layout: str, kind: str) -> None:
    options: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    if kind == "qwen3-moe":
        options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    model = build_model(kind, **{**WIDE, **options})
    reference = build_model(kind, **{**WIDE, **options})
    model.save_pretrained(tmp_path)
    tensors, meant = load_file(tmp_path / "model.safetensors"), {}
    is_expert = [name for name in tensors if ".experts." in name and tensors[name].dim() == 2]
    assert is_expert
    for name in is_expert:
        path, weight = name.removesuffix(".weight"), tensors.pop(name)
        if layout == "fp8":
            parts, meant[name] = fp8_blocks(weight)
        else:
            codes = round_weight(weight, 4, 32, sym=False)
            parts, meant[name] = (gptq_parts(codes, 4) if layout == "gptq" else awq_parts(codes)), codes.weight
        tensors |= {f"{path}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"bits": 4, "group_size": 32, "sym": False, "quant_method": layout}
    if layout == "fp8":
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(tmp_path / "config.json", quantization_config=config)
    # the reference: the same model from a file of the weights that the codes mean
    floats = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    (tmp_path / "float").mkdir()
    save_file(
        {**floats, **{name: one.contiguous() for name, one in meant.items()}}, tmp_path / "float/model.safetensors"
    )
    (tmp_path / "float/config.json").write_text((tmp_path / "config.json").read_text())
    edit_json(tmp_path / "float/config.json", quantization_config=None)
    reference = type(reference).from_pretrained(tmp_path / "float", attn_implementation="eager").float().eval()
    token_ids = random_tokens(30)
    ours = PagedRun(load(tmp_path, activation_dtype="float")).logits(token_ids, [30])
    torch.testing.assert_close(ours, reference_logits(reference, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_awq_weight_equals_dequantized_codes(tmp_path: Path, group_size: int) -> None:
    model = save_awq(build_model(**WIDE), tmp_path, group_size=group_size)
    for path in (NAME, "model.layers.0.mlp.down_proj"):
        assert torch.equal(assembled(tmp_path, path).dequantize(torch.float32), model.get_submodule(path).weight)


def test_awq_logits_equal_transformers(tmp_path: Path) -> None:
    model = save_awq(build_model("qwen2", **WIDE), tmp_path, modules_to_not_convert=["lm_head"])
    assert_equal_logits(tmp_path, model, "int4")


def test_awq_dequantizes_as_the_library_does(tmp_path: Path) -> None:
    """AutoAWQ's dequantize_gemm, in float32."""
    save_awq(build_model(**WIDE), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shifts, back = torch.arange(0, 32, 4), torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def unpack(words: Tensor) -> Tensor:
        codes = ((words[:, :, None] >> shifts) & 15)[:, :, back]
        return codes.reshape(len(words), -1)

    codes, zeros = unpack(tensors[f"{NAME}.qweight"]), unpack(tensors[f"{NAME}.qzeros"])
    scales = tensors[f"{NAME}.scales"].float()
    expected = (codes - zeros.repeat_interleave(32, 0)) * scales.repeat_interleave(32, 0)
    assert torch.equal(assembled(tmp_path).dequantize(torch.float32), expected.t())


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}


@pytest.mark.parametrize(
    ("packing", "is_second_format"),
    [("auto_round:auto_gptq", False), ("auto_round:gptqmodel", True), ("auto_round", True)],
)
@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_auto_round_gptq_packing_equals_dequantized_codes(
    tmp_path: Path, method: str, packing: str, is_second_format: bool
) -> None:
    def make(path: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if path == "lm_head" or path.endswith("o_proj"):
            return None
        bits = 8 if path.endswith("down_proj") else 4
        codes = round_weight(weight, bits, 32, sym=False)
        # what it writes has no g_idx
        parts = {n: t for n, t in gptq_parts(codes, bits, is_second_format=is_second_format).items() if n != "g_idx"}
        return parts, codes.weight

    extra = {
        ".*down_proj": {"bits": 8, "group_size": 32},
        **{f"model.layers.{i}.self_attn.o_proj": {"bits": 16, "data_type": "float"} for i in range(2)},
    }
    config = {**AUTO_ROUND, "quant_method": method, "packing_format": packing, "extra_config": extra}
    model = save_parts(build_model(**WIDE), tmp_path, make, config)
    assert_equal_logits(tmp_path, model, "int4+int8")


def test_auto_round_awq_packing_equals_dequantized_codes(tmp_path: Path) -> None:
    model = save_awq(build_model(**WIDE), tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={**AUTO_ROUND, "packing_format": "auto_round:auto_awq"})
    assert_equal_logits(tmp_path, model, "int4")


def test_negative_scales_are_used_unchanged(tmp_path: Path) -> None:
    """AutoRound's symmetric groups have the sign of their largest weight."""
    weight = build_model(**WIDE).get_submodule(NAME).weight.detach()
    codes = round_weight(weight, 4, 32, sym=True)
    codes.scales[0] *= -1

    def make(path: str, _: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        return (gptq_parts(codes, 4), codes.weight) if path == NAME else None

    config = {**AUTO_ROUND, "sym": True, "packing_format": "auto_round:auto_gptq"}
    model = save_parts(build_model(**WIDE), tmp_path, make, config)
    assert_equal_logits(tmp_path, model, "int4")


def test_dynamic_rules_set_bits_per_linear(tmp_path: Path) -> None:
    def make(path: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if path == "lm_head" or ".0.self_attn" in path:
            return None
        is_wide = path.endswith("down_proj")
        codes = round_weight(weight, 8 if is_wide else 4, 64 if is_wide else 32, sym=is_wide)
        return gptq_parts(codes, 8 if is_wide else 4), codes.weight

    dynamic = {r"-:.*\.0\.self_attn": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 64, "sym": True}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "dynamic": dynamic}
    model = save_parts(build_model(**WIDE), tmp_path, make, config)
    assert_equal_logits(tmp_path, model, "int4+int8")


@pytest.mark.parametrize("config", [{"modules_in_block_to_quantize": [["mlp.up_proj"]]}, {"lm_head": True}])
def test_files_decide_quantized_linears_over_config(tmp_path: Path, config: dict[str, Any]) -> None:
    """Published configs name some that aren't, and leave some out that are."""
    model = save_gptq(build_model(**WIDE), tmp_path, **config)
    assert_equal_logits(tmp_path, model, "int4")


@pytest.mark.parametrize("save", [save_gptq, save_awq])
def test_config_in_separate_file_is_read(tmp_path: Path, save: Any) -> None:
    model = save(build_model(**WIDE), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_json(tmp_path / "config.json", quantization_config=None)
    if save is save_awq:
        old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
        (tmp_path / "quant_config.json").write_text(json.dumps(old))
    else:
        del written["quant_method"], written["checkpoint_format"]
        (tmp_path / "quantize_config.json").write_text(json.dumps(written))
    # AutoGPTQ names the file by its settings
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-32g.safetensors")
    assert_equal_logits(tmp_path, model, "int4")


def test_zero_biases_of_unbiased_linears_are_passed_over(tmp_path: Path) -> None:
    model = save_gptq(build_model(**WIDE), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{NAME}.bias"] = torch.zeros(WIDE["intermediate_size"], dtype=torch.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal_logits(tmp_path, model, "int4")


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 32)], ids=str)
def test_fp8_blocks_equal_dequantized_codes(tmp_path: Path, block: tuple[int, int]) -> None:
    # blocks of 128 don't divide 320 or 160
    sizes = {**WIDE, "hidden_size": 320, "intermediate_size": 160}
    model = save_fp8(build_model("qwen3", **sizes, head_dim=32), tmp_path, block=block)
    for path in (NAME, "model.layers.0.mlp.down_proj"):
        assert torch.equal(assembled(tmp_path, path).dequantize(torch.float32), model.get_submodule(path).weight)
    assert_equal_logits(tmp_path, model, "fp8")


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
@pytest.mark.parametrize("shape", [(), (1,), (256, 1), (256,)], ids=str)
def test_fp8_without_blocks_equals_dequantized_codes(tmp_path: Path, method: str, shape: tuple[int, ...]) -> None:
    def make(path: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if path != NAME:
            return None
        scale = weight.abs().amax() / 448 if len(shape) < 1 or shape == (1,) else weight.abs().amax(1) / 448
        codes = (weight / scale.reshape(-1, 1)).to(torch.float8_e4m3fn)
        parts = {"weight": codes, "weight_scale": scale.reshape(shape), "input_scale": torch.ones(())}
        return parts, codes.float() * scale.reshape(-1, 1)

    model = save_parts(build_model(**WIDE), tmp_path, make, {"quant_method": method, "activation_scheme": "static"})
    assert torch.equal(assembled(tmp_path).dequantize(torch.float32), model.get_submodule(NAME).weight)
    assert_equal_logits(tmp_path, model, "fp8")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of GPTQ's first format, to break."""
    save_gptq(build_model(**WIDE), tmp_path)
    return tmp_path


def change(directory: Path, **tensors: Tensor | None) -> None:
    """Set these tensors of `NAME`; None deletes."""
    path = directory / "model.safetensors"
    weights = {**load_file(path), **{f"{NAME}.{suffix}": tensor for suffix, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, path)


def part(directory: Path, suffix: str) -> Tensor:
    return load_file(directory / "model.safetensors")[f"{NAME}.{suffix}"]


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales", "g_idx"])
def test_digest_follows_every_tensor_of_words(directory: Path, suffix: str) -> None:
    digest, found = load(directory).spec.digest, part(directory, suffix)
    if suffix == "g_idx":
        found = found.long()
    else:
        found[1, 3] += 1
    change(directory, **{suffix: found})
    assert load(directory).spec.digest != digest


def test_digest_follows_the_format_of_zeros(directory: Path) -> None:
    digest = load(directory).spec.digest
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    edit_json(directory / "config.json", quantization_config={**config, "checkpoint_format": "gptq_v2"})
    assert load(directory).spec.digest != digest


@pytest.mark.parametrize(
    ("suffix", "tensor", "error", "message"),
    [
        ("qweight", torch.zeros(16, 128, dtype=torch.int32), ShapeMismatch, r"qweight has the shape .* \[16, 256\]"),
        ("qzeros", torch.zeros(2, 32, dtype=torch.int32), ShapeMismatch, r"qzeros has the shape .* \[4, 32\]"),
        ("scales", torch.zeros(4, 256, dtype=torch.int8), ModelError, "scales is stored as I8"),
        ("scales", torch.full((4, 256), float("nan")), ModelError, "scales has 1024 of 1024 scales that aren't finite"),
        ("g_idx", torch.arange(128, dtype=torch.int32) // 30, ModelError, "g_idx holds groups from 0 to 4; expected 0"),
        (
            "g_idx",
            torch.arange(128, dtype=torch.int32).mul(31) // 1000,
            ModelError,
            "g_idx puts 33 inputs into group 0; only multiples of 32",
        ),
        ("bias", torch.ones(256), ModelError, "bias isn't zero; this linear has no bias"),
        ("weight", torch.zeros(256, 128), UnexpectedTensor, f"holds {NAME}.weight"),
    ],
    ids=str,
)
def test_ill_fitting_word_tensor_is_named(
    directory: Path, suffix: str, tensor: Tensor, error: type[ModelError], message: str
) -> None:
    change(directory, **{suffix: tensor})
    with pytest.raises(error, match=message):
        load(directory)


def test_asymmetric_zeros_override_symmetric_config(tmp_path: Path) -> None:
    """The tensors decide; a channel's own zero needs groups, which 130 inputs have none of."""
    weight = build_model(**WIDE).get_submodule(NAME).weight.detach()
    config = {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}
    codes = round_weight(weight, 8, -1, sym=False)

    def make(path: str, _: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        return (gptq_parts(codes, 8), codes.weight) if path == NAME else None

    model = save_parts(build_model(**WIDE), tmp_path, make, config)
    assert_equal_logits(tmp_path, model, "int8")


def test_quantizing_again_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="quantized to int4 already by gptq"):
        load(directory, quantize="int8")
    load(directory, quantize="int4")


def test_nan_fp8_codes_in_blocks_are_refused(tmp_path: Path) -> None:
    save_fp8(build_model(**WIDE), tmp_path)
    codes = part(tmp_path, "weight")
    codes.view(torch.uint8)[3, 5] = 0x7F
    change(tmp_path, weight=codes)
    with pytest.raises(ModelError, match=rf"{NAME}\.weight has 1 of 32768 FP8 codes that are NaN"):
        load(tmp_path)


def test_non_positive_fp8_scales_are_refused(tmp_path: Path) -> None:
    save_fp8(build_model(**WIDE), tmp_path)
    change(tmp_path, weight_scale_inv=part(tmp_path, "weight_scale_inv") * 0)
    with pytest.raises(ModelError, match=rf"{NAME}\.weight_scale_inv has 2 of 2 scales"):
        load(tmp_path)


@pytest.mark.parametrize("save", [save_gptq, save_awq])
def test_rows_are_rounded_in_groups_by_default(tmp_path: Path, save: Any) -> None:
    save(build_model(**WIDE), tmp_path)
    plain, rounded = (load(tmp_path, activation_dtype=dtype) for dtype in ("float", "auto"))
    assert (plain.spec.arithmetic, rounded.spec.arithmetic) == ("w4a16+fp32", "w4a8-g32-o2+w4a8-g32+fp32")
    plain, rounded = (PagedRun(one).logits(random_tokens(20), [20]) for one in (plain, rounded))
    assert 1e-4 < (plain - rounded).abs().max() < 0.5


@pytest.mark.parametrize("layout", ["gptq", "awq", "fp8"])
def test_word_code_precision_equals_dequantized_base_precision(tmp_path: Path, layout: str) -> None:
    """`loraserve doctor --precision` measures it; certificates compare with the same base."""
    trained = AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32)
    if layout == "gptq":
        save_gptq(trained, tmp_path, desc_act=True)
    else:
        (save_awq if layout == "awq" else save_fp8)(trained, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base_dir() / name, tmp_path)
    config = EngineConfig(model_dir=str(tmp_path), model_id="base", store_url="", activation_dtype="float")
    found = measure(config)
    assert found.quantization == ("fp8" if layout == "fp8" else "int4")
    assert found.total.top1_agreement == 1.0
    assert found.total.max_difference < 1e-4
