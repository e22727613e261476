"""Rounding to int4 on calibration text, and the checkpoint that is made of it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.transform import TransformConfig
from safetensors.torch import load_file

from loraserve.errors import ConfigError, MissingTensor, ModelError, ShapeMismatch
from loraserve.model.checkpoint.blueprint import draw
from loraserve.model.checkpoint.files import open_checkpoint
from loraserve.model.checkpoint.original import OriginalBase
from loraserve.model.compensation import quantizing
from loraserve.model.compensation.calibration import calibrate
from loraserve.model.compensation.compressed import CompressedWriter
from loraserve.model.compensation.gptq import compensate, inverse_factor
from loraserve.model.config.model_config import read_config
from loraserve.model.layers.linears import quantize_weight
from loraserve.text.passage import PASSAGE
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import QuantizeRequest
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.common.rotation import rotate

from .conftest import PagedRun, build_model, load, random_tokens, save_model

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def correlated_rows(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width // 4) @ torch.randn(width // 4, width) + 0.1 * torch.randn(num_rows, width)


@pytest.mark.parametrize("rotation", [0, 64])
@pytest.mark.parametrize("width", [64, 192])
def test_compensated_products_err_less_than_plain_products(width: int, rotation: int) -> None:
    x, weight = correlated_rows(500, width), torch.randn(61, width)
    turned = rotate(x, rotation)
    compensated = compensate(weight, inverse_factor(turned), rotation)
    plain = quantize_weight(weight, "int4", rotation)
    assert (compensated.format, compensated.group_size, compensated.rotation) == ("int4", 32, rotation)
    assert torch.equal(compensated.scales.bfloat16().float(), compensated.scales)
    expected = x @ weight.t()
    errors = [(x @ one.dequantize(torch.float32).t() - expected).norm() for one in (compensated, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_single_row_inputs_can_be_compensated() -> None:
    x, weight = torch.randn(1, 64), torch.randn(8, 64)
    rounded = compensate(weight, inverse_factor(x), 0).dequantize(torch.float32)
    assert (rounded - weight).norm() < 0.3 * weight.norm()
    with pytest.raises(ModelError, match="inputs of a linear"):
        inverse_factor(torch.full((2, 64), torch.inf))
    with pytest.raises(ModelError, match="A weight holds"):
        compensate(torch.full((8, 64), torch.nan), inverse_factor(x), 0)


def calibrated(
    directory: Path, out: Path, sequences: list[list[int]], int8_modules: Collection[str] = ()
) -> dict[str, QuantizedWeight]:
    """Write a checkpoint; return the weights of each module that it should hold."""
    base, checkpoint = OriginalBase(directory, torch.device("cpu")), open_checkpoint(directory)
    blueprint = draw(read_config(directory), checkpoint.tensors, "int4")
    writer, weights = CompressedWriter(directory, out, blueprint, checkpoint), {}

    def keep(layer: int, rounded: Any) -> None:
        writer.put_layer(layer, rounded)
        weights.update(rounded)

    paths = [module.path for site in blueprint.sites for module in site.modules]
    int8_paths = [path for path in paths if path.rpartition(".")[2] in int8_modules]
    calibrate(base, blueprint, sequences, keep, lambda *_: None, int8_paths)
    writer.finish()
    return weights


@pytest.mark.parametrize(
    ("kind", "options", "int8_modules"),
    [
        ("llama", {}, ()),
        ("llama", {}, ("v_proj", "down_proj")),
        ("qwen2", {"tie_word_embeddings": True}, ("k_proj",)),
        ("phi3", {"pad_token_id": 0}, ("qkv_proj",)),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}, ()),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}, ("w2",)),
    ],
)
def test_checkpoint_is_served_as_calibrated(
    tmp_path: Path, kind: str, options: dict[str, Any], int8_modules: tuple[str, ...]
) -> None:
    model = build_model(kind, **SIZES, **options)
    directory, out = save_model(model, tmp_path / "base"), tmp_path / "out"
    weights = calibrated(directory, out, [random_tokens(40, seed=seed) for seed in range(4)], int8_modules)
    decoder = load(out)
    assert decoder.spec.quantization == ("int4+int8" if int8_modules else "int4")
    names = {path.rpartition(".")[2] for path, weight in weights.items() if weight.format == "int8"}
    assert names == set(int8_modules)
    # rotated weights take rounded activations, and a rounded head beside them
    arithmetics = {name.rpartition("-h")[0] or name for name in decoder.spec.arithmetic.split("+")}
    assert arithmetics <= {"w4a8-row", "w4a16", "w8a8-row", "w8a7-row"}
    assert arithmetics & {"w8a8-row", "w8a7-row"}
    with torch.no_grad():
        for path, weight in weights.items():
            model.get_submodule(path).weight.copy_(weight.dequantize(torch.float32)) if kind != "mixtral" else None
    if kind == "mixtral":
        return
    token_ids = random_tokens(30)
    expected = model(torch.tensor([token_ids])).logits[0].detach()
    floats = load(out, activation_dtype="float")
    torch.testing.assert_close(PagedRun(floats).logits(token_ids, [20]), expected, rtol=0, atol=0.05)
    errors = (PagedRun(decoder).logits(token_ids, [20]) - expected).norm(dim=1) / expected.norm(dim=1)
    # rows in int8, of a model of noise
    assert errors.max() < 0.1


@pytest.mark.interpreted
def test_gpu_rotates_rows_in_floats(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    directory = save_model(build_model(**SIZES, head_dim=16), tmp_path / "base")
    weights = calibrated(directory, tmp_path / "out", [random_tokens(40)])
    from loraserve.model.backends.gpu_backend import GpuLinear

    weight, x = weights["model.layers.0.mlp.down_proj"], torch.randn(3, 96).bfloat16()
    linear = GpuLinear(weight.to("cpu"), None, torch.float32)
    expected = x.double() @ weight.dequantize(torch.float64).t()
    assert torch.equal(torch.cat(list(linear.rows(0, 64))), weight.dequantize(torch.float32))
    error = (linear(x).double() - expected).norm() / expected.norm()
    assert error < 0.02


@pytest.mark.parametrize(("quantize", "num_lines"), [("int4", 1), ("int8", 0), ("none", 0)])
def test_int4_load_names_calibration_once(
    tmp_path: Path, quantize: str, num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    load(save_model(build_model(**SIZES), tmp_path), quantize=quantize)
    assert sum("loraserve quantize DIR --out OUT" in record.getMessage() for record in caplog.records) == num_lines


def test_config_names_the_rotation_as_compressed_tensors_does(tmp_path: Path) -> None:
    directory = save_model(build_model(**SIZES), tmp_path / "base")
    calibrated(directory, tmp_path / "out", [random_tokens(40)])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    transforms = TransformConfig.model_validate(config["transform_config"])
    assert {name: scheme.head_dim for name, scheme in transforms.config_groups.items()} == {"h64": 64, "h32": 32}
    (down, others) = (
        config["transform_config"]["config_groups"][name]["apply"][0]["targets"] for name in ("h32", "h64")
    )
    assert all(path.endswith("down_proj") for path in down)
    assert "model.layers.1.self_attn.q_proj" in others
    assert load(tmp_path / "out").spec.digest != load(directory).spec.digest


def test_int8_group_equals_compressed_tensors(tmp_path: Path) -> None:
    directory, out = save_model(build_model(**SIZES), tmp_path / "base"), tmp_path / "out"
    weights = calibrated(directory, out, [random_tokens(40)], ("v_proj", "down_proj"))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    config.pop("transform_config")
    groups = QuantizationConfig.model_validate(config).config_groups
    bits = {name: (scheme.weights.num_bits, scheme.weights.symmetric) for name, scheme in groups.items()}
    assert bits == {"group_0": (4, False), "group_1": (8, True)}
    path = "model.layers.1.mlp.down_proj"
    stored = {name: tensor for part in out.glob("*.safetensors") for name, tensor in load_file(part).items()}
    unpacked = unpack_from_int32(stored[f"{path}.weight_packed"], 8, torch.Size((64, 96)))
    assert torch.equal(unpacked, weights[path].codes)
    # orthogonal Hadamard matrices, of blocks of 32
    plain = unpacked.float() * stored[f"{path}.weight_scale"]
    assert torch.allclose(rotate(plain, 32) / 32**0.5, weights[path].dequantize(torch.float32), atol=1e-6)


@pytest.mark.parametrize("num_bits", [None, 4])
def test_int8_group_of_other_bits_is_refused(tmp_path: Path, num_bits: int | None) -> None:
    out = tmp_path / "out"
    calibrated(save_model(build_model(**SIZES), tmp_path / "base"), out, [random_tokens(40)], ("down_proj",))
    config = json.loads((out / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    if num_bits is None:
        del groups["group_1"]
    else:
        groups["group_1"]["weights"]["num_bits"] = num_bits
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises((ModelError, MissingTensor, ShapeMismatch), match="down_proj"):
        load(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "random-hadamard"}, '"hadamard"'),
        ({"randomize": True}, "false"),
        ({"head_dim": 128}, "64 or 32 or 16"),
        ({"apply": []}, "weight_input"),
    ],
)
def test_other_transforms_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    directory = save_model(build_model(**SIZES), tmp_path / "base")
    calibrated(directory, tmp_path / "out", [random_tokens(40)])
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["transform_config"]["config_groups"]["h64"].update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "out")


def test_interrupted_quantization_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loraserve.demo.pack import base_dir

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    request = QuantizeRequest(str(base_dir()), str(tmp_path / "out"), max_tokens=1024, window=64)
    with pytest.raises(KeyboardInterrupt):
        quantizing.quantize_checkpoint(request, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_impossible_calibration_is_refused_with_reason(tmp_path: Path) -> None:
    from loraserve.demo.pack import base_dir

    text = tmp_path / "short.txt"
    text.write_text("the table")
    request = QuantizeRequest(str(base_dir()), str(tmp_path / "out"), text_file=str(text))
    with pytest.raises(ConfigError, match="at least 1024 are needed"):
        quantizing.quantize_checkpoint(request, lambda *_: None)
    (tmp_path / "there").mkdir()
    with pytest.raises(ModelError, match="is there already"):
        quantizing.quantize_checkpoint(QuantizeRequest(str(base_dir()), str(tmp_path / "there")), lambda *_: None)


def test_unknown_int8_names_are_refused_with_choices(tmp_path: Path) -> None:
    from loraserve.demo.pack import base_dir

    request = QuantizeRequest(str(base_dir()), str(tmp_path / "out"), int8_modules=("v_proj", "w9"))
    with pytest.raises(ConfigError, match=r"^w9: no linear") as refusal:
        quantizing.quantize_checkpoint(request, lambda *_: None)
    assert "down_proj" in (refusal.value.hint or "")


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        # k and v have 5 % of the weights each
        ("llama", {"intermediate_size": 256, "num_key_value_heads": 2}, {"v_proj", "k_proj"}),
        ("llama", {"intermediate_size": 128, "num_key_value_heads": 4}, set()),
        ("phi3", {"pad_token_id": 0}, set()),
    ],
)
def test_default_keeps_keys_and_values_within_bits(
    tmp_path: Path, kind: str, options: dict[str, Any], expected: set[str]
) -> None:
    directory = save_model(build_model(kind, **(SIZES | {"num_attention_heads": 4} | options)), tmp_path)
    blueprint = draw(read_config(directory), open_checkpoint(directory).tensors, "int4")
    paths = quantizing._int8_paths(blueprint, None)
    assert {path.rpartition(".")[2] for path in paths} == expected
    assert len(paths) == 2 * len(expected)


def test_trained_base_keeps_more_in_eight_bits(tmp_path: Path) -> None:
    from loraserve.demo.pack import base_dir

    token_ids = Tokenizer(base_dir()).encode(PASSAGE)
    windows = [token_ids[start : start + 64] for start in range(0, 512, 64)]

    def log_probs(directory: Path, quantize: str = "none") -> torch.Tensor:
        decoder = load(directory, quantize=quantize)
        return torch.stack([PagedRun(decoder).logits(window, [64]).log_softmax(-1) for window in windows])

    for name, int8_modules in (("calibrated", ()), ("mixed", ("v_proj", "down_proj"))):
        request = QuantizeRequest(
            str(base_dir()), str(tmp_path / name), max_tokens=4096, window=64, int8_modules=int8_modules
        )
        quantizing.quantize_checkpoint(request, lambda *_: None)
    exact = log_probs(base_dir())
    rounded = [log_probs(base_dir(), "int4"), log_probs(tmp_path / "calibrated"), log_probs(tmp_path / "mixed")]
    plain, calibrated, mixed = (float((exact.exp() * (exact - one)).sum(-1).mean()) for one in rounded)
    assert calibrated < 0.6 * plain
    assert mixed < 0.9 * calibrated


def test_bundled_text_has_several_kinds() -> None:
    text = quantizing.calibration_text()
    assert len(text.split()) > 20_000
    assert len(text.encode()) < 200_000
    kinds = ("User:", "def ", "the house", "SELECT ", "Der Zug", "the Congress", "Elizabeth", "hackers")
    assert all(part in text for part in kinds)
    # what is computed spreads over all of it, so that each kind has a part in each half
    halves = text[: len(text) // 2], text[len(text) // 2 :]
    assert all(part in half for half in halves for part in ("Congress", "Elizabeth", "adapter", "User:"))
