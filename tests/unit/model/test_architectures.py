"""What each architecture adds to the plain decoder holds for adapters and for cobatched rows
too.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from loraserve.model.decoder import Decoder
from loraserve_kernels.cpu.lora.layout import LAYER_MODULES, PackedAdapter

from .conftest import PagedRun, build_model, load, random_adapter, random_tokens, reference_logits, save_model
from .test_equality import CASES

# heads and widths that the compiled kernels take
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
NAMES = ["granite", "olmo2", "smollm3-window-yarn", "gemma2", "gemma3", "phi3", "glm4", "hunyuan-alpha-biases"]


@pytest.fixture(scope="module", params=NAMES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    kind, overrides = CASES[request.param]
    model = build_model(kind, **{**overrides, **SIZES})
    return model, save_model(model, tmp_path_factory.mktemp("model"))


def merged(model: Any, adapter: PackedAdapter) -> Any:
    """The model of transformers with the adapter's update added to its weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer, block in enumerate(model.model.layers):
            updates = {m: 0.5 * adapter.lora_b(layer, m).T @ adapter.lora_a(layer, m) for m in LAYER_MODULES}
            if hasattr(block.self_attn, "qkv_proj"):
                updates["qkv_proj"] = torch.cat([updates.pop(module) for module in ("q_proj", "k_proj", "v_proj")])
            if hasattr(block.mlp, "gate_up_proj"):
                updates["gate_up_proj"] = torch.cat([updates.pop(module) for module in ("gate_proj", "up_proj")])
            for module, update in updates.items():
                part = block.self_attn if hasattr(block.self_attn, module) else block.mlp
                getattr(part, module).weight.add_(update)
    return model


def test_adapted_rows_equal_merged_models(saved: tuple[Any, Path]) -> None:
    model, directory = saved
    run = PagedRun(load(directory))
    first, second = random_adapter(run.decoder, 4), random_adapter(run.decoder, 13, seed=1)
    tokens = [random_tokens(count, seed=count) for count in (20, 31, 18)]
    a, b, c = (run.add(token_ids) for token_ids in tokens)
    prefill = run.step([(a, 19), (b, 30), (c, 17)], lora=[(first, 19, 49), (second, 49, 66)], last_rows_only=True)
    decode = run.step([(a, 1), (b, 1), (c, 1)], lora=[(first, 1, 2), (second, 2, 3)])
    for i, reference in enumerate([model, merged(model, first), merged(model, second)]):
        expected = reference_logits(reference, tokens[i])[-2:]
        torch.testing.assert_close(torch.cat((prefill[i], decode[i])), expected, rtol=0, atol=1e-4)


def test_adapter_on_a_fused_linear_is_each_parts(tmp_path: Path) -> None:
    """As PEFT writes it for Phi-3, which knows the fused linear alone."""
    model = build_model("phi3", **CASES["phi3"][1])
    base = load(save_model(model, tmp_path)).spec
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["qkv_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(*((tmp_path / "adapter" / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)))
    ir = compile_adapter(adapter.config, adapter.tensors, base)
    assert ir.target_modules == ("q_proj", "k_proj", "v_proj")
    assert {m.module: m.lora_b.shape for m in ir.modules if m.lora_b is not None} == {
        module: (base.modules[module][0], 2) for module in ir.target_modules
    }


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_sequence_has_the_same_bits_alone_and_cobatched(saved: tuple[Any, Path], quantize: str) -> None:
    decoder: Decoder = load(saved[1], quantize=quantize)
    token_ids, adapter = random_tokens(30), random_adapter(decoder, 8)
    alone = PagedRun(decoder)
    sequence = alone.add(token_ids)
    expected = [alone.step([(sequence, 27)], lora=[(adapter, 0, 27)])[0]]
    expected += [alone.step([(sequence, 1)], lora=[(adapter, 0, 1)])[0] for _ in range(3)]
    crowd = PagedRun(decoder, seed=5)
    sequence = crowd.add(token_ids)
    others = [crowd.add(random_tokens(40, seed=seed)) for seed in range(3)]
    crowd.step([(others[0], 20), (others[1], 5)])
    found = [crowd.step([(others[0], 1), (sequence, 27), (others[2], 9)], lora=[(adapter, 1, 28)])[1]]
    found.append(crowd.step([(sequence, 1), (others[1], 16)], lora=[(adapter, 0, 1)])[0])
    found.append(crowd.step([(others[0], 1), (others[1], 1), (sequence, 1)], lora=[(adapter, 2, 3)])[2])
    found.append(crowd.step([(others[2], 30), (others[0], 2), (sequence, 1)], lora=[(adapter, 32, 33)])[2])
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, theirs), step
