"""Adapters of every kind that is served, as PEFT saves them, in one batch: each row's logits are
those that PEFT computes for its adapter alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import loraserve.model.layers.linears as quantize_module
from adapters_store import LocalStore
from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from loraserve.errors import AdapterUnavailable
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.load import load_adapter
from loraserve.memory.loading.lowering import with_saved_base
from loraserve.model.decoder import Decoder
from loraserve.model.layers.linears import JoinedLinear, make_linear, quantize_weight
from loraserve.model.reference_model import evaluate
from loraserve.model.reference_pass import Subject
from loraserve.types import AdapterRef, Digest, TenantId
from loraserve_kernels.common.formats import rotation_block
from loraserve_kernels.common.quantized import quantize
from loraserve_kernels.cpu.lora.layout import MODULE_INDEX, PackedAdapter

from .conftest import PagedRun, build_model, load, random_tokens, reference_logits, save_model

# PEFT remarks on tied embeddings and on what it saves of them
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]},
    "dora": {
        "r": 4,
        "lora_alpha": 6,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": LINEARS,
        "rank_pattern": {"k_proj": 9, "layers.1.mlp.up_proj": 1},
        "alpha_pattern": {"v_proj": 2},
    },
    "outside": {
        "r": 5,
        "lora_alpha": 4,
        "target_modules": ["embed_tokens", "lm_head", "v_proj"],
        "rank_pattern": {"lm_head": 2},
        "alpha_pattern": {"embed_tokens": 9},
    },
    "head alone": {"r": 2, "lora_alpha": 3, "target_modules": ["lm_head"], "layers_to_transform": [1]},
    "dora outside": {
        "r": 3,
        "lora_alpha": 4,
        "use_dora": True,
        "target_modules": ["embed_tokens", "lm_head", "o_proj"],
    },
}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied qwen2 with biases": ("qwen2", {"tie_word_embeddings": True}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7}),
}


def save_adapter(base: Path, directory: Path, config: dict[str, Any], *, seed: int) -> Any:
    """Save a random adapter with PEFT; returns the model as PEFT loads it back."""
    model = peft.get_peft_model(open_model(base), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * noise)
            elif "lora_" in name:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return peft.PeftModel.from_pretrained(open_model(base), directory).eval()


def publish(directory: Path, store: LocalStore) -> AdapterRef:
    blobs = []
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        with store.stage() as staged:
            staged.write((directory / file).read_bytes())
            blobs.append(staged.commit())
    digest = Digest(hashlib.sha256("".join(blobs).encode()).hexdigest())
    return AdapterRef(
        tenant=TenantId("t"), name="a", version=1, digest=digest, config_blob=blobs[0], weights_blob=blobs[1]
    )


def load_packed(base: Any, directory: Path, store: LocalStore) -> PackedAdapter:
    """Load an adapter's directory as an engine on a CPU does."""
    packed = load_adapter(store, publish(directory, store), base.spec, CpuDevice(base.spec, 1 << 30), base).host
    assert isinstance(packed, PackedAdapter)
    return packed


class Serving:
    """A base, and what PEFT saves for it."""

    def __init__(self, root: Path, kind: str, options: dict[str, Any], **loading: Any) -> None:
        self.root, self.store = root, LocalStore(root / "store")
        self.base_dir = save_model(build_model(kind, **options), root / "base")
        self.decoder: Decoder = load(self.base_dir, **loading)

    def adapter(self, config: dict[str, Any], *, seed: int = 0) -> tuple[PackedAdapter, Any]:
        directory = self.root / f"adapter-{seed}"
        model = save_adapter(self.base_dir, directory, config, seed=seed)
        return self.load(directory), model

    def load(self, directory: Path) -> PackedAdapter:
        return load_packed(self.decoder, directory, self.store)

    def plainly(self, directory: Path, prompt: list[int]) -> Tensor:
        """Return the plain answers that a certificate compares with."""
        read = read_adapter(*((directory / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE)))
        ir = compile_adapter(read.config, read.tensors, self.decoder.spec)
        ir = with_saved_base(ir, self.decoder.spec, self.decoder)
        return evaluate(self.decoder, [Subject([prompt], [(ir, 1.0)])])[0].adapted[0]


def run_together(
    decoder: Decoder, prompts: list[list[int]], adapters: list[PackedAdapter | None], **step: Any
) -> list[Tensor]:
    run = PagedRun(decoder)
    segments, row = [], 0
    for prompt, adapter in zip(prompts, adapters, strict=True):
        if adapter is not None:
            segments.append((adapter, row, row + len(prompt)))
        row += len(prompt)
    return run.step([(run.add(prompt), len(prompt)) for prompt in prompts], lora=segments, **step)


