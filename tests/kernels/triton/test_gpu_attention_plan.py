import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from loraserve_kernels.errors import InvalidPlan
from loraserve_kernels.gpu.attention.plan import (
    HEADER,
    ITEM,
    ITEMS_AT,
    MIN_SPLIT,
    NUM_DECODE_ITEMS,
    NUM_ITEMS,
    NUM_ROWS,
    ROW,
    ROWS_AT,
    TABLE_WIDTH,
    TABLES_AT,
    GpuAttentionPlan,
    max_splits,
)


def make_plan(
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    max_num_tokens: int = 512,
    max_num_seqs: int = 300,
    max_model_len: int = 4096,
) -> GpuAttentionPlan:
    return GpuAttentionPlan(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        max_num_tokens=max_num_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        device=torch.device("cpu"),
    )


def fill(
    plan: GpuAttentionPlan,
    num_rows: Sequence[int],
    context_lens: Sequence[int],
    tables: npt.NDArray[np.int32] | None = None,
) -> None:
    if tables is None:
        tables = np.arange(len(context_lens) * 300, dtype=np.int32).reshape(len(context_lens), 300)
    starts = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int32)
    plan.fill(starts, np.array(context_lens, dtype=np.int32), tables)


def items_of(plan: GpuAttentionPlan) -> npt.NDArray[np.int32]:
    header = plan.buffer[:HEADER].tolist()
    at = header[ITEMS_AT]
    return plan.buffer[at : at + header[NUM_ITEMS] * ITEM].numpy().reshape(-1, ITEM)[:, :6]


