"""What a GPU can't do without: bytes that must be read or written once, and operations.

A figure's share of the limit is the limit's time over its own.

Not counted: launches, what fits the cache between two kernels of one call (shrunk sums), tables and
indices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ACTIVATION_BYTES = 2
"""bfloat16 or float16 between linears."""


@dataclass(frozen=True, slots=True)
class SiteShape:
    """Linears with a common input.

    Attributes:
        out_features: of each.
    """

    in_features: int
    out_features: tuple[int, ...]

    @property
    def width(self) -> int:
        return sum(self.out_features)

    @property
    def weights_per_rank(self) -> int:
        """Numbers of A and B that one rank on every linear takes."""
        return len(self.out_features) * self.in_features + self.width

    @property
    def num_weights(self) -> int:
        return self.in_features * self.width


@dataclass(frozen=True, slots=True)
class Work:
    """What some kernels can't avoid.

    Attributes:
        num_bytes: read or written, each once.
        operations: multiplications and additions on tensor cores.
    """

    num_bytes: float
    operations: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.operations + other.operations)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine was measured to do.

    Attributes:
        copy_bytes_per_s: of a large copy on the device, bytes read and bytes written together.
        operations_per_s: of a large product in bfloat16.
        load_bytes_per_s: from pinned host memory to the device.
    """

    copy_bytes_per_s: float
    operations_per_s: float
    load_bytes_per_s: float

    def seconds(self, work: Work) -> float:
        """The least time that the work takes: its bytes or its operations,
        whichever takes longer.
        """
        return max(work.num_bytes / self.copy_bytes_per_s, work.operations / self.operations_per_s)


def lora_work(shape: SiteShape, ranks: Iterable[int], row_ranks: Iterable[int], weight_bytes: float = 2) -> Work:
    """Shrink and expand of one site: each distinct adapter's weights, x and y's old content read,
    y written.

    Args:
        ranks: of the distinct adapters that the step has.
        row_ranks: of each row that has an adapter.
        weight_bytes: of one stored weight.
    """
    rows = list(row_ranks)
    weights = sum(ranks) * shape.weights_per_rank
    activations = len(rows) * (shape.in_features + 2 * shape.width) * ACTIVATION_BYTES
    return Work(weights * weight_bytes + activations, 2.0 * sum(rows) * shape.weights_per_rank)


def linear_work(shape: SiteShape, num_rows: int, weight_num_bytes: float) -> Work:
    """One site's base linear: its weight and x read, y written."""
    activations = num_rows * (shape.in_features + shape.width) * ACTIVATION_BYTES
    return Work(weight_num_bytes + activations, 2.0 * num_rows * shape.num_weights)


def attention_work(
    query_lens: Sequence[int], context_lens: Sequence[int], num_heads: int, num_kv_heads: int, head_dim: int
) -> Work:
    """One layer's attention: each sequence's cached keys and values read once, queries read and
    answers written; causal products.
    """
    kv = 2 * sum(context_lens) * num_kv_heads * head_dim * ACTIVATION_BYTES
    rows = 2 * sum(query_lens) * num_heads * head_dim * ACTIVATION_BYTES
    # row j of m sees context - m + j + 1 keys
    seen = sum(m * c - m * (m - 1) // 2 for m, c in zip(query_lens, context_lens, strict=True))
    return Work(kv + rows, 4.0 * seen * num_heads * head_dim)


def decode_work(
    *,
    base_bytes: float,
    base_weights: int,
    num_rows: int,
    adapter_bytes: float,
    row_adapter_weights: int,
    kv_bytes: float,
) -> Work:
    """A whole decode step: every weight of the linears and the head, every distinct adapter's
    weights and every cached key and value, read once.

    Args:
        base_bytes, base_weights: of the linears and the head, as they are stored.
        adapter_bytes: of the distinct adapters.
        row_adapter_weights: the sum over rows of the weights that their adapters have.
        kv_bytes: of all contexts.
    """
    return Work(base_bytes + adapter_bytes + kv_bytes, 2.0 * (num_rows * base_weights + row_adapter_weights))


def share(limit_s: float, seconds: float | None) -> float | None:
    """The part of the limit that was reached; None where nothing was measured."""
    return None if seconds is None or seconds <= 0 else limit_s / seconds


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """None where there is no value."""
    logs = [math.log(value) for value in values if value is not None and value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that at least a part `q` of them doesn't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
