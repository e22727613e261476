"""Random triples of a family, a format of weights and a kind of adapter: transformers' and PEFT's
logits, or a refusal by the kind's or the format's name.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from campaigns import default_and_campaign
from gguf_files import ARCHITECTURES, dequantized, write_gguf
from stored_words import save_awq, save_fp8, save_gptq
from torch import Tensor

from adapters_store import LocalStore
from loraserve.errors import AdapterUnservable
from loraserve.model.checkpoint.source import resolve_model_dir
from loraserve_kernels.cpu.lora.layout import PackedAdapter

from .conftest import CONFIGS, PagedRun, build_model, load, random_tokens, reference_logits, save_model
from .gguf.test_gguf_base import KINDS as SMALL_FAMILIES
from .gguf.test_gguf_base import SIZES
from .modelling.families import OTHERS
from .modelling.families import build as build_modelled
from .modelling.families import load as load_modelled
from .stored_quantized import group, save_compressed
from .test_adapter_kinds import load_packed

# PEFT remarks on tied embeddings, on what it saves of them, and on ranks over a linear's width
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning", "RuntimeWarning")
]

FAMILIES: dict[str, dict[str, Any]] = {
    **SMALL_FAMILIES,
    "gemma2 untied": {"query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": False},
    "vaultgemma": {"query_pre_attn_scalar": 32, "sliding_window": 8},
    "helium": {"pad_token_id": 0, "head_dim": 16},
    "glm": {"pad_token_id": 0},
    "ministral": {"sliding_window": 8},
    "granite biases": {"attention_bias": True, "mlp_bias": True},
    "smollm3 untied": {"num_hidden_layers": 4, "pad_token_id": 0, "tie_word_embeddings": False},
}
"""Family and variant → fields beside `SIZES`; the native decoder reads them."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"]
MLP = ["gate_proj", "up_proj", "down_proj", "gate_up_proj"]


def _compressed(*arguments: Any, **settings: Any) -> Callable[[Any, Path], Any]:
    def save(model: Any, directory: Path) -> Any:
        return save_compressed(model, directory, [group(*arguments, **settings)])

    return save


def _rounded(form: str) -> Callable[[Any, Path], Any]:
    def save(model: Any, directory: Path) -> Any:
        meant = dequantized(model, form)
        write_gguf(meant, directory / "base.gguf", form)
        return meant

    return save


@torch.no_grad()
def _save_bfloat16(model: Any, directory: Path) -> Any:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    save_model(copy.deepcopy(model).bfloat16(), directory)
    return model


FORMATS: dict[str, Callable[[Any, Path], Any]] = {
    "float32": lambda model, directory: save_model(model, directory) and model,
    "bfloat16": _save_bfloat16,
    "compressed-tensors int8": _compressed(8, "channel"),
    "compressed-tensors int4": _compressed(4, "group", group_size=32, symmetric=False),
    "compressed-tensors fp8": _compressed(8, "channel", type="float"),
    "gptq": lambda model, directory: save_gptq(model, directory),
    "gptq of 8 bits, desc_act": lambda model, directory: save_gptq(
        model, directory, bits=8, sym=True, desc_act=True, version="gptq_v2"
    ),
    "awq": lambda model, directory: save_awq(model, directory),
    "fp8 in blocks": lambda model, directory: save_fp8(model, directory, block=(32, 32)),
    **{f"gguf {form}": _rounded(form) for form in ("F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")},
}
"""Format → what saves a model in it, and returns the float32 model that it means."""

