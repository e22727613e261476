"""Tokens sampled on the device, beside those that the CPU's sampler draws from the same logits,
seeds and positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.gpu.close import holds
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row
from loraserve.engine.execution.sampler import MIN_TEMPERATURE, uniform
from loraserve.types import SamplingParams
from loraserve_kernels.cpu.sampling.drawing import Draw, draw_torch
from loraserve_kernels.gpu.sampling.masks import LOWEST, MaskRows, allowed_logits
from loraserve_kernels.gpu.sampling.sampling import SamplingRows, sample, top_logprobs

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top-k": {"temperature": 0.9, "top_k": 40},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-p of nearly all": {"temperature": 2.0, "top_p": 0.999},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
}
NEAR = 1e-6
"""Of a random number to where another token begins:
sums in another order may then give that one.
"""


def cases(machine: Machine) -> Iterator[Case]:
    rows, vocab = (len(KINDS), 700) if machine.is_tiny else (256, 128_256)
    for std in (2.0,) if machine.is_tiny else (0.5, 2.0, 8.0):
        yield Case(f"logits of deviation {std}", lambda s=std: _check(machine, rows, vocab, s))
    yield Case("cobatched", lambda: _check_cobatched(machine, rows, vocab))
    yield Case("not finite", lambda: _check_not_finite(machine, vocab))
    yield Case("masks", lambda: _check_masks(machine, rows, vocab))
    yield Case("logprobs", lambda: _check_logprobs(machine, vocab))


def make_params(count: int) -> list[SamplingParams]:
    kinds = list(KINDS.values())
    return [SamplingParams(seed=2**63 + 7919 * i, **kinds[i % len(kinds)]) for i in range(count)]


def run(machine: Machine, logits: Tensor, params: list[SamplingParams], positions: list[int]) -> tuple[Tensor, Tensor]:
    rows = SamplingRows(len(params), machine.device)
    rows.fill(params, positions)
    tokens = torch.full((len(params),), -7, dtype=torch.int64, device=machine.device)
    finite = torch.zeros(len(params), dtype=torch.bool, device=machine.device)
    sample(logits, rows, tokens, finite)
    return tokens.cpu(), finite.cpu()


def _check(machine: Machine, count: int, vocab: int, std: float) -> list[Row]:
    logits, params = machine.randn(count, vocab, std=std), make_params(count)
    tokens, finite = run(machine, logits, params, list(range(count)))
    on_host, wrong, near = logits.cpu(), [], 0
    for i, (row, p) in enumerate(zip(on_host, params, strict=True)):
        u = uniform(p.seed, i)
        of_row = Draw(p.temperature, p.top_k, p.top_p, p.min_p, u)
        expected = int(row.argmax()) if p.temperature <= MIN_TEMPERATURE else draw_torch(row, of_row)
        if int(tokens[i]) != expected:
            if p.temperature > MIN_TEMPERATURE and distance(row, p, u) < NEAR:
                near += 1
            else:
                wrong.append(f"row {i} ({list(KINDS)[i % len(KINDS)]}): {int(tokens[i])}, not {expected}")
    note = "; ".join(wrong[:3]) or f"{count} rows of {vocab}, {near} of them within {NEAR:g} of another token"
    is_ok = not wrong and bool(finite.all()) and near <= max(1, count // 50)
    return [holds(f"sampling, logits of deviation {std:g}", is_ok, note)]


def distance(row: Tensor, params: SamplingParams, u: float) -> float:
    """How far the random number is from the nearest place where one token's part of the
    distribution ends, in float64.
    """
    scaled = row.numpy() / np.float32(params.temperature)
    has_top_k = 0 < params.top_k < len(scaled)
    order = np.argsort(-scaled, kind="stable") if has_top_k or params.top_p < 1 else np.arange(len(scaled))
    p = np.exp(scaled[order].astype(np.float64) - float(scaled.max()))
    if has_top_k:
        p = p[: params.top_k]
    if params.top_p < 1:
        p = p[: max(1, int(((p.cumsum() - p) < params.top_p * p.sum()).sum()))]
    p = np.where(p >= params.min_p * p.max(), p, 0.0)
    ends = p.cumsum()[:-1] / p.sum()
    return float(np.abs(ends - u).min()) if len(ends) else 1.0


def _check_cobatched(machine: Machine, count: int, vocab: int) -> list[Row]:
    logits, params = machine.randn(count, vocab, std=2.0), make_params(count)
    together, _ = run(machine, logits, params, list(range(count)))
    chosen = range(0, count, max(1, count // 8))
    alone = [int(run(machine, logits[i : i + 1], [params[i]], [i])[0]) for i in chosen]
    return [holds("sampling: a row alone and cobatched", [int(together[i]) for i in chosen] == alone)]


def _check_not_finite(machine: Machine, vocab: int) -> list[Row]:
    logits, params = machine.randn(4, vocab), make_params(4)
    logits[1, vocab - 1] = float("nan")
    logits[3, 0] = float("inf")
    _, finite = run(machine, logits, params, [0] * 4)
    return [holds("sampling: rows that aren't finite are told", finite.tolist() == [True, False, True, False])]


def _check_masks(machine: Machine, count: int, vocab: int) -> list[Row]:
    """Masks go through pinned memory, two steps after each other; the kernel has to apply both."""
    rows, found = MaskRows(count, vocab, machine.device), []
    for step in range(3):
        logits = machine.randn(count, vocab, std=2.0)
        draw = np.random.default_rng(step)
        masks: list[npt.NDArray[np.uint32] | None] = []
        expected = logits.cpu().clone()
        for row in range(count):
            allowed = draw.random(vocab) < (0.001, 0.5, 0.98)[row % 3]
            padded = np.pad(allowed, (0, -vocab % 32))
            words = np.packbits(padded, bitorder="little").view(np.uint32)
            masks.append(None if row % 4 == 3 else words)
            if row % 4 != 3:
                expected[row, torch.from_numpy(~allowed)] = float(LOWEST.value)
        rows.fill(masks)
        found.append(torch.equal(allowed_logits(logits, rows).cpu(), expected))
    return [holds("sampling: masks of allowed tokens, three steps", all(found))]


def _check_logprobs(machine: Machine, vocab: int) -> list[Row]:
    logits = machine.randn(5, vocab, std=3.0)
    tokens = torch.randint(vocab, (5,), device=machine.device)
    chosen, values, ids = top_logprobs(logits, tokens, 6)
    expected = logits.double().log_softmax(1)
    top = expected.topk(6, dim=1)
    errors = (chosen - expected.gather(1, tokens[:, None])[:, 0], values - top.values)
    error = max(float(e.abs().max()) for e in errors)
    is_ok = error <= 1e-4 and torch.equal(logits.gather(1, ids), logits.gather(1, top.indices))
    return [{"check": "log probabilities", "error": error, "bound": 1e-4, "ok": is_ok, "note": f"{vocab} tokens"}]
