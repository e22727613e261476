"""Steps of the GPU's sampling on poisoned memory,
beside the engine's sampler and beside the rule written plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraserve.engine.execution.sampler import uniform
from loraserve.types import SamplingParams
from loraserve_kernels.cpu.sampling.drawing import Draw, draw_torch
from loraserve_kernels.gpu.sampling.sampling import SamplingRows, sample

NEAR = 1e-6
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
}


def make_params(kinds: Sequence[str], *, first_seed: int = 3) -> list[SamplingParams]:
    return [SamplingParams(seed=first_seed + 7919 * i, **KINDS[kind]) for i, kind in enumerate(kinds)]


def poisoned_logits(logits: Tensor, *, num_padding: int = 0) -> Tensor:
    """The same rows in memory that goes on with NaN to the right, and rows of NaN behind."""
    num_rows, vocab_size = logits.shape
    whole = torch.full((num_rows + num_padding, vocab_size + 24), float("nan"))
    whole[:num_rows, :vocab_size] = logits
    return whole[:, :vocab_size]


def make_rows(max_num_seqs: int, vocab_size: int) -> SamplingRows:
    """Rows whose memory holds what no step left there."""
    rows = SamplingRows(max_num_seqs, torch.device("cpu"))
    for tensor in vars(rows.scratch(vocab_size)).values():
        if isinstance(tensor, Tensor):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30 + 1)
    rows._rows.fill_(-1)
    return rows


def run(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int] | None = None,
    *,
    rows: SamplingRows | None = None,
) -> tuple[list[int], list[bool]]:
    """(tokens, finite) of every row of the logits, also of those behind the params'."""
    rows = rows or make_rows(logits.shape[0] + 1, logits.shape[1])
    rows.fill(params, range(len(params)) if positions is None else positions)
    tokens = torch.full((logits.shape[0],), -7, dtype=torch.int64)
    finite = torch.zeros(logits.shape[0], dtype=torch.bool)
    before = logits.clone()
    sample(logits, rows, tokens, finite)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return tokens.tolist(), finite.tolist()


def by_engine(row: Tensor, params: SamplingParams, position: int) -> int:
    if params.temperature <= 1e-5:
        return int(row.argmax())
    of_row = Draw(params.temperature, params.top_k, params.top_p, params.min_p, uniform(params.seed, position))
    return draw_torch(row, of_row)


def by_rule(row: Tensor, params: SamplingParams, position: int) -> tuple[int, float]:
    """The token by the rule in float64, equal logits in order of their ids; and how near the random
    number is to where another one begins.
    """
    if params.temperature <= 1e-5:
        return int(np.flatnonzero(row.numpy() == row.numpy().max())[0]), 1.0
    scaled = row.numpy() / np.float32(params.temperature)
    has_top_k = 0 < params.top_k < len(scaled)
    is_sorted = has_top_k or params.top_p < 1.0
    order = np.argsort(-scaled, kind="stable") if is_sorted else np.arange(len(scaled))
    p = np.exp(scaled[order].astype(np.float64) - float(scaled.max()))
    likeliest = p.max()
    if has_top_k:
        p = p[: params.top_k]
    if params.top_p < 1.0:
        p = p[: max(1, int(((p.cumsum() - p) < params.top_p * p.sum()).sum()))]
    p = np.where(p >= params.min_p * likeliest, p, 0.0)
    running = p.cumsum() / p.sum()
    u = uniform(params.seed, position)
    nearest = float(np.abs(running[:-1] - u).min()) if len(running) > 1 else 1.0
    return int(order[np.searchsorted(running, u, side="right")]), nearest


def equals_engine(logits: Tensor, params: Sequence[SamplingParams]) -> bool:
    tokens, finite = run(poisoned_logits(logits), params)
    return all(finite) and tokens == [
        by_engine(row, p, i) for i, (row, p) in enumerate(zip(logits, params, strict=True))
    ]


def equals_rule(logits: Tensor, params: Sequence[SamplingParams]) -> bool:
    """Every token, but those whose random number is nearer than `NEAR` to another one's."""
    tokens, finite = run(poisoned_logits(logits), params)
    expected = [by_rule(row, p, i) for i, (row, p) in enumerate(zip(logits, params, strict=True))]
    return all(finite) and all(
        token == right or nearest < NEAR for token, (right, nearest) in zip(tokens, expected, strict=True)
    )
