"""Kernels, plans and pages that are wrong in one place:
the comparison of test_gpu_lora must fail for each.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from paged_pools import ODD, Fleet, Ranks

from loraserve_kernels.gpu.lora import apply as gpu_lora
from loraserve_kernels.gpu.lora.plan import HEADER
from loraserve_kernels.gpu.paged.layout import DELTA_UNIT, HAS_DELTA

from .mutation import mutant_of
from .stepping import Step, make_step

pytestmark = [pytest.mark.interpreted, pytest.mark.campaign]

ADAPTERS: list[Ranks] = [8, 24, {"o_proj": 12, "down_proj": 12, "embed_tokens": 3}]


def make(site: str, *, has_bias: bool = False) -> Step:
    """The second adapter is stored in int8 and has a δ everywhere."""
    torch.manual_seed(0)
    fleet = Fleet(ADAPTERS, ODD, torch.float16, stored=[torch.float16, torch.int8], has_delta=ODD)
    a, b, c = fleet.slots
    return make_step(fleet, [0, b, a, 0, c, a, 0], site, has_bias=has_bias)


def is_caught(step: Step) -> bool:
    """A wrong result, or memory that no tensor owns."""
    # codes without their scales are beyond float16, and poison meets zeros
    with np.errstate(all="ignore"):
        return not step.is_right()


@pytest.mark.parametrize("site", ["qkv", "down", "embed"])
def test_the_unmutated_step_is_right(site: str) -> None:
    assert not is_caught(make(site))


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        pytest.param("shrink", "is_rank = multiplier != 0.0", "is_rank = offs_r < 16",
            id="shrink reads ranks that don't exist"),
        pytest.param("shrink", "acc, mask=is_row[:, None])", "acc, mask=is_row[:, None] & is_rank[None, :])",
            id="columns without a rank aren't zeroed"),
        pytest.param("shrink", "mask=is_row[:, None] & (k + offs_k < K)[None, :]", "mask=is_row[:, None]",
            id="x is read past its end"),
        pytest.param("shrink", "acc = acc * multiplier[None, :]", "acc = acc * 1.0", id="scaling is forgotten"),
        pytest.param("shrink", "k_end = tl.minimum(k_start + part, K)", "k_end = K", id="parts of K overlap"),
        pytest.param("shrink", "starts = tl.multiple_of(units *",
            "starts = tl.multiple_of((tl.max(units, 0) + 0 * units) *", id="every rank is the last"),
        pytest.param("shrink", "acc, x_ptrs, codes_ptr, units", "acc, x_ptrs, weights_ptr, units",
            id="int8 is read as 16 bits by shrink"),
        pytest.param("shrink", "rows[:, None] * stride_x", "(row0 + offs_m)[:, None] * stride_x",
            id="shrink ignores the permutation"),
        pytest.param("expand", "+ offs_r).to(tl.float32, bitcast=True) != 0.0", "+ offs_r) != 1",
            id="expand reads ranks that don't exist"),
        pytest.param("expand", "range(1, SPLIT_K)", "range(1, 1)", id="planes are forgotten"),
        pytest.param("expand", "tile_ptr = record_ptr + j * stride_tile", "tile_ptr = record_ptr",
            id="every tile is the first"),
        pytest.param("expand", "tl.load(tile_ptr + 6 + slice_ * 4)", "tl.load(tile_ptr + 6 + slice_ * 4) + 1",
            id="the next adapter's B"),
        pytest.param("expand", "acc, h_ptr, codes_ptr, record_ptr", "acc, h_ptr, weights_ptr, record_ptr",
            id="int8 is read as 16 bits by expand"),
        pytest.param("expand", "mask=is_row, other=0).to(tl.int64)",
            "mask=is_row, other=0).to(tl.int64) * 0 + row0 + offs_m", id="base rows are touched"),
        pytest.param("expand", "acc += tl.load(y_ptrs, mask=is_output, other=0.0).to(tl.float32)", "",
            id="y is overwritten"),
        pytest.param("expand", "has_ending = tl.load(tile_ptr + 7 + slice_ * 4)", "has_ending = 0",
            id="the delta is forgotten"),
        pytest.param("expand", "(acc - bias[None, :])", "acc", id="the bias is scaled"),
        pytest.param("expand", "DELTA_UNIT).to(tl.int64) * (UNIT_BITS // 32) + first_column",
            "DELTA_UNIT).to(tl.int64) * (UNIT_BITS // 32)", id="every block of columns has the first one's delta"),
    ],
)  # fmt: skip
def test_a_mutant_kernel_is_caught(
    kernel: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"{kernel}_kernel"
    monkeypatch.setattr(gpu_lora, name, mutant_of(getattr(gpu_lora, name), old, new, tmp_path))
    # gate_up has several blocks of columns, down several parts of its sums
    assert is_caught(make("down", has_bias=True)) or is_caught(make("gate_up", has_bias=True))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("token_ids_ptr + rows, mask=is_row", "token_ids_ptr + row0 + offs_m, mask=is_row",
            id="the permutation is ignored"),
        pytest.param("is_row[:, None] & (multiplier != 0.0)[None, :]", "is_row[:, None] & (offs_r < 16)[None, :]",
            id="ranks that don't exist are read"),
        pytest.param("h * multiplier[None, :], mask", "h, mask", id="scaling is forgotten"),
        pytest.param("tl.load(codes_ptr + starts[None, :] + token_ids",
            "tl.load(codes_ptr + starts[None, :] + 1 + token_ids", id="the next token"),
    ],
)  # fmt: skip
def test_a_mutant_look_up_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = make("embed")
    # in place of an address that would end the process
    step.x[step.is_base] = 0
    monkeypatch.setattr(gpu_lora, "look_up_kernel", mutant_of(gpu_lora.look_up_kernel, old, new, tmp_path))
    assert is_caught(step)


def take_all_adapters_for_16_bits(step: Step) -> None:
    tiles_at = int(step.plan.buffer[7])
    step.plan.buffer[tiles_at : tiles_at + 48].view(3, 16)[:, 2] = 0


def give_everybody_the_first_delta(step: Step) -> None:
    tiles_at = int(step.plan.buffer[7])
    tiles = step.plan.buffer[tiles_at : tiles_at + 48].view(3, 16)
    tiles[:, 7] = 1
    scaled = tiles[1, 6]
    records = step.fleet.pool.records[:, 1]
    records[:, [DELTA_UNIT, HAS_DELTA]] = records[scaled, [DELTA_UNIT, HAS_DELTA]]


def swap_adapters(step: Step) -> None:
    tiles_at = int(step.plan.buffer[7])
    tiles = step.plan.buffer[tiles_at : tiles_at + 32].view(2, 16)
    tiles[:, :2] = tiles.flip(0)[:, :2].clone()


def put_a_base_row_in(step: Step) -> None:
    step.plan.buffer[HEADER + 1] = 0


def lose_a_row_tile(step: Step) -> None:
    step.plan.buffer[6] -= 1


def lose_a_work_item(step: Step) -> None:
    step.plan.buffer[4] -= 1


@pytest.mark.parametrize(
    "mutate",
    [
        swap_adapters,
        put_a_base_row_in,
        lose_a_row_tile,
        lose_a_work_item,
        take_all_adapters_for_16_bits,
        give_everybody_the_first_delta,
    ],
)
def test_a_mutant_plan_is_caught(mutate: Callable[[Step], None]) -> None:
    step = make("o")
    mutate(step)
    assert is_caught(step)


def test_swapped_slots_are_caught() -> None:
    step = make("o")
    a, b, _ = step.fleet.slots
    step.fleet.packed[a], step.fleet.packed[b] = step.fleet.packed[b], step.fleet.packed[a]
    assert is_caught(step)


def test_unzeroed_page_padding_is_caught() -> None:
    step = make("down")
    data = step.fleet.pool.data
    # rows of 1058 weights are followed by zeros up to 1072
    halves = data.view(torch.float16)
    halves[halves == 0] = float("nan")
    assert is_caught(step)
