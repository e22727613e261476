"""Operations between the linears on a GPU.

They are embedding, residual sum with RMSNorm, rotary positions with the cache's writes, and SwiGLU.
One launch each.

None synchronises or allocates: each may be captured in a CUDA graph for its number of rows. A row's
bits don't depend on what shares its step. "Compute dtype" is bfloat16 or float16; arithmetic is
float32, rounded once at the end. Needs Triton; with ``TRITON_INTERPRET=1`` it runs on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.rows.kernels import (
    add_rms_norm_kernel,
    embed_kernel,
    norm_in_place_kernel,
    rotate_and_store_kernel,
    swiglu_kernel,
)

COMPUTE_DTYPES = (torch.bfloat16, torch.float16)
MAX_HIDDEN_SIZE = 16_384
"""A row is normed in the registers of one program."""

BLOCK = 1024
"""Columns of a row that a program of `embed` or `swiglu` works on: eight for each of 128 threads,
which is 16 bytes.
"""
NUM_WARPS = 4


def norm_config(hidden_size: int) -> tuple[int, int]:
    """Choose (block, num_warps) of `add_rms_norm`.

    A thread has at most 32 elements, 16 up to a size of 8192.
    """
    block: int = triton.next_power_of_2(hidden_size)
    return block, min(16, max(1, block // 512))


def heads_config(head_dim: int, num_heads: int) -> tuple[int, int]:
    """Choose (block_heads, block_half) of `rotate_and_store` for that many heads.

    Query, key and value heads count; each of 128 threads has 16 bytes of each half.
    """
    half: int = triton.next_power_of_2(head_dim // 2)
    return max(1, min(BLOCK // half, triton.next_power_of_2(num_heads))), half


def embed(token_ids: Tensor, table: Tensor, out: Tensor) -> None:
    """Write the table's rows of these tokens to `out`, widened.

    A token that the table doesn't have becomes a row of NaN.

    Args:
        token_ids: [num_tokens] int64 or int32, contiguous.
        table: [vocab_size, hidden_size] compute dtype or float32, contiguous in the last dim.
        out: [num_tokens, hidden_size] float32, contiguous in the last dim.

    Raises:
        TensorMismatch: shapes, dtypes, strides or devices disagree.
    """
    num_tokens, hidden_size = _shape_of("out", out)
    if table.ndim != 2 or token_ids.shape != (num_tokens,) or table.shape[1] != hidden_size:
        raise TensorMismatch(
            f"token_ids are {tuple(token_ids.shape)}, the table is {tuple(table.shape)}, out is {tuple(out.shape)}; "
            "expected [num_tokens], [vocab_size, hidden_size] and [num_tokens, hidden_size]"
        )
    _expect("token_ids", token_ids, (torch.int64, torch.int32))
    _expect("table", table, (*COMPUTE_DTYPES, torch.float32))
    _expect("out", out, (torch.float32,))
    _expect_one_device(out, token_ids, table)
    if num_tokens == 0:
        return
    embed_kernel[(num_tokens, triton.cdiv(hidden_size, BLOCK))](
        token_ids,
        table,
        out,
        table.stride(0),
        out.stride(0),
        table.shape[0],
        hidden_size,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def add_rms_norm(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    *,
    delta_weight: Tensor | None = None,
    delta_scale: float = 1.0,
) -> None:
    """Add ``delta_scale * delta`` to `hidden` in place, then write its norm to `out`.

    The norm is ``hidden / sqrt(mean(hidden²) + eps) * weight``.

    Args:
        hidden: [num_tokens, hidden_size] float32, contiguous in the last dim, as are the others.
        delta: the same shape, compute dtype; None: hidden stays as it is.
        weight: [hidden_size] float32; None: hidden itself is written to `out`, rounded.
        out: the same shape, compute dtype.
        delta_weight: [hidden_size] float32: delta is normed with it before it is scaled and added;
            None: it isn't.

    Raises:
        TensorMismatch: shapes, dtypes, strides or devices disagree, or hidden_size is above
            `MAX_HIDDEN_SIZE`.
    """
    num_tokens, hidden_size = _shape_of("hidden", hidden)
    shapes = {tuple(t.shape) for t in (hidden, delta, out) if t is not None}
    weights = [w for w in (weight, delta_weight) if w is not None]
    if len(shapes) > 1 or any(w.shape != (hidden_size,) for w in weights) or hidden_size > MAX_HIDDEN_SIZE:
        raise TensorMismatch(
            f"hidden, delta and out are {sorted(shapes)}, the weight is "
            f"{' and '.join(str(tuple(w.shape)) for w in weights)}; "
            f"expected [num_tokens, hidden_size] thrice and [hidden_size], at most {MAX_HIDDEN_SIZE}"
        )
    _expect("hidden", hidden, (torch.float32,))
    for w in weights:
        _expect("weight", w, (torch.float32,))
    _expect("out", out, COMPUTE_DTYPES)
    if delta is not None:
        _expect("delta", delta, COMPUTE_DTYPES)
    _expect_one_device(hidden, out, delta, *weights)
    if num_tokens == 0:
        return
    block, num_warps = norm_config(hidden_size)
    add_rms_norm_kernel[(num_tokens,)](
        hidden,
        delta if delta is not None else out,
        weight if weight is not None else hidden,
        delta_weight if delta_weight is not None else hidden,
        out,
        hidden.stride(0),
        delta.stride(0) if delta is not None else 0,
        out.stride(0),
        hidden_size,
        eps,
        delta_scale,
        HAS_DELTA=delta is not None,
        HAS_DELTA_NORM=delta_weight is not None,
        HAS_NORM=weight is not None,
        BLOCK=block,
        num_warps=num_warps,
        enable_fp_fusion=True,
    )


def norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    """Replace each row by ``x / sqrt(mean(x²) + eps) * weight``.

    Args:
        x: [num_tokens, size] compute dtype, contiguous in the last dim.
        weight: [size] float32.

    Raises:
        TensorMismatch: shapes, dtypes, strides or devices disagree, or the size is above
            `MAX_HIDDEN_SIZE`.
    """
    num_tokens, size = _shape_of("x", x)
    if weight.shape != (size,) or size > MAX_HIDDEN_SIZE:
        raise TensorMismatch(
            f"x is {tuple(x.shape)}, the weight {tuple(weight.shape)}; expected rows as long as it, "
            f"at most {MAX_HIDDEN_SIZE}"
        )
    _expect("x", x, COMPUTE_DTYPES)
    _expect("weight", weight, (torch.float32,))
    _expect_one_device(x, weight)
    if num_tokens == 0:
        return
    block, num_warps = norm_config(size)
    norm_in_place_kernel[(num_tokens,)](
        x, weight, x.stride(0), size, eps, BLOCK=block, num_warps=num_warps, enable_fp_fusion=True
    )


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    is_norm_last: bool = False,
    is_interleaved: bool = False,
) -> None:
    """Rotate the queries in place; write the rotated keys and the values to the cache.

    `qkv` keeps its keys and values as they were. Where the norms are given, each head's query and
    key are normed over the head's dim, before they are rotated or after. A row whose slot is -1
    stores nothing. A position that the table doesn't have makes NaN.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] compute dtype, contiguous in
            the last dim.
        positions: [num_tokens] int32 or int64, contiguous.
        cos_sin: [max_len, rotated] float32, contiguous: a position's cosines, then its sines. Of
            each head the first `rotated` elements turn, element i with element i + rotated / 2.
            None: nothing is rotated.
        slot_mapping: [num_tokens] int64, contiguous: ``block * block_size + offset``.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], qkv's dtype, contiguous
            in the last dim, with the same strides.
        q_norm, k_norm: [head_dim] float32; both or neither.
        eps: of the norms.
        is_norm_last: whether heads are rotated before they are normed.
        is_interleaved: whether element 2i turns with element 2i + 1 instead.

    Raises:
        TensorMismatch: shapes, dtypes, strides or devices disagree.
    """
    num_tokens, width = _shape_of("qkv", qkv)
    if k_cache.ndim != 4 or v_cache.shape != k_cache.shape or v_cache.stride() != k_cache.stride():
        raise TensorMismatch(
            f"k_cache is {tuple(k_cache.shape)} with strides {k_cache.stride()}, "
            f"v_cache {tuple(v_cache.shape)} with {v_cache.stride()}; "
            "expected [num_blocks, num_kv_heads, block_size, head_dim] with the same strides"
        )
    num_blocks, cached_heads, block_size, head_dim = k_cache.shape
    all_heads = num_heads + 2 * num_kv_heads
    if width != all_heads * head_dim or cached_heads != num_kv_heads or head_dim % 2 or num_heads < 1:
        raise TensorMismatch(
            f"qkv is {width} wide and the cache has {cached_heads} heads of {head_dim}; {num_heads} query heads "
            f"and {num_kv_heads} key and value heads of an even dim were expected"
        )
    if (
        positions.shape != (num_tokens,)
        or slot_mapping.shape != (num_tokens,)
        or (
            cos_sin is not None
            and (
                cos_sin.ndim != 2
                or cos_sin.shape[1] > head_dim
                or cos_sin.shape[1] % 2
                or cos_sin.stride(0) != cos_sin.shape[1]
            )
        )
    ):
        raise TensorMismatch(
            f"positions are {tuple(positions.shape)}, slot_mapping {tuple(slot_mapping.shape)}, cos_sin "
            f"{'None' if cos_sin is None else tuple(cos_sin.shape)}; expected [{num_tokens}] twice and a contiguous "
            f"[max_len, at most {head_dim}, even]"
        )
    if (q_norm is None) != (k_norm is None):
        raise TensorMismatch("one of q_norm and k_norm is None; give both or neither")
    _expect("qkv", qkv, COMPUTE_DTYPES)
    _expect("positions", positions, (torch.int32, torch.int64))
    _expect("slot_mapping", slot_mapping, (torch.int64,))
    if cos_sin is not None:
        _expect("cos_sin", cos_sin, (torch.float32,))
    _expect("k_cache", k_cache, (qkv.dtype,))
    _expect("v_cache", v_cache, (qkv.dtype,))
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            _expect(name, norm, (torch.float32,))
            if norm.shape != (head_dim,):
                raise TensorMismatch(f"{name} is {tuple(norm.shape)}; expected [{head_dim}], a head's dim")
    _expect_one_device(qkv, positions, slot_mapping, cos_sin, k_cache, v_cache, q_norm, k_norm)
    if num_tokens == 0:
        return
    block_heads, block_half = heads_config(head_dim, all_heads)
    rotate_and_store_kernel[(num_tokens, triton.cdiv(all_heads, block_heads))](
        qkv,
        positions,
        cos_sin if cos_sin is not None else qkv,
        slot_mapping,
        k_cache,
        v_cache,
        q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv,
        qkv.stride(0),
        *k_cache.stride()[:3],
        cos_sin.shape[0] if cos_sin is not None else 0,
        num_blocks * block_size,
        num_heads,
        num_kv_heads,
        eps,
        HAS_NORM=q_norm is not None,
        IS_NORM_LAST=is_norm_last,
        ROTATES=cos_sin is not None,
        ROTATED=head_dim if cos_sin is None else cos_sin.shape[1],
        IS_INTERLEAVED=is_interleaved,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """Write ``silu(gate) * up`` to `out`, where the gate is the first half of `gate_up`.

    Args:
        gate_up: [num_tokens, 2 * size] compute dtype, contiguous in the last dim.
        out: [num_tokens, size], the same dtype, contiguous in the last dim.

    Raises:
        TensorMismatch: shapes, dtypes, strides or devices disagree.
    """
    _activate(gate_up, out, is_gelu=False)


def geglu(gate_up: Tensor, out: Tensor) -> None:
    """Write ``gelu(gate) * up`` to `out`, by gelu's approximation with tanh.

    All else is as in `swiglu`.
    """
    _activate(gate_up, out, is_gelu=True)


def _activate(gate_up: Tensor, out: Tensor, *, is_gelu: bool) -> None:
    num_tokens, size = _shape_of("out", out)
    if gate_up.shape != (num_tokens, 2 * size):
        raise TensorMismatch(f"gate_up is {tuple(gate_up.shape)}; for this out, {[num_tokens, 2 * size]} was expected")
    _expect("gate_up", gate_up, COMPUTE_DTYPES)
    _expect("out", out, (gate_up.dtype,))
    _expect_one_device(out, gate_up)
    if num_tokens == 0:
        return
    swiglu_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        size,
        GELU=is_gelu,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def _shape_of(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.ndim != 2:
        raise TensorMismatch(f"{name} is {tuple(tensor.shape)}; expected rows of tokens, two dims")
    return tensor.shape[0], tensor.shape[1]


def _expect(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise TensorMismatch(f"{name} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise TensorMismatch(f"{name} has strides {tensor.stride()}; expected it contiguous in the last dim")


def _expect_one_device(*tensors: Tensor | None) -> None:
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise TensorMismatch(f"tensors are on {sorted(map(str, devices))}; expected them on one device")
