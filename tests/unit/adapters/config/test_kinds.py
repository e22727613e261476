"""A kind of adapter that isn't served is refused by its name,
and nothing else is said of the upload.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.utils import PeftType

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.config.kinds import NOT_SERVED, SERVED
from loraserve.adapters.format.peft_format import read_adapter
from loraserve.adapters.tuners import TUNERS
from loraserve.errors import AdapterFormatError, AdapterRejected, AdapterUnsupported
from loraserve.types import BaseSpec

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")
]

LINEARS = ["q_proj", "v_proj"]
CONFIGS: dict[str, Callable[[], peft.PeftConfig]] = {
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=LINEARS),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, target_modules=LINEARS),
    "HRA": lambda: peft.HRAConfig(target_modules=LINEARS),
    "SHIRA": lambda: peft.ShiraConfig(r=2, target_modules=LINEARS),
    "FOURIERFT": lambda: peft.FourierFTConfig(n_frequency=8, target_modules=LINEARS),
    "RANDLORA": lambda: peft.RandLoraConfig(r=4, target_modules=LINEARS),
    "MISS": lambda: peft.MissConfig(r=4, target_modules=LINEARS),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "P_TUNING": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"),
}


def test_every_installed_peft_kind_is_served_or_named() -> None:
    assert set(TUNERS) == set(SERVED)
    assert {kind.value for kind in PeftType} <= {*SERVED, *NOT_SERVED}
    assert not set(SERVED) & set(NOT_SERVED)


@pytest.mark.parametrize("kind", CONFIGS)
def test_unsupported_peft_kind_is_refused_by_kind(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    peft.get_peft_model(model, CONFIGS[kind]()).save_pretrained(tmp_path)
    config = (tmp_path / "adapter_config.json").read_bytes()
    with pytest.raises(AdapterUnsupported) as caught:
        read_adapter(config, (tmp_path / "adapter_model.safetensors").read_bytes())
    [problem] = caught.value.problems
    assert problem.startswith(f"peft_type is '{kind}'")
    assert "a kind of adapter that isn't served. Served kinds: LORA, ADALORA, IA3, LOHA, LOKR and VERA." in problem


@pytest.mark.parametrize(
    ("changes", "said", "error"),
    [
        ({"peft_type": "XLORA", "experts": {}, "r": 0}, "'XLORA' (X-LoRA), a kind", AdapterUnsupported),
        ({"peft_type": "lora"}, "peft_type is 'lora', a kind", AdapterUnsupported),
        ({"peft_type": None}, "peft_type is None, a kind", AdapterUnsupported),
        ({"peft_type": {"LORA": 1}}, "peft_type is {'LORA': 1}, a kind", AdapterUnsupported),
        ({"peft_type": ...}, "has no peft_type, which PEFT needs to load an adapter", AdapterFormatError),
    ],
)
def test_kind_is_checked_before_remaining_fields(
    changes: dict[str, Any],
    said: str,
    error: type[AdapterRejected],
    make_config: Callable[..., dict[str, Any]],
    base: BaseSpec,
) -> None:
    config = {name: value for name, value in make_config(brand_new=3, **changes).items() if value is not ...}
    with pytest.raises(error) as caught:
        compile_adapter(config, {}, base)
    [problem] = caught.value.problems
    assert said in problem
    with pytest.raises(error) as caught:
        read_adapter(json.dumps(config).encode(), b"no safetensors")
    assert list(caught.value.problems) == [problem]
