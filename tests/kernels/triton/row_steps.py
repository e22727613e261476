"""Calls of the GPU's row kernels on poisoned memory, beside their references in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.model.layers.rotary import rotate
from loraserve_kernels.gpu.rows import rows as gpu_rows

MAX_LEN = 50
BLOCK_SIZE = 16
EPS = 1e-5


def poisoned(num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A view into rows that go on with NaN, filled with NaN as well;
    and the rest of those rows, which must stay NaN.
    """
    whole = torch.full((num_rows, width + 40), float("nan"), dtype=dtype)
    return whole[:, :width], whole[:, width:]


def random_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    rows, _ = poisoned(num_rows, width, dtype)
    return rows.copy_(torch.randn(num_rows, width))


def is_close(result: Tensor, expected: Tensor) -> bool:
    """Within one step of the dtype (the interpreter truncates to bf16) of each element, or of
    float32's rounding of the largest; NaN where NaN.
    """
    expected = expected.double()
    size = expected.nan_to_num().abs()
    tolerance = torch.finfo(result.dtype).eps * size + 4e-7 * size.max()
    error = (result.double() - expected).abs()
    return bool((error.nan_to_num(0.0) <= tolerance).all()) and torch.equal(result.isnan(), expected.isnan())


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def add_rms_norm_is_right(
    num_tokens: int,
    size: int,
    dtype: torch.dtype,
    *,
    has_delta: bool,
    has_weight: bool = True,
    has_delta_weight: bool = False,
    delta_scale: float = 1.0,
) -> bool:
    hidden = random_rows(num_tokens, size, torch.float32)
    delta = random_rows(num_tokens, size, dtype) if has_delta else None
    weight = torch.randn(size) if has_weight else None
    delta_weight = torch.randn(size) if has_delta_weight else None
    out, right_of_out = poisoned(num_tokens, size, dtype)
    added = torch.zeros(num_tokens, size, dtype=torch.float64) if delta is None else delta.double()
    if delta_weight is not None:
        added = rms_norm(added, delta_weight.double())
    total = hidden.double() + delta_scale * added
    gpu_rows.add_rms_norm(hidden, delta, weight, EPS, out, delta_weight=delta_weight, delta_scale=delta_scale)
    expected = total if weight is None else rms_norm(total, weight.double())
    return is_close(hidden, total) and is_close(out, expected) and bool(right_of_out.isnan().all())


def norm_in_place_is_right(num_tokens: int, size: int, dtype: torch.dtype) -> bool:
    """In the middle of wider rows, whose other elements keep their bits."""
    rows, weight = random_rows(num_tokens, size + 30, dtype), torch.randn(size)
    before = rows.clone()
    gpu_rows.norm_in_place(rows[:, 10 : 10 + size], weight, EPS)
    expected = before.double()
    expected[:, 10 : 10 + size] = rms_norm(expected[:, 10 : 10 + size], weight.double())
    is_kept = torch.equal(rows[:, :10], before[:, :10]) and torch.equal(rows[:, 10 + size :], before[:, 10 + size :])
    return is_kept and is_close(rows, expected)


def gate_is_right(num_tokens: int, size: int, dtype: torch.dtype, *, is_gelu: bool = False) -> bool:
    gate_up = random_rows(num_tokens, 2 * size, dtype).mul_(2)
    out, right_of_out = poisoned(num_tokens, size, dtype)
    (gpu_rows.geglu if is_gelu else gpu_rows.swiglu)(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    activated = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
    return is_close(out, activated * up) and bool(right_of_out.isnan().all())


@dataclass
class Attention:
    """One step's queries, keys and values, and a cache of NaN whose blocks lie apart."""

    qkv: Tensor
    positions: Tensor
    slots: Tensor
    cos_sin: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    arena: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    is_norm_last: bool = False
    is_interleaved: bool = False

    def run(self) -> None:
        gpu_rows.rotate_and_store(
            self.qkv,
            self.positions,
            self.cos_sin,
            self.slots,
            self.k_cache,
            self.v_cache,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=EPS,
            is_norm_last=self.is_norm_last,
            is_interleaved=self.is_interleaved,
        )

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """(queries, keys, values) in float64, [num_tokens, heads, head_dim]."""
        x = self.qkv.double().unflatten(-1, (-1, self.head_dim)).clone()
        q, k, v = x.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if not self.is_norm_last:
            q, k = self._normed(q, k)
        if self.cos_sin is not None:
            cos, sin = self.cos_sin.double()[self.positions.long()].chunk(2, -1)
            if self.is_interleaved:
                cos, sin = torch.stack((cos, cos), -1).flatten(1), torch.stack((-sin, sin), -1).flatten(1)
            else:
                cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
            for heads in (q, k):
                rotate(heads, cos[:, None], sin[:, None], is_interleaved=self.is_interleaved)
        if self.is_norm_last:
            q, k = self._normed(q, k)
        return q, k, v

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return rms_norm(q, self.q_norm.double()), rms_norm(k, self.k_norm.double())

    def is_right(self) -> bool:
        """Queries, cache and everything else: keys and values of qkv keep their bits,
        memory of no stored slot stays NaN.
        """
        q, k, v = self.expected()
        caches = [torch.full_like(cache, float("nan")) for cache in (self.k_cache, self.v_cache)]
        for row, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                for cache, rows in zip(caches, (k, v), strict=True):
                    cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = rows[row]
        num_stored = int((self.slots >= 0).sum()) * self.num_kv_heads * self.head_dim
        before = self.qkv.clone()
        self.run()
        width = self.num_heads * self.head_dim
        return (
            is_close(self.qkv[:, :width], q.flatten(1))
            and torch.equal(self.qkv[:, width:], before[:, width:])
            and is_close(self.k_cache, caches[0])
            and torch.equal(self.v_cache.nan_to_num(), caches[1].nan_to_num())
            and int((~self.arena.isnan()).sum()) == 2 * num_stored
        )


def make_attention(
    dtype: torch.dtype,
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    has_norm: bool = False,
    rotated: int | None = None,
    is_norm_last: bool = False,
    is_interleaved: bool = False,
    slots: tuple[int, ...] = (37, -1, 0, 79, 16),
) -> Attention:
    # a block of the arena holds keys, then values, then something else; its first one is another
    # owner's
    num_elements = num_kv_heads * BLOCK_SIZE * head_dim
    arena = torch.full((6, 2 * num_elements + 48), float("nan"), dtype=dtype)
    shape = (5, num_kv_heads, BLOCK_SIZE, head_dim)
    angles = torch.rand(MAX_LEN, (rotated or head_dim) // 2) * 6
    return Attention(
        qkv=random_rows(len(slots), (num_heads + 2 * num_kv_heads) * head_dim, dtype),
        positions=torch.randperm(MAX_LEN)[: len(slots)].int(),
        slots=torch.tensor(slots, dtype=torch.int64),
        # stretched positions have longer ones
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1) * (1.25 if is_norm_last else 1),
        k_cache=arena[1:, :num_elements].view(shape),
        v_cache=arena[1:, num_elements : 2 * num_elements].view(shape),
        arena=arena,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm=torch.randn(head_dim) if has_norm else None,
        k_norm=torch.randn(head_dim) if has_norm else None,
        is_norm_last=is_norm_last,
        is_interleaved=is_interleaved,
    )
