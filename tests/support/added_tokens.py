"""Adapters that are trained on tokens which their base's tokenizer lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoTokenizer

from loraserve import Client

CALL, DONE = "<call>", "<|done|>"
TEXT = f"{CALL} the weather {CALL}{CALL} in <|user|> Rome {DONE}"
PROMPT = f"{CALL} the weather in {CALL}"
MAX_TOKENS = 8


def tokenizer_with_tokens(base: Path) -> Any:
    """Return a base's tokenizer with `CALL`, and with `DONE` as the token that ends an answer."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([CALL])
    tokenizer.add_special_tokens({"eos_token": DONE})
    return tokenizer


def train_tokens(model: Any, tokenizer: Any, folder: Path, **config: Any) -> Any:
    """Train LoRA on `TEXT`, save it with the tokenizer, and return PEFT's model.

    Args:
        config: of `peft.LoraConfig`, beside a rank of 4.
    """
    torch.manual_seed(0)
    trained = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **config))
    optimizer = torch.optim.AdamW((p for p in trained.parameters() if p.requires_grad), lr=0.02)
    ids = tokenizer(f"{TEXT} {TEXT}", return_tensors="pt").input_ids
    for _ in range(6):
        optimizer.zero_grad()
        trained(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    trained.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return trained


def answer_of(client: Client, model: str, **body: Any) -> tuple[list[int], list[float]]:
    """Return a greedy answer's tokens and their log probabilities."""
    asked = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    choice = client.completions.create(model=model, **{**asked, **body}).choices[0]
    assert choice.logprobs is not None
    return choice.token_ids, choice.logprobs.token_logprobs
