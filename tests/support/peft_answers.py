"""Answers of a model as transformers and PEFT generate them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.inference_mode()
def generate(model: Any, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens after a prompt of token ids, and their log probabilities."""
    ids = torch.tensor([list(prompt)])
    answer = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = answer.sequences[0, len(prompt) :]
    rows = torch.cat(answer.logits).log_softmax(-1)
    return tokens.tolist(), rows.gather(1, tokens[:, None])[:, 0].tolist()
