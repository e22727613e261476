"""Make a random-weight Llama, a tokenizer and LoRA adapters in PEFT's format.

Nothing is downloaded; the same arguments give the same bytes.

    python benchmarks/make_model.py S benchmarks/models/S --adapters 32
    python benchmarks/make_model.py S benchmarks/models/S --adapters 1000 \\
        --ranks 1 --targets q_proj --first 1000 --only-adapters

The base goes to OUT, the adapters to OUT-adapters/lora-0000 and so on, ranks taken in turn.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MODULES = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<pad>"]
CORPUS_CHARACTERS = 24 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """A base's shape."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @staticmethod
    def of(model: Path) -> Size:
        """Return the shape of a Llama in a folder."""
        config = json.loads((model / "config.json").read_text())
        fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        return Size(*(config[field] for field in fields), config["vocab_size"])

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Module → (out_features, in_features)."""
        h, kv, i = self.hidden, self.hidden // self.heads * self.kv_heads, self.intermediate
        shapes = ((h, h), (kv, h), (kv, h), (h, h), (i, h), (i, h), (h, i))
        return dict(zip(MODULES, shapes, strict=True))


SIZES = {
    "tiny": Size(64, 2, 4, 2, 128, 512),
    "S": Size(768, 12, 12, 4, 2048, 32000),
    "M": Size(2048, 22, 32, 4, 5632, 32000),
}


def normal(generator: torch.Generator, shape: tuple[int, ...], std: float, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=generator) * std).to(dtype)


def module_path(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{'self_attn' if module in ATTENTION else 'mlp'}.{module}"


def write_base(size: Size, out: Path, dtype: torch.dtype, seed: int) -> None:
    """Write config.json, generation_config.json and model.safetensors.

    Activations and logits have the size that a trained model's have.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": normal(generator, (size.vocab, size.hidden), 1.0, dtype)}
    for layer in range(size.layers):
        for module, shape in size.modules.items():
            tensors[f"{module_path(layer, module)}.weight"] = normal(generator, shape, shape[1] ** -0.5, dtype)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(size.hidden, dtype=dtype)
    tensors["model.norm.weight"] = torch.ones(size.hidden, dtype=dtype)
    tensors["lm_head.weight"] = normal(generator, (size.vocab, size.hidden), 2.0 * size.hidden**-0.5, dtype)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.hidden // size.heads,
        "intermediate_size": size.intermediate,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def corpus() -> Iterator[str]:
    """The ASCII lines of the standard library's sources."""
    root, taken = Path(sysconfig.get_paths()["stdlib"]), 0
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        lines = path.read_bytes().decode("ascii", "replace").splitlines(keepends=True)
        text = "".join(line for line in lines if "\ufffd" not in line)
        taken += len(text)
        yield text
        if taken >= CORPUS_CHARACTERS:
            return


def write_tokenizer(out: Path, vocab: int) -> None:
    """Train a byte-level BPE and write tokenizer.json and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def adapter_tensors(
    size: Size, *, rank: int, targets: tuple[str, ...], dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    """Random weights of one adapter.

    With alpha / r = 2, its update is half as large as the base weight, whatever the rank.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(size.layers):
        for module in targets:
            out_features, in_features = size.modules[module]
            path = f"base_model.model.{module_path(layer, module)}"
            tensors[f"{path}.lora_A.weight"] = normal(generator, (rank, in_features), in_features**-0.5, dtype)
            tensors[f"{path}.lora_B.weight"] = normal(generator, (out_features, rank), 0.25 * rank**-0.5, dtype)
    return tensors


def adapter_config(
    *, rank: int, targets: tuple[str, ...], invocation: tuple[int, ...] | None = None
) -> dict[str, object]:
    """Return the contents of adapter_config.json, as PEFT writes it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
        "init_lora_weights": True,
        "alora_invocation_tokens": None if invocation is None else list(invocation),
    }


def write_adapter(
    size: Size,
    out: Path,
    *,
    rank: int,
    targets: tuple[str, ...],
    dtype: torch.dtype,
    seed: int,
    invocation: tuple[int, ...] | None = None,
) -> None:
    """Write one adapter. With an invocation it's an activated LoRA."""
    tensors = adapter_tensors(size, rank=rank, targets=targets, dtype=dtype, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = adapter_config(rank=rank, targets=targets, invocation=invocation)
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=(*SIZES, "real"), help="real: with --only-adapters, for the base in OUT")
    parser.add_argument("out", type=Path)
    parser.add_argument("--adapters", type=int, default=0, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first adapter's number")
    parser.add_argument("--ranks", default="8,16,32,64")
    parser.add_argument("--targets", default=",".join(MODULES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-adapters", action="store_true", help="leave the base as it is")
    options = parser.parse_args()
    if options.size == "real" and not options.only_adapters:
        parser.error("a real base isn't made here: python -m benchmarks.real_model OUT; add --only-adapters")
    size, dtype = SIZES.get(options.size) or Size.of(options.out), getattr(torch, options.dtype)
    if not options.only_adapters:
        write_base(size, options.out, dtype, options.seed)
        write_tokenizer(options.out, size.vocab)
    ranks, targets = [int(rank) for rank in options.ranks.split(",")], tuple(options.targets.split(","))
    folder = options.out.with_name(f"{options.out.name}-adapters")
    for i in range(options.first, options.first + options.adapters):
        rank, seed = ranks[i % len(ranks)], options.seed + 1 + i
        write_adapter(size, folder / f"lora-{i:04d}", rank=rank, targets=targets, dtype=dtype, seed=seed)


if __name__ == "__main__":
    main()
