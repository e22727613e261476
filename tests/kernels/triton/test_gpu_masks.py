"""Masks of allowed tokens on a GPU, against the rule written plainly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from loraserve.types import SamplingParams
from loraserve_kernels.errors import InvalidPlan, TensorMismatch
from loraserve_kernels.gpu.sampling import masks as gpu_masks
from loraserve_kernels.gpu.sampling.masks import BLOCK, MaskRows, allowed_logits

from .mutation import mutant_of
from .sampling_steps import KINDS, by_engine, make_params, poisoned_logits, run

pytestmark = pytest.mark.interpreted

CPU = torch.device("cpu")
LOWEST = float(gpu_masks.LOWEST.value)
SIZES = [1, 31, 32, 33, 63, BLOCK, BLOCK + 1, 2 * BLOCK + 77]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def draw_masks(num_rows: int, vocab_size: int) -> list[np.ndarray | None]:
    """Packed masks: few tokens, many, all or none of them; every fourth row has no mask."""
    draw = np.random.default_rng(num_rows * vocab_size)
    masks: list[np.ndarray | None] = []
    for row in range(num_rows):
        bits = draw.random(vocab_size) < (0.02, 0.9, 0.5)[row % 3]
        padded = np.pad(bits, (0, -vocab_size % 32))
        masks.append(None if row % 4 == 3 else np.packbits(padded, bitorder="little").view(np.uint32))
    return masks


def by_rule(logits: torch.Tensor, masks: list[np.ndarray | None]) -> torch.Tensor:
    out = logits.clone()
    for row, mask in zip(out, masks, strict=True):
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little").astype(bool)
            row[torch.from_numpy(~bits) & row.isfinite()] = LOWEST
    return out


def masked(logits: torch.Tensor, masks: list[np.ndarray | None], *, max_num_seqs: int = 0) -> torch.Tensor:
    rows = MaskRows(max_num_seqs or len(masks), logits.shape[1], CPU)
    # as a step before might have left it
    rows._rows.fill_(-1)
    rows.fill(masks)
    before = logits.clone()
    out = allowed_logits(logits, rows)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return out


@pytest.mark.parametrize("vocab_size", SIZES)
def test_forbidden_tokens_get_lowest_logit(vocab_size: int) -> None:
    logits, masks = poisoned_logits(torch.randn(6, vocab_size)), draw_masks(6, vocab_size)
    assert torch.equal(masked(logits, masks, max_num_seqs=9), by_rule(logits, masks))


def test_non_finite_logit_of_forbidden_token_stays() -> None:
    logits, masks = torch.randn(4, 100), [np.zeros(4, np.uint32)] * 4
    logits[0, 3], logits[1, 99], logits[2, 0] = float("nan"), float("inf"), float("-inf")
    out = masked(logits, masks)
    assert out[0, 3].isnan()
    assert out[1, 99] == float("inf")
    assert out[2, 0] == float("-inf")
    assert torch.equal(out[3], torch.full((100,), LOWEST))
    _, finite = run(out, [SamplingParams(temperature=0.0)] * 4)
    assert finite == [False, False, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_among_allowed_tokens_equals_engine(kind: str) -> None:
    logits, masks = torch.randn(6, 700) * 3, draw_masks(6, 700)
    masks[0] = np.zeros(22, np.uint32)
    masks[0][11] = 1 << 7
    params = make_params([kind] * 6)
    tokens, finite = run(masked(logits, masks), params)
    assert all(finite)
    expected = by_rule(logits, masks).masked_fill(by_rule(logits, masks) == LOWEST, float("-inf"))
    assert tokens == [by_engine(row, p, i) for i, (row, p) in enumerate(zip(expected, params, strict=True))]
    assert tokens[0] == 11 * 32 + 7


def test_steps_alternate_between_two_buffers() -> None:
    """The third fill may overwrite the first one's buffer: its copy is done by then."""
    rows = MaskRows(2, 64, CPU)
    for number in range(5):
        rows.fill([np.full(2, number, np.uint32), None])
        assert rows.words[0].tolist() == [number, number]
        assert rows.is_masked.tolist() == [1, 0]
    rows.fill([None])
    assert rows.is_masked[0] == 0


def test_mismatched_rows_are_refused() -> None:
    rows = MaskRows(2, 64, CPU)
    with pytest.raises(InvalidPlan):
        rows.fill([None] * 3)
    rows.fill([None, None])
    for logits in (
        torch.zeros(3, 64),
        torch.zeros(2, 65),
        torch.zeros(2, 64, dtype=torch.float16),
        torch.zeros(64, 2).T,
    ):
        with pytest.raises(TensorMismatch):
            allowed_logits(logits, rows)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ids // 32", "ids // 31"),
        ("(ids % 32)", "(ids % 31)"),
        ("& 1) != 0)", "& 1) == 0)"),
        ('| ~(tl.abs(x) < float("inf"))', "| (x != x)"),
        ("row * stride_words) != 0", "row * stride_words) == 0"),
        ("row * stride_words + ids", "ids"),
        ("out_ptr + row * vocab_size", "out_ptr + row * (vocab_size - 1)"),
        ("tl.where(is_kept, x, LOWEST)", "tl.where(is_kept, x, 0.0)"),
    ],
)
def test_kernel_with_single_fault_is_detected(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_masks, "mask_kernel", mutant_of(gpu_masks.mask_kernel, old, new, tmp_path))
    logits, masks = poisoned_logits(torch.randn(6, 700)), draw_masks(6, 700)
    logits[0, 1], logits[1, 2] = float("inf"), float("nan")
    masks[0], masks[1] = np.zeros(22, np.uint32), np.zeros(22, np.uint32)
    assert not torch.equal(masked(logits, masks).nan_to_num(), by_rule(logits, masks).nan_to_num())
