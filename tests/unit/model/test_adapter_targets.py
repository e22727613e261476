"""What a config means by its module names is, for every architecture, what PEFT makes of it: the
same linears and norms of the same layers.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from loraserve.adapters.format.tensor_names import BaseTensorNames, module_name
from loraserve.adapters.ir import ModuleIR
from loraserve.errors import AdapterRejected
from loraserve.types import BaseSpec

from .conftest import CONFIGS, build_model, load, save_model
from .test_equality import CASES

# PEFT remarks on tied embeddings, on keys without a module and on names that transformers has
# changed
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning", "RuntimeWarning")
]

KINDS = {kind: (kind, changes) for kind, changes in reversed(CASES.values())}
REACHES: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "a regex": {
        "target_modules": r".*\.[02]\.(self_attn\.\w+_proj|mlp\.(gate|gate_up|down)_proj)",
        "exclude_modules": "lm_.*",
    },
    "some layers, by suffix": {
        "target_modules": ["o_proj", "self_attn.q_proj", "qkv_proj", "lm_head", "model.layers.0.self_attn.v_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
        "exclude_modules": ["down_proj"],
    },
    "what is saved whole": {
        "target_modules": "all-linear",
        "modules_to_save": ["self_attn.o_proj", "model.norm", "lm_head"],
    },
}


@pytest.fixture(scope="module", params=CONFIGS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, BaseSpec]:
    kind, changes = KINDS[request.param]
    model = build_model(kind, **changes)
    return model, load(save_model(model, tmp_path_factory.mktemp("model"))).spec


def adapter_files(model: Any, directory: Path, reach: dict[str, Any]) -> tuple[Any, Any]:
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **reach)
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(directory)
    adapter = read_adapter(*((directory / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)))
    # PEFT writes the modules that it has found; what it was asked for must mean the same
    return {**adapter.config, **reach}, adapter.tensors


def name_of(m: ModuleIR, names: BaseTensorNames) -> str:
    """PEFT's name of a module; of an expert, that of the wrapper of all experts' parameter."""
    if names.experts is None or m.module in names.base.modules:
        return module_name(names.base, m.layer, m.module)
    wrappers = {"experts.down_proj": "mlp.experts", "router": "mlp.gate", "shared_gate": "mlp.shared_expert_gate"}
    return f"{names.base.layers_path}.{m.layer}.{wrappers.get(m.module, 'mlp.experts.base_layer')}"


@pytest.mark.parametrize("reach", REACHES)
def test_config_targets_same_modules_as_peft(reach: str, base: tuple[Any, BaseSpec], tmp_path: Path) -> None:
    model, spec = base
    config, tensors = adapter_files(model, tmp_path, REACHES[reach])
    if spec.experts is not None and reach == "a regex":
        # PEFT makes names of a regex where there are experts, and takes them in every layer
        config["target_modules"] = json.loads((tmp_path / CONFIG_FILE).read_text())["target_modules"]
    ir = compile_adapter(config, tensors, spec)
    names = BaseTensorNames(spec)
    ours = {name_of(m, names) for m in ir.modules} | {names.of((n.layer, n.norm)) for n in ir.norms}
    parts = ("lora_A.weight", "lora_B.weight", "base_layer.weight", "weight", "bias")
    theirs = {name.removeprefix("base_model.model.") for name in tensors}
    for part in parts:
        theirs = {name.removesuffix(f".{part}") for name in theirs}
    assert ours == theirs


def test_norms_not_feeding_linears_are_refused_by_name(base: tuple[Any, BaseSpec], tmp_path: Path) -> None:
    model, spec = base
    norms = {name.rpartition(".")[2] for name, _ in model.named_modules() if name.endswith("norm")}
    for norm in norms - {path.rpartition(".")[2] for path in spec.norm_paths.values()}:
        config, tensors = adapter_files(model, tmp_path, {"target_modules": ["o_proj"], "modules_to_save": [norm]})
        with pytest.raises(AdapterRejected, match=f"{norm}.weight' is a fully trained weight"):
            compile_adapter(config, tensors, spec)
