"""GGUF files of llama.cpp's converter compile to what the adapter of PEFT's compiles to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_files import write_gguf_adapter

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.containers import convert_files, write_safetensors
from loraserve.adapters.format.peft_format import read_adapter
from loraserve.adapters.ir import AdapterIR
from loraserve.errors import AdapterRejected
from loraserve.limits import LIMITS, Limits
from loraserve.model.gguf.gguf_adapter import GgufAdapter
from loraserve.types import BaseSpec, Digest

MODULES = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64), "down_proj": (64, 96)}
OUTSIDE = {"lm_head": (128, 64), "embed_tokens": (64, 128)}
BASE = BaseSpec(
    id="tiny",
    digest=Digest("0" * 64),
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=64,
    vocab_size=128,
    max_model_len=128,
    modules=MODULES | OUTSIDE,
    module_paths={
        **{m: f"{'mlp' if m == 'down_proj' else 'self_attn'}.{m}" for m in MODULES},
        "lm_head": "lm_head",
        "embed_tokens": "model.embed_tokens",
    },
    layers_path="model.layers",
    eos_token_ids=(0,),
    dtype="float32",
    quantization="none",
    head_dim=16,
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    # of files whose architecture has more than one
    "olmo3": "Olmo3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
}
CONFIG = SimpleNamespace(model_type="llama", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def peft_tensors(rank: int = 32, modules: tuple[str, ...] = tuple(MODULES), layers: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(layers):
        for module in modules:
            out_features, in_features = MODULES[module]
            name = f"base_model.model.model.layers.{layer}.{BASE.module_paths[module]}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator)
    return tensors


def written(folder: Path, tensors: dict[str, Any], config: Any = CONFIG, **how: Any) -> bytes:
    return write_gguf_adapter(tensors, config, folder / "x.gguf", **{"alpha": 48.0, **how}).read_bytes()


def read(data: bytes, base: BaseSpec = BASE, config: bytes = b"") -> AdapterIR:
    files = convert_files(config, data, base, containers=(GgufAdapter(),))
    adapter = read_adapter(files.config, b"".join(write_safetensors(files.tensors)))
    return compile_adapter(adapter.config, adapter.tensors, base)


def meant(tensor: Any, form: str) -> Any:
    array = tensor.numpy()
    if form == "Q8_0":
        return quants.dequantize(quants.quantize(array, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    return array.astype({"F32": np.float32, "F16": np.float16}[form])


@pytest.mark.parametrize("form", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_factors_equal_pefts(tmp_path: Path, form: str, kind: str) -> None:
    tensors = peft_tensors()
    config = SimpleNamespace(**{**vars(CONFIG), "model_type": kind})
    base = BaseSpec(**{**{f: getattr(BASE, f) for f in BASE.__struct_fields__}, "architecture": ARCHITECTURES[kind]})
    ir = read(written(tmp_path, tensors, config, form=form), base)
    assert len(ir.modules) == 2 * len(MODULES)
    for module in ir.modules:
        assert (module.rank, module.scaling) == (32, 1.5)
        for part, found in (("A", module.lora_a), ("B", module.lora_b)):
            path = f"base_model.model.model.layers.{module.layer}.{BASE.module_paths[module.module]}"
            assert found is not None
            assert np.array_equal(found.array, meant(tensors[f"{path}.lora_{part}.weight"], form)), module


def test_ends_are_read_on_untied_base(tmp_path: Path) -> None:
    tensors = {
        "base_model.model.lm_head.lora_A.weight": torch.randn(4, 64),
        "base_model.model.lm_head.lora_B.weight": torch.randn(128, 4),
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(4, 128),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.randn(64, 4),
    }
    ir = read(written(tmp_path, tensors))
    by_name = {module.module: module for module in ir.modules}
    for name, module in by_name.items():
        path = f"base_model.model.{BASE.module_paths[name]}.lora_"
        suffixes = ("embedding_A", "embedding_B") if name == "embed_tokens" else ("A.weight", "B.weight")
        for suffix, found in zip(suffixes, (module.lora_a, module.lora_b), strict=True):
            assert found is not None
            assert np.array_equal(found.array, tensors[path + suffix].numpy())
    assert set(by_name) == {"lm_head", "embed_tokens"}
    tied = BaseSpec(**{**{f: getattr(BASE, f) for f in BASE.__struct_fields__}, "is_head_tied": True})
    with pytest.raises(AdapterRejected, match="one on this base"):
        read(written(tmp_path, tensors), tied)


@pytest.mark.parametrize(("alpha", "scalings"), [(48.0, {4: 12.0, 8: 6.0}), (0.0, {4: 1.0, 8: 1.0})])
def test_ranks_of_modules_scale_as_in_llama_cpp(tmp_path: Path, alpha: float, scalings: dict[int, float]) -> None:
    tensors = peft_tensors(4, ("q_proj", "k_proj"), layers=1) | peft_tensors(8, ("down_proj",))
    ir = read(written(tmp_path, tensors, alpha=alpha))
    assert {module.module: module.rank for module in ir.modules} == {"q_proj": 4, "k_proj": 4, "down_proj": 8}
    assert all(module.scaling == scalings[module.rank] for module in ir.modules)


def test_invocation_tokens_are_kept(tmp_path: Path) -> None:
    ir = read(written(tmp_path, peft_tensors(4), metadata={"adapter.alora.invocation_tokens": [3, 5]}))
    assert ir.invocation_token_ids == (3, 5)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"metadata": {"general.type": None}}, "general.type is None.*loraserve serve --model"),
        ({"metadata": {"general.type": "model"}}, "general.type is 'model'"),
        ({"metadata": {"adapter.type": "control_vector"}}, "adapter.type is 'control_vector'"),
        ({"form": "Q4_0"}, "has the type Q4_0.*--outtype f16"),
        ({"alpha": float("inf")}, "adapter.lora.alpha is inf"),
        ({"config": SimpleNamespace(**{**vars(CONFIG), "model_type": "qwen2"})}, "architecture 'qwen2'"),
    ],
)
def test_file_is_refused_by_cause(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    with pytest.raises(AdapterRejected, match=words):
        read(written(tmp_path, peft_tensors(), **how))


def test_tensors_are_refused_by_name(tmp_path: Path) -> None:
    good = peft_tensors(4)
    missing = dict(list(good.items())[:-1])
    with pytest.raises(AdapterRejected, match=r"no lora_b of 'model\.layers\.1\.mlp\.down_proj'"):
        read(written(tmp_path, missing))
    data = written(tmp_path, good)
    with pytest.raises(AdapterRejected, match="isn't a factor of LoRA"):
        read(data.replace(b"blk.0.attn_q.weight.lora_a", b"blk.0.attn_q.weight.lora_c"))
    with pytest.raises(AdapterRejected, match="linear that this base doesn't have"):
        read(data.replace(b"blk.0.attn_q.weight.lora_a", b"blk.0.attn_z.weight.lora_a"))
    with pytest.raises(AdapterRejected, match="twice"):
        read(data.replace(b"blk.0.attn_q.weight.lora_a", b"blk.0.attn_k.weight.lora_a"))
    with pytest.raises(AdapterRejected, match="holds its own config"):
        read(data, config=b"{}")


def test_unfolded_size_is_bounded(tmp_path: Path) -> None:
    data = written(tmp_path, peft_tensors(), form="Q8_0")
    limits = Limits(max_upload_bytes=2 * len(data))
    with pytest.raises(AdapterRejected, match="bytes as floats; at most"):
        GgufAdapter().read(b"", data, BASE, limits)
    assert GgufAdapter().read(b"", data, BASE, Limits(max_upload_bytes=4 * len(data))).tensors


def test_damaged_file_is_refused_at_every_cut(tmp_path: Path) -> None:
    data = written(tmp_path, peft_tensors(4, ("q_proj",), layers=1))
    for end in range(4, len(data) - 64, 5):
        with pytest.raises(AdapterRejected):
            read(data[:end])
    random = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(data)
        for place in random.integers(4, 700, 3):
            broken[place] = random.integers(256)
        try:
            read(bytes(broken))
        except AdapterRejected:
            continue


def test_beginning_bounds_the_file(tmp_path: Path) -> None:
    data = written(tmp_path, peft_tensors(4))
    container = GgufAdapter()
    assert container.read_beginning(data[:300], LIMITS) is None
    most = container.read_beginning(data[:4000], LIMITS)
    assert most is not None
    assert len(data) <= most <= len(data) + (2 << 20)
    with pytest.raises(AdapterRejected, match="more than 1,048,576 bytes"):
        container.read_beginning(data[:8] + b"\xff" * 6 + bytes(2) + data[16:4000], LIMITS)
