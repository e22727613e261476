from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.rows import rows as gpu_rows

from .row_steps import (
    EPS,
    MAX_LEN,
    add_rms_norm_is_right,
    gate_is_right,
    make_attention,
    norm_in_place_is_right,
    poisoned,
    random_rows,
)

pytestmark = pytest.mark.interpreted

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@DTYPES
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
def test_embedding_widens_the_tables_rows(dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    table = random_rows(11, 1037, dtype)
    ids = torch.tensor([10, 0, 3, 3], dtype=id_dtype)
    out, right_of_out = poisoned(4, 1037, torch.float32)
    gpu_rows.embed(ids, table, out)
    assert torch.equal(out, table[ids.long()].float())
    assert right_of_out.isnan().all()


def test_unknown_token_spoils_only_own_row() -> None:
    table, out = random_rows(11, 40, torch.float16), torch.zeros(4, 40)
    gpu_rows.embed(torch.tensor([2, 11, -1, 2**40]), table, out)
    assert torch.equal(out[0], table[2].float())
    assert out[1:].isnan().all()


@DTYPES
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 96), (5, 1000)])
def test_hidden_rows_are_summed_in_place_and_normed(
    num_tokens: int, size: int, dtype: torch.dtype, has_delta: bool
) -> None:
    assert add_rms_norm_is_right(num_tokens, size, dtype, has_delta=has_delta)


@DTYPES
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("has_delta_weight", [True, False])
def test_sum_is_normed_and_scaled(has_delta_weight: bool, has_weight: bool, dtype: torch.dtype) -> None:
    assert add_rms_norm_is_right(
        3, 100, dtype, has_delta=True, has_weight=has_weight, has_delta_weight=has_delta_weight, delta_scale=0.3
    )


def test_hidden_rows_without_a_norm_go_on_rounded() -> None:
    assert add_rms_norm_is_right(2, 100, torch.float16, has_delta=False, has_weight=False)


@DTYPES
def test_rows_are_normed_in_place(dtype: torch.dtype) -> None:
    assert norm_in_place_is_right(3, 100, dtype)


def test_eps_keeps_a_row_of_zeros_finite() -> None:
    out, _ = poisoned(1, 64, torch.float16)
    gpu_rows.add_rms_norm(torch.zeros(1, 64), None, torch.ones(64), EPS, out)
    assert torch.equal(out, torch.zeros(1, 64, dtype=torch.float16))


