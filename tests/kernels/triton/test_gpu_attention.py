import copy

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.attention import paged as gpu_attention
from loraserve_kernels.gpu.attention.plan import CHUNK_BLOCK_M, MIN_SPLIT

from .attending import SCALE, Attending, make_attending

pytestmark = pytest.mark.interpreted

# a row of each kind: alone, split in three, without context, at a block's end and behind it; chunks
# with and without context before them
NUM_ROWS = [1, 7, 1, 33, 1, 1, 2, 0, 1]
CONTEXT_LENS = [1, 7, 2 * MIN_SPLIT + 30, 50, 0, 16, 300, 5, 17]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (2, 2, 64, torch.float16),
        (8, 2, 64, torch.bfloat16),
        (7, 1, 80, torch.float16),
        (4, 1, 128, torch.bfloat16),
        (2, 1, 256, torch.float16),
    ],
)
def test_decode_rows_and_chunks_equal_the_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    step = make_attending(
        NUM_ROWS, CONTEXT_LENS, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
    )
    assert step.is_right()


@pytest.mark.parametrize("num_heads", [17, 40])
def test_group_larger_than_tile_equals_reference(num_heads: int) -> None:
    assert make_attending([1, 3], [270, 20], num_heads=num_heads, num_kv_heads=1, head_dim=16).is_right()


@pytest.mark.parametrize("window", [1, 16, MIN_SPLIT + 77])
def test_a_sliding_window_equals_the_reference(window: int) -> None:
    assert make_attending(NUM_ROWS, CONTEXT_LENS).is_right(window)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, 0.8), (MIN_SPLIT + 77, 3.0)])
def test_softly_capped_scores_equal_the_reference(window: int | None, soft_cap: float) -> None:
    assert make_attending(NUM_ROWS, CONTEXT_LENS).is_right(window, soft_cap)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_products_far_beyond_soft_cap_equal_cap() -> None:
    step = make_attending([1, 3], [270, 20])
    step.q.mul_(3000)
    assert step.is_right(soft_cap=2.0)


@pytest.mark.parametrize("block_size", [5, 256])
def test_blocks_of_any_size_equal_the_reference(block_size: int) -> None:
    assert make_attending(NUM_ROWS, CONTEXT_LENS, block_size=block_size).is_right(sliding_window=130)


def test_decode_only_step_equals_reference() -> None:
    step = make_attending([1, 1, 1, 1], [0, 700, MIN_SPLIT, MIN_SPLIT + 1])
    assert step.plan.is_decode_only
    assert step.is_right()


@pytest.mark.parametrize("context", [20, 2 * MIN_SPLIT + 3])
def test_rows_of_same_sequence_decode_side_by_side(context: int) -> None:
    """What the verification of proposed tokens needs: each row sees its own context alone, and
    has the bits that a step of its own would give it. As rows of a chunk they needn't have these.
    """
    count = 5
    contexts = np.arange(context - count + 1, context + 1, dtype=np.int32)
    step = make_attending([count], [context], max_model_len=1024)
    assert step.is_right()
    chunk, tables = step.out.clone(), step.block_tables.numpy()
    step.plan.fill(np.arange(count + 1, dtype=np.int32), contexts, np.repeat(tables, count, 0))
    assert step.plan.is_decode_only
    together = step.run().clone()
    torch.testing.assert_close(together, chunk, rtol=2e-3, atol=2e-3)
    q, out = step.q, step.out
    for row in range(count):
        step.plan.fill(np.array([0, 1], dtype=np.int32), contexts[row : row + 1], tables)
        step.q, step.out = q[row : row + 1], out[row : row + 1]
        assert torch.equal(step.run()[0], together[row])


def test_single_chunk_step_equals_reference() -> None:
    step = make_attending([70], [75])
    assert not step.plan.is_decode_only
    assert step.is_right()


def test_rows_without_context_become_zeros_and_rest_stay() -> None:
    step = make_attending([1, 1, 1], [9, 0, 0])
    wide = torch.full((5, 4, 64), float("nan"), dtype=torch.float16)
    step.q, step.out = torch.cat([step.q, step.q[:2]]), wide
    out = step.run()
    assert (out[1:3] == 0).all()
    assert out[0].isfinite().all()
    assert out[3:].isnan().all()


def rows_of(step: Attending, sequence: int) -> torch.Tensor:
    return step.out[step.query_starts[sequence] : step.query_starts[sequence + 1]]


