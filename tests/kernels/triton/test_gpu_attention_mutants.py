"""Kernels and plans of the GPU's attention that are wrong in one place: the comparison of
test_gpu_attention must fail for each.
"""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from loraserve_kernels.gpu.attention import kernel as attention_kernel
from loraserve_kernels.gpu.attention import paged as gpu_attention
from loraserve_kernels.gpu.attention.plan import (
    ITEM,
    ITEMS_AT,
    MIN_SPLIT,
    NUM_ITEMS,
    ROWS_AT,
)

from .attending import Attending, make_attending

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.campaign,
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
]

WINDOW = 100


def make() -> Attending:
    torch.manual_seed(0)
    # KV head 0 and 1, a row in two splits, a row without context, a chunk of two tiles, the second
    # not full
    return make_attending([1, 1, 19, 1], [MIN_SPLIT + 40, 0, 40, 9], num_heads=4, num_kv_heads=2)


def make_late() -> Attending:
    # the row in two splits isn't the first
    torch.manual_seed(0)
    return make_attending([1, 1, 1], [0, 9, MIN_SPLIT + 40], num_heads=2, num_kv_heads=2)


def is_caught(step: Attending, window: int | None = None, soft_cap: float | None = None) -> bool:
    """A wrong result, or memory that no tensor owns."""
    return not step.is_right(window, soft_cap)


def mutated(name: str, old: str, new: str, folder: Path) -> Any:
    """The kernel with one piece of its module's source replaced."""
    source = inspect.getsource(attention_kernel)
    assert source.count(old) == 1, f"attention_kernel.py has {source.count(old)} times: {old}"
    path = folder / "attend_mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return getattr(mutant, name)


def test_the_unmutated_step_is_right() -> None:
    assert not is_caught(make())
    assert not is_caught(make(), WINDOW)


@pytest.mark.parametrize(
    ("kernel", "old", "new", "window"),
    [
        pytest.param("attend_kernel", "mask=is_key[:, None] & is_d[None, :]", "mask=is_d[None, :]", None,
            id="values past the context are read"),
        pytest.param("attend_kernel", "is_seen = (key[None, :] <= position[:, None]) & ", "is_seen = ", WINDOW,
            id="rows of a chunk see those after them"),
        pytest.param("attend_kernel", "(is_key & (key > position - window))", "(is_key & (key > -1))", WINDOW,
            id="a decode row sees keys before its window"),
        pytest.param("attend_kernel", "(key[None, :] > (position - window)[:, None])", "(key[None, :] > -1)", 10,
            id="a chunk's rows see keys before their window"),
        pytest.param("attend_kernel", "(is_key & (key > position - window))", "(key > position - window)", None,
            id="padding counts as keys"),
        pytest.param("attend_kernel", "key_begin += split * part", "key_begin += 0 * part", None,
            id="every split is the first"),
        pytest.param("attend_kernel", "key_end = tl.minimum(key_begin + part, key_end)", "key_end = key_end", None,
            id="splits overlap"),
        pytest.param("attend_kernel", "acc = acc * shrunk[:, None]", "acc = acc * 1.0", None,
            id="sums aren't rescaled"),
        pytest.param("attend_kernel", "total = total * shrunk + ", "total = total + ", None,
            id="weights' sum isn't rescaled"),
        pytest.param("attend_kernel", "head += kv_head * GROUP", "head += kv_head", None,
            id="a group's heads aren't its own"),
        pytest.param("attend_kernel", "(kv_head * BLOCK_SIZE + key % BLOCK_SIZE)", "(key % BLOCK_SIZE)", None,
            id="every group attends to the first head"),
        pytest.param("attend_kernel", "position += offs_m // HEADS", "position += offs_m * 0", None,
            id="rows of a tile stand where its first does"),
        pytest.param("attend_kernel", "offs_m // HEADS < num_rows", "offs_m // HEADS <= num_rows", None,
            id="the row behind a sequence's is written"),
        pytest.param("attend_kernel", "tl.load(item_ptr + 3) * table_width", "0 * table_width", None,
            id="every sequence has the first's blocks"),
        pytest.param("attend_kernel", "(key + BLOCK_N) // BLOCK_SIZE, mask=key + BLOCK_N < key_end",
            "key // BLOCK_SIZE, mask=key < key_end", None, id="blocks aren't looked up ahead"),
        pytest.param("attend_kernel", "v_at = block.to(tl.int64) * stride_v_block",
            "v_at = block.to(tl.int64) * stride_out", None, id="another stride between blocks"),
        pytest.param("attend_kernel", "lse = tl.where(total > 0.0, highest +",
            "lse = tl.where(total > 0.0, 0.0 +", None, id="a split's highest score is forgotten"),
        pytest.param("combine_kernel", "if num_splits != 1:", "if num_splits > 1:", None,
            id="rows without context aren't zeroed"),
        pytest.param("combine_kernel", "if num_splits != 1:", "if True:", None, id="rows with one split are combined"),
        pytest.param("combine_kernel", "first_item = tl.load(row_ptr + 1)", "first_item = tl.load(row_ptr)", None,
            id="another row's splits"),
        pytest.param("combine_kernel", "acc += tl.sum(weights[:, None] * parts, 0)", "acc += tl.sum(parts, 0)", None,
            id="splits weigh the same"),
        pytest.param("combine_kernel", "mask=is_split[:, None] & is_d[None, :]", "mask=is_d[None, :]", None,
            id="places behind a row's splits are read"),
    ],
)  # fmt: skip
def test_a_mutant_kernel_is_caught(
    kernel: str, old: str, new: str, window: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = make_late() if kernel == "combine_kernel" else make()
    monkeypatch.setattr(gpu_attention, kernel, mutated(kernel, old, new, tmp_path))
    assert is_caught(step, window)


@pytest.mark.parametrize(
    ("old", "new"), [("cap - 2.0 * cap / (", "cap - 2.0 / ("), ("(tl.exp2(scores) + 1.0)", "(tl.exp2(scores) + 2.0)")]
)
def test_a_mutant_cap_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_attention, "attend_kernel", mutated("attend_kernel", old, new, tmp_path))
    assert is_caught(make(), soft_cap=0.8)


def items(step: Attending) -> torch.Tensor:
    at, count = int(step.plan.buffer[ITEMS_AT]), int(step.plan.buffer[NUM_ITEMS])
    return step.plan.buffer[at : at + count * ITEM].view(count, ITEM)


def swap_sequences(step: Attending) -> None:
    items(step)[[0, 1, 2], 3] = torch.tensor([3, 3, 0], dtype=torch.int32)


def take_a_split_twice(step: Attending) -> None:
    items(step)[1, 4] = 0


def lose_a_tile(step: Attending) -> None:
    step.plan.buffer[NUM_ITEMS] -= 1


def shift_a_chunk(step: Attending) -> None:
    items(step)[-1, 2] += 1


def swap_blocks(step: Attending) -> None:
    # of the chunk, whose rows see them in order
    table = step.plan.device_block_tables[2, :2]
    table.copy_(table.flip(0).clone())


def send_a_row_elsewhere(step: Attending) -> None:
    step.plan.buffer[step.plan.buffer[ROWS_AT]] = 12


@pytest.mark.parametrize(
    "mutate", [swap_sequences, take_a_split_twice, lose_a_tile, shift_a_chunk, swap_blocks, send_a_row_elsewhere]
)
def test_a_mutant_plan_is_caught(mutate: Callable[[Attending], None]) -> None:
    step = make()
    mutate(step)
    assert is_caught(step)
