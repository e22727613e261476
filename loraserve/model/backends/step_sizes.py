"""Sizes of the buffers that a base's step program keeps, by number of rows: no torch, no numba."""

from __future__ import annotations

from loraserve.model.config.model_config import ModelConfig
from loraserve_kernels.common.arithmetic import OUTLIERS

_SMALLEST_CAPACITY = 16
_CAPACITIES_PER_DOUBLING = 8
_LARGEST_TILE = 32
"""Output channels that a buffer is filled up to, on processors with the widest vectors."""
SMALLEST_GROUP = 16
"""Inputs that share a scale in int4, at least."""


def capacity_of(num_rows: int) -> int:
    """Choose the rows that buffers are built for: at most a quarter more than are needed.

    There are few such sizes, since a step of more rows than before makes all kernels again.
    """
    unit = (1 << (num_rows - 1).bit_length()) // _CAPACITIES_PER_DOUBLING
    unit = max(_SMALLEST_CAPACITY, unit)
    return -(-num_rows // unit) * unit


def buffer_bytes(config: ModelConfig, num_rows: int) -> int:
    """Compute the bytes of a program's buffers once a step has had this many rows.

    Codes in int8 are counted as on processors without VNNI, which take two bytes for each.
    """
    heads, hidden = config.num_heads * config.head_dim, config.hidden_size
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    streams = 2 * 4 * hidden
    inputs, outputs = [hidden, heads, heads], [qkv, hidden]
    if config.experts is None:
        inputs.append(config.intermediate_size)
        outputs.append(2 * config.intermediate_size)
    per_row = streams + sum(map(_input_bytes, inputs)) + sum(map(_output_bytes, outputs))
    return capacity_of(num_rows) * per_row


def _input_bytes(width: int) -> int:
    """Compute the bytes of a row that linears read.

    These are values, codes, outliers, and scales and starts of groups.
    """
    return 4 * width + 4 * -(-width // 2) + 8 * OUTLIERS + 8 * -(-width // SMALLEST_GROUP)


def _output_bytes(width: int) -> int:
    """Compute the bytes of a row that linears write."""
    return 4 * (-(-width // _LARGEST_TILE) * _LARGEST_TILE + _LARGEST_TILE)
