"""A drawn token lies where the distribution's running sum passes the drawn number."""

from __future__ import annotations

import math
import random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.sampling.drawing import Draw, draw, draw_torch
from loraserve_kernels.errors import TensorMismatch

WIDTHS = (16, 17, 31, 33, 511, 512, 513, 1040, 32003)
UNIFORMS = (0.0, 1e-9, 0.1, 0.37, 0.5, 0.73, 0.9, 0.999, 1 - 2**-53)
EPSILON = 1e-5
"""Share of the whole by which borders may differ: weights are float32, the rule's are float64."""


def flat(width: int) -> Tensor:
    return torch.randn(width)


def peaked(width: int) -> Tensor:
    return torch.randn(width) * 6


def coarse(width: int) -> Tensor:
    """Make many equal logits."""
    return torch.randint(-4, 4, (width,)).float()


def equal(width: int) -> Tensor:
    return torch.zeros(width)


def masked(width: int) -> Tensor:
    """Make logits of which a grammar allows five."""
    row = torch.full((width,), -math.inf)
    row[torch.randperm(width)[:5]] = torch.randn(5)
    return row


def lonely(width: int) -> Tensor:
    row = torch.full((width,), -1e30)
    row[width - 1] = 3.0
    return row


KINDS = (flat, peaked, coarse, equal, masked, lonely)


