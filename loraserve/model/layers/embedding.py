"""A base's embedding table: floats, or the quantized rows that its checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.model.layers.linears import float_rows
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.common.row_blocks import row_blocks


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
        """Return the tokens' rows, [num_tokens, hidden_size] float32."""
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


EmbeddingTable = Tensor | QuantizedTable


def look_up(table: EmbeddingTable, token_ids: Tensor) -> Tensor:
    """Return the tokens' rows, [num_tokens, hidden_size] float32."""
    if isinstance(table, QuantizedTable):
        return table.look_up(token_ids)
    return F.embedding(token_ids, table).float()


def table_rows(table: EmbeddingTable) -> Iterator[Tensor]:
    """Yield all rows in float32, a block at a time, in order."""
    if isinstance(table, QuantizedTable):
        return table.rows(0, table.shape[0])
    return float_rows(table, 0, table.shape[0])
