"""A base's embedding table: floats, or the quantized rows that its checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.errors import InvariantViolation
from loraserve.model.layers.linears import Linear, float_rows
from loraserve.model.layers.quantized_linears import G32Linear, PackedLinear
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.common.row_blocks import row_blocks
from loraserve_kernels.cpu.linear import decoded, g32_dot


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTable:
    """Rows that are widened to float32 when they are looked up.

    Attributes:
        weight: [num_tokens, hidden_size], by token.
    """

    weight: QuantizedWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.out_features, self.weight.in_features

    @property
    def nbytes(self) -> int:
        return self.weight.num_bytes

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Look up the tokens' rows, [num_tokens, hidden_size] float32."""
        weight = self.weight
        rows = replace(
            weight,
            codes=weight.codes[token_ids],
            scales=weight.scales[token_ids],
            zeros=None if weight.zeros is None else weight.zeros[token_ids],
            out_features=token_ids.shape[0],
        )
        return rows.dequantize(torch.float32)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        """Yield these rows in float32, a block at a time, in order."""
        for first, last in row_blocks(start, end, self.weight.in_features):
            yield self.weight.rows(first, last).dequantize(torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class HeadTable:
    """Rows of a quantized head that is the embedding too: there is one copy of them.

    Attributes:
        hidden_size: of a row.
    """

    head: G32Linear | PackedLinear
    hidden_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.head.out_features, self.hidden_size

    @property
    def nbytes(self) -> int:
        """Bytes in addition to the head's: none."""
        return 0

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Look up the tokens' rows, [num_tokens, hidden_size] float32."""
        if isinstance(self.head, G32Linear):
            return g32_dot.look_up(self.head.own_weight, token_ids)
        weight = self.head.own_weight
        if weight is None:
            raise InvariantViolation("rows are looked up in a head that is multiplied by a library")
        return decoded.look_up(weight, token_ids)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        """Yield these rows in float32, a block at a time, in order."""
        return self.head.rows(start, end)


def quantized_table(weight: QuantizedWeight, head: Linear | None) -> QuantizedTable | HeadTable:
    """Build the table of a quantized embedding.

    Args:
        head: the linear of the same weight, where the embedding is the head; None: it isn't.
    """
    if isinstance(head, G32Linear) or (isinstance(head, PackedLinear) and head.own_weight is not None):
        return HeadTable(head, weight.in_features)
    return QuantizedTable(weight)


EmbeddingTable = Tensor | QuantizedTable | HeadTable


def look_up(table: EmbeddingTable, token_ids: Tensor) -> Tensor:
    """Look up the tokens' rows, [num_tokens, hidden_size] float32."""
    if isinstance(table, Tensor):
        return F.embedding(token_ids, table).float()
    return table.look_up(token_ids)


def table_rows(table: EmbeddingTable) -> Iterator[Tensor]:
    """Yield all rows in float32, a block at a time, in order."""
    if isinstance(table, Tensor):
        return float_rows(table, 0, table.shape[0])
    return table.rows(0, table.shape[0])
