"""Plain PyTorch: what each kernel computes, in the dtype that it is given (float64 for tests).

Slow, and the measure of all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loraserve_kernels.common.modules import MODULE_INDEX, SITES

if TYPE_CHECKING:
    from loraserve_kernels.common.packed import PackedAdapter
    from loraserve_kernels.common.plan import LoraPlan


def apply_lora(x: Tensor, y: Tensor, plan: LoraPlan, site: str, layer: int, bias: Tensor | None = None) -> None:
    """Turn `y` into what each row's adapter makes of it, in place, in y's dtype.

    That is ``(1 + δ) · (W' x + B diag(scaling) A x) + bias + shift``, for every row and slice of
    the site that has an adapter.

    Args:
        x: [num_tokens, in_features].
        y: [num_tokens, sum of the site's out_features], ``W x + bias``.
        bias: [sum of the site's out_features]: what y already holds of the linears' biases.

    Source: DoRA, arXiv:2402.09353; PEFT computes the same as ``y + δ · (y − bias) + (1 + δ) ·
    scaling · B A x``.
    """
    for segment in plan.segments:
        rows, adapter, column = slice(segment.row_start, segment.row_end), segment.adapter, 0
        inputs = x[rows].to(y.dtype)
        for module in SITES[site]:
            columns = slice(column, column := column + adapter.out_features[MODULE_INDEX[module]])
            part, added = y[rows, columns], 0 if bias is None else bias[columns].to(y.dtype)
            part -= added
            replaced = adapter.row_overrides(layer, module)
            if replaced is not None:
                part[:, replaced.ids.long()] = inputs @ replaced.pick(slice(None), y.dtype).T
            _expand(inputs @ adapter.lora_a(layer, module).to(y.dtype).T, part, adapter, module, layer)
            shift = adapter.bias_delta(layer, module)
            part += added if shift is None else added + shift.to(y.dtype)


def apply_embedding_lora(token_ids: Tensor, y: Tensor, plan: LoraPlan) -> None:
    """Apply the embedding's LoRA, whose input is one-hot.

    ``x A^T`` is row token_id of A^T, ``W' x`` is row token_id of the table.

    Args:
        token_ids: [num_tokens], integers.
        y: [num_tokens, hidden_size], the rows of the base's embedding.
    """
    for segment in plan.segments:
        rows, adapter = slice(segment.row_start, segment.row_end), segment.adapter
        replaced = adapter.row_overrides(0, "embed_tokens")
        if replaced is not None:
            table = replaced.pick(slice(None), y.dtype)
            for row in range(segment.row_start, segment.row_end):
                found = (replaced.ids == token_ids[row]).nonzero()
                if len(found):
                    y[row] = table[found[0, 0]]
        shrunk = adapter.lora_a(0, "embed_tokens").T[token_ids[rows].long()].to(y.dtype)
        _expand(shrunk, y[rows], adapter, "embed_tokens", 0)


def _expand(shrunk: Tensor, y: Tensor, adapter: PackedAdapter, module: str, layer: int) -> None:
    y += shrunk * adapter.scaling(layer, module).to(y.dtype) @ adapter.lora_b(layer, module).to(y.dtype)
    delta = adapter.dora_delta(layer, module)
    if delta is not None:
        y += delta.to(y.dtype) * y


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: list[int],
    context_lens: list[int],
    block_tables: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Compute causal attention of each row over its sequence's cached keys, in q's dtype.

    Return it as [num_tokens, num_heads, head_dim]. The rows of a sequence are its last ones: row j
    of m stands at position ``context_len - m + j``. With a sliding window w, a row sees itself and
    the w − 1 positions before it. With a soft cap c, scores are c · tanh(score / c).
    """
    out = torch.empty_like(q)
    group, block_size = q.shape[1] // k_cache.shape[1], k_cache.shape[2]
    for i, context_len in enumerate(context_lens):
        rows = slice(query_starts[i], query_starts[i + 1])
        table = block_tables[i, : -(-context_len // block_size)].long()
        # [blocks, kv_heads, block_size, D] → [heads, context, D]
        k, v = (
            cache[table].transpose(0, 1).flatten(1, 2)[:, :context_len].to(q.dtype).repeat_interleave(group, 0)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,hkd->hqk", q[rows], k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(context_len - (rows.stop - rows.start), context_len)[:, None]
        key = torch.arange(context_len)[None, :]
        hidden = key > position
        if sliding_window is not None:
            hidden |= key <= position - sliding_window
        out[rows] = torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
    return out


def quantize_rows(matrix: Tensor, max_code: int) -> tuple[Tensor, Tensor]:
    """Round each row to integers of at most `max_code` in size.

    Return (codes, scale per row); ``matrix ≈ codes · scale``. A zero row has scale 0.
    """
    scale = matrix.abs().amax(-1) / max_code
    codes = torch.where(scale[:, None] > 0, matrix / scale[:, None], torch.zeros_like(matrix)).round()
    return codes.clamp(-max_code, max_code), scale
