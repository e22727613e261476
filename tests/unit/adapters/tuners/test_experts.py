"""LoRA on mixtures of experts: both of PEFT's layouts are read, and files that contradict their
config or the base are refused by what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.digest import adapter_digest
from loraserve.adapters.format.peft_format import read_tensors
from loraserve.adapters.ir import AdapterIR
from loraserve.adapters.tuners.factors import as_float32
from loraserve.adapters.validation import check_finite
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterNotFinite, AdapterUnsupported
from loraserve.types import BaseSpec, ExpertsSpec

Arrays = dict[str, np.ndarray[Any, Any]]

EXPERTS = ExpertsSpec(
    num_experts=3,
    modules={
        "experts.gate_proj": (20, 32),
        "experts.up_proj": (20, 32),
        "experts.down_proj": (32, 20),
        "router": (3, 32),
    },
    module_paths={
        "experts.gate_proj": "block_sparse_moe.experts.{}.w1",
        "experts.up_proj": "block_sparse_moe.experts.{}.w3",
        "experts.down_proj": "block_sparse_moe.experts.{}.w2",
        "router": "block_sparse_moe.gate",
    },
    parameters_path="mlp.experts",
)
BOTH = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
PREFIX = "base_model.model.model.layers"


@pytest.fixture
def mixture(base: BaseSpec) -> BaseSpec:
    modules = {name: shape for name, shape in base.modules.items() if name not in ("gate_proj", "up_proj", "down_proj")}
    return msgspec.structs.replace(base, modules=modules, experts=EXPERTS)


@pytest.fixture
def compiled(
    mixture: BaseSpec, save: Callable[..., bytes], make_config: Callable[..., dict[str, Any]]
) -> Callable[..., AdapterIR]:
    def run(arrays: Arrays, *, on: BaseSpec = mixture, **changes: Any) -> AdapterIR:
        return compile_adapter(make_config(**changes), read_tensors(bytearray(save(arrays))), on)

    return run


def draw(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def parameters(rank: int = 4) -> Arrays:
    """LoRA on both parameters of all experts, in every layer."""
    arrays = {}
    for layer in range(3):
        outer, inner = f"{PREFIX}.{layer}.mlp.experts", f"{PREFIX}.{layer}.mlp.experts.base_layer"
        arrays[f"{outer}.lora_A.weight"] = draw(3 * rank, 20, seed=layer)
        arrays[f"{outer}.lora_B.weight"] = draw(32, 3 * rank, seed=layer + 10)
        arrays[f"{inner}.lora_A.weight"] = draw(3 * rank, 32, seed=layer + 20)
        arrays[f"{inner}.lora_B.weight"] = draw(40, 3 * rank, seed=layer + 30)
    return arrays


def linears(rank: int = 4) -> Arrays:
    """LoRA on every linear of every expert."""
    arrays = {}
    for layer in range(3):
        for expert in range(3):
            for name, (out_features, in_features) in {"w1": (20, 32), "w2": (32, 20), "w3": (20, 32)}.items():
                prefix = f"{PREFIX}.{layer}.block_sparse_moe.experts.{expert}.{name}"
                arrays[f"{prefix}.lora_A.weight"] = draw(rank, in_features, seed=layer * 9 + expert)
                arrays[f"{prefix}.lora_B.weight"] = draw(out_features, rank, seed=layer * 9 + expert + 50)
    return arrays


WITH_PARAMETERS = {"target_modules": [], "target_parameters": BOTH}
WITH_LINEARS = {"target_modules": ["w1", "w2", "w3"]}


def test_parameters_are_cut_as_in_peft(compiled: Callable[..., AdapterIR]) -> None:
    arrays = parameters()
    ir = compiled(arrays, **WITH_PARAMETERS)
    assert len(ir.modules) == 3 * 3 * 3
    assert ir.target_modules == ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
    modules = {m.place: m for m in ir.modules}
    a = arrays[f"{PREFIX}.1.mlp.experts.base_layer.lora_A.weight"].reshape(3, 4, 32)
    b = arrays[f"{PREFIX}.1.mlp.experts.base_layer.lora_B.weight"].reshape(40, 4, 3)
    for expert in range(3):
        up = modules[1, "experts.up_proj", expert]
        assert np.array_equal(as_float32(up.lora_a), a[expert])
        assert np.array_equal(as_float32(up.lora_b), b[20:, :, expert])
        assert up.scaling == 2.0


def test_expert_linears_have_own_ranks(compiled: Callable[..., AdapterIR]) -> None:
    arrays = linears()
    name = f"{PREFIX}.2.block_sparse_moe.experts.1.w2"
    arrays[f"{name}.lora_A.weight"], arrays[f"{name}.lora_B.weight"] = draw(7, 20), draw(32, 7)
    ir = compiled(arrays, **WITH_LINEARS, rank_pattern={"layers.2.block_sparse_moe.experts.1.w2": 7})
    ranks = {m.place: m.rank for m in ir.modules}
    assert ranks.pop((2, "experts.down_proj", 1)) == 7
    assert set(ranks.values()) == {4}


def test_targets_of_linears_leave_missing_experts_alone(
    compiled: Callable[..., AdapterIR], make_tensors: Callable[..., Arrays]
) -> None:
    # as transformers 5 trains it, which has no linears of experts
    ir = compiled(make_tensors({(layer, "q_proj"): 4 for layer in range(3)}), target_modules=["q_proj", "w1"])
    assert ir.target_modules == ("q_proj",)
    assert ir.absent_targets == ("w1",)


def rename(arrays: Arrays, old: str, new: str) -> Arrays:
    return {name.replace(old, new): array for name, array in arrays.items()}


REFUSALS: dict[str, tuple[Arrays, dict[str, Any], type[Exception], str]] = {
    "an expert too many": (
        {**linears(), **rename(linears(), "experts.2.", "experts.3.")},
        WITH_LINEARS,
        AdapterBaseMismatch,
        "for expert 3 in layers 0–2; this base has 3",
    ),
    "a missing expert": (
        {name: array for name, array in linears().items() if ".1.block_sparse_moe.experts.2.w3" not in name},
        WITH_LINEARS,
        AdapterFormatError,
        "targets experts.2.up_proj in layer 1, and the file holds no tensors",
    ),
    "a missing half": (
        {
            name: array
            for name, array in linears().items()
            if "layers.0" not in name or "experts.1.w1.lora_B" not in name
        },
        WITH_LINEARS,
        AdapterFormatError,
        "experts.1.gate_proj has lora_A and no lora_B in layer 0",
    ),
    "a wrong width": (
        {**linears(), f"{PREFIX}.0.block_sparse_moe.experts.0.w2.lora_A.weight": draw(4, 24)},
        WITH_LINEARS,
        AdapterBaseMismatch,
        "experts.0.down_proj.lora_A is 4×24 in layer 0",
    ),
    "linears that no target names": (
        linears(),
        {"target_modules": ["w1", "w2"]},
        AdapterFormatError,
        "holds tensors for experts.0.up_proj in layers 0–2, which the config doesn't target",
    ),
    "a rank over the limit": (
        linears(600),
        {**WITH_LINEARS, "r": 600},
        AdapterFormatError,
        "r is 600; expected a whole number from 1 to 512",
    ),
    "magnitudes": (
        {**linears(), f"{PREFIX}.0.block_sparse_moe.experts.0.w1.lora_magnitude_vector": draw(20)},
        WITH_LINEARS,
        AdapterUnsupported,
        "LoRA without magnitudes",
    ),
    "a whole weight": (
        {**linears(), f"{PREFIX}.0.block_sparse_moe.experts.0.w1.weight": draw(20, 32)},
        WITH_LINEARS,
        AdapterUnsupported,
        "is for a mixture's experts, of which LoRA",
    ),
    "a parameter fewer": (
        {name: array for name, array in parameters().items() if "base_layer" not in name},
        WITH_PARAMETERS,
        AdapterFormatError,
        "target_parameters name mlp.experts.gate_up_proj in layers 0–2, and the file holds no tensors",
    ),
    "a parameter too many": (
        parameters(),
        {"target_modules": [], "target_parameters": BOTH[:1]},
        AdapterFormatError,
        "holds tensors for 2 of the parameters of mlp.experts in layers 0–2",
    ),
    "half of a parameter": (
        {name: array for name, array in parameters().items() if ".1.mlp.experts.lora_B" not in name},
        WITH_PARAMETERS,
        AdapterFormatError,
        "mlp.experts.down_proj has no lora_B in layer 1",
    ),
    "parameters the other way round": (
        rename(
            rename(rename(parameters(), "experts.lora", "@"), "base_layer.lora", "lora"), "@", "experts.base_layer.lora"
        ),
        WITH_PARAMETERS,
        AdapterBaseMismatch,
        "mlp.experts.down_proj.lora_A is 12×32",
    ),
    "parameters of another rank": (
        parameters(5),
        WITH_PARAMETERS,
        AdapterFormatError,
        "mlp.experts.down_proj has rank 5 in layers 0–2; the config says 4",
    ),
    "a number of experts that differs": (
        {name: array[:-1] if name.endswith("A.weight") else array[:, :-1] for name, array in parameters().items()},
        WITH_PARAMETERS,
        AdapterBaseMismatch,
        r"mlp.experts.gate_up_proj.lora_A is 11×32",
    ),
    "DoRA on parameters": (
        parameters(),
        {**WITH_PARAMETERS, "use_dora": True},
        AdapterUnsupported,
        "use_dora is refused together with target_parameters",
    ),
    "a bias on parameters": (
        parameters(),
        {**WITH_PARAMETERS, "lora_bias": True},
        AdapterUnsupported,
        "lora_bias is refused together with target_parameters",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_file_of_experts_is_refused_by_name(case: str, compiled: Callable[..., AdapterIR]) -> None:
    arrays, changes, kind, message = REFUSALS[case]
    with pytest.raises(kind) as caught:
        compiled(arrays, **changes)
    assert message in " ".join(caught.value.problems)


def test_parameters_are_refused_without_experts(compiled: Callable[..., AdapterIR], base: BaseSpec) -> None:
    with pytest.raises(AdapterUnsupported) as caught:
        compiled(parameters(), on=base, **WITH_PARAMETERS)
    assert any("adapters change no parameters of experts" in problem for problem in caught.value.problems)
    with pytest.raises(AdapterUnsupported, match="is for a mixture's experts; on this base"):
        compiled(linears(), on=base, **WITH_LINEARS)


def test_infinite_number_is_found_by_expert(compiled: Callable[..., AdapterIR]) -> None:
    arrays = linears()
    arrays[f"{PREFIX}.1.block_sparse_moe.experts.2.w3.lora_B.weight"][5, 1] = np.inf
    with pytest.raises(AdapterNotFinite, match=r"experts\.2\.up_proj\.lora_B in layer 1 .* at \[5, 1\]"):
        check_finite(compiled(arrays, **WITH_LINEARS))


def test_digest_tells_parameters_apart(save: Callable[..., bytes], make_config: Callable[..., dict[str, Any]]) -> None:
    tensors = read_tensors(bytearray(save(parameters())))
    digests = [
        adapter_digest(make_config(target_modules=[], target_parameters=targets), tensors)
        for targets in (BOTH, BOTH[::-1], BOTH[:1], None)
    ]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3
