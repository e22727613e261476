"""What PEFT trains beside plain LoRA, saved by it and compiled by us, computes what PEFT computes
after it has read its own files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from loraserve.adapters.format.tensor_names import module_name
from loraserve.adapters.ir import AdapterIR, ModuleIR, TensorView
from loraserve.adapters.validation import check_finite
from loraserve.types import BaseSpec

# the oracles' own deprecations and remarks aren't ours to mend
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

QKV = ("q_proj", "k_proj", "v_proj")
LINEARS = [*QKV, "o_proj", "gate_proj", "up_proj", "down_proj"]

# name → (architecture, what its config says beside the sizes, what BaseSpec says beside the
# default)
BASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "tied": ("Llama", {"tie_word_embeddings": True}, {"is_head_tied": True}),
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True}, {"biased_modules": tuple(LINEARS)}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {"is_head_tied": True, "biased_modules": QKV}),
    "phi3": (
        "Phi3",
        {"pad_token_id": 0},
        {
            "module_paths": {
                **{m: f"self_attn.qkv_proj[{m}]" for m in QKV},
                "o_proj": "self_attn.o_proj",
                **{m: f"mlp.gate_up_proj[{m}]" for m in ("gate_proj", "up_proj")},
                "down_proj": "mlp.down_proj",
                "lm_head": "lm_head",
                "embed_tokens": "model.embed_tokens",
            }
        },
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 8, "tie_word_embeddings": True},
        {
            "is_head_tied": True,
            "norm_paths": {
                "attention_norm": "input_layernorm",
                "attention_out_norm": "post_attention_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "mlp_out_norm": "post_feedforward_layernorm",
                "norm": "model.norm",
            },
        },
    ),
}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "norm": "model.norm"}
EVERY = {"target_modules": LINEARS}
BOTH = ["embed_tokens", "lm_head"]
ONE = {"target_modules": ["q_proj"]}

CASES: list[tuple[str, dict[str, Any]]] = [
    # biases
    ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj", "o_proj"]}),
    ("qwen2", {"bias": "all", "lora_bias": True, "use_rslora": True, "target_modules": ["q_proj", "o_proj"]}),
    ("biased", {"bias": "all", "use_dora": True, "target_modules": ["q_proj", "mlp.down_proj"]}),
    ("biased", {"lora_bias": True, "target_modules": ["lm_head", "o_proj"]}),
    # whole modules
    ("llama", {"modules_to_save": ["lm_head"], **ONE}),
    ("llama", {"modules_to_save": BOTH, **ONE}),
    ("tied", {"modules_to_save": ["lm_head"], **ONE}),
    ("tied", {"modules_to_save": ["embed_tokens"], **ONE}),
    ("tied", {"modules_to_save": BOTH, **ONE}),
    ("tied", {"modules_to_save": ["lm_head"], "ensure_weight_tying": True, **ONE}),
    ("tied", {"modules_to_save": ["embed_tokens"], "target_modules": ["lm_head"]}),
    ("tied", {"modules_to_save": ["lm_head"], "target_modules": ["embed_tokens"]}),
    ("llama", {"modules_to_save": ["lm_head"], "ensure_weight_tying": True, **ONE}),
    ("llama", {"modules_to_save": ["norm"], **ONE}),
    ("gemma2", {"modules_to_save": ["model.norm", "input_layernorm", "pre_feedforward_layernorm"], **ONE}),
    ("gemma2", {"modules_to_save": ["post_attention_layernorm", "post_feedforward_layernorm"], **ONE}),
    ("qwen2", {"modules_to_save": ["k_proj", "layers.1.self_attn.o_proj"], "bias": "all", **EVERY}),
    ("biased", {"modules_to_save": ["mlp"], "bias": "lora_only", **EVERY}),
    ("phi3", {"modules_to_save": ["qkv_proj"], "target_modules": ["gate_up_proj"]}),
    # rows of tokens
    ("llama", {"trainable_token_indices": [9, 3, 7], **ONE}),
    ("tied", {"trainable_token_indices": [9, 3, 7], **ONE}),
    ("gemma2", {"trainable_token_indices": [9, 3, 7], **ONE}),
    ("llama", {"trainable_token_indices": {"lm_head": [5, 6], "embed_tokens": [3]}, **ONE}),
    ("tied", {"trainable_token_indices": {"lm_head": [5, 6]}, **ONE}),
    ("tied", {"trainable_token_indices": {"lm_head": [6, 5], "embed_tokens": [6, 5]}, **ONE}),
    ("tied", {"trainable_token_indices": {"lm_head": [5, 6], "embed_tokens": [6, 5]}, **ONE}),
    ("tied", {"trainable_token_indices": [9, 3], "target_modules": ["lm_head", "q_proj"]}),
    ("llama", {"trainable_token_indices": [9, 3], "target_modules": ["lm_head", "q_proj"]}),
    ("llama", {"trainable_token_indices": [9, 3], "modules_to_save": ["lm_head"], **ONE}),
    # what is saved of the base beside it
    ("llama", {"save_embedding_layers": True, **ONE}),
    ("tied", {"save_embedding_layers": True, **ONE}),
    ("tied", {"save_embedding_layers": True, "trainable_token_indices": [9, 3], **ONE}),
    (
        "tied",
        {"save_embedding_layers": True, "trainable_token_indices": [9, 3], "target_modules": ["lm_head", "q_proj"]},
    ),
    ("tied", {"save_embedding_layers": True, "modules_to_save": BOTH, **ONE}),
    ("tied", {"save_embedding_layers": True, "target_modules": ["embed_tokens"]}),
    # LoRA that ties
    ("tied", {"ensure_weight_tying": True, "target_modules": ["embed_tokens"]}),
    ("tied", {"ensure_weight_tying": True, "target_modules": ["lm_head", "q_proj"]}),
    ("tied", {"ensure_weight_tying": True, "target_modules": r".*embed_tokens|.*k_proj"}),
    # linears that the base has fused
    ("phi3", {"target_modules": "all-linear", "rank_pattern": {"qkv_proj": 3}, "alpha_pattern": {"up_proj": 7}}),
    ("phi3", {"target_modules": ["qkv_proj", "o_proj"], "use_dora": True, "layers_to_transform": [1]}),
    ("phi3", {"target_modules": r".*\.(qkv|gate_up)_proj", "lora_bias": True}),
]


def make_model(name: str) -> Any:
    architecture, changes, _ = BASES[name]
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = getattr(transformers, f"{architecture}Config")(**sizes, **heads, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter.normal_(1.0, 0.3)
    return model.eval()


def save(base: str, directory: Path, config: dict[str, Any]) -> None:
    """What PEFT writes of an adapter on that base in which everything that it would train has
    changed.
    """
    fields = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", **config}
    saves_embedding = fields.pop("save_embedding_layers", "auto")
    model = peft.get_peft_model(make_model(base), peft.LoraConfig(**fields))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        if saves_embedding is True and not {"trainable_token_indices", "modules_to_save"} & config.keys():
            model.base_model.model.get_output_embeddings().weight.mul_(
                1 if "embed_tokens" in config["target_modules"] else 2
            )
    model.save_pretrained(directory, save_embedding_layers=saves_embedding)


def read(directory: Path) -> tuple[dict[str, Any], dict[str, TensorView]]:
    adapter = read_adapter((directory / CONFIG_FILE).read_bytes(), (directory / WEIGHTS_FILE).read_bytes())
    return adapter.config, adapter.tensors


def as_float(view: TensorView) -> Tensor:
    return torch.from_numpy(np.array(view.array))


class Adapted(nn.Module):
    """A linear, or the embedding, with what a `ModuleIR` changes of it, as its docstring has it."""

    def __init__(self, base: Any, m: ModuleIR, rows: slice) -> None:
        super().__init__()
        self.is_embedding = isinstance(base, nn.Embedding)
        self.scale = getattr(base, "scalar_embed_scale", 1.0)
        weight = base.weight[rows] if m.weight is None else as_float(m.weight)
        if m.token_rows is not None:
            weight = weight.clone()
            weight[list(m.token_ids)] = as_float(m.token_rows)
        bias = None if getattr(base, "bias", None) is None else base.bias[rows]
        self.bias = bias if m.bias is None else as_float(m.bias)
        update = torch.zeros(())
        if m.lora_a is not None and m.lora_b is not None:
            update = m.scaling * as_float(m.lora_b) @ as_float(m.lora_a)
        self.weight = weight + (update.T if self.is_embedding and update.ndim else update)
        if m.magnitude is not None:
            self.weight = self.weight * (as_float(m.magnitude) / self.weight.norm(dim=1))[:, None]
        if m.lora_bias is not None:
            self.bias = m.scaling * as_float(m.lora_bias) + (0 if self.bias is None else self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[x] * self.scale if self.is_embedding else nn.functional.linear(x, self.weight, self.bias)


class Side(nn.Module):
    """Linears whose outputs lie side by side."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def applied(model: Any, ir: AdapterIR, spec: BaseSpec) -> Any:
    """The model with the adapter in it, by the formulas of the IR alone."""
    original = copy.deepcopy(model)
    by_name: dict[str, dict[str, ModuleIR]] = {}
    for m in ir.modules:
        by_name.setdefault(module_name(spec, m.layer, m.module), {})[m.module] = m
    for name, modules in by_name.items():
        base, start, parts = original.get_submodule(name), 0, []
        layer = next(iter(modules.values())).layer
        whole = [module for module in spec.modules if module_name(spec, layer, module) == name]
        for module in whole:
            rows = slice(start, start + spec.modules[module][0]) if len(whole) > 1 else slice(None)
            start += spec.modules[module][0]
            parts.append(Adapted(base, modules.get(module, ModuleIR(layer, module)), rows))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, parts[0] if len(parts) == 1 else Side(parts))
    for norm in ir.norms:
        path = spec.norm_paths[norm.norm]
        where = path if norm.norm == "norm" else f"{spec.layers_path}.{norm.layer}.{path}"
        model.get_submodule(where).weight = nn.Parameter(as_float(norm.weight))
    return model


