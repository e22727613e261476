"""LoRA on mixtures of experts: of parameters, equal to PEFT; of each expert's linears, equal to
models with the updates merged; all in one batch with adapters of the attention and the base.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from loraserve.adapters.compiler import open_adapter
from loraserve.adapters.composition import composition_digest
from loraserve.adapters.format.peft_format import CONFIG_FILE, WEIGHTS_FILE
from loraserve.engine.verification.module_changes import expected_changes, worst_difference
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.load import load_adapter
from loraserve.types import AdapterPart, BaseSpec
from loraserve_kernels.common.packed import PackedAdapter

from .conftest import random_tokens, reference_logits
from .test_adapter_kinds import Serving, open_model, publish, run_together
from .test_equality import CASES

# PEFT remarks on parameters that torch would compile anew
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning", "RuntimeWarning")
]

BASES = {
    "qwen3-moe": CASES["qwen3-moe"],
    "mixtral": CASES["mixtral"],
    "olmoe": CASES["olmoe"],
    "qwen2-moe": CASES["qwen2-moe"],
    # heads of 10 are computed layer by layer, those of 16 as one program
    "qwen3-moe by layer": ("qwen3-moe", {**CASES["qwen3-moe"][1], "head_dim": 10}),
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "both": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 5, r".*\.1\.mlp\.experts\.gate_up_proj": 2},
        "alpha_pattern": {"mlp.experts.gate_up_proj": 7},
    },
    "gate and up alone": {
        "r": 4,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": [],
        "target_parameters": ["experts.gate_up_proj"],
    },
    "down alone": {"r": 1, "lora_alpha": 2, "target_modules": [], "target_parameters": ["experts.down_proj"]},
    "the router": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["o_proj"],
        "target_parameters": ["mlp.gate.weight", "down_proj"],
    },
}
PLAIN = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module", params=BASES)
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Serving:
    return Serving(tmp_path_factory.mktemp("base"), *BASES[request.param])


def test_experts_in_a_mixed_batch_equal_peft(serving: Serving) -> None:
    pairs = [serving.adapter(config, seed=seed) for seed, config in enumerate([*PARAMETERS.values(), PLAIN])]
    prompts = [random_tokens(9 + i, seed=i) for i in range(len(pairs) + 1)]
    adapters = [None, *(packed for packed, _ in pairs)]
    models = [open_model(serving.base_dir), *(model for _, model in pairs)]
    expected = [reference_logits(model, prompt) for model, prompt in zip(models, prompts, strict=True)]
    together = run_together(serving.decoder, prompts, adapters)
    last = run_together(serving.decoder, prompts, adapters, last_rows_only=True)
    for got, got_last, wanted in zip(together, last, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
        torch.testing.assert_close(got_last, wanted[-1:], atol=1e-4, rtol=0)
    for prompt, adapter, got in zip(prompts, adapters, together, strict=True):
        assert torch.equal(run_together(serving.decoder, [prompt], [adapter])[0], got)
    base = reference_logits(models[0], prompts[1])
    assert float((expected[1] - base).abs().max()) > 0.01


@dataclass(frozen=True)
class Linear:
    """A linear of a mixture, by its name in checkpoints and in transformers' model."""

    name: str
    shape: tuple[int, int]
    weight: Callable[[Any], Tensor]


def mixture_linears(spec: BaseSpec) -> Iterator[Linear]:
    """Linears of a base's mixtures: each expert's, the router, the shared expert's and its gate."""
    experts = spec.experts
    assert experts is not None
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for module, path in experts.module_paths.items():
            shape = experts.modules[module]
            for expert in range(experts.num_experts if "{}" in path else 1):
                yield Linear(
                    prefix + path.format(expert), shape, partial(fused_weight, layer, module, expert, shape[0])
                )
        for module in ("gate_proj", "up_proj", "down_proj"):
            if module in spec.modules:
                name = prefix + spec.module_paths[module]
                yield Linear(name, spec.modules[module], lambda model, name=name: model.get_submodule(name).weight)


