"""IA3 as PEFT saves it, compiled by us, multiplies the same numbers;
what it would multiply elsewhere is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from loraserve.adapters.format.tensor_names import module_name
from loraserve.adapters.ir import AdapterIR
from loraserve.adapters.tuners.ia3 import compile_ia3
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterUnsupported
from loraserve.types import BaseSpec

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

CASES: dict[str, dict[str, Any]] = {
    "PEFT's choice for Llama": {},
    "up_proj and what it feeds": {
        "target_modules": ["up_proj", "down_proj", "o_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "no feed-forward module": {"target_modules": ["down_proj", "gate_proj", "q_proj"], "feedforward_modules": []},
    "the head": {"target_modules": ["lm_head", "v_proj"], "feedforward_modules": []},
    "a regex": {
        "target_modules": ["v_proj", "down_proj"],
        "feedforward_modules": r".*\.mlp\.down_proj",
        "exclude_modules": ["layers.1.self_attn.v_proj"],
    },
}


@torch.inference_mode()
def scaled_logits(model: torch.nn.Module, ir: AdapterIR, base: BaseSpec, as_tensor: Callable[..., Any]) -> torch.Tensor:
    """The base's logits with what the IR says of each linear's output."""
    for m in ir.modules:
        assert m.output_scale is not None
        assert set(m.tensors) == {"output_scale"}
        scale = as_tensor(m.output_scale)
        model.get_submodule(module_name(base, m.layer, m.module)).register_forward_hook(
            lambda _module, _args, output, scale=scale: output * scale
        )
    logits: torch.Tensor = model(input_ids=torch.arange(9)[None] * 7 % 64).logits
    return logits


@pytest.mark.parametrize("case", CASES)
def test_scaled_outputs_give_pefts_logits(
    case: str,
    tmp_path: Path,
    make_base: Callable[..., BaseSpec],
    make_model: Callable[..., Any],
    save_adapter: Callable[..., Any],
    compile_kind: Callable[..., Any],
    as_tensor: Callable[..., Any],
) -> None:
    base = make_base()
    ir = compile_kind(save_adapter(tmp_path, peft.IA3Config(**CASES[case])), base)
    ours = scaled_logits(make_model(), ir, base, as_tensor)
    model = peft.PeftModel.from_pretrained(make_model(), tmp_path).eval()
    with torch.inference_mode():
        theirs = model(input_ids=torch.arange(9)[None] * 7 % 64).logits
        without = make_model()(input_ids=torch.arange(9)[None] * 7 % 64).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    assert float((without - theirs).abs().max()) > 0.01


def test_vector_on_input_of_foreign_module_is_refused(
    tmp_path: Path, make_base: Callable[..., BaseSpec], save_adapter: Callable[..., Any]
) -> None:
    adapter = save_adapter(tmp_path, peft.IA3Config(target_modules=["o_proj"], feedforward_modules=["o_proj"]))
    with pytest.raises(
        AdapterUnsupported, match="feedforward_modules names o_proj in layers 0–2; IA3 on a module's input"
    ):
        compile_ia3(adapter.config, adapter.tensors, make_base())


def test_vector_on_down_proj_input_requires_known_gate(
    tmp_path: Path, make_base: Callable[..., BaseSpec], save_adapter: Callable[..., Any]
) -> None:
    adapter = save_adapter(tmp_path, peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]))
    modules = {name: shape for name, shape in make_base().modules.items() if name != "gate_proj"}
    with pytest.raises(AdapterUnsupported, match="feedforward_modules names down_proj"):
        compile_ia3(adapter.config, adapter.tensors, make_base(modules=modules))


def test_feedforward_modules_must_agree_with_the_vectors(
    tmp_path: Path, make_base: Callable[..., BaseSpec], save_adapter: Callable[..., Any]
) -> None:
    adapter = save_adapter(
        tmp_path, peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"])
    )
    with pytest.raises(AdapterFormatError, match=r"down_proj\.ia3_l is a vector for the input in layers 0–2"):
        compile_ia3({**adapter.config, "feedforward_modules": ["v_proj"]}, adapter.tensors, make_base())


def test_vector_of_different_base_is_refused(
    tmp_path: Path, make_base: Callable[..., BaseSpec], save_adapter: Callable[..., Any]
) -> None:
    adapter = save_adapter(tmp_path, peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[]))
    modules = dict(make_base().modules) | {"v_proj": (8, 32)}
    with pytest.raises(AdapterBaseMismatch, match=r"v_proj\.ia3_l is 16×1 in layers 0–2; expected 8×1 on this base"):
        compile_ia3(adapter.config, adapter.tensors, make_base(modules=modules))
