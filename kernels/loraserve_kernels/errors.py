"""Errors of the kernels.

They are plain ValueErrors: this package doesn't use loraserve's error tree.
"""

from __future__ import annotations


class TensorMismatch(ValueError):
    """A tensor's shape, dtype or device isn't the one that the plan or the other tensors imply."""


class InvalidPlan(ValueError):
    """Segments or block tables that can't describe a step."""


class PoolFull(ValueError):
    """An adapter needs more pages, tiles or slots than are free."""


class InvalidTuning(ValueError):
    """A file of tile sizes that can't be read, or that names what no kernel has."""


class InvalidWeight(ValueError):
    """A weight that can't be quantized, or in a format that the kernels don't have."""
