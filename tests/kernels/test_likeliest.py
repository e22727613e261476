"""A row's likeliest token is the first of the largest; a row that isn't finite has none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loraserve_kernels.cpu.sampling.likeliest import NOT_FINITE, likeliest, likeliest_torch

from .avx2 import run_tests, wider_processor

WIDTHS = (1, 2, 7, 15, 16, 17, 33, 511, 512, 513, 1000, 32000)
EACH = pytest.mark.parametrize("find", [likeliest, likeliest_torch])

Find = Callable[[Tensor], list[int]]


@EACH
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 70])
def test_every_place_can_have_the_largest(find: Find, num_rows: int, width: int) -> None:
    logits = torch.randn(num_rows, width)
    expected = torch.randint(width, (num_rows,))
    expected[0] = width - 1
    logits[torch.arange(num_rows), expected] = 9.0
    assert find(logits) == expected.tolist()
    # rows of a wider tensor
    assert find(torch.cat([logits, torch.full((num_rows, 3), 99.0)], 1)[:, :width]) == expected.tolist()


@EACH
@pytest.mark.parametrize("width", WIDTHS)
def test_first_of_equal_maxima_is_taken(find: Find, width: int) -> None:
    coarse = torch.randint(-3, 3, (40, width)).float()
    # 0 and -0 are equal
    coarse[coarse == 0] *= torch.where(torch.rand(int((coarse == 0).sum())) < 0.5, 1.0, -1.0)
    assert find(coarse) == [row.index(max(row)) for row in coarse.tolist()]
    assert find(torch.full((2, width), -1e30)) == [0, 0]


@EACH
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_non_finite_number_spoils_only_own_row(find: Find, width: int, bad: float) -> None:
    logits = torch.randn(12, width)
    expected = logits.argmax(1).tolist()
    places = [0, width // 2, width - 1]
    for row, place in enumerate(places):
        logits[row * 4, place] = bad
        expected[row * 4] = NOT_FINITE
    assert find(logits) == expected


@EACH
def test_large_numbers_are_finite(find: Find) -> None:
    logits = torch.full((2, 100), 3e38)
    logits[1, 50] = math.nan
    assert find(logits) == [0, NOT_FINITE]


@wider_processor
def test_avx2_samples_equal_wider_processors() -> None:
    run_tests("test_likeliest.py", "test_drawing.py")