@pytest.fixture
def make_spec(make_base: Callable[..., BaseSpec]) -> Callable[[str], BaseSpec]:
    return lambda name: make_base(num_layers=2, **{"norm_paths": NORMS, **BASES[name][2]})


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "config"),
    CASES,
    ids=lambda v: v if isinstance(v, str) else " ".join(f"{key}={value}" for key, value in v.items())[:70],
)
def test_compiled_kind_equals_peft_on_same_files(
    base: str, config: dict[str, Any], tmp_path: Path, make_spec: Callable[[str], BaseSpec]
) -> None:
    with torch.enable_grad():
        save(base, tmp_path, config)
    spec = make_spec(base)
    ir = compile_adapter(*read(tmp_path), spec)
    check_finite(ir)
    ids = torch.tensor([[1, 9, 3, 7, 5, 6, 63, 3]])
    expected = peft.PeftModel.from_pretrained(make_model(base), tmp_path).eval()(ids).logits
    torch.testing.assert_close(applied(make_model(base), ir, spec)(ids).logits, expected, rtol=1e-5, atol=2e-5)
    assert (expected - make_model(base)(ids).logits).abs().max() > 1e-3


def test_activated_adapter_keeps_invocation(tmp_path: Path, make_spec: Callable[[str], BaseSpec]) -> None:
    save("qwen2", tmp_path, {"alora_invocation_tokens": [7, 3, 7], "lora_bias": True, **ONE})
    ir = compile_adapter(*read(tmp_path), make_spec("qwen2"))
    assert ir.invocation_token_ids == (7, 3, 7)
    assert [m.lora_bias is not None for m in ir.modules] == [True, True]
