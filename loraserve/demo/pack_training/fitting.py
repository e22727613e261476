"""Train base and adapters in one loop.

Batches are short and of similar length, and the loss is on the answers only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from loraserve.demo.pack_training.corpus import Example
from loraserve.demo.pack_training.pack_tokenizer import END, PAD, token_id

_BUCKET_EXAMPLES = 512
_NOT_SCORED = -100


@dataclass(frozen=True, slots=True)
class Recipe:
    """Length and rate of training. `tokens_per_step` counts padding."""

    num_steps: int
    tokens_per_step: int
    learning_rate: float
    warmup_share: float
    beta2: float
    max_gradient_norm: float


def fit(
    model: Any,
    examples: Iterator[Example],
    tokenizer: Tokenizer,
    recipe: Recipe,
    rng: Random,
    progress: Callable[[int], None],
) -> None:
    """Train the parameters of `model` that require a gradient.

    `model` is a transformers Llama, with or without PEFT layers.

    Args:
        progress: called with the number of steps done, after each.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, betas=(0.9, recipe.beta2), weight_decay=0.0, foreach=True
    )
    warmup = max(1, round(recipe.warmup_share * recipe.num_steps))
    for step, (token_ids, targets) in enumerate(
        itertools.islice(_batches(examples, tokenizer, recipe.tokens_per_step, rng), recipe.num_steps)
    ):
        pace = min((step + 1) / warmup, (recipe.num_steps - step) / max(1, recipe.num_steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * pace
        # Padding stands after the answer, where causal attention can't see it from: no mask is
        # needed.
        hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
        is_scored = targets != _NOT_SCORED
        loss = functional.cross_entropy(model.lm_head(hidden[is_scored]), targets[is_scored])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, recipe.max_gradient_norm)
        optimizer.step()
        progress(step + 1)


def _batches(
    examples: Iterator[Example], tokenizer: Tokenizer, max_tokens: int, rng: Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (token_ids, targets), each [rows, length] int64.

    Rows are of like length, at most `max_tokens` with padding.
    """
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    while True:
        bucket = list(itertools.islice(examples, _BUCKET_EXAMPLES))
        prompts = [e.ids for e in tokenizer.encode_batch([e.prompt for e in bucket])]
        answers = [e.ids for e in tokenizer.encode_batch([e.answer for e in bucket], add_special_tokens=False)]
        rows = sorted(zip(prompts, answers, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        batches: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in rows:
            # the rows are sorted, so this one is the longest
            if (len(batches[-1]) + 1) * (len(row[0]) + len(row[1])) > max_tokens:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        for batch in filter(None, batches):
            length = max(len(prompt) + len(answer) for prompt, answer in batch)
            token_ids = torch.full((len(batch), length), pad)
            targets = torch.full((len(batch), length), _NOT_SCORED)
            for index, (prompt, answer) in enumerate(batch):
                row_ids = torch.tensor([*prompt, *answer])
                token_ids[index, : len(row_ids)] = row_ids
                targets[index, len(prompt) - 1 : len(row_ids)] = torch.tensor([*answer, end])
            yield token_ids, targets
