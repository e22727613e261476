from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loraserve_kernels import reference
from loraserve_kernels.cpu.attention import paged as cpu_attention
from loraserve_kernels.cpu.attention.paged import make_attention_plan, paged_attention, store_kv
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA
from loraserve_kernels.errors import InvalidPlan, TensorMismatch

from .conftest import Paged, make_paged

PATHS = [
    pytest.param(cpu_attention.attend_torch, id="torch"),
    pytest.param(paged_attention, id="numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")),
]
# float32 against float64, outputs below about 3
TOLERANCE = 5e-6


def attend(paged: Paged, path: Callable[..., Any] = paged_attention, **kwargs: Any) -> Tensor:
    out = torch.full_like(paged.q, float("nan"))
    path(paged.q, paged.k_cache, paged.v_cache, paged.plan, out, scale=0.2, **kwargs)
    return out


def expected(paged: Paged, **kwargs: Any) -> Tensor:
    return reference.paged_attention(
        paged.q.double(),
        paged.k_cache.double(),
        paged.v_cache.double(),
        paged.query_starts,
        paged.context_lens,
        paged.block_tables,
        scale=0.2,
        **kwargs,
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 32), (4, 4, 64), (8, 1, 80), (2, 1, 128), (2, 2, 12)]
)
def test_decode_rows_and_chunks_equal_the_reference(
    path: Callable[..., Any], window: int | None, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    paged = make_paged(
        [1, 7, 1, 33, 9, 2],
        [1, 7, 63, 50, 200, 17],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    assert (attend(paged, path, sliding_window=window) - expected(paged, sliding_window=window)).abs().max() < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "soft_cap"), [(6, 2, 32, 0.7), (4, 4, 64, 2.0), (2, 1, 128, 50.0)]
)
def test_softly_capped_scores_equal_the_reference(
    path: Callable[..., Any], window: int | None, num_heads: int, num_kv_heads: int, head_dim: int, soft_cap: float
) -> None:
    paged = make_paged(
        [1, 7, 33, 2], [1, 63, 50, 17], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    options = {"sliding_window": window, "soft_cap": soft_cap}
    assert (attend(paged, path, **options) - expected(paged, **options)).abs().max() < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
def test_products_far_beyond_soft_cap_equal_cap(path: Callable[..., Any]) -> None:
    paged = make_paged([3], [20])
    paged.q.mul_(1e6)
    options = {"soft_cap": 5.0}
    assert (attend(paged, path, **options) - expected(paged, **options)).abs().max() < TOLERANCE


@pytest.mark.parametrize("path", PATHS)
def test_views_of_wider_tensors_are_read_and_written(path: Callable[..., Any]) -> None:
    paged = make_paged([3, 1], [20, 9])
    wide = torch.full((4, 11, 32), float("nan"))
    wide[:, 2:8] = paged.q
    out = torch.full((4, 9, 32), float("nan"))
    path(wide[:, 2:8], paged.k_cache, paged.v_cache, paged.plan, out[:, 1:7], scale=0.2)
    assert (out[:, 1:7] - expected(paged)).abs().max() < TOLERANCE
    assert out[:, [0, 7, 8]].isnan().all()


@pytest.mark.parametrize("path", PATHS)
def test_nan_stays_within_sequence(path: Callable[..., Any]) -> None:
    paged = make_paged([2, 1, 1], [30, 40, 20])
    paged.k_cache[paged.block_tables[1, 0]] = float("nan")
    out = attend(paged, path)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 19])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_row_bits_are_independent_of_batch_and_chunk(window: int | None, soft_cap: float | None, head_dim: int) -> None:
    # of 128, a row's heads take turns at two blocks
    paged = make_paged([50, 1], [70, 100], head_dim=head_dim)
    together = attend(paged, sliding_window=window, soft_cap=soft_cap)
    for num_rows, position in ((1, 69), (1, 20), (3, 40), (13, 64)):
        last = position - 20
        alone = Paged(
            paged.q[last - num_rows + 1 : last + 1],
            paged.k_cache,
            paged.v_cache,
            [0, num_rows],
            [position + 1],
            paged.block_tables[:1],
        )
        found = attend(alone, sliding_window=window, soft_cap=soft_cap)
        assert torch.equal(found, together[last - num_rows + 1 : last + 1])


STORES = [
    pytest.param(cpu_attention.store_torch, id="torch"),
    pytest.param(store_kv, id="numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")),
]


@pytest.mark.parametrize("store", STORES)
def test_keys_and_values_go_only_to_assigned_slots(store: Callable[..., None]) -> None:
    # as the model has them: slices of one tensor
    qkv = torch.randn(3, 8, 32)
    k, v = qkv[:, 4:6], qkv[:, 6:]
    k_cache, v_cache = torch.zeros(4, 2, 16, 32), torch.zeros(4, 2, 16, 32)
    store(k, v, k_cache, v_cache, torch.tensor([5, 16 + 15, 48]))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[0, :, 5], rows[0])
        assert torch.equal(cache[1, :, 15], rows[1])
        assert torch.equal(cache[3, :, 0], rows[2])
        assert cache.count_nonzero() == rows.count_nonzero()


@pytest.mark.parametrize("store", STORES)
def test_many_rows_are_stored(store: Callable[..., None]) -> None:
    k, v, slots = torch.randn(200, 2, 32), torch.randn(200, 2, 32), torch.randperm(256)[:200]
    k_cache, v_cache = torch.zeros(16, 2, 16, 32), torch.zeros(16, 2, 16, 32)
    store(k, v, k_cache, v_cache, slots)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache.transpose(1, 2).flatten(0, 1)[slots], rows)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("slot", [-1, 64])
def test_a_slot_outside_the_cache_is_refused(store: Callable[..., None], slot: int) -> None:
    rows, cache = torch.randn(2, 2, 32), torch.zeros(4, 2, 16, 32)
    with pytest.raises(InvalidPlan, match="4 blocks of 16"):
        store(rows, rows, cache, cache.clone(), torch.tensor([3, slot]))


def test_impossible_step_is_refused() -> None:
    tables = torch.zeros(1, 2, dtype=torch.int32)
    for starts, contexts in (([0, 0], [3]), ([0, 4], [3]), ([0, 1], [33]), ([0, 1, 2], [3])):
        with pytest.raises(InvalidPlan):
            make_attention_plan(starts, contexts, tables, 16)
    with pytest.raises(InvalidPlan, match="int32"):
        make_attention_plan([0, 1], [3], tables.long(), 16)


def test_tensors_not_fitting_plan_are_refused() -> None:
    paged = make_paged([2], [9])
    with pytest.raises(TensorMismatch, match=r"this plan takes 2 rows and \d blocks of 16 or more"):
        paged_attention(paged.q[:1], paged.k_cache, paged.v_cache, paged.plan, paged.q[:1], scale=1.0)


def test_block_missing_from_cache_is_refused() -> None:
    paged = make_paged([2], [9])
    paged.block_tables[0, 0] = 4
    with pytest.raises(TensorMismatch, match="5 blocks"):
        attend(paged)
    paged.block_tables[0, 0] = -1
    with pytest.raises(InvalidPlan, match="block -1"):
        attend(paged)