@pytest.mark.parametrize("base", BASES)
def test_each_kind_in_a_mixed_batch_equals_peft(base: str, tmp_path: Path) -> None:
    serving = Serving(tmp_path, *BASES[base])
    pairs = [serving.adapter(config, seed=seed) for seed, config in enumerate(KINDS.values())]
    prompts = [random_tokens(6 + i, seed=i) for i in range(len(pairs) + 1)]
    adapters = [None, *(packed for packed, _ in pairs)]
    models = [open_model(serving.base_dir), *(model for _, model in pairs)]
    expected = [reference_logits(model, prompt) for model, prompt in zip(models, prompts, strict=True)]
    for got, wanted in zip(run_together(serving.decoder, prompts, adapters), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    for got, wanted in zip(
        run_together(serving.decoder, prompts, adapters, last_rows_only=True), expected, strict=True
    ):
        torch.testing.assert_close(got, wanted[-1:], atol=1e-4, rtol=0)
    base_logits = reference_logits(models[0], prompts[1])
    assert float((expected[1] - base_logits).abs().max()) > 0.01


def test_tied_lora_acts_on_embedding_and_head(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "qwen2", {"tie_word_embeddings": True})
    config = {"r": 3, "lora_alpha": 4, "target_modules": ["embed_tokens", "k_proj"], "ensure_weight_tying": True}
    packed, model = serving.adapter(config)
    assert packed.ranks[0, MODULE_INDEX["lm_head"]] == packed.ranks[0, MODULE_INDEX["embed_tokens"]] == 3
    prompt = random_tokens(9)
    got = run_together(serving.decoder, [prompt], [packed])[0]
    torch.testing.assert_close(got, reference_logits(model, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_base_changing_initialisation_is_served_after_peft_conversion(init: str, tmp_path: Path) -> None:
    serving = Serving(tmp_path, "llama", {})
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=["q_proj", "up_proj"], init_lora_weights=init)
    model = peft.get_peft_model(open_model(serving.base_dir), config)
    first, last = tmp_path / "first", tmp_path / "last"
    # as PEFT's guide has it: what training began with, then what it came to
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(first)
    model.peft_config["default"].init_lora_weights = init
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    prompt = random_tokens(9)
    expected = reference_logits(model.eval(), prompt)
    model.save_pretrained(last, path_initial_model_for_weight_conversion=str(first))
    got = run_together(serving.decoder, [prompt], [serving.load(last)])[0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "loading",
    [{"quantize": "nf4"}, {"quantize": "int4", "activation_dtype": "float"}, {"quantize": "fp8"}],
    ids=lambda o: o["quantize"],
)
def test_dora_equals_peft_on_dequantized_base_weights(loading: dict[str, Any], tmp_path: Path) -> None:
    serving = Serving(tmp_path, "qwen2", {"hidden_size": 64, "intermediate_size": 128}, **loading)
    config = {"r": 4, "lora_alpha": 6, "use_dora": True, "target_modules": LINEARS}
    packed, model = serving.adapter(config)
    replace_weights(model, serving.decoder)
    prompt = random_tokens(9)
    # the head is int8, whose inputs are rounded: what enters it is compared
    got = run_together(serving.decoder, [prompt], [packed])[0]
    torch.testing.assert_close(
        got, reference_logits(model, prompt), atol=0.05 if loading["quantize"] == "nf4" else 1e-4, rtol=0
    )


def rounded_weight(weight: Tensor, format: str) -> Tensor:
    """What a CPU's codes of a weight mean: integers are rotated, as their activations are."""
    rotation = rotation_block(weight.shape[1]) if format in ("int8", "int4") else 0
    return quantize_weight(weight, format, rotation).dequantize(torch.float32)


@pytest.mark.parametrize("quantize", ["none", "int8", "int4", "nf4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_base_exposes_weights_used_in_computation(quantize: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build_model("qwen2", hidden_size=64, intermediate_size=128)
    decoder = load(save_model(model, tmp_path), quantize=quantize, dtype=dtype)
    for layer in range(decoder.spec.num_layers):
        for module in LINEARS:
            weight = model.model.layers[layer].get_submodule(decoder.spec.module_paths[module]).weight.detach()
            expected = weight.to(dtype).float() if quantize == "none" else rounded_weight(weight, quantize)
            assert torch.equal(torch.cat(list(decoder.weight_rows(layer, module))), expected), module
    head_format = {"int4": "int8", "nf4": "int8"}.get(quantize, quantize)
    head = model.lm_head.weight.detach()
    expected = head.to(dtype).float() if quantize == "none" else rounded_weight(head, head_format)
    assert torch.equal(torch.cat(list(decoder.weight_rows(0, "lm_head"))), expected)
    assert torch.equal(
        torch.cat(list(decoder.weight_rows(0, "embed_tokens"))), model.model.embed_tokens.weight.detach()
    )


@pytest.mark.parametrize("format", [None, "int8", "int4", "nf4", "fp8"])
def test_gpu_linear_returns_any_range_of_rows(format: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_backend = pytest.importorskip("loraserve.model.backends.gpu_backend", reason="needs Triton")
    matrix = torch.randn(37, 128, generator=torch.Generator().manual_seed(0))
    weight = matrix.half() if format is None else quantize(matrix, format, has_zeros=format == "int4").to("cpu")
    expected = weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    monkeypatch.setattr(gpu_backend, "GPU_BLOCK_WEIGHTS", 128 * 5)
    rows = list(gpu_backend.GpuLinear(weight, None, None).rows(3, 29))
    assert max(block.shape[0] for block in rows) == 5
    assert torch.equal(torch.cat(rows), expected[3:29])


def test_joined_linears_return_rows_and_biases_across_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second, third = (torch.randn(n, 64, generator=generator) for n in (20, 9, 13))
    parts = [
        make_linear(first, None, quantize="nf4", dtype=torch.float32),
        make_linear(second, torch.arange(9.0), quantize="none", dtype=torch.float32),
        make_linear(third, None, quantize="int8", dtype=torch.float32),
    ]
    joined = JoinedLinear(parts)
    whole = torch.cat([block for part in parts for block in part.rows(0, part.out_features)])
    assert whole.shape[0] == joined.out_features == 42
    for start, end in ((0, 42), (17, 23), (20, 29), (28, 42)):
        assert torch.equal(torch.cat(list(joined.rows(start, end))), whole[start:end])
    assert joined.bias is not None
    assert torch.equal(joined.bias, torch.cat((torch.zeros(20), torch.arange(9.0), torch.zeros(13))))


def test_weights_come_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(tmp_path, "llama", {})
    config = {"r": 3, "lora_alpha": 4, "use_dora": True, "target_modules": ["embed_tokens", "lm_head", "k_proj"]}
    whole, _ = serving.adapter(config)
    monkeypatch.setattr("loraserve_kernels.common.row_blocks.BLOCK_WEIGHTS", 48 * 7)
    monkeypatch.setattr(quantize_module, "_VIEW_WEIGHTS", 48 * 7)
    assert max(block.shape[0] for block in serving.decoder.weight_rows(0, "lm_head")) == 7
    cut = serving.load(tmp_path / "adapter-0")
    for module in ("embed_tokens", "lm_head", "k_proj"):
        torch.testing.assert_close(cut.dora_delta(0, module), whole.dora_delta(0, module), atol=1e-6, rtol=1e-5)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "one number": lambda copy: copy.index_fill(0, torch.tensor([17]), 0.3),
    "another embedding": lambda copy: copy.roll(1, 0) * 1.5,
    "a 16-bit copy": lambda copy: copy.bfloat16(),
}


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["outside", "dora outside", "embedding alone"])
@pytest.mark.parametrize("change", COPIES)
def test_saved_base_copy_replaces_weight_as_in_peft(
    change: str, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """PEFT loads the copy, cast to the base's dtype; of a tied base, into both."""
    serving = Serving(tmp_path, "llama", options)
    embedding_alone = {"r": 2, "lora_alpha": 3, "target_modules": ["embed_tokens", "q_proj"]}
    serving.adapter(KINDS.get(kind, embedding_alone))
    directory = tmp_path / "adapter-0"
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    copies = [name for name in tensors if name.endswith("base_layer.weight")]
    assert copies
    for name in copies:
        tensors[name] = COPIES[change](tensors[name]).contiguous()
    save_file(tensors, path)
    oracle = peft.PeftModel.from_pretrained(open_model(serving.base_dir), directory).eval()
    prompt = [3, 17, 18, 5, 40, 7, 17]
    [served] = run_together(serving.decoder, [prompt], [serving.load(directory)])
    expected = reference_logits(oracle, prompt)
    assert float((served - expected).abs().max()) < 1e-4 * max(1, float(expected.abs().max()))
    plain = serving.plainly(directory, prompt)
    assert float((plain - expected).abs().max()) < 1e-4 * max(1, float(expected.abs().max()))


def test_unchanged_embedding_in_any_dtype_is_accepted(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "llama", {}, dtype=torch.bfloat16)
    serving.adapter(KINDS["outside"])
    path = tmp_path / "adapter-0" / "adapter_model.safetensors"
    for dtype in (torch.float32, torch.bfloat16):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
        serving.load(tmp_path / "adapter-0")


def test_zero_norm_dora_row_is_refused(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "llama", {})
    serving.adapter({"r": 2, "lora_alpha": 2, "use_dora": True, "target_modules": ["q_proj"]})
    path = tmp_path / "adapter-0" / "adapter_model.safetensors"
    tensors = load_file(path)
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    row = next(iter(serving.decoder.weight_rows(1, "q_proj")))[5]
    tensors[f"{prefix}.lora_A.weight"][0] = row
    tensors[f"{prefix}.lora_B.weight"][5] = torch.tensor([-1.0, 0.0])
    save_file(tensors, path)
    with pytest.raises(AdapterUnavailable, match="Layer 1 q_proj: the norm of row 5"):
        serving.load(tmp_path / "adapter-0")


def open_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def replace_weights(model: Any, decoder: Decoder) -> None:
    """Give PEFT's base the weights that ours computes with."""
    for name, parameter in model.get_base_model().named_parameters():
        if name.endswith("base_layer.weight"):
            _, _, layer, _, module, *_ = name.split(".")
            parameter.copy_(torch.cat(list(decoder.weight_rows(int(layer), module))))
        elif name == "lm_head.weight":
            parameter.copy_(torch.cat(list(decoder.weight_rows(0, "lm_head"))))
