"""Makes a demo pack: a 1M-parameter Llama and seven PEFT adapters.

They are trained from a seed on one CPU core. The one module that needs `transformers` and `peft`
(the extra `demo-train`), with `loraserve.demo.score`.
"""

from __future__ import annotations

import json
import platform
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from tokenizers import Tokenizer

from loraserve.demo.card import Card, write_card
from loraserve.demo.frames import ADAPTERS, Style
from loraserve.demo.pack import BASE_NAME, CARD_FILES, adapter_dirs, base_dir
from loraserve.demo.pack_training.corpus import adapter_examples, base_examples
from loraserve.demo.pack_training.fitting import Recipe, fit
from loraserve.demo.pack_training.pack_tokenizer import END, PAD, token_id, tokenizer_config, train_tokenizer
from loraserve.demo.score import NUM_PROMPTS, PROMPT_SEED, score_pack

DEFAULT_SEED = 7
MAX_POSITIONS = 512
ROPE_THETA = 1000.0
BASE_RECIPE = Recipe(
    num_steps=2600, tokens_per_step=480, learning_rate=4e-3, warmup_share=0.02, beta2=0.98, max_gradient_norm=1.0
)
# Without the short memory of beta2, the warm-up and the tight clip, an adapter's first tokens come
# out as garbage.
ADAPTER_RECIPE = Recipe(
    num_steps=120, tokens_per_step=640, learning_rate=8e-3, warmup_share=0.1, beta2=0.9, max_gradient_norm=0.3
)
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Progress = Callable[[str, int, int], None]
"""Called with (what is being made, steps done, steps in all)."""


def train(out_dir: Path, seed: int = DEFAULT_SEED, progress: Progress = lambda stage, done, total: None) -> Card:
    """Write a pack to `out_dir`, its card last, and return the card.

    The same seed gives the same pack on the same machine.

    Args:
        out_dir: made if it isn't there; a pack that is in it is written over.
    """
    for name in CARD_FILES:
        # A card that is there describes the old pack.
        (out_dir / name).unlink(missing_ok=True)
    base_time_s, training_time_s = train_models(out_dir, seed, progress)
    progress("score", 0, 1)
    with _one_thread():
        scores = score_pack(out_dir)
    progress("score", 1, 1)
    card = Card(
        seed=seed,
        num_prompts=NUM_PROMPTS,
        prompt_seed=PROMPT_SEED,
        scores=scores,
        base_time_s=round(base_time_s, 1),
        training_time_s=round(training_time_s, 1),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
    )
    write_card(out_dir, card)
    return card


def train_models(
    out_dir: Path,
    seed: int,
    progress: Progress,
    base_recipe: Recipe = BASE_RECIPE,
    adapter_recipe: Recipe = ADAPTER_RECIPE,
) -> tuple[float, float]:
    """Write base and adapters to `out_dir`.

    Return how long the base took, and everything: seconds of one core's time.
    """
    with _one_thread():
        start = time.process_time()
        tokenizer = train_tokenizer(seed)
        _train_base(base_dir(out_dir), tokenizer, seed, base_recipe, progress)
        base_time_s = time.process_time() - start
        directories = adapter_dirs(out_dir)
        for style in ADAPTERS:
            # From the disk: the adapter must learn on the rounded weights that it will be served
            # on.
            base = transformers.LlamaForCausalLM.from_pretrained(base_dir(out_dir), dtype=torch.float32)
            _train_adapter(directories[style], base, tokenizer, style, seed, adapter_recipe, progress)
        return base_time_s, time.process_time() - start


def _train_base(directory: Path, tokenizer: Tokenizer, seed: int, recipe: Recipe, progress: Progress) -> None:
    torch.manual_seed(seed)
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=True,
        # A fifth of this is usual, and far too small for a model so narrow.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = transformers.LlamaForCausalLM(config)
    rng = random.Random(f"base {seed}")
    fit(
        model,
        base_examples(rng),
        tokenizer,
        recipe,
        rng,
        lambda step: progress("base", step, recipe.num_steps),
    )
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=pad)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(MAX_POSITIONS))
    # transformers 5 writes it inside rope_parameters alone, where older readers don't look.
    _tidy(directory, "config.json", {"rope_theta": ROPE_THETA})


def _train_adapter(
    directory: Path, base: Any, tokenizer: Tokenizer, style: Style, seed: int, recipe: Recipe, progress: Progress
) -> None:
    torch.manual_seed(seed + 1 + ADAPTERS.index(style))
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=list(TARGET_MODULES), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config)
    rng = random.Random(f"adapter {style} {seed}")
    fit(
        model.get_base_model(),
        adapter_examples(rng, style),
        tokenizer,
        recipe,
        rng,
        lambda step: progress(style, step, recipe.num_steps),
    )
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(
        directory,
        # They weren't trained; left to itself, PEFT looks up on the hub whether they might have
        # been.
        save_embedding_layers=False,
    )
    (directory / "README.md").unlink(missing_ok=True)
    # PEFT writes this machine's path, and a set in whatever order it has this time.
    _tidy(
        directory,
        "adapter_config.json",
        {"base_model_name_or_path": BASE_NAME, "target_modules": list(TARGET_MODULES)},
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one core and no log: these models are too small to share out."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _tidy(directory: Path, config_name: str, fields: dict[str, object]) -> None:
    """Set these fields of the config, and let everybody read the directory's files.

    safetensors makes them private.
    """
    config = json.loads((directory / config_name).read_text(encoding="utf-8"))
    _write_json(directory / config_name, config | fields)
    for path in directory.iterdir():
        path.chmod(0o644)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
