"""Row kernels that are wrong in one place: the comparisons of test_gpu_rows must fail for each."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from loraserve_kernels.gpu.rows import rows as gpu_rows

from .mutation import mutant_of
from .row_steps import add_rms_norm_is_right, gate_is_right, make_attention, norm_in_place_is_right

pytestmark = [pytest.mark.interpreted, pytest.mark.campaign]


def heads_are_right() -> bool:
    return make_attention(torch.float16, num_heads=5, num_kv_heads=3, head_dim=80, has_norm=True).is_right()


def partial_heads_are_right() -> bool:
    return make_attention(torch.float16, head_dim=80, rotated=48, has_norm=True).is_right()


def interleaved_heads_are_right() -> bool:
    return make_attention(torch.float16, head_dim=80, rotated=48, is_interleaved=True).is_right()


def heads_normed_last_are_right() -> bool:
    return make_attention(torch.float16, head_dim=80, has_norm=True, is_norm_last=True).is_right()


def norm_is_right() -> bool:
    return add_rms_norm_is_right(3, 100, torch.float16, has_delta=True, has_delta_weight=True, delta_scale=0.3)


def norm_in_place() -> bool:
    return norm_in_place_is_right(3, 100, torch.float16)


def activation_is_right() -> bool:
    return gate_is_right(3, 1100, torch.float16)


def gelu_is_right() -> bool:
    return gate_is_right(3, 1100, torch.float16, is_gelu=True)


COMPARISONS = {
    "rotate_and_store": heads_are_right,
    "rotate_and_store in part": partial_heads_are_right,
    "rotate_and_store by pairs": interleaved_heads_are_right,
    "rotate_and_store normed last": heads_normed_last_are_right,
    "add_rms_norm": norm_is_right,
    "norm_in_place": norm_in_place,
    "swiglu": activation_is_right,
    "swiglu with gelu": gelu_is_right,
}


@pytest.mark.parametrize("kernel", COMPARISONS)
def test_the_unmutated_kernel_is_right(kernel: str) -> None:
    torch.manual_seed(0)
    assert COMPARISONS[kernel]()


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        pytest.param("add_rms_norm", "tl.store(hidden_ptr + row * stride_hidden + columns, x, mask=is_column)", "pass",
            id="the sum isn't kept"),
        pytest.param("add_rms_norm", "/ size + eps", "/ BLOCK + eps", id="the mean is the block's"),
        pytest.param("add_rms_norm", "+ row * stride_delta + columns, mask=is_column",
            "+ row * stride_delta + columns, mask=columns < BLOCK", id="delta is read past its end"),
        pytest.param("add_rms_norm",
            "* stride_out + columns, y.to(out_ptr.dtype.element_ty), mask=is_column)\n\n\n"
            "@triton.jit  # type: ignore[untyped-decorator]\ndef norm_in",
            "* stride_out + columns, y.to(out_ptr.dtype.element_ty))\n\n\n"
            "@triton.jit  # type: ignore[untyped-decorator]\ndef norm_in",
            id="out is written past its end"),
        pytest.param("add_rms_norm", "+ eps) * weight", "+ eps)", id="the weight is forgotten"),
        pytest.param("add_rms_norm", "x += delta * delta_scale", "x += delta", id="the scale is forgotten"),
        pytest.param("add_rms_norm", "tl.sum(delta * delta, axis=0) / size", "tl.sum(delta * delta, axis=0) / BLOCK",
            id="delta's mean is the block's"),
        pytest.param("add_rms_norm", "delta *= tl.load(delta_weight_ptr", "delta += tl.load(delta_weight_ptr",
            id="delta's weight is added"),
        pytest.param("norm_in_place", "(x * weight).to", "x.to", id="the weight in place is forgotten"),
        pytest.param("norm_in_place", "(x * weight).to(x_ptr.dtype.element_ty), mask=is_column",
            "(x * weight).to(x_ptr.dtype.element_ty)", id="the next elements are overwritten"),
        pytest.param("rotate_and_store", "a * cos - b * sin", "a * cos + b * sin", id="heads turn backwards"),
        pytest.param("rotate_and_store", "is_rotated = heads < num_heads + num_kv_heads",
            "is_rotated = heads < num_heads", id="keys aren't rotated"),
        pytest.param("rotate_and_store", "is_rotated = heads < num_heads + num_kv_heads",
            "is_rotated = heads < num_heads + 2 * num_kv_heads", id="values are rotated"),
        pytest.param("rotate_and_store", "(slot >= 0) & (slot < num_slots)", "slot < num_slots",
            id="rows without a slot are stored"),
        pytest.param("rotate_and_store", "% BLOCK_SIZE) * stride_slot", "% BLOCK_SIZE) * 0",
            id="every slot of a block is the first"),
        pytest.param("rotate_and_store", "v_heads = k_heads - num_kv_heads", "v_heads = k_heads",
            id="keys are stored as values"),
        pytest.param("rotate_and_store", "b = second * scale * tl.where(is_q[:, None], q_second, k_second)",
            "b = second * scale * q_second", id="keys are normed as queries"),
        pytest.param("rotate_and_store", "first * first + second * second, axis=1", "first * first, axis=1",
            id="half a head is normed"),
        pytest.param("rotate_and_store", "to_q = is_q[:, None] & is_column[None, :]", "to_q = is_element",
            id="qkv's keys are overwritten"),
        pytest.param("rotate_and_store", "to_v = ((v_heads >= 0)", "to_v = ((v_heads > 0)",
            id="a value's head is lost"),
        pytest.param("rotate_and_store", "(v_heads < num_stored))[:, None] & is_column[None, :]",
            "(v_heads < num_stored))[:, None]", id="the next slot is overwritten"),
        pytest.param("rotate_and_store in part",
            "at_first = tl.where(columns < NUM_PAIRS, columns, columns + NUM_PAIRS)",
            "at_first = columns", id="unturned elements are taken for turned"),
        pytest.param("rotate_and_store in part", "angles_ptrs + NUM_PAIRS, mask", "angles_ptrs, mask",
            id="sines of a part are its cosines"),
        pytest.param("rotate_and_store by pairs", "at_first = 2 * columns", "at_first = columns",
            id="neighbours overlap"),
        pytest.param("rotate_and_store by pairs", "tl.load(angles_ptrs, mask=is_angle, other=float(\"nan\")), 1.0)",
            "tl.load(angles_ptrs, mask=is_angle, other=float(\"nan\")), 0.0)", id="the unturned part is dropped"),
        pytest.param("rotate_and_store normed last", "if HAS_NORM and not IS_NORM_LAST:", "if HAS_NORM:",
            id="heads are normed twice"),
        pytest.param("swiglu with gelu", "1.5957691216057308 *", "0.7978845608028654 *", id="half of gelu's angle"),
        pytest.param("swiglu with gelu", "0.044715 * gate", "0.0", id="gelu without its cube"),
        pytest.param("swiglu", "gate / (1.0 + tl.exp(-x)) * up", "up / (1.0 + tl.exp(-up)) * gate",
            id="up is the gate"),
        pytest.param("swiglu", "tl.load(gate_ptrs + size, mask", "tl.load(gate_ptrs + BLOCK, mask",
            id="up is looked for after a block"),
    ],
)  # fmt: skip
def test_a_mutant_kernel_is_caught(
    kernel: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    name = f"{kernel.partition(' ')[0]}_kernel"
    monkeypatch.setattr(gpu_rows, name, mutant_of(getattr(gpu_rows, name), old, new, tmp_path))
    assert not COMPARISONS[kernel]()
