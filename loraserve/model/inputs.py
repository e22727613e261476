"""Inputs of a forward pass: tensors, and the adapters of their rows. Passed, never global."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from loraserve.errors import InvariantViolation
from loraserve_kernels.common.plan import LoraPlan, make_plan
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan

if TYPE_CHECKING:
    from loraserve.model.states import RecurrentStates, StateUse
    from loraserve_kernels.gpu.attention.plan import GpuAttentionPlan


@dataclass(frozen=True, slots=True)
class KVTensors:
    """The paged KV cache's bytes: one tensor per layer that attends.

    Each is [num_blocks, num_kv_heads, block_size, head_dim].

    Attributes:
        states: of layers that are recurrent; None: none are.
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    block_size: int
    states: RecurrentStates | None = None


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows of a step whose hidden states after the last norm are needed, next to others' logits.

    The last layer continues with both kinds: the kept rows.

    Attributes:
        kept: [num_kept] int64, ascending: rows of the step.
        logits_places: [num_logits] int64: which of the kept rows the head reads.
        hidden_places: [num_pooled] int64: which of them are pooled.
    """

    kept: Tensor
    logits_places: Tensor
    hidden_places: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.kept, self.logits_places, self.hidden_places


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Rows of a step on a CPU.

    Rows of one sequence are contiguous and in position order; sequences of one adapter are
    neighbours.

    Attributes:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int64.
        slot_mapping: [num_tokens] int64, ``block * block_size + offset``: where the row's K and V
            are written.
        query_starts: num_seqs + 1 numbers: sequence i has rows ``query_starts[i]:query_starts[i +
            1]``.
        context_lens: num_seqs numbers: the sequence's tokens whose KV exist once this step has run.
        block_tables: [num_seqs, max_blocks] int32, padded with 0.
        logits_rows: [num_logits] int64, ascending: the rows whose logits are needed; None: all.
        lora: which rows belong to which adapter; None when every row is the base's.
        pooled: rows whose hidden states are needed; None: none.
        states: num_seqs: where the sequences' recurrent states are; None: the base has none.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: list[int]
    context_lens: list[int]
    block_tables: Tensor
    logits_rows: Tensor | None
    lora: LoraPlan | None
    pooled: PooledRows | None = None
    states: Sequence[StateUse] | None = None

    @property
    def kept_rows(self) -> Tensor | None:
        """Rows that the last layer continues with; None: all."""
        return self.logits_rows if self.pooled is None else self.pooled.kept

    @property
    def kept_lora(self) -> LoraPlan | None:
        """The plan of a step that continues with the rows of `kept_rows` alone."""
        return self._lora_of(self.kept_rows)

    @property
    def logits_lora(self) -> LoraPlan | None:
        """The plan of a step that continues with the rows of `logits_rows` alone."""
        return self._lora_of(self.logits_rows)

    def _lora_of(self, rows: Tensor | None) -> LoraPlan | None:
        if self.lora is None or rows is None:
            return self.lora
        numbers: list[int] = rows.tolist()
        if any(a >= b for a, b in pairwise(numbers)):
            raise InvariantViolation(f"rows that go on must ascend; they are {numbers[:16]}")
        if len(numbers) == self.lora.num_tokens:
            return self.lora
        return select_rows(self.lora, numbers)


@dataclass(frozen=True, slots=True)
class GpuInputs:
    """Rows of a step on a GPU.

    Every tensor has one address for life, so that a captured graph reads each later step's.

    Attributes:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int32.
        slot_mapping: [num_tokens] int64, ``block * block_size + offset``: where the row's K and V
            are written; -1: nowhere, for rows that only fill up a batch.
        attention: which rows see which keys.
        logits_rows: [num_logits] int64: the rows whose logits are needed; None: all.
        lora: which rows belong to which adapter; None when every row is the base's.
        logits_lora: the same of the rows that the last layer continues with, counted among
            themselves, and of those whose logits are needed among these.
        pooled: rows whose hidden states are needed; None: none.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: GpuAttentionPlan
    logits_rows: Tensor | None
    lora: GpuLoraPlan | None
    logits_lora: GpuLoraPlan | None
    pooled: PooledRows | None = None

    @property
    def kept_rows(self) -> Tensor | None:
        """Rows that the last layer continues with; None: all."""
        return self.logits_rows if self.pooled is None else self.pooled.kept

    @property
    def kept_lora(self) -> GpuLoraPlan | None:
        """The plan of the rows of `kept_rows`."""
        return self.logits_lora


def select_rows(lora: LoraPlan, rows: Sequence[int]) -> LoraPlan | None:
    """Select the plan for a step that continues with these rows only, ascending.

    None when no adapter's row is among them.
    """
    segments = []
    for segment in lora.segments:
        start, end = bisect_left(rows, segment.row_start), bisect_left(rows, segment.row_end)
        if start < end:
            segments.append((segment.adapter, start, end))
    return make_plan(segments, len(rows))
