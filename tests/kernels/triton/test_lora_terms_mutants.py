"""Kernels, plans and pages that are wrong in one place about what adapters have beside ranks: the
comparison of test_gpu_lora_terms must fail for each.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from paged_pools import EVEN, ODD, Fleet, random_modules

from loraserve_kernels.common.modules import ReplacedRows
from loraserve_kernels.gpu.lora import apply as gpu_lora
from loraserve_kernels.gpu.lora.plan import REPLACED_AT, SITE_INDEX
from loraserve_kernels.gpu.paged import packing as paged_packing
from loraserve_kernels.gpu.paged.layout import NUM_REPLACED, REPLACED_TILE, REPLACED_WORK

from .mutation import mutant_of
from .stepping import Step, make_step

pytestmark = [pytest.mark.interpreted, pytest.mark.campaign]


def shifting() -> Step:
    """One adapter shifts in both layers, in int8; another in the first layer alone. gate_up has
    several blocks of columns.
    """
    torch.manual_seed(0)
    terms = {"has_delta": ("gate_proj",), "has_shift": ("gate_proj", "up_proj")}
    fleet = Fleet([8], ODD, torch.float16)
    a = fleet.add(random_modules(3, ODD, torch.int8, **terms), torch.int8)
    elsewhere = [*random_modules(0, ODD, torch.float16, [0], **terms), *random_modules(5, ODD, torch.float16, [1])]
    b = fleet.add(elsewhere, torch.float16)
    return make_step(fleet, [0, b, a, 0, fleet.slots[0], a], "gate_up", has_bias=True)


def replacing(site: str) -> Step:
    """One adapter replaces many rows in int8, another a few, a third none."""
    torch.manual_seed(0)
    module = {"lm_head": "lm_head", "embed": "embed_tokens"}[site]
    fleet = Fleet([2, 3], EVEN, torch.float16, stored=[torch.float16, torch.int8], num_rows={module: 150})
    a, b = fleet.slots
    few = random_modules({module: 0}, EVEN, torch.float16, num_rows={module: 3})[0]
    assert few.row_overrides is not None
    # each at its own place
    c = fleet.add(
        [replace(few, row_overrides=ReplacedRows(torch.arange(3).int(), few.row_overrides.weight))], torch.float16
    )
    step = make_step(fleet, [0, c, a, b, 0, *[b] * 18, c], site, y_dtype=torch.float32, has_bias=site == "lm_head")
    if site == "embed":
        replaced = fleet.packed[b].row_overrides(0, module)
        assert replaced is not None
        ids, is_replaced = replaced.ids.long(), torch.zeros(EVEN[module][1], dtype=torch.bool)
        is_replaced[ids] = True
        others = (~is_replaced).nonzero()[::100, 0][:2]
        step.x[torch.tensor(step.row_slots) == b] = torch.cat((ids[torch.randperm(150)[:17]], others))
        step.x[[1, 23]] = torch.tensor([2, 1])
        # in place of an address that would end the process
        step.x[step.is_base] = 0
    return step


def is_caught(step: Step) -> bool:
    """A wrong result, or memory that no tensor owns."""
    with np.errstate(all="ignore"):
        return not step.is_right()


@pytest.mark.parametrize("make", [shifting, lambda: replacing("lm_head"), lambda: replacing("embed")])
def test_the_unmutated_step_is_right(make: Callable[[], Step], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lora, "REPLACE_CHUNK", 128)
    assert not is_caught(make())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("tl.load(record_ptr + HAS_SHIFT) != 0", "has_ending == 7", id="the shift is forgotten"),
        pytest.param("tl.load(record_ptr + HAS_SHIFT) != 0", "has_ending != 0", id="another layer's shift"),
        pytest.param("SHIFT_UNIT).to(tl.int64) * (UNIT_BITS // 32) + first_column",
            "SHIFT_UNIT).to(tl.int64) * (UNIT_BITS // 32)", id="every block of columns has the first one's shift"),
        pytest.param("tl.load(record_ptr + SHIFT_UNIT)", "tl.load(record_ptr + DELTA_UNIT)", id="the shift is δ"),
        pytest.param("acc += shift[None, :]", "acc += shift[None, :] * (1 + acc * 0.01)", id="the shift is scaled"),
    ],
)  # fmt: skip
def test_a_mutant_shift_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_lora, "expand_kernel", mutant_of(gpu_lora.expand_kernel, old, new, tmp_path))
    assert is_caught(shifting())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("piece % group_size * 16", "0", id="every row tile is the group's first"),
        pytest.param("piece // group_size * RECORD", "piece * RECORD", id="the group's row tiles don't share records"),
        pytest.param("tl.program_id(0), num_works", "tl.program_id(0), num_works - 1", id="the last work is lost"),
        pytest.param("acc = acc * multiplier[None, :]", "acc = acc * 1.0", id="scales are forgotten"),
        pytest.param("acc, x_ptrs, codes_ptr, units", "acc, x_ptrs, weights_ptr, units", id="int8 is read as 16 bits"),
        pytest.param("x_ptr + rows[:, None] * stride_x", "x_ptr + (row0 + offs_m)[:, None] * stride_x",
            id="x ignores the permutation"),
        pytest.param("stride_y + ids[None, :]", "stride_y + offs_r[None, :]", id="ids are ignored"),
        pytest.param("mask=is_row[:, None] & is_replaced[None, :])", "mask=is_row[:, None] & (ids >= 0)[None, :])",
            id="places without a row are written"),
        pytest.param("mask=is_row[:, None] & is_replaced[None, :])",
            "mask=(offs_m < 16)[:, None] & is_replaced[None, :])", id="other rows are written"),
        pytest.param("bias_ptr + ids", "bias_ptr + offs_r", id="another column's bias"),
    ],
)  # fmt: skip
def test_a_mutant_head_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_lora, "replace_kernel", mutant_of(gpu_lora.replace_kernel, old, new, tmp_path))
    assert is_caught(replacing("lm_head"))


def test_row_tiles_are_searched_several_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = mutant_of(
        gpu_lora.replace_kernel, "TILES_AT_ONCE = tl.constexpr(64)", "TILES_AT_ONCE = tl.constexpr(2)", tmp_path
    )
    monkeypatch.setattr(gpu_lora, "replace_kernel", kernel)
    assert not is_caught(replacing("lm_head"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("tl.minimum(tokens + 1, num_replaced)", "tl.minimum(tokens, num_replaced)",
            id="a token at its own place isn't found"),
        pytest.param("tl.max(high - low, axis=0) > 1", "tl.max(high - low, axis=0) > 3",
            id="the search stops too early"),
        pytest.param("low // 16 * RECORD + low % 16", "low // 16 * RECORD", id="a record's first row"),
        pytest.param("tl.load(record_ptrs + IDS, mask=is_row, other=-1) == tokens", "is_row & (tokens >= 0)",
            id="every token is replaced"),
        pytest.param("token_ids_ptr + rows, mask=is_row", "token_ids_ptr + row0 + offs_m, mask=is_row",
            id="the permutation is ignored"),
        pytest.param("values = values * multiplier[:, None]", "values = values * 1.0", id="scales are forgotten"),
        pytest.param("work % num_chunks * CHUNK_N", "work % num_chunks * 0", id="every chunk is the first"),
        pytest.param("if tl.load(plan_ptr + WORKS_AT) == 0:", "if tl.load(plan_ptr + WORKS_AT) > 0:",
            id="there is taken to be no work"),
        pytest.param("rows[:, None] * stride_y + (n +", "(row0 + offs_m)[:, None] * stride_y + (n +",
            id="y ignores the permutation"),
    ],
)  # fmt: skip
def test_a_mutant_embedding_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_lora, "REPLACE_CHUNK", 128)
    kernel = mutant_of(gpu_lora.replace_embedding_kernel, old, new, tmp_path)
    monkeypatch.setattr(gpu_lora, "replace_embedding_kernel", kernel)
    assert is_caught(replacing("embed"))


def row_tiles(step: Step) -> torch.Tensor:
    header = step.plan.buffer[4 * SITE_INDEX["lm_head"] :][:4].tolist()
    return step.plan.buffer[header[3] : header[3] + 16 * header[2]].view(-1, 16)


def start_all_work_at_once(step: Step) -> None:
    row_tiles(step)[:, REPLACED_WORK] = 0


def count_too_little_work(step: Step) -> None:
    step.plan.buffer[REPLACED_AT + SITE_INDEX["lm_head"]] -= 1


def take_the_next_tiles_rows(step: Step) -> None:
    tiles = row_tiles(step)
    tiles[tiles[:, NUM_REPLACED] > 0, REPLACED_TILE] += 1


@pytest.mark.parametrize("mutate", [start_all_work_at_once, count_too_little_work, take_the_next_tiles_rows])
def test_a_mutant_plan_is_caught(mutate: Callable[[Step], None]) -> None:
    step = replacing("lm_head")
    mutate(step)
    assert is_caught(step)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("scales[scales == 0] = 1", "pass", id="a row of zeros in int8 is none"),
        pytest.param("np.where(starts < 0, ids,", "np.where(starts < 0, 0,", id="ids are lost"),
    ],
)
def test_mutant_pages_are_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import paged_pools

    make_pages = mutant_of(Holder(paged_packing.make_pages), old, new, tmp_path)
    monkeypatch.setattr(paged_pools, "make_pages", make_pages)
    assert is_caught(replacing("lm_head"))


class Holder:
    """A function as `mutant_of` takes a kernel."""

    def __init__(self, fn: Callable[..., object]) -> None:
        self.fn = fn