def test_each_row_has_single_tile_or_all_splits() -> None:
    plan = make_plan()
    rng = np.random.default_rng(0)
    for _ in range(20):
        num_rows = rng.choice([0, 1, 1, 2, 7, 8, 9, 40], 12)
        context_lens = np.maximum(num_rows, rng.integers(0, 1500, 12)) * (rng.random(12) < 0.9)
        context_lens = np.where(num_rows > 1, np.maximum(context_lens, num_rows), context_lens)
        fill(plan, num_rows.tolist(), context_lens.tolist())
        starts = np.concatenate([[0], np.cumsum(num_rows)])
        seen: dict[int, list[int]] = {}
        for row0, rows, position, sequence, split, num_splits in items_of(plan).tolist():
            for j in range(rows):
                row = row0 + j
                assert starts[sequence] <= row < starts[sequence + 1]
                assert position + j == context_lens[sequence] - (starts[sequence + 1] - row)
                seen.setdefault(row, []).append(split)
                assert num_splits == (1 if num_rows[sequence] > 1 else -(-context_lens[sequence] // MIN_SPLIT))
        for sequence, context in enumerate(context_lens):
            for row in range(starts[sequence], starts[sequence + 1]):
                num_splits = 1 if num_rows[sequence] > 1 else -(-context // MIN_SPLIT)
                assert seen.get(row, []) == list(range(num_splits))


def test_decode_items_come_first_for_rows() -> None:
    plan = make_plan()
    fill(plan, [1, 20, 1, 0, 1], [700, 20, 0, 9, 5])
    header = plan.buffer[:HEADER].tolist()
    assert header[NUM_DECODE_ITEMS] == 4
    assert (items_of(plan)[:4, 3] == [0, 0, 0, 4]).all()
    rows = plan.buffer[header[ROWS_AT] :][: header[NUM_ROWS] * ROW].view(-1, ROW)[:, :3]
    assert rows.tolist() == [[0, 0, 3], [21, 3, 0], [22, 3, 1]]


def test_long_tiles_precede_short_tiles() -> None:
    plan = make_plan()
    fill(plan, [40, 40], [40, 900])
    positions = items_of(plan)[:, 2]
    assert (np.diff(positions) <= 0).all()
    assert positions[0] == 892


def test_tables_are_as_wide_as_the_longest_context() -> None:
    plan = make_plan()
    tables = np.arange(600, dtype=np.int32).reshape(2, 300)
    fill(plan, [1, 3], [33, 17], tables)
    header = plan.buffer[:HEADER].tolist()
    assert header[TABLE_WIDTH] == 3
    assert header[TABLES_AT] % 16 == 0
    assert plan.device_block_tables.tolist() == tables[:, :3].tolist()
    assert plan.device_block_tables.data_ptr() == plan.buffer[header[TABLES_AT] :].data_ptr()


def test_launch_parameters_are_known_on_host() -> None:
    plan = make_plan()
    fill(plan, [1, 1, 0], [3, 0, 7])
    assert (plan.num_tokens, plan.num_seqs, plan.num_decode_rows, plan.num_tiles) == (2, 3, 2, 0)
    assert plan.is_decode_only
    fill(plan, [1, 9], [3, 30])
    assert (plan.num_tokens, plan.num_decode_rows, plan.num_tiles, plan.max_query_len) == (10, 1, 2, 9)
    assert not plan.is_decode_only


def test_step_numbers_stay_on_host_during_next_fill() -> None:
    plan = make_plan()
    fill(plan, [1], [900])
    staged = plan._staged[0]
    before = staged.clone()
    fill(plan, [1, 1], [5, 9])
    assert torch.equal(staged, before)
    fill(plan, [3], [9])
    assert not torch.equal(staged, before)


def test_split_count_depends_only_on_context_and_model() -> None:
    assert [max_splits(n) for n in (1, 2, 4, 8, 32, 128)] == [64, 64, 32, 16, 16, 16]
    plan = make_plan(num_heads=8, num_kv_heads=8, max_model_len=10**6)
    contexts = np.array([0, 1, MIN_SPLIT, MIN_SPLIT + 1, 15 * MIN_SPLIT + 1, 16 * MIN_SPLIT + 1, 10**6])
    assert plan.num_splits(contexts).tolist() == [0, 1, 1, 2, 16, 16, 16]


def test_the_largest_step_fits() -> None:
    plan = make_plan(max_num_seqs=5, max_num_tokens=30, max_model_len=2000)
    fill(plan, [1] * 5, [2000] * 5)
    fill(plan, [6] * 5, [2000] * 5)
    fill(plan, [26, 1, 1, 1, 1], [2000] * 5)
    fill(plan, [2] * 5, [2000] * 5)


@pytest.mark.parametrize(
    ("num_rows", "context_lens", "message"),
    [
        ([1, 1], [1], "for 1 sequences"),
        ([], [], "for 0 sequences"),
        ([4], [3], "can't have contexts"),
        ([2], [0], "can't have contexts"),
        ([1, 1], [3, -1], "can't have contexts"),
        ([3, -1], [3, 3], "can't have contexts"),
        ([40], [40], "this plan was made for"),
        ([1] * 6, [1] * 6, "this plan was made for"),
        ([1], [2001], "this plan was made for"),
    ],
)
def test_contradicting_sequences_are_refused(num_rows: list[int], context_lens: list[int], message: str) -> None:
    plan = make_plan(max_num_seqs=5, max_num_tokens=30, max_model_len=2000)
    fill(plan, [1], [7])
    before = plan.buffer.clone()
    with pytest.raises(InvalidPlan, match=message):
        fill(plan, num_rows, context_lens)
    assert torch.equal(plan.buffer, before)
    assert plan.num_tokens == 1


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(InvalidPlan, match="2 blocks of 16 for a context of 33; it takes 3"):
        fill(make_plan(), [1], [33], np.zeros((1, 2), dtype=np.int32))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 3, 64), (8, 0, 64), (8, 2, 72), (8, 2, 512)])
def test_head_counts_unknown_to_kernels_are_refused(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    with pytest.raises(InvalidPlan):
        make_plan(num_heads, num_kv_heads, head_dim)


def test_fill_runs_without_loops() -> None:
    def num_lines(num_seqs: int) -> int:
        plan = make_plan()
        lines = 0

        def trace(frame: object, event: str, arg: object) -> object:
            nonlocal lines
            lines += event == "line"
            return trace

        num_rows = [1 + 2 * (i % 2) for i in range(num_seqs)]
        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            fill(plan, num_rows, [50] * num_seqs)
        finally:
            sys.settrace(before)
        return lines

    assert num_lines(200) == num_lines(4) > 0