@DTYPES
@pytest.mark.parametrize("has_norm", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (7, 1, 80), (28, 4, 128)], ids=["64", "80", "128"]
)
def test_queries_are_rotated_and_keys_and_values_stored(
    num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    step = make_attention(dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, has_norm=has_norm)
    assert step.is_right()


@pytest.mark.parametrize("is_norm_last", [False, True], ids=["norm-first", "norm-last"])
@pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("rotated", [64, 40], ids=["whole", "part"])
def test_heads_turn_by_each_kind_of_rope(rotated: int, is_interleaved: bool, is_norm_last: bool) -> None:
    step = make_attention(
        torch.float16, has_norm=True, rotated=rotated, is_interleaved=is_interleaved, is_norm_last=is_norm_last
    )
    assert step.is_right()


@pytest.mark.parametrize("has_norm", [True, False], ids=["normed", "plain"])
def test_rows_without_angles_are_not_rotated(has_norm: bool) -> None:
    step = make_attention(torch.float16, has_norm=has_norm)
    step.cos_sin = None
    step.positions.fill_(2**30)
    assert step.is_right()


def test_padding_rows_store_no_values() -> None:
    step = make_attention(torch.float16, slots=(-1, -1))
    step.positions.zero_()
    assert step.is_right()
    assert step.arena.isnan().all()


def test_unknown_cache_slot_is_not_written() -> None:
    step = make_attention(torch.float16, slots=(5 * 16, 2**33, 5 * 16 + 3))
    step.run()
    assert step.arena.isnan().all()


@pytest.mark.parametrize("position", [-1, MAX_LEN, 2**40])
def test_unknown_position_spoils_only_own_row(position: int) -> None:
    step = make_attention(torch.float16, slots=(3, 4))
    step.positions = step.positions.long()
    step.positions[0] = position
    step.run()
    width = step.num_heads * step.head_dim
    assert step.qkv[0, :width].isnan().all()
    assert step.qkv[1].isfinite().all()
    assert step.k_cache[0, :, 3].isnan().all()
    assert step.k_cache[0, :, 4].isfinite().all()


@DTYPES
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1024), (3, 1100), (2, 75)])
def test_swiglu_equals_silu_times_up(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    assert gate_is_right(num_tokens, size, dtype)


@DTYPES
def test_geglu_equals_gelu_times_up(dtype: torch.dtype) -> None:
    assert gate_is_right(3, 1100, dtype, is_gelu=True)


def test_row_bits_do_not_depend_on_step() -> None:
    together = make_attention(torch.float16, has_norm=True)
    hidden, gate_up = random_rows(5, 200, torch.float32), random_rows(5, 200, torch.float16)
    normed, activated = torch.empty(5, 200, dtype=torch.float16), torch.empty(5, 100, dtype=torch.float16)
    qkv, own = together.qkv.clone(), hidden.clone()
    together.run()
    gpu_rows.add_rms_norm(hidden, gate_up, torch.ones(200), EPS, normed)
    gpu_rows.swiglu(gate_up, activated)
    for row in (0, 3):
        alone = make_attention(torch.float16, has_norm=True, slots=(int(together.slots[row]),))
        alone.qkv[0], alone.positions[0] = qkv[row], together.positions[row]
        alone.cos_sin, alone.q_norm, alone.k_norm = together.cos_sin, together.q_norm, together.k_norm
        alone.run()
        assert torch.equal(alone.qkv[0], together.qkv[row])
        block, offset = divmod(int(together.slots[row]), 16)
        assert torch.equal(alone.k_cache[block, :, offset], together.k_cache[block, :, offset])
        one, act = torch.empty(1, 200, dtype=torch.float16), torch.empty(1, 100, dtype=torch.float16)
        gpu_rows.add_rms_norm(own[row : row + 1], gate_up[row : row + 1], torch.ones(200), EPS, one)
        gpu_rows.swiglu(gate_up[row : row + 1], act)
        assert torch.equal(one[0], normed[row])
        assert torch.equal(act[0], activated[row])


def test_step_without_rows_launches_no_kernel() -> None:
    half = torch.empty(0, 64, dtype=torch.float16)
    gpu_rows.embed(torch.empty(0, dtype=torch.int64), torch.ones(3, 64), torch.empty(0, 64))
    gpu_rows.add_rms_norm(torch.empty(0, 64), half, torch.ones(64), EPS, half)
    gpu_rows.swiglu(half, half[:, :32])
    make_attention(torch.float16, slots=()).run()


def attention_with(**changes: Any) -> Any:
    step = make_attention(torch.float16)
    for name, value in changes.items():
        setattr(step, name, value)
    return step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(5, 600, dtype=torch.float16)}, "600 wide"),
        ({"positions": torch.zeros(5)}, "positions is torch.float32; expected torch.int32 or torch.int64"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, r"slot_mapping \(4,\)"),
        ({"cos_sin": torch.zeros(9, 33)}, r"cos_sin \(9, 33\)"),
        ({"v_cache": torch.zeros(5, 2, 16, 64, dtype=torch.float16)}, "with the same strides"),
        ({"q_norm": torch.zeros(64)}, "give both or neither"),
        ({"q_norm": torch.zeros(9), "k_norm": torch.zeros(64)}, r"q_norm is \(9,\); expected \[64\]"),
        ({"qkv": torch.zeros(5, 640)}, "qkv is torch.float32; expected torch.bfloat16 or torch.float16"),
    ],
)
def test_mismatched_tensors_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TensorMismatch, match=message):
        attention_with(**changes).run()


def test_mismatched_rows_are_refused() -> None:
    rows, half = torch.zeros(3, 64), torch.zeros(3, 64, dtype=torch.float16)
    with pytest.raises(TensorMismatch, match=r"table is \(9, 32\)"):
        gpu_rows.embed(torch.zeros(3, dtype=torch.int64), torch.zeros(9, 32), rows)
    with pytest.raises(TensorMismatch, match="contiguous in the last dim"):
        gpu_rows.add_rms_norm(torch.zeros(64, 3).T, half, torch.ones(64), EPS, half)
    with pytest.raises(TensorMismatch, match=r"weight is \(63,\)"):
        gpu_rows.add_rms_norm(rows, half, torch.ones(63), EPS, half)
    with pytest.raises(TensorMismatch, match=r"weight is \(63,\)"):
        gpu_rows.add_rms_norm(rows, half, None, EPS, half, delta_weight=torch.ones(63))
    with pytest.raises(TensorMismatch, match=r"the weight \(63,\)"):
        gpu_rows.norm_in_place(half, torch.ones(63), EPS)
    with pytest.raises(TensorMismatch, match=r"\[3, 128\] was expected"):
        gpu_rows.swiglu(half, half)
    with pytest.raises(TensorMismatch, match=r"out is torch\.bfloat16"):
        gpu_rows.swiglu(half, half[:, :32].bfloat16())
