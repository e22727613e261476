from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import default_and_campaign
from safetensors.torch import load_file, save_file

from loraserve.errors import ConfigError, MissingTensor, ModelError, ShapeMismatch, UnexpectedTensor
from loraserve.model.layers.linears import quantize_weight
from loraserve.progress import Progress
from loraserve_kernels.cpu.linear.chooser import Chooser

from ..conftest import PagedRun, build_model, edit_json, load, random_tokens, reference_logits, save_model
from ..stored_quantized import group, save_compressed

NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_model(build_model(), tmp_path)


def change_weights(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Set these tensors of the single file; None deletes."""
    path = directory / "model.safetensors"
    weights = {**load_file(path), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, path)


def test_spec_describes_loaded_base(directory: Path) -> None:
    decoder = load(directory, max_model_len=100)
    spec = decoder.spec
    assert spec.id == "org/base"
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.max_model_len) == (3, 48, 101, 100)
    assert spec.modules["k_proj"] == (24, 48)
    assert spec.module_paths["down_proj"] == "mlp.down_proj"
    assert spec.layers_path == "model.layers"
    assert spec.eos_token_ids == (2,)
    assert (spec.dtype, spec.quantization) == ("float32", "none")
    weights = load_file(directory / "model.safetensors")
    assert spec.num_parameters == sum(tensor.numel() for tensor in weights.values())
    assert spec.size_bytes >= 4 * spec.num_parameters
    assert decoder.kv_shape == (3, 2, 12)


@pytest.mark.parametrize(
    ("quantize", "layers", "head"),
    [
        ("none", {"fp32"}, {"fp32"}),
        ("int8", {"w8a8-row-h64", "w8a7-row-h64"}, {"w8a8-row-h64", "w8a7-row-h64"}),
        ("int4", {"w4a8-row-h64"}, {"w8a8-row-h64", "w8a7-row-h64"}),
        ("nf4", {"w4a16-nf4"}, {"w8a8-row-h64", "w8a7-row-h64"}),
        ("fp8", {"w8a16-fp8"}, {"w8a16-fp8"}),
    ],
)
def test_spec_names_the_arithmetic_of_layers_and_head(
    tmp_path: Path, quantize: str, layers: set[str], head: set[str]
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    spec = load(save_model(build_model(**sizes), tmp_path), quantize=quantize).spec
    names = spec.arithmetic.split("+")
    assert names[0] in layers
    assert names[-1] in head
    assert len(names) == (1 if layers & head else 2)
    assert spec.device == "cpu"
    assert spec.kernels
    assert spec.instructions


def test_load_reports_kernel_probing_and_resumes_progress(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser, progress, told = Chooser(), Progress(), []
    for module in ("checkpoint.loader", "layers.linears"):
        monkeypatch.setattr(f"loraserve.model.{module}.chooser", lambda: chooser)
    progress.on_begin = lambda: told.append(str(progress))
    load(directory, quantize="int8", progress=progress)
    assert "probing kernels for int8" in told
    assert told[told.index("probing kernels for int8") + 1].startswith("loading shard 1 of 1 and rounding it to int8")
    assert str(progress) == "packing the embedding and the head"


def test_sharded_checkpoint_equals_single_file(directory: Path, tmp_path: Path) -> None:
    model = build_model()
    sharded = save_model(model, tmp_path / "sharded", max_shard_size="30KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    whole, parts = load(directory), load(sharded)
    token_ids = random_tokens(20)
    assert torch.equal(PagedRun(whole).logits(token_ids, [20]), PagedRun(parts).logits(token_ids, [20]))
    assert whole.spec.digest == parts.spec.digest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoint_is_widened_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    half = build_model().to(dtype)
    save_model(half, tmp_path)
    # not half.float(): that would keep frequencies that were rounded as well
    model = build_model()
    model.load_state_dict(half.state_dict())
    token_ids = random_tokens(20)
    ours = PagedRun(load(tmp_path)).logits(token_ids, [20])
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-4)


def test_digest_follows_the_weights_and_the_function(directory: Path) -> None:
    digest = load(directory).spec.digest
    assert len(digest) == 64
    assert load(directory, quantize="int8").spec.digest == digest
    edit_json(directory / "config.json", rms_norm_eps=1e-3)
    assert load(directory).spec.digest != digest
    edit_json(directory / "config.json", rms_norm_eps=1e-6)
    assert load(directory).spec.digest == digest
    weights = load_file(directory / "model.safetensors")
    weights[NAME].view(-1)[7] += 1e-3
    change_weights(directory, **{NAME: weights[NAME]})
    assert load(directory).spec.digest != digest


@pytest.mark.parametrize(("quantize", "bound"), [("fp8", 1e-4), ("int4", 1e-4), ("nf4", 0.03)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_float_checkpoint_is_rounded_during_load(tmp_path: Path, quantize: str, bound: float, is_tied: bool) -> None:
    model = build_model("qwen2", hidden_size=64, intermediate_size=96 * 2, tie_word_embeddings=is_tied)
    activations = "float" if quantize == "int4" else "auto"
    decoder = load(save_model(model, tmp_path), quantize=quantize, activation_dtype=activations)
    token_ids = random_tokens(30)
    ours = PagedRun(decoder).logits(token_ids, [20])
    # only a head of its own can be rounded without the embedding
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                # the head has eight bits where the layers have four
                format = "int8" if name == "lm_head" and quantize != "fp8" else quantize
                module.weight.copy_(quantize_weight(module.weight, format).dequantize(torch.float32))
    expected = reference_logits(model, token_ids)
    # nf4's head rounds activations too
    assert ((ours - expected).norm(dim=1) / expected.norm(dim=1)).max() < bound
    assert decoder.spec.quantization == quantize


@pytest.mark.parametrize("name", [NAME, "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_missing_tensor_is_named_with_shape(directory: Path, name: str) -> None:
    shape = list(load_file(directory / "model.safetensors")[name].shape)
    change_weights(directory, **{name: None})
    with pytest.raises(MissingTensor, match=name) as raised:
        load(directory)
    assert f"of shape {shape}" in str(raised.value)


def test_wrong_shape_is_named_with_expected_shape(directory: Path) -> None:
    change_weights(directory, **{NAME: torch.zeros(25, 48)})
    with pytest.raises(ShapeMismatch, match=rf"{NAME} has the shape \[25, 48\]; expected \[24, 48\]"):
        load(directory)


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_unexpected_tensor_is_named(directory: Path, name: str) -> None:
    change_weights(directory, **{name: torch.zeros(4)})
    with pytest.raises(UnexpectedTensor, match=name):
        load(directory)


def test_rotary_buffers_of_old_checkpoints_are_passed_over(directory: Path) -> None:
    digest = load(directory).spec.digest
    change_weights(directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)})
    assert load(directory).spec.digest == digest


def test_mismatched_checkpoint_is_refused_before_reading_tensors(directory: Path) -> None:
    change_weights(directory, **{NAME: None, "lm_head.weight": torch.zeros(101, 48, dtype=torch.float64)})
    with pytest.raises(MissingTensor):
        load(directory)


def test_integer_weights_in_float_checkpoint_are_refused(directory: Path) -> None:
    change_weights(directory, **{NAME: torch.zeros(24, 48, dtype=torch.int8)})
    with pytest.raises(ModelError, match=f"{NAME} is stored as I8"):
        load(directory)


def test_tied_checkpoint_keeps_stored_head(tmp_path: Path) -> None:
    model = build_model(tie_word_embeddings=False)
    save_model(model, tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    token_ids = random_tokens(20)
    ours = PagedRun(load(tmp_path)).logits(token_ids, [20])
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device 'tpu'"),
        ({"quantize": "int3"}, "'int3'"),
        ({"dtype": torch.float64}, "float64"),
        ({"max_model_len": 129}, "max_model_len is 129; expected at most 128"),
        ({"max_model_len": 0}, "max_model_len is 0"),
    ],
)
def test_unsupported_option_is_refused_with_value(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(directory, **options)


@pytest.mark.parametrize(("quantize", "groups"), [("int4", "32"), ("nf4", "64")])
def test_width_unfit_for_groups_is_refused_before_reading(directory: Path, quantize: str, groups: str) -> None:
    change_weights(directory, **{NAME: None})
    with pytest.raises(
        ModelError, match=f"48 inputs can't be quantized to {quantize}, whose groups have ({groups}) inputs"
    ):
        load(directory, quantize=quantize)


_MEASURE = """
import json, sys
from pathlib import Path
import torch
from loraserve.model.checkpoint.loader import load_model
from loraserve.model.checkpoint.site import return_free_memory
from loraserve_kernels.cpu.linear.chooser import chooser

torch.set_num_threads(1)

def load(directory, quantize):
    return load_model(
        Path(directory), model_id="m", dtype=torch.float32, quantize=quantize, device="cpu", max_model_len=None
    )

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

# what libraries set up on first use isn't the model's: neither are the products that oneDNN compiles while kernels
# are tried
load(sys.argv[1], sys.argv[3])
for out_features in (512, 1024):
    for in_features in (512, 1024):
        chooser().choose("int8" if sys.argv[3] == "int8" else "int4", out_features, in_features)
return_free_memory()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
decoder = load(sys.argv[2], sys.argv[3])
print(json.dumps([status("VmHWM") - before, status("VmRSS") - before, decoder.spec.size_bytes]))
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is measured by way of Linux's /proc"
)
@pytest.mark.parametrize(
    ("is_quantized", "quantize"),
    default_and_campaign([(False, "none"), (False, "int8"), (True, "none")], default=[(False, "int8")]),
)
def test_peak_memory_is_final_weights_plus_single_shard(tmp_path: Path, is_quantized: bool, quantize: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": 4096}
    big, tiny = build_model(**sizes, num_attention_heads=8), build_model(hidden_size=64, intermediate_size=64)
    for model, name, shard_size in ((tiny, "tiny", "5GB"), (big, "big", "5MB" if is_quantized else "30MB")):
        if is_quantized:
            groups = [group(4, "group", group_size=64)]
            save_compressed(model, tmp_path / name, groups, ignore=[], max_shard_size=shard_size)
        else:
            save_model(model, tmp_path / name, max_shard_size=shard_size)
    shards = [path.stat().st_size for path in (tmp_path / "big").glob("*.safetensors")]
    assert len(shards) >= 4
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            _MEASURE,
            str(tmp_path / "tiny"),
            str(tmp_path / "big"),
            quantize,
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    peak, kept, size_bytes = json.loads(result.stdout)
    assert peak <= size_bytes + max(shards)
    # what was gathered on the way isn't kept
    assert kept <= size_bytes * 1.1
    # the measure sees the weights at all
    assert kept >= size_bytes * 0.8
