"""Sampling kernels that are wrong in one place:
the comparisons of test_gpu_sampling must fail for each.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from loraserve.engine.execution.sampler import uniform
from loraserve.types import SamplingParams
from loraserve_kernels.gpu.sampling import draw as draw_kernels
from loraserve_kernels.gpu.sampling import kernels as sampling_kernels
from loraserve_kernels.gpu.sampling import sampling as gpu_sampling

from .mutation import mutant_of
from .sampling_steps import by_rule, make_params, poisoned_logits, run

pytestmark = [pytest.mark.interpreted, pytest.mark.campaign]

KERNELS: dict[str, Any] = {
    "scan": sampling_kernels.scan_kernel,
    "pick": sampling_kernels.pick_kernel,
    "weigh": sampling_kernels.weigh_kernel,
    "draw": draw_kernels.draw_kernel,
    "search": draw_kernels.search_kernel,
}
# two chunks, of which the second is short
VOCAB_SIZE = 7001


def late(**cuts: Any) -> SamplingParams:
    """With a seed whose first number is near 1: the token is the last one that is kept."""
    return SamplingParams(seed=next(s for s in range(10_000) if 0.985 < uniform(s, 0) < 0.995), **cuts)


def equals_rule_at_0(logits: Tensor, params: list[SamplingParams]) -> bool:
    tokens, finite = run(poisoned_logits(logits), params, [0] * len(params))
    return all(finite) and tokens == [by_rule(row, p, 0)[0] for row, p in zip(logits, params, strict=True)]


def is_greedy_right() -> bool:
    """Among equal logits, beside a row of higher ones and one that isn't finite."""
    logits = torch.randn(4, VOCAB_SIZE)[:3]
    logits[0, [71, 72, 4101]] = 9.0
    logits[1, :5] = torch.arange(50.0, 55.0)
    logits[2, 6000] = float("nan")
    tokens, finite = run(logits, make_params(["greedy"] * 3))
    return tokens[:2] == [71, 4] and finite == [True, True, False]


def is_drawn_by_id() -> bool:
    params = [SamplingParams(temperature=0.5, seed=seed) for seed in range(4)] + [late(min_p=0.5, temperature=0.7)]
    return equals_rule_at_0(torch.randn(5, VOCAB_SIZE), params)


def is_drawn_by_logit() -> bool:
    """From candidates: with every cut, among equal logits, on both sides of zero."""
    logits = torch.randn(5, VOCAB_SIZE) * 2 - 7
    logits[1] *= 3
    logits[3:] = logits[3:].round()
    params = [late(top_k=2), late(top_p=0.5), late(top_k=50, min_p=0.6, temperature=0.8)]
    params += [late(top_k=40), SamplingParams(top_k=40, seed=0)]
    return equals_rule_at_0(logits, params)


def is_searched() -> bool:
    """Rows whose candidates aren't enough: they hold too little, or there is no room for the
    likeliest among all that share a logit.
    """
    logits = torch.randn(2, VOCAB_SIZE) / 4
    logits[1] = 0.0
    logits[1, 6990] = 1.0
    return equals_rule_at_0(logits, [late(top_p=0.98, min_p=0.5), late(top_k=5000)])


COMPARISONS = [is_greedy_right, is_drawn_by_id, is_drawn_by_logit, is_searched]


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_the_unmutated_kernels_are_right(comparison: Any) -> None:
    torch.manual_seed(0)
    assert comparison()