_LINEAR_KINDS: dict[str, Callable[..., peft.PeftConfig]] = {
    "LORA": lambda targets, rng: peft.LoraConfig(
        r=rng.randint(2, 9), lora_alpha=rng.randint(1, 3), use_rslora=rng.random() < 0.5, target_modules=targets
    ),
    "LORA with patterns": lambda targets, rng: peft.LoraConfig(
        r=4,
        lora_alpha=3,
        target_modules=targets,
        rank_pattern={targets[0]: 7},
        alpha_pattern={rf"layers\.1\..*{targets[-1]}": 3},
    ),
    "LORA with lora_bias": lambda targets, rng: peft.LoraConfig(
        r=3, lora_alpha=2, lora_bias=True, target_modules=targets
    ),
    "DORA": lambda targets, rng: peft.LoraConfig(
        r=rng.randint(2, 9), lora_alpha=2, use_dora=True, target_modules=targets
    ),
    "LOHA": lambda targets, rng: peft.LoHaConfig(r=rng.randint(1, 4), alpha=5, target_modules=targets),
    "LOKR": lambda targets, rng: peft.LoKrConfig(
        r=rng.randint(1, 4), alpha=3, decompose_both=rng.random() < 0.5, target_modules=targets
    ),
    "VERA": lambda targets, rng: peft.VeraConfig(r=rng.randint(2, 12), target_modules=targets),
    "ADALORA": lambda targets, rng: peft.AdaLoraConfig(
        init_r=rng.randint(2, 6), lora_alpha=3, target_modules=targets, total_step=10, tinit=1, tfinal=1
    ),
    "IA3": lambda targets, rng: peft.IA3Config(
        target_modules=targets, feedforward_modules=[name for name in targets if name == "down_proj"]
    ),
}
_OUTSIDE_KINDS: dict[str, Callable[..., peft.PeftConfig]] = {
    "LORA of the embedding": lambda targets, rng: peft.LoraConfig(
        r=3, lora_alpha=2, target_modules=[*targets, "embed_tokens"]
    ),
    "LORA of the head": lambda targets, rng: peft.LoraConfig(r=3, lora_alpha=2, target_modules=[*targets, "lm_head"]),
    "whole head": lambda targets, rng: peft.LoraConfig(
        r=2, lora_alpha=2, target_modules=targets, modules_to_save=["lm_head"]
    ),
    "whole embedding": lambda targets, rng: peft.LoraConfig(
        r=2, lora_alpha=2, target_modules=targets, modules_to_save=["embed_tokens"]
    ),
    "rows of the embedding": lambda targets, rng: peft.LoraConfig(
        r=2, lora_alpha=2, target_modules=targets, trainable_token_indices=sorted(rng.sample(range(90), 5))
    ),
}
_REFUSED_KINDS: dict[str, Callable[..., peft.PeftConfig]] = {
    "BOFT": lambda targets, rng: peft.BOFTConfig(boft_block_size=4, target_modules=targets),
    "HRA": lambda targets, rng: peft.HRAConfig(target_modules=targets),
    "MISS": lambda targets, rng: peft.MissConfig(r=4, target_modules=targets),
    "FOURIERFT": lambda targets, rng: peft.FourierFTConfig(n_frequency=8, target_modules=targets),
}
KINDS = {**_LINEAR_KINDS, **_OUTSIDE_KINDS}


@dataclass(frozen=True, slots=True)
class Triple:
    family: str
    format: str
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.seed} {self.family}, {self.format}, {self.kind}"


def _draw(seed: int) -> Triple:
    rng = random.Random(seed)
    if rng.random() < 0.15:
        return Triple(rng.choice(list(OTHERS)), "transformers' code", _draw_kind(rng), seed)
    family = rng.choice(list(FAMILIES))
    return Triple(family, rng.choice([name for name in FORMATS if _can_write(family, name)]), _draw_kind(rng), seed)


def _can_write(family: str, format: str) -> bool:
    """Return whether the tests write such files as other programs do."""
    if format.startswith("gguf"):
        # llama.cpp has no head of their own for Gemma's files
        return CONFIGS[family.split()[0]].model_type in ARCHITECTURES and family != "gemma2 untied"
    # the packages that quantize to the others know no experts in one tensor
    return format in ("float32", "bfloat16") or not ("moe" in family or family in ("mixtral", "olmoe"))


