"""Kernels, plans and pages that are wrong in one place: the comparison of test_gpu_lora must fail for each."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from paged_pools import ODD, Fleet, Ranks

from loraserve_kernels import gpu_lora
from loraserve_kernels.gpu_plan import HEADER

from .stepping import Step, make_step

pytestmark = pytest.mark.interpreted

ADAPTERS: list[Ranks] = [8, 40, {"o_proj": 12, "down_proj": 12}]


def make(site: str) -> Step:
    torch.manual_seed(0)
    fleet = Fleet(ADAPTERS, ODD, torch.float16)
    a, b, c = fleet.slots
    return make_step(fleet, [0, b, a, 0, c, a, 0], site, torch.float16)


def mutated(name: str, old: str, new: str, folder: Path) -> Any:
    """The kernel of this module with one piece of its source replaced."""
    module = inspect.getmodule(getattr(gpu_lora, f"{name}_kernel").fn)
    assert module is not None
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{name}.py has {source.count(old)} times: {old}"
    path = folder / f"{name}_mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return getattr(mutant, f"{name}_kernel")


def is_caught(step: Step) -> bool:
    """A wrong result, or memory that no tensor owns."""
    return not step.is_right()


@pytest.mark.parametrize("site", ["qkv", "down"])
def test_the_unmutated_step_is_right(site: str) -> None:
    assert not is_caught(make(site))


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        pytest.param("shrink", "is_rank = multiplier != 0.0", "is_rank = offs_r < 16", id="shrink reads ranks that don't exist"),
        pytest.param("shrink", "acc, mask=is_row[:, None])", "acc, mask=is_row[:, None] & is_rank[None, :])", id="columns without a rank aren't zeroed"),
        pytest.param("shrink", "mask=is_row[:, None] & (k + offs_k < K)[None, :]", "mask=is_row[:, None]", id="x is read past its end"),
        pytest.param("shrink", "acc = acc * multiplier[None, :]", "acc = acc * 1.0", id="scaling is forgotten"),
        pytest.param("shrink", "k_end = tl.minimum(plane * part + part, K)", "k_end = K", id="parts of K overlap"),
        pytest.param("shrink", "offs_r // 8).to", "offs_r // 16).to", id="the second block is the first"),
        pytest.param("shrink", "mask=is_row, other=0).to(tl.int64)", "mask=is_row, other=0).to(tl.int64) * 0 + row0 + offs_m", id="shrink ignores the permutation"),
        pytest.param("expand", "* 16 + offs_r) != 0.0", "* 16 + offs_r) < 1e30", id="expand reads ranks that don't exist"),
        pytest.param("expand", "range(1, SPLIT_K)", "range(1, 1)", id="planes are forgotten"),
        pytest.param("expand", "tile = first_tile + j", "tile = first_tile", id="every tile is the first"),
        pytest.param("expand", "tl.load(tile_ptr + 6 + slice_ * 4)", "tl.load(tile_ptr + 6 + slice_ * 4) + 1", id="the next adapter's B"),
        pytest.param("expand", "mask=is_row, other=0).to(tl.int64)", "mask=is_row, other=0).to(tl.int64) * 0 + row0 + offs_m", id="base rows are touched"),
        pytest.param("expand", "acc += tl.load(y_ptrs, mask=is_output, other=0.0).to(tl.float32)", "", id="y is overwritten"),
    ],
)  # fmt: skip
def test_a_mutant_kernel_is_caught(
    kernel: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_lora, f"{kernel}_kernel", mutated(kernel, old, new, tmp_path))
    assert is_caught(make("down"))


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


@pytest.mark.parametrize("mutate", [swap_adapters, put_a_base_row_in, lose_a_row_tile, lose_a_work_item])
def test_a_mutant_plan_is_caught(mutate: Callable[[Step], None]) -> None:
    step = make("o")
    mutate(step)
    assert is_caught(step)


def test_swapped_slots_are_caught() -> None:
    step = make("o")
    a, b, _ = step.fleet.slots
    step.fleet.packed[a], step.fleet.packed[b] = step.fleet.packed[b], step.fleet.packed[a]
    assert is_caught(step)


def test_padding_of_pages_that_isnt_zeroed_is_caught() -> None:
    step = make("down")
    data = step.fleet.pool.data
    # rows of 1058 weights are followed by zeros up to 1072; only zeros stand in blocks' gaps
    data[data == 0] = float("nan")
    assert is_caught(step)
