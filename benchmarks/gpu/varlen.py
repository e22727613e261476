"""Paged attention by ``torch.nn.attention.varlen``, a peer of our own: another order of sums,
so other bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import varlen


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """One step's sequences, as torch takes them.

    Attributes:
        query_starts, key_starts: [num_seqs + 1] int32, on the device: running sums of rows and of
            contexts.
        context_lens: [num_seqs] int32, on the device.
        block_tables: [num_seqs, the longest context's blocks] int32, on the device.
    """

    query_starts: Tensor
    key_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_context_len: int


def plan_varlen(
    query_lens: Sequence[int], context_lens: Sequence[int], tables: Tensor, block_size: int, device: torch.device
) -> VarlenPlan:
    """Return the plan of these sequences; `tables` are their block tables, on any device."""

    def sums(lens: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *lens], dtype=np.int32)).to(device)

    width = -(-max(context_lens) // block_size)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    blocks = tables[:, :width].to(device, torch.int32).contiguous()
    return VarlenPlan(sums(query_lens), sums(context_lens), lens, blocks, max(query_lens), max(context_lens))


def varlen_obstacle(block_size: int, device: torch.device) -> str | None:
    """Return why `varlen_attention` can't answer for blocks of this size here; None if it can.

    torch has block tables since 2.12. Its own FlashAttention 2 takes blocks of multiples of 256
    tokens, and only since 2.13 can it be kept from splitting keys, which depends on the batch and
    leaves rows unwritten (pytorch issue 194167). FlashAttention 3, where it is installed and
    activated, takes blocks of any size.
    """
    if not hasattr(varlen, "varlen_attn_out"):
        return f"torch {torch.__version__} has no block tables; 2.12 does"
    if device.type != "cuda":
        return f"FlashAttention needs a CUDA device; the plan is on {device}"
    implementation = _implementation()
    if implementation == "FA2" and _torch_version() < (2, 13):
        return (
            f"the FlashAttention of torch {torch.__version__} can't be kept from splitting keys; 2.13's can, or "
            "activate FA3"
        )
    if implementation == "FA2" and block_size % 256:
        return f"torch's own FlashAttention takes blocks of multiples of 256 tokens, not {block_size}; activate FA3"
    if implementation == "FA4" and torch.cuda.get_device_capability(device)[0] != 10:
        return "FA4 takes block tables on compute capability 10 alone; activate FA3"
    return None


def varlen_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: VarlenPlan, out: Tensor, *, scale: float
) -> None:
    """Write what `paged_attention` writes, up to rounding.

    Call it only where there is no `varlen_obstacle`.

    Args:
        q, out: [num_tokens, num_heads, head_dim] bfloat16 or float16.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], q's dtype.
    """
    varlen.varlen_attn_out(
        out,
        q,
        # pages as [num_blocks, block_size, num_kv_heads, head_dim]
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        plan.query_starts,
        # FA2 asks for these though the contexts' lengths say as much; FA3 refuses them beside a
        # block table
        plan.key_starts if _implementation() == "FA2" else None,
        plan.max_query_len,
        plan.max_context_len,
        scale=scale,
        # the keys that a row sees to its left and to its right
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k_cache.shape[1],
        seqused_k=plan.context_lens,
        block_table=plan.block_tables,
        num_splits=1,
    )


def _implementation() -> str:
    """Return which FlashAttention is active; torch's own where torch can't have another."""
    current = getattr(attention, "current_flash_attention_impl", None)
    return (current() if current is not None else None) or "FA2"


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