def kept(row: Tensor, of_row: Draw, moved: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """List the tokens that the cuts keep, in the order of the running sum, and their weights.

    Args:
        moved: share of the mass by which the border of `top_p` is moved.
    """
    logits = row.double().numpy() / of_row.temperature
    weights = np.exp(logits - logits.max())
    order = np.arange(len(weights))
    if 0 < of_row.top_k < len(weights) or of_row.top_p < 1:
        # heaviest first; equal ones by id
        order = np.lexsort((order, -row.numpy()))
        if of_row.top_k > 0:
            order = order[: of_row.top_k]
        mass = weights[order]
        if of_row.top_p < 1:
            before = mass.cumsum() - mass
            order = order[: max(1, int((before < (of_row.top_p + moved) * mass.sum()).sum()))]
    mass = np.where(weights[order] >= of_row.min_p, weights[order], 0.0)
    return order, mass


def is_right(token: int, row: Tensor, of_row: Draw) -> bool:
    return any(lies_in(token, of_row.uniform, *kept(row, of_row, moved)) for moved in (0.0, -EPSILON, EPSILON))


def lies_in(token: int, uniform: float, order: npt.NDArray[np.int64], mass: npt.NDArray[np.float64]) -> bool:
    share = np.concatenate([[0.0], mass.cumsum() / mass.sum()])
    (place,) = np.nonzero(order == token)
    if len(place) == 0:
        return False
    low, high = share[place[0]], share[place[0] + 1]
    return bool(low < high and low - EPSILON <= uniform <= high + EPSILON)


def draws_of(chooser: random.Random, count: int) -> list[Draw]:
    return [
        Draw(
            chooser.choice((0.05, 0.7, 1.0, 1.3, 20.0)),
            chooser.choice((0, 0, 1, 2, 5, 40, 1000, 100_000)),
            chooser.choice((1.0, 1.0, 0.999, 0.95, 0.5, 0.01)),
            chooser.choice((0.0, 0.0, 0.05, 0.5, 1.0)),
            chooser.choice((*UNIFORMS, chooser.random())),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_token_lies_where_running_sum_passes(width: int, kind) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(width)
    rows = torch.stack([kind(width) for _ in range(60)])
    draws = draws_of(random.Random(f"{width} {kind.__name__}"), len(rows))
    tokens = draw(rows.clone(), range(len(rows)), draws)
    wrong = [
        (token, of_row)
        for token, row, of_row in zip(tokens, rows, draws, strict=True)
        if not is_right(token, row, of_row)
    ]
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
def test_torch_draws_same_tokens(kind) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(7)
    rows = torch.stack([kind(700) for _ in range(200)])
    draws = draws_of(random.Random(kind.__name__), len(rows))
    tokens = draw(rows.clone(), range(len(rows)), draws)
    wrong = [
        (token, other, of_row)
        for token, row, of_row in zip(tokens, rows, draws, strict=True)
        # torch's order of equal logits isn't defined, and a number may lie on a border
        if (other := draw_torch(row, of_row)) != token
        and not (row[other] == row[token] or is_right(other, row, of_row))
    ]
    assert wrong == []


def test_token_is_independent_of_cobatched_rows() -> None:
    torch.manual_seed(1)
    rows = torch.randn(70, 5003) * 3
    draws = draws_of(random.Random(1), len(rows))
    together = draw(rows.clone(), range(len(rows)), draws)
    for index in range(len(rows)):
        assert draw(rows[index : index + 1].clone(), (0,), (draws[index],)) == [together[index]]
    # some rows of a wider tensor, in another order
    wide = torch.cat([rows, torch.full((70, 5), 99.0)], 1)[:, :5003]
    chosen = list(range(69, 0, -3))
    assert draw(wide, chosen, [draws[index] for index in chosen]) == [together[index] for index in chosen]
    assert torch.equal(wide[0], rows[0]), "a row that isn't named is left alone"


@pytest.mark.parametrize("of_row", [Draw(1.0, 0, 1.0, 0.0, 0.5), Draw(1.0, 3, 0.9, 0.0, 0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_row_of_no_distribution_is_refused(bad: float, of_row: Draw) -> None:
    rows = torch.randn(3, 700)
    rows[1, 600] = bad
    with pytest.raises(TensorMismatch, match="row 1 of the logits"):
        draw(rows.clone(), (0, 1), (of_row, of_row))
    with pytest.raises(TensorMismatch, match="row 0 of the logits"):
        draw(torch.full((1, 700), -math.inf), (0,), (of_row,))


def test_top_p_of_zero_keeps_likeliest() -> None:
    row = torch.randn(700) / 100
    (token,) = draw(row[None].clone(), (0,), (Draw(1.0, 0, 0.0, 0.0, 0.9),))
    assert token == int(row.argmax())


def test_token_is_independent_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    rows = torch.randn(16, 5003) * 3
    draws = draws_of(random.Random(2), len(rows))
    found = []
    for num_threads in (1, 2, 5):
        monkeypatch.setattr(threads, "num_threads", lambda num_threads=num_threads: num_threads)
        found.append(draw(rows.clone(), range(len(rows)), draws))
    assert found[0] == found[1] == found[2]


def test_shares_follow_distribution() -> None:
    row = torch.cat([torch.tensor([0.5, 0.3, 0.2]).log(), torch.full((29,), -math.inf)])
    chooser = random.Random(3)
    numbers = [chooser.random() for _ in range(4000)]
    tokens = draw(row.repeat(4000, 1), range(4000), [Draw(1.0, 0, 1.0, 0.0, number) for number in numbers])
    assert [tokens.count(token) / 4000 for token in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_draws_are_same_on_every_processor() -> None:
    # neither torch's normal numbers nor a processor's logarithms: multiples of 2^-20
    numbers = np.random.default_rng(4).integers(-(2**24), 2**24, size=(40, 3001))
    rows = torch.from_numpy((numbers / 2**20).astype(np.float32))
    draws = draws_of(random.Random(4), len(rows))
    tokens = draw(rows, range(len(rows)), draws)
    # the weights that are left in the rows, to the bit
    digest = int(rows.view(torch.int32).long().sum())
    assert (tokens[:8], sum(index * token for index, token in enumerate(tokens)), digest) == DRAWN


DRAWN = ([560, 995, 1184, 950, 1532, 2808, 2720, 2364], 1009656, 84646502191615)
