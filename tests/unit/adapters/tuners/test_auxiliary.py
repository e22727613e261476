"""What PEFT trains beside the tensors of LoHa, LoKr, IA3 and VeRA, compiled by us, gives PEFT's own
logits together with them.
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
from loraserve.adapters.ir import AdapterIR
from loraserve.errors import AdapterRejected
from loraserve.types import BaseSpec

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

BIASED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "norm": "model.norm"}
TOKENS = torch.arange(9)[None] * 7 % 64

CASES: dict[str, peft.PeftConfig] = {
    "LoHa, head and norms": peft.LoHaConfig(
        r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head", "post_attention_layernorm", "norm"]
    ),
    "LoKr, a linear": peft.LoKrConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["k_proj"]),
    "IA3, embedding and what it scales": peft.IA3Config(
        target_modules=["v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        modules_to_save=["embed_tokens", "up_proj"],
    ),
    "VeRA, biases of its modules": peft.VeraConfig(r=6, target_modules=["q_proj", "up_proj"], bias="vera_only"),
    "VeRA, all biases and the head": peft.VeraConfig(
        r=6, target_modules=["v_proj", "o_proj"], bias="all", modules_to_save=["lm_head"]
    ),
    "VeRA on the head": peft.VeraConfig(r=6, target_modules=["lm_head", "v_proj"]),
}


@torch.no_grad()
def apply(model: transformers.PreTrainedModel, ir: AdapterIR, base: BaseSpec, as_tensor: Callable[..., Any]) -> None:
    """Make the model what the IR's formula makes of it."""
    for m in ir.modules:
        module = model.get_submodule(module_name(base, m.layer, m.module))
        if m.weight is not None:
            module.weight.data = as_tensor(m.weight).clone()
        if m.bias is not None:
            module.bias.data = as_tensor(m.bias).clone()
        if m.lora_a is not None:
            module.weight += m.scaling * (as_tensor(m.lora_b) @ as_tensor(m.lora_a))
        if m.output_scale is not None:
            module.weight *= as_tensor(m.output_scale)[:, None]
            module.bias *= as_tensor(m.output_scale)
    for n in ir.norms:
        path = NORMS[n.norm] if n.norm == "norm" else f"model.layers.{n.layer}.{NORMS[n.norm]}"
        model.get_submodule(path).weight.data = as_tensor(n.weight).clone()


@pytest.mark.parametrize("case", CASES)
def test_auxiliary_training_equals_peft_logits(
    case: str,
    tmp_path: Path,
    make_base: Callable[..., BaseSpec],
    make_model: Callable[..., Any],
    save_adapter: Callable[..., Any],
    compile_kind: Callable[..., Any],
    as_tensor: Callable[..., Any],
) -> None:
    base = make_base(biased_modules=BIASED, norm_paths=NORMS)
    ir = compile_kind(save_adapter(tmp_path, CASES[case]), base)
    ours, plain = make_model(), make_model()
    apply(ours, ir, base, as_tensor)
    theirs = peft.PeftModel.from_pretrained(make_model(), tmp_path).eval()
    with torch.inference_mode():
        ours, theirs, plain = (model(input_ids=TOKENS).logits for model in (ours, theirs, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    assert float((plain - theirs).abs().max()) > 0.01
    assert set(ir.saved_base) == ({"lm_head"} if case == "VeRA on the head" else set())


def test_weight_missing_in_config_is_refused(
    tmp_path: Path,
    make_base: Callable[..., BaseSpec],
    save_adapter: Callable[..., Any],
    compile_kind: Callable[..., Any],
) -> None:
    adapter = save_adapter(tmp_path, CASES["LoKr, a linear"])
    del adapter.config["modules_to_save"]
    with pytest.raises(
        AdapterRejected, match=r"weight of k_proj in layers 0–2, which the config's modules_to_save doesn't name"
    ):
        compile_kind(adapter, make_base(biased_modules=BIASED))
