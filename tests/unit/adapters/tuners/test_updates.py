"""LoHa, LoKr, VeRA and AdaLoRA as PEFT saves them, compiled by us,
are the same updates that PEFT computes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from loraserve.adapters.format.tensor_names import module_name
from loraserve.types import BaseSpec

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")
]

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADALORA: dict[str, Any] = {"total_step": 10, "tinit": 1, "tfinal": 1}
PRUNED = {
    f"model.layers.{layer}.self_attn.{module}.lora_E.default": [True, False, index > layer, True]
    for index, module in enumerate(("q_proj", "v_proj"))
    for layer in range(3)
}

CASES: dict[str, peft.PeftConfig] = {
    "LoHa": peft.LoHaConfig(r=3, alpha=5, target_modules=LINEARS),
    "LoHa, r² over a module's sides": peft.LoHaConfig(r=6, alpha=2, target_modules=LINEARS),
    "LoHa, patterns": peft.LoHaConfig(
        r=2,
        alpha=4,
        target_modules=["q_proj", "up_proj", "down_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 3, "^model.layers.0.mlp.down_proj": 1},
        alpha_pattern={"up_proj": 7},
        use_effective_conv2d=True,
    ),
    "LoHa, all-linear but one": peft.LoHaConfig(
        r=2, alpha=4, target_modules="all-linear", exclude_modules=["layers.1.mlp.up_proj"]
    ),
    "LoKr": peft.LoKrConfig(r=2, alpha=5, target_modules=LINEARS),
    "LoKr, both whole": peft.LoKrConfig(r=64, alpha=5, target_modules=LINEARS, rank_dropout_scale=True),
    "LoKr, both products": peft.LoKrConfig(r=1, alpha=3, target_modules=LINEARS, decompose_both=True),
    "LoKr, a factor": peft.LoKrConfig(r=3, alpha=3, target_modules=LINEARS, decompose_factor=4, decompose_both=True),
    "LoKr, a factor that doesn't divide": peft.LoKrConfig(
        r=2, alpha=3, target_modules=LINEARS, decompose_factor=5, init_weights="lycoris"
    ),
    "LoKr, r over a factor's side": peft.LoKrConfig(
        r=5, alpha=3, target_modules=["up_proj", "down_proj"], decompose_factor=48, decompose_both=True
    ),
    "LoKr, patterns": peft.LoKrConfig(
        r=2,
        alpha=4,
        target_modules=["q_proj", "up_proj", "k_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 3, "k_proj": 16},
        alpha_pattern={"up_proj": 7},
        layers_to_transform=[0, 1],
    ),
    "VeRA": peft.VeraConfig(r=12, target_modules=LINEARS),
    "VeRA, r over a module's sides": peft.VeraConfig(
        r=40, target_modules=["k_proj", "down_proj"], layers_to_transform=[1], projection_prng_key=5
    ),
    "AdaLoRA": peft.AdaLoraConfig(init_r=4, lora_alpha=3, target_modules=LINEARS, use_rslora=True, **ADALORA),
    "AdaLoRA, no alpha": peft.AdaLoraConfig(init_r=5, lora_alpha=0, target_modules=["o_proj"], **ADALORA),
    "AdaLoRA, ranks cut down": peft.AdaLoraConfig(
        init_r=4, lora_alpha=3, target_modules=["q_proj", "v_proj"], rank_pattern=dict(PRUNED), **ADALORA
    ),
    "AdaLoRA, modules without a rank": peft.AdaLoraConfig(
        init_r=4,
        lora_alpha=3,
        target_modules=["q_proj", "v_proj"],
        rank_pattern=PRUNED | {"model.layers.1.self_attn.v_proj.lora_E.default": [False] * 4},
        **ADALORA,
    ),
    "AdaLoRA, ranks cut down and no alpha": peft.AdaLoraConfig(
        init_r=4, lora_alpha=0, target_modules=["q_proj", "v_proj"], rank_pattern=dict(PRUNED), **ADALORA
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_modules_update_equals_pefts(
    case: str,
    tmp_path: Path,
    make_base: Callable[..., BaseSpec],
    save_adapter: Callable[..., Any],
    load_adapter: Callable[..., Any],
    compile_kind: Callable[..., Any],
    delta: Callable[..., torch.Tensor],
) -> None:
    base = make_base()
    ir = compile_kind(save_adapter(tmp_path, CASES[case]), base)
    ours = {module_name(base, m.layer, m.module): delta(m) for m in ir.modules}
    theirs = {name: layer.get_delta_weight("default").detach() for name, layer in load_adapter(tmp_path).items()}
    # where nothing changes, nothing is compiled
    theirs = {
        name: update for name, update in theirs.items() if case != "AdaLoRA, modules without a rank" or update.any()
    }
    assert ours.keys() == theirs.keys()
    assert ir.kind == CASES[case].peft_type
    for name, update in theirs.items():
        torch.testing.assert_close(ours[name], update, rtol=1e-5, atol=1e-6 * float(update.abs().max()))


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        (peft.LoHaConfig(r=3, target_modules=["k_proj"]), 9),
        (peft.LoHaConfig(r=6, target_modules=["k_proj"]), 16),
        (peft.LoKrConfig(r=2, target_modules=["up_proj"]), 4 * 2),
        # w1 is 48×4, a product of rank 5; w2 is 1×8
        (peft.LoKrConfig(r=5, target_modules=["up_proj"], decompose_factor=48, decompose_both=True), 4),
        (peft.VeraConfig(r=40, target_modules=["k_proj"]), 16),
    ],
    ids=lambda value: value.peft_type.value if isinstance(value, peft.PeftConfig) else str(value),
)
def test_rank_bound_is_known_without_computing(
    config: peft.PeftConfig,
    rank: int,
    tmp_path: Path,
    make_base: Callable[..., BaseSpec],
    save_adapter: Callable[..., Any],
    compile_kind: Callable[..., Any],
) -> None:
    ir = compile_kind(save_adapter(tmp_path, config), make_base())
    assert {m.rank for m in ir.modules} == {rank}


def test_adalora_extras_are_served_like_lora(
    tmp_path: Path,
    make_base: Callable[..., BaseSpec],
    save_adapter: Callable[..., Any],
    load_adapter: Callable[..., Any],
    compile_kind: Callable[..., Any],
    as_tensor: Callable[..., torch.Tensor],
) -> None:
    config = peft.AdaLoraConfig(
        init_r=2, lora_alpha=3, target_modules=["q_proj"], bias="lora_only", modules_to_save=["lm_head"], **ADALORA
    )
    base = make_base(biased_modules=LINEARS)
    adapter = save_adapter(tmp_path, config)
    modules = {module_name(base, m.layer, m.module): m for m in compile_kind(adapter, base).modules}
    for name, layer in load_adapter(tmp_path).items():
        torch.testing.assert_close(as_tensor(modules[name].bias), layer.base_layer.bias.detach(), rtol=0, atol=0)
    head = torch.from_numpy(adapter.tensors["base_model.model.lm_head.weight"].array)
    torch.testing.assert_close(as_tensor(modules["lm_head"].weight), head, rtol=0, atol=0)
    assert modules["lm_head"].rank == 0


PHI3 = {
    "q_proj": "self_attn.qkv_proj[q_proj]",
    "k_proj": "self_attn.qkv_proj[k_proj]",
    "v_proj": "self_attn.qkv_proj[v_proj]",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_up_proj[gate_proj]",
    "up_proj": "mlp.gate_up_proj[up_proj]",
    "down_proj": "mlp.down_proj",
}


@pytest.mark.parametrize(
    "config",
    [
        peft.LoHaConfig(r=3, alpha=5, target_modules=["qkv_proj", "o_proj"], rank_pattern={"qkv_proj": 2}),
        peft.LoKrConfig(r=2, alpha=5, target_modules=["qkv_proj", "gate_up_proj"]),
        peft.VeraConfig(r=6, target_modules="all-linear"),
        peft.AdaLoraConfig(init_r=3, target_modules=["gate_up_proj"], **ADALORA),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_updates_of_fused_linears_are_split(
    config: peft.PeftConfig,
    tmp_path: Path,
    make_base: Callable[..., BaseSpec],
    save_adapter: Callable[..., Any],
    compile_kind: Callable[..., Any],
    delta: Callable[..., torch.Tensor],
) -> None:
    model = transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
        )
    )
    adapter = save_adapter(tmp_path, config, model=model)
    paths = PHI3 | {"lm_head": "lm_head", "embed_tokens": "model.embed_tokens"}
    ir = compile_kind(adapter, make_base(module_paths=paths))
    parts: dict[tuple[int, str], list[torch.Tensor]] = {}
    for m in ir.modules:
        parts.setdefault((m.layer, PHI3[m.module].partition("[")[0]), []).append(delta(m))
    for (layer, path), deltas in parts.items():
        theirs = model.get_submodule(f"model.layers.{layer}.{path}").get_delta_weight("default").detach()
        torch.testing.assert_close(torch.cat(deltas), theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()))
    targets = {name for name, _ in model.named_modules() if name.endswith("base_layer")}
    assert len(parts) == len(targets)
