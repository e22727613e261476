"""Random bases, and random adapters of every kind that is served, as transformers and PEFT save
them: what a property test draws from.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = LINEARS[:4]
EXPERTS = ("mixtral", "qwen3-moe", "qwen2-moe", "olmoe")
FUSED = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "glm": (*ATTENTION, "gate_up_proj", "down_proj"),
    "glm4": (*ATTENTION, "gate_up_proj", "down_proj"),
}
TOKENS = 101

BASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 9, "head_dim": 16}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.8}),
    ("olmo2", {}),
    ("smollm3", {"pad_token_id": 0, "no_rope_layers": [1, 0, 1]}),
    ("gemma2", {"head_dim": 16, "sliding_window": 7, "pad_token_id": 0, "bos_token_id": 1}),
    (
        "gemma3",
        {"head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 2, "pad_token_id": 0, "bos_token_id": 1},
    ),
    ("phi3", {"pad_token_id": 0}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3-moe", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ("gemma", {"head_dim": 16}),
    ("vaultgemma", {"head_dim": 16, "sliding_window": 7, "pad_token_id": 0, "bos_token_id": 1}),
    ("olmo3", {"sliding_window": 7}),
    ("exaone4", {"head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 2}),
    ("seed-oss", {"head_dim": 16}),
    ("ernie4.5", {"head_dim": 16}),
    ("glm", {"head_dim": 16, "pad_token_id": 0}),
    ("glm4", {"head_dim": 16, "pad_token_id": 0}),
    ("hunyuan", {"head_dim": 16}),
    ("ministral", {"head_dim": 16, "sliding_window": 9}),
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    (
        "qwen2-moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
        },
    ),
)
"""(kind, what differs from the small config)."""

SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"hidden_size": 64, "intermediate_size": 96},
    {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4, "intermediate_size": 72},
)


@dataclass(frozen=True)
class Draw:
    """One adapter: its kind, for messages, PEFT's config, and what is done to the files that PEFT
    has saved: ``another`` copy of the embedding, a copy of ``16 bits``, every tensor in
    ``float64``, ``defaults`` left out of the config.
    """

    kind: str
    config: peft.PeftConfig
    edit: str = ""


def draw_base(rng: random.Random) -> tuple[str, dict[str, Any]]:
    kind, options = rng.choice(BASES)
    size = dict(rng.choice(SIZES))
    if "no_rope_layers" in options:
        size.pop("num_hidden_layers", None)
    return kind, {**size, **options}


def draw_adapter(rng: random.Random, kind: str, options: dict[str, Any], num_layers: int) -> Draw:
    """An adapter that fits a base of this kind."""
    linears = FUSED.get(kind, ATTENTION if kind in EXPERTS else LINEARS)
    biased = [m for m in linears if has_bias(kind, options, m)]
    kinds = ["lora", "lora", "patterns", "dora", "regex", "lora bias", "outside", "norms", "tokens", "alora", "head"]
    kinds += ["copies", "float64", "defaults"]
    if kind not in FUSED:
        kinds += ["loha", "lokr", "ia3", "vera"]
    if biased:
        kinds += ["bias", "bias"]
    if kind in EXPERTS:
        kinds += ["experts", "experts"]
    name = rng.choice(kinds)
    targets = rng.sample(linears, rng.randint(1, len(linears)))
    rank = rng.choice((1, 2, 3, 4, 7, 8, 16, 19))
    common: dict[str, Any] = {
        "r": rank,
        # so that an adapter is about as strong as the base: much stronger, and PEFT's own rounding
        # is more than we allow
        "lora_alpha": rank * rng.choice((0.25, 0.5, 1.5)),
        "use_rslora": rng.random() < 0.4,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
    }
    layer = rng.randrange(num_layers)
    lora = peft.LoraConfig
    match name:
        case "lora":
            more: dict[str, Any] = rng.choice(
                (
                    {},
                    {"layers_to_transform": [layer]},
                    {"exclude_modules": targets[:-1]},
                    # to PEFT, experts are linears too
                    {} if kind in EXPERTS else {"target_modules": "all-linear"},
                )
            )
            return Draw(name, lora(**{**common, **more}))
        case "patterns":
            # no two for one module: PEFT sorts the keys when it saves, and the first that fits
            # counts
            ranks = {
                rng.choice([m for m in linears if m != "o_proj"]): rng.randint(1, 12),
                f"layers.{layer}.self_attn.o_proj": 5,
            }
            alphas = {rng.choice([m for m in linears if m != "o_proj"]): 2, rf".*\.{layer}\.self_attn\.o_proj": 7.5}
            return Draw(name, lora(**common, rank_pattern=ranks, alpha_pattern=alphas))
        case "dora":
            return Draw(name, lora(**common, use_dora=True))
        case "regex":
            suffixes = "|".join(targets)
            pattern = rng.choice(
                (
                    rf".*layers\.[0-{num_layers - 1}]\..*({suffixes})",
                    # as ms-swift writes it
                    rf"^(language_model|model)(?!.*(lm_head|output|emb|wte|shared|experts)).*({suffixes})$",
                    rf"(?!.*experts)(?=.*layers\.{layer}\.).*(?<!norm)\.({suffixes})",
                )
            )
            return Draw(name, lora(**{**common, "target_modules": pattern}))
        case "experts":
            parameters = ["mlp.experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"]
            named = rng.sample(parameters, rng.randint(1, len(parameters)))
            ranks = {"experts.down_proj": rng.randint(1, 9)}
            return Draw(name, lora(**common, target_parameters=named, rank_pattern=ranks))
        case "lora bias":
            return Draw(name, lora(**common, lora_bias=True))
        case "bias":
            common["target_modules"] = list({*targets, rng.choice(biased)})
            return Draw(name, lora(**common, bias=rng.choice(("all", "lora_only"))))
        case "outside":
            return Draw(name, lora(**{**common, "target_modules": ["embed_tokens", "lm_head", *targets[:2]]}))
        case "copies":
            # the embedding is a target, so that PEFT saves the base's own beside it
            config = lora(**{**common, "target_modules": ["embed_tokens", *targets[:2]]})
            return Draw(name, config, rng.choice(("another", "16 bits")))
        case "float64":
            return Draw(name, lora(**common, bias="none"), name)
        case "defaults":
            return Draw(name, lora(**{**common, "r": 8, "lora_alpha": 8}), name)
        case "norms":
            saved = rng.sample(norms(kind), rng.randint(1, 2))
            return Draw(name, lora(**common, modules_to_save=saved))
        case "head":
            saved = (
                ["lm_head", "embed_tokens"]
                if options.get("tie_word_embeddings") or "gemma" in kind or kind == "ernie4.5"
                else rng.choice((["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]))
            )
            return Draw(name, lora(**common, modules_to_save=saved, ensure_weight_tying=False))
        case "tokens":
            return Draw(name, lora(**common, trainable_token_indices=sorted(rng.sample(range(TOKENS), 3))))
        case "alora":
            return Draw(name, lora(**common, alora_invocation_tokens=[rng.randrange(3, TOKENS) for _ in range(2)]))
        case "loha":
            return Draw(
                name, peft.LoHaConfig(r=rng.randint(1, 4), alpha=3, target_modules=targets, task_type="CAUSAL_LM")
            )
        case "lokr":
            return Draw(
                name,
                peft.LoKrConfig(
                    r=rng.randint(1, 4),
                    alpha=3,
                    target_modules=targets,
                    decompose_both=rng.random() < 0.5,
                    task_type="CAUSAL_LM",
                ),
            )
        case "ia3":
            modules = ["k_proj", "v_proj", *(["down_proj"] if "down_proj" in linears else [])]
            forward = [m for m in modules if m == "down_proj"]
            return Draw(
                name, peft.IA3Config(target_modules=modules, feedforward_modules=forward, task_type="CAUSAL_LM")
            )
        case _:
            # VeRA's shared matrices want all of a kind
            return Draw(
                name, peft.VeraConfig(r=rng.randint(2, 12), target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            )


_ALL_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_NORMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), ("post_attention_layernorm", "post_feedforward_layernorm")),
    **dict.fromkeys(("gemma2", "gemma3"), _ALL_NORMS),
    "vaultgemma": ("input_layernorm", "pre_feedforward_layernorm"),
    "glm4": ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
}


def norms(kind: str) -> list[str]:
    """Names of norms that an adapter may have weights of its own for."""
    return [*_NORMS.get(kind, ("input_layernorm", "post_attention_layernorm")), "model.norm"]


def has_bias(kind: str, options: dict[str, Any], module: str) -> bool:
    if kind in ("qwen2", "qwen2-moe", "glm", "glm4", "seed-oss"):
        return module in ("q_proj", "k_proj", "v_proj")
    return bool(options.get("attention_bias" if module in ATTENTION else "mlp_bias"))


def save_adapter(model: Any, draw: Draw, directory: Path, seed: int) -> Any:
    """Give PEFT's adapter random weights and save it; return the model as PEFT loads it back."""
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(copy.deepcopy(model), draw.config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad:
                    _randomise(name, parameter, torch.randn(parameter.shape, generator=generator))
        adapted.save_pretrained(directory)
        _edit(directory, draw.edit)
        return peft.PeftModel.from_pretrained(copy.deepcopy(model), directory).eval()


def _edit(directory: Path, edit: str) -> None:
    """Change the saved files as others than PEFT write them."""
    weights, config = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    if edit == "defaults":
        fields = json.loads(config.read_text())
        del fields["r"], fields["lora_alpha"]
        config.write_text(json.dumps(fields))
    elif edit == "float64":
        save_file({name: tensor.double() for name, tensor in load_file(weights).items()}, weights)
    elif edit:
        tensors = load_file(weights)
        for name in [name for name in tensors if name.endswith("base_layer.weight")]:
            copy = tensors[name]
            tensors[name] = copy.bfloat16() if edit == "16 bits" else (copy.roll(1, 0) * 1.1).contiguous()
        save_file(tensors, weights)


def _randomise(name: str, parameter: torch.Tensor, noise: torch.Tensor) -> None:
    if "magnitude" in name or "ia3" in name:
        parameter.mul_(1 + 0.3 * noise)
    elif "modules_to_save" in name or "token_adapter" in name or "trainable_tokens" in name:
        parameter.add_(0.3 * noise * parameter.std().clamp(min=0.3))
    elif "hada_" in name or "lokr_" in name:
        parameter.copy_(0.7 * noise)
    elif "vera_lambda" in name:
        parameter.copy_(1 + noise)
    elif parameter.dim() == 1:
        parameter.add_(0.3 * noise)
    else:
        parameter.copy_(noise * parameter.shape[-1] ** -0.5)