def _draw_kind(rng: random.Random) -> str:
    """Draw a served kind nine times of ten."""
    return rng.choice(list(_REFUSED_KINDS if rng.random() < 0.1 else KINDS))


TRIPLES = [_draw(seed) for seed in range(300)]


def _randomize(model: Any, seed: int) -> None:
    """Give what PEFT trains about the base's strength."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name or "ia3_l" in name:
                parameter.mul_(1 + 0.3 * noise)
            elif "modules_to_save" in name or "token_adapter" in name or name.endswith("original_module.weight"):
                parameter.add_(0.1 * noise)
            elif "hada_" in name or "lokr_" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))


def _targets(model: Any, rng: random.Random, *, is_native: bool) -> list[str]:
    """Draw names of linears that each layer has."""
    found: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        layer = re.match(r".*?\.\d+\.", name)
        if layer is not None and isinstance(module, torch.nn.Linear) and "expert" not in name:
            found.setdefault(layer[0], set()).add(name.rsplit(".", 1)[-1])
    linears = sorted(set.intersection(*found.values()))
    known = [name for name in linears if not is_native or name in ATTENTION + MLP]
    return rng.sample(known, rng.randint(1, len(known)))


def _logits(base: Any, tokens: list[int], adapter: PackedAdapter | None) -> Tensor:
    """Compute a sequence in two chunks beside another one without an adapter."""
    run, parts = PagedRun(base), []
    mine, other = run.add(tokens), run.add(tokens[::-1])
    for count in (len(tokens) - 3, 3):
        segments = [] if adapter is None else [(adapter, count, 2 * count)]
        parts.append(run.step([(other, count), (mine, count)], lora=segments)[1])
    return torch.cat(parts)


@pytest.mark.usefixtures("cache_home")
@pytest.mark.parametrize("triple", default_and_campaign(TRIPLES, default=TRIPLES[:10]), ids=str)
def test_triple_equals_peft_or_is_refused(triple: Triple, tmp_path: Path) -> None:
    rng, directory = random.Random(triple.seed), tmp_path / "base"
    directory.mkdir()
    is_native = triple.family in FAMILIES
    if is_native:
        fields = {**SIZES, **FAMILIES[triple.family]}
        model = build_model(
            triple.family.split()[0], **{name: value for name, value in fields.items() if value is not None}
        )
        meant = FORMATS[triple.format](model, directory)
        base: Any = load(resolve_model_dir(str(directory)), activation_dtype="float")
    else:
        meant = build_modelled(triple.family)
        save_model(meant, directory)
        base = load_modelled(directory)
    config = {**KINDS, **_REFUSED_KINDS}[triple.kind](_targets(meant, rng, is_native=is_native), rng)
    adapted = peft.get_peft_model(copy.deepcopy(meant), config).eval()
    _randomize(adapted, triple.seed)
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = random_tokens(23, seed=triple.seed)
    store = LocalStore(tmp_path / "store")
    if triple.kind in _REFUSED_KINDS:
        with pytest.raises(AdapterUnservable, match=f"'{triple.kind}'"):
            load_packed(base, tmp_path / "adapter", store)
        return
    adapter = load_packed(base, tmp_path / "adapter", store)
    theirs, found = reference_logits(adapted, tokens), _logits(base, tokens, adapter)
    assert float((theirs - reference_logits(meant, tokens)).abs().max()) > 1e-3
    # a random model's attention may be near a tie: then float32 has larger errors, PEFT's own too
    if hasattr(adapted.get_base_model(), "set_experts_implementation"):
        # torch's grouped product has no doubles
        adapted.get_base_model().set_experts_implementation("eager")
    exact = reference_logits(adapted.double(), tokens)
    bound = max(1e-4 * max(1.0, float(exact.abs().max()) / 10), 5 * float((theirs - exact).abs().max()))
    assert float((found - exact).abs().max()) < bound