def fused_weight(layer: int, module: str, expert: int, size: int, model: Any) -> Tensor:
    """Return the weight of an expert's linear, or of what chooses experts, as a view."""
    mlp = model.model.layers[layer].mlp
    if module == "router":
        return mlp.gate.weight
    if module == "shared_gate":
        return mlp.shared_expert_gate.weight
    if module == "experts.down_proj":
        return mlp.experts.down_proj[expert]
    start = 0 if module == "experts.gate_proj" else size
    return mlp.experts.gate_up_proj[expert, start : start + size]


def first_match(patterns: Mapping[str, float], name: str, otherwise: float) -> float:
    return next((value for key, value in patterns.items() if name.endswith(key)), otherwise)


def linears_of(serving: Serving, config: Mapping[str, Any], *, seed: int) -> dict[str, Tensor]:
    """LoRA on the linears of mixtures, as PEFT saves it where each expert has its own."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for linear in mixture_linears(serving.decoder.spec):
        if not any(linear.name.endswith(f".{target}") for target in config["target_modules"]):
            continue
        rank, (out_features, in_features) = first_match(config["rank_pattern"], linear.name, config["r"]), linear.shape
        prefix = f"base_model.model.{linear.name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * rank**-0.5
    return tensors


def save_linears(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", **config}))
    save_file(dict(tensors), directory / WEIGHTS_FILE)
    return directory


@torch.no_grad()
def merge(serving: Serving, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Return transformers' model with the updates merged."""
    model = open_model(serving.base_dir)
    for linear in mixture_linears(serving.decoder.spec):
        prefix = f"base_model.model.{linear.name}"
        if f"{prefix}.lora_A.weight" in tensors:
            a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
            alpha = first_match(config["alpha_pattern"], linear.name, config["lora_alpha"])
            linear.weight(model).add_(alpha / a.shape[0] ** (0.5 if config["use_rslora"] else 1) * b @ a)
    return model


def config_of_linears(serving: Serving, **fields: Any) -> dict[str, Any]:
    """Config of LoRA on every linear of a mixture, of ranks that differ by expert and layer."""
    experts = serving.decoder.spec.experts
    assert experts is not None
    gate, up, down, router, *others = (path.rpartition(".")[2] for path in experts.module_paths.values())
    router_of_one = f"layers.1.{experts.module_paths['router']}"
    return {
        "r": 3,
        "lora_alpha": 6,
        "use_rslora": False,
        "target_modules": [gate, up, down, router, *others],
        "rank_pattern": {
            f"experts.1.{down}": 7,
            f"experts.2.{gate}": 1,
            router_of_one: 2,
        },
        "alpha_pattern": {f"experts.0.{down}": 9},
        **fields,
    }


@pytest.mark.parametrize("use_rslora", [False, True])
def test_linears_of_experts_equal_merged_models(serving: Serving, use_rslora: bool) -> None:
    config = config_of_linears(serving, use_rslora=use_rslora)
    tensors = linears_of(serving, config, seed=int(use_rslora))
    directory = save_linears(serving.root / f"linears-{use_rslora}", config, tensors)
    prompts = [random_tokens(count, seed=count) for count in (13, 20)]
    plain, adapted = run_together(serving.decoder, prompts, [None, serving.load(directory)])
    torch.testing.assert_close(plain, reference_logits(open_model(serving.base_dir), prompts[0]), atol=1e-4, rtol=0)
    expected = reference_logits(merge(serving, config, tensors), prompts[1])
    torch.testing.assert_close(adapted, expected, atol=1e-4, rtol=0)
    assert float((expected - reference_logits(open_model(serving.base_dir), prompts[1])).abs().max()) > 0.01
    # what a certificate compares with
    torch.testing.assert_close(serving.plainly(directory, prompts[1]), expected, atol=1e-4, rtol=0)


def test_experts_left_alone_take_no_bytes(serving: Serving) -> None:
    config = config_of_linears(serving)
    whole = linears_of(serving, config, seed=3)
    few = {name: tensor for name, tensor in whole.items() if ".experts.1." in name and ".layers.2." in name}
    targets = sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in few})
    packed = serving.load(save_linears(serving.root / "few", {**config, "target_modules": targets}, few))
    assert packed.experts is not None
    assert list(packed.experts.rows) == [(2, 1)]
    num_weights = sum(tensor.numel() for tensor in few.values())
    assert 4 * num_weights <= packed.num_bytes < 4 * num_weights + 2048


