"""What a forward pass is given: tensors, and who they belong to. Passed, never global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from loraserve_kernels.plan import LoraPlan


@dataclass(frozen=True, slots=True)
class KVTensors:
    """The paged KV cache's bytes: one tensor per layer, [num_blocks, num_kv_heads, block_size, head_dim]."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One step's rows. Rows of one sequence are contiguous and in position order; sequences of one adapter are neighbours.

    Attributes:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int64.
        slot_mapping: [num_tokens] int64, ``block * block_size + offset``: where the row's K and V are written.
        query_starts: num_seqs + 1 numbers: sequence i has rows ``query_starts[i]:query_starts[i + 1]``.
        context_lens: num_seqs numbers: the sequence's tokens whose KV exist once this step has run.
        block_tables: [num_seqs, max_blocks] int32, padded with 0.
        logits_rows: [num_logits] int64: the rows whose logits are wanted.
        lora: which rows belong to which adapter; None when every row is the base's.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: list[int]
    context_lens: list[int]
    block_tables: Tensor
    logits_rows: Tensor
    lora: LoraPlan | None