def alone(step: Attending, sequence: int, num_rows: int) -> Attending:
    """The last rows of one sequence, by themselves, over the same cache."""
    context = step.context_lens[sequence]
    single = make_attending([num_rows], [context])
    single.k_cache, single.v_cache = step.k_cache, step.v_cache
    table = step.block_tables[sequence : sequence + 1].numpy()
    single.plan.fill(np.array([0, num_rows], dtype=np.int32), np.array([context], dtype=np.int32), table)
    end = step.query_starts[sequence + 1]
    single.q.copy_(step.q[end - num_rows : end])
    return single


@pytest.mark.parametrize("window", [None, 70])
def test_row_bits_do_not_depend_on_batch(window: int | None) -> None:
    together = make_attending(NUM_ROWS, CONTEXT_LENS)
    together.run(window)
    for sequence in (1, 2, 3, 6):
        single = alone(together, sequence, NUM_ROWS[sequence])
        assert torch.equal(single.run(window), rows_of(together, sequence))


@pytest.mark.parametrize("window", [None, 70])
def test_row_bits_do_not_depend_on_chunk_start(window: int | None) -> None:
    together = make_attending([40], [110])
    together.run(window)
    for num_rows in (2, 21):
        assert torch.equal(alone(together, 0, num_rows).run(window), rows_of(together, 0)[-num_rows:])


def test_nan_stays_in_own_sequence() -> None:
    step = make_attending([2, 1, 1, 1], [30, 600, 20, 300])
    for sequence, block in ((1, 0), (0, 1)):
        step.k_cache[step.block_tables[sequence, block]] = float("nan")
        step.v_cache[step.block_tables[sequence, block]] = float("nan")
    out = step.run()
    assert out[:3].isnan().all()
    assert out[3:].isfinite().all()


def test_launch_serves_later_fill_with_equal_decode_rows() -> None:
    first = make_attending([1, 1, 1, 1], [3, 300, 0, 40])
    captured = copy.copy(first.plan)
    second = make_attending([1, 1, 1, 1], [900, 0, 17, MIN_SPLIT])
    first.plan.fill(
        np.arange(5, dtype=np.int32), np.array(second.context_lens, dtype=np.int32), second.block_tables.numpy()
    )
    # what a replay sees: the tensors as they are now, and every number that the host knew before
    second.plan = captured
    assert second.is_right()


def test_long_contexts_are_cut_into_bounded_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve_kernels.gpu.attention.plan.MIN_SPLIT", 32)
    monkeypatch.setattr("loraserve_kernels.gpu.attention.plan.max_splits", lambda num_kv_heads: 4)
    step = make_attending([1, 1, 1], [500, 90, 130])
    # some of the last row's splits get no tile of keys, since there are three tiles for four
    assert step.plan.buffer[0] == 4 + 3 + 4
    assert step.is_right()


def test_same_plan_serves_consecutive_steps() -> None:
    first = make_attending(NUM_ROWS, CONTEXT_LENS)
    assert first.is_right()
    second = make_attending([4, 1, 1], [60, 280, 2])
    first.plan.fill(
        np.array(second.query_starts, dtype=np.int32),
        np.array(second.context_lens, dtype=np.int32),
        second.block_tables.numpy(),
    )
    second.plan = first.plan
    assert second.is_right()


def test_tensors_mismatching_plan_are_refused() -> None:
    step = make_attending([1, 3], [40, 3])
    q, k, v, plan, out = step.q, step.k_cache, step.v_cache, step.plan, step.out
    before = step.wide_out.clone()
    for args in (
        (q[:2], k, v, plan, out[:2]),
        (q, k, v, plan, out[:, :2]),
        (q[:, :2], k, v, plan, out[:, :2]),
        (q, k[:, :1], v[:, :1], plan, out),
        (q, k[:, :, :8], v[:, :, :8], plan, out),
        (q, k, v[:1], plan, out),
        (q.transpose(0, 1).contiguous().transpose(0, 1), k, v, plan, out),
        (q, k.transpose(1, 2).contiguous().transpose(1, 2), v, plan, out),
    ):
        with pytest.raises(TensorMismatch):
            gpu_attention.paged_attention(*args, scale=SCALE)
    with pytest.raises(TensorMismatch, match=r"all must be bfloat16, or all float16"):
        gpu_attention.paged_attention(q.bfloat16(), k, v, plan, out, scale=SCALE)
    with pytest.raises(TensorMismatch, match="a sliding window of 0"):
        gpu_attention.paged_attention(q, k, v, plan, out, scale=SCALE, sliding_window=0)
    assert torch.equal(before.view(torch.int16), step.wide_out.view(torch.int16))


def test_chunk_rows_fill_tiles_of_query_heads() -> None:
    step = make_attending([17], [17], num_heads=8, num_kv_heads=2)
    assert step.plan.num_tiles == -(-17 // (CHUNK_BLOCK_M // 4))