def test_sum_of_adapters_adds_up_in_each_expert(serving: Serving) -> None:
    config = config_of_linears(serving)
    first, second = (linears_of(serving, config, seed=seed) for seed in (11, 12))
    refs = [
        publish(save_linears(serving.root / f"term-{i}", config, tensors), serving.store)
        for i, tensors in enumerate((first, second))
    ]
    terms = tuple(AdapterPart(adapter=ref, weight=weight) for ref, weight in zip(refs, (0.5, -0.25), strict=True))
    ref = msgspec.structs.replace(refs[0], digest=composition_digest(terms), parts=terms)
    device = CpuDevice(serving.decoder.spec, 1 << 30)
    packed = load_adapter(serving.store, ref, serving.decoder.spec, device).host
    assert isinstance(packed, PackedAdapter)
    # ranks one after the other are twice as many, and so are the alphas that scale them alike
    summed = {
        name: torch.cat([0.5 * tensor, -0.25 * second[name]], 1)
        if "lora_B" in name
        else torch.cat([tensor, second[name]])
        for name, tensor in first.items()
    }
    alphas = {key: 2 * alpha for key, alpha in config["alpha_pattern"].items()}
    merged = merge(serving, {**config, "lora_alpha": 12, "alpha_pattern": alphas}, summed)
    prompt = random_tokens(12)
    [got] = run_together(serving.decoder, [prompt], [packed])
    torch.testing.assert_close(got, reference_logits(merged, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantize", ["int4 float", "int8 auto", "int4 auto"])
def test_experts_on_quantized_base_equal_reference(quantize: str, tmp_path: Path) -> None:
    quantize, _, rounding = quantize.partition(" ")
    wide = {"hidden_size": 64, "intermediate_size": 64}
    wide |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 96}
    kind, options = CASES["qwen2-moe"]
    serving = Serving(tmp_path, kind, {**options, **wide}, quantize=quantize, activation_dtype=rounding)
    config = config_of_linears(serving)
    directory = save_linears(tmp_path / "adapter", config, linears_of(serving, config, seed=0))
    prompt = random_tokens(12)
    plain, adapted = run_together(serving.decoder, [prompt, prompt], [None, serving.load(directory)])
    effect = float((adapted - plain).abs().max())
    # where inputs are rounded, a number next to the middle of two codes may be rounded otherwise
    tolerance = 1e-4 if rounding == "float" else 0.1 * effect
    torch.testing.assert_close(adapted, serving.plainly(directory, prompt), atol=tolerance, rtol=0)
    assert effect > 0.5


def test_shared_expert_takes_dora_as_an_mlp(tmp_path: Path) -> None:
    serving = Serving(tmp_path, *BASES["qwen2-moe"])
    config = {"r": 3, "lora_alpha": 4, "use_dora": True, "target_modules": r".*(k_proj|shared_expert\.\w+_proj)"}
    packed, model = serving.adapter(config)
    assert packed.dora_delta(0, "down_proj") is not None
    prompt = random_tokens(9)
    [got] = run_together(serving.decoder, [prompt], [packed])
    expected = reference_logits(model, prompt)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(serving.plainly(tmp_path / "adapter-0", prompt), expected, atol=1e-4, rtol=0)


def test_comparison_of_modules_finds_swapped_experts(serving: Serving) -> None:
    config, spec = config_of_linears(serving, rank_pattern={}), serving.decoder.spec
    tensors = linears_of(serving, config, seed=4)
    directory = save_linears(serving.root / "right", config, tensors)
    ir = open_adapter(*((directory / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)), spec)
    expected = expected_changes([(ir, 1.0)], spec)
    assert worst_difference(serving.load(directory), expected, spec)[0] < 1e-4
    swapped = {
        re.sub(r"(layers\.1\..*experts\.)([01])\.", lambda found: f"{found[1]}{1 - int(found[2])}.", name): tensor
        for name, tensor in tensors.items()
    }
    found, (layer, module, expert) = worst_difference(
        serving.load(save_linears(serving.root / "swapped", config, swapped)), expected, spec
    )
    assert found > 0.5
    assert (layer, expert) in ((1, 0), (1, 1))
    assert module.startswith("experts.")
