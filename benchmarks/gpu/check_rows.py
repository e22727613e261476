"""What stands between the linears, on the device: embedding, residual sum with RMSNorm, rotation
with the cache's writes, SwiGLU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.close import against_float64, dtype_name, same_bits
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row
from loraserve_kernels.gpu.rows import rows as gpu_rows

EPS = 1e-5
BLOCK_SIZE = 16


def cases(machine: Machine) -> Iterator[Case]:
    rows, hidden, inner = (3, 72, 96) if machine.is_tiny else (257, 4096, 14_336)
    for dtype in machine.dtypes:
        name = dtype_name(dtype)
        yield Case(f"embed, {name}", lambda d=dtype: _embed(machine, d, rows, hidden))
        for has_delta in (True, False):
            yield Case(f"norm, {name}", lambda d=dtype, a=has_delta: _norm(machine, d, rows, hidden, has_delta=a))
        yield Case(f"swiglu, {name}", lambda d=dtype: _swiglu(machine, d, rows, inner))
        for has_norm in (True, False):
            yield Case(f"rotate, {name}", lambda d=dtype, a=has_norm: _rotate(machine, d, rows, has_norm=a))


def _embed(machine: Machine, dtype: torch.dtype, rows: int, hidden: int) -> list[Row]:
    table = machine.randn(1000, hidden, dtype=dtype)
    tokens = torch.randint(1000, (rows,), device=machine.device)
    out = torch.full((rows, hidden), float("nan"), device=machine.device)
    gpu_rows.embed(tokens, table, out)
    return [same_bits("embed", out, table[tokens].float(), note=dtype_name(dtype))]


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _norm(machine: Machine, dtype: torch.dtype, rows: int, hidden: int, *, has_delta: bool) -> list[Row]:
    stream, weight = machine.randn(rows, hidden), machine.randn(hidden)
    delta = machine.randn(rows, hidden, dtype=dtype) if has_delta else None
    total = stream + (0 if delta is None else delta.float())
    out = torch.full((rows, hidden), float("nan"), dtype=dtype, device=machine.device)
    gpu_rows.add_rms_norm(stream, delta, weight, EPS, out)
    note = f"{dtype_name(dtype)}, {'with' if has_delta else 'without'} a sum"
    return [
        same_bits("the residual stream", stream, total, note=note),
        against_float64("norm", out, _normed(total.double(), weight.double()), note=note),
    ]


def _swiglu(machine: Machine, dtype: torch.dtype, rows: int, inner: int) -> list[Row]:
    gate_up = machine.randn(rows, 2 * inner, dtype=dtype, std=2.0)
    out = torch.full((rows, inner), float("nan"), dtype=dtype, device=machine.device)
    gpu_rows.swiglu(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    return [against_float64("SwiGLU", out, F.silu(gate) * up, note=dtype_name(dtype))]


def _rotate(machine: Machine, dtype: torch.dtype, rows: int, *, has_norm: bool) -> list[Row]:
    heads, kv_heads, dim = (4, 2, 32) if machine.is_tiny else (32, 8, 128)
    qkv = machine.randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.rand(rows + 9, dim // 2, device=machine.device) * 6
    positions = torch.randperm(rows + 9, device=machine.device)[:rows]
    num_blocks = -(-rows // BLOCK_SIZE) + 1
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=machine.device)[:rows]
    # one row stands for nobody
    slots[rows // 2] = -1
    k_cache, v_cache = (
        torch.full((num_blocks, kv_heads, BLOCK_SIZE, dim), float("nan"), dtype=dtype, device=machine.device)
        for _ in range(2)
    )
    norms = [machine.randn(dim) for _ in range(2)] if has_norm else [None, None]
    q, k, v = qkv.double().unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    if norms[0] is not None and norms[1] is not None:
        q, k = _normed(q, norms[0].double()), _normed(k, norms[1].double())
    cos, sin = (part.double()[positions][:, None] for part in (angles.cos(), angles.sin()))
    q, k = (
        torch.cat(
            (x[..., : dim // 2] * cos - x[..., dim // 2 :] * sin, x[..., dim // 2 :] * cos + x[..., : dim // 2] * sin),
            -1,
        )
        for x in (q, k)
    )
    stored = slots >= 0
    blocks, places = slots[stored] // BLOCK_SIZE, slots[stored] % BLOCK_SIZE
    expected_k = torch.full(k_cache.shape, float("nan"), dtype=torch.float64, device=machine.device)
    expected_v = v_cache.clone()
    expected_k[blocks, :, places] = k[stored]
    expected_v[blocks, :, places] = v[stored].to(dtype)
    gpu_rows.rotate_and_store(
        qkv,
        positions,
        torch.cat((angles.cos(), angles.sin()), -1),
        slots,
        k_cache,
        v_cache,
        num_heads=heads,
        num_kv_heads=kv_heads,
        q_norm=norms[0],
        k_norm=norms[1],
        eps=EPS,
    )
    note = f"{dtype_name(dtype)}, {'with' if has_norm else 'without'} norms of heads"
    result_q = qkv[:, : heads * dim].unflatten(-1, (heads, dim))
    return [
        against_float64("rotated queries", result_q, q, note=note),
        against_float64("stored keys", k_cache, expected_k, note=note),
        same_bits("stored values", v_cache.nan_to_num(), expected_v.nan_to_num(), note=note),
    ]