@pytest.mark.parametrize(
    ("kernel", "old", "new", "comparison"),
    [
        pytest.param("scan", "token = tl.min(tl.min(tl.where(x == top, ids, NO_TOKEN), axis=1), axis=0)",
            "token = tl.max(tl.max(tl.where(x == top, ids, 0), axis=1), axis=0)", is_greedy_right,
            id="the first of equal logits isn't taken"),
        pytest.param("scan", "ids < vocab_size, other=float(\"-inf\"))\n    is_finite",
            "ids < vocab_size + 1000, other=float(\"-inf\"))\n    is_finite", is_greedy_right,
            id="a row is read past its end"),
        pytest.param("scan", '(tl.abs(x) < float("inf")) |', "(x == x + 1) |", is_greedy_right,
            id="finite logits are reported"),
        pytest.param("pick", "tl.store(finite_ptr + row, is_finite != 0)",
            "tl.store(finite_ptr + row, is_finite == is_finite)", is_greedy_right, id="a NaN isn't reported"),
        pytest.param("pick", "chunk_tops == top, chunk_tokens", "chunk_tops < top, chunk_tokens", is_greedy_right,
            id="another chunk's token"),
        pytest.param("pick", "tops_ptr + row, tl.div_rn(top, temperature)", "tops_ptr + row, top", is_drawn_by_id,
            id="the top isn't scaled"),
        pytest.param("weigh", "tl.where(s >= floor, weight_of(s, top), 0)", "weight_of(s, top)", is_drawn_by_id,
            id="min-p doesn't cut the chunks"),
        pytest.param("weigh", "s = tl.div_rn(x, temperature)", "s = x", is_drawn_by_id, id="logits aren't scaled"),
        pytest.param("weigh", "places = tl.atomic_add(counts_ptr + row, count, sem=\"relaxed\") + ranks - 1",
            "places = ranks - 1 + 0 * tl.atomic_add(counts_ptr + row, count, sem=\"relaxed\")", is_drawn_by_logit,
            id="chunks take the same places"),
        pytest.param("draw", "target -= tl.sum(tl.where(chunks < chunk, masses, 0), axis=0)", "pass", is_drawn_by_id,
            id="the chunks before aren't taken off"),
        pytest.param("draw", "axis=0) <= target).to(tl.int32), axis=0)\n        target",
            "axis=0) < 0).to(tl.int32), axis=0)\n        target", is_drawn_by_id, id="every chunk is the first"),
        pytest.param("draw", "tl.load(seed_ptr + row), tl.load(position_ptr + row)), tl.sum",
            "tl.load(position_ptr + row), tl.load(seed_ptr + row)), tl.sum", is_drawn_by_id,
            id="seed and position are swapped"),
        pytest.param("draw", "count = top_k.to(tl.int64)", "count = top_k.to(tl.int64) + 1", is_drawn_by_logit,
            id="top-k keeps one more"),
        pytest.param("draw", "mass += (count - num_above) * weight_of(float_of(key), top)", "pass", is_drawn_by_logit,
            id="top-k drops the last logit"),
        pytest.param("draw", "mass += ((last - mass) // weight + 1) * weight", "pass", is_drawn_by_logit,
            id="top-p drops the token that crosses it"),
        pytest.param("draw", "mass = tl.minimum(mass, reached)", "pass", is_drawn_by_logit, id="min-p doesn't cut"),
        pytest.param("draw", "return key, rank.to(tl.int32)", "return key, rank.to(tl.int32) * 0", is_drawn_by_logit,
            id="the first of equal logits is always taken"),
        pytest.param("search", "return key, rank.to(tl.int32)", "return key, rank.to(tl.int32) * 0", is_searched,
            id="and so in the search"),
        pytest.param("draw", "high, above = key1, sum1", "high = key1", is_drawn_by_logit,
            id="what is above is forgotten"),
        pytest.param("draw", "is_enough & (count <= MAX_CANDIDATES)", "count <= MAX_CANDIDATES", is_searched,
            id="too few candidates are enough"),
        pytest.param("draw", "is_enough & (count <= MAX_CANDIDATES)", "is_enough", is_searched,
            id="candidates without room are forgotten"),
        pytest.param("search", "ranks = num_seen + tl.cumsum", "ranks = tl.cumsum", is_searched,
            id="every block counts from the start"),
        pytest.param("search", "(start < vocab_size) & (num_seen <= rank)", "start < BLOCK", is_searched,
            id="the first block alone is searched"),
        pytest.param("search", "row_keys = tl.where(start + offs < size, key_of(s), 0)",
            "row_keys = key_of(s)", is_searched, id="what isn't there is counted"),
    ],
)  # fmt: skip
def test_a_mutant_kernel_is_caught(
    kernel: str, old: str, new: str, comparison: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(gpu_sampling, f"{kernel}_kernel", mutant_of(KERNELS[kernel], old, new, tmp_path))
    assert not comparison()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("z ^ (z >> 27)", "z ^ (z >> 28)", id="random bits are others"),
        pytest.param("tl.where(x < 0.0, bits ^ 0xFFFFFFFF, bits | 0x80000000)", "bits | 0x80000000",
            id="floats below zero are in the wrong order"),
        pytest.param("depth * _LOG2E\n", "depth\n", id="weights are powers of two"),
        pytest.param("return tl.minimum(tl.maximum(kept, 1), mass)", "return mass", id="top-p doesn't cut"),
    ],
)  # fmt: skip
def test_wrong_arithmetic_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = Path(str(draw_kernels.__file__)).parent
    math = (path / "probabilities.py").read_text()
    assert math.count(old) == 1
    (tmp_path / "wrong_math.py").write_text(math.replace(old, new))
    monkeypatch.syspath_prepend(tmp_path)
    source = "from loraserve_kernels.gpu.sampling.probabilities import"
    mutants = {name: mutant_of(kernel, source, "from wrong_math import", tmp_path) for name, kernel in KERNELS.items()}
    for name, kernel in mutants.items():
        monkeypatch.setattr(gpu_sampling, f"{name}_kernel", kernel)
    assert not is_drawn_by_logit()
