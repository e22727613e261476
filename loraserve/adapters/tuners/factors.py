"""Updates that PEFT's other kinds hold as products of small matrices.

Here each is one pair of factors, ΔW = B A, in float32. numpy only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loraserve.adapters.ir import TensorView

Matrix = npt.NDArray[np.float32]
Factors = tuple[Matrix, Matrix]
"""(B [out, rank], A [rank, in])."""


def as_float32(tensor: TensorView) -> Matrix:
    """Its numbers, exactly; shares memory with it where it is float32 already."""
    if tensor.dtype == "BF16":
        widened: npt.NDArray[Any] = tensor.array.astype(np.uint32) << 16
        return widened.view(np.float32)
    return tensor.array.astype(np.float32, copy=False)


def as_view(array: npt.NDArray[Any]) -> TensorView:
    """Wrap a computed float32 array as if it had been stored."""
    stored = np.ascontiguousarray(array, dtype=np.float32)
    return TensorView("F32", stored.shape, stored)


def hadamard(w1: Factors, w2: Factors) -> Factors:
    """Compute (B1 A1) ⊙ (B2 A2) as one pair.

    Each column of B is the product of a column of B1 and one of B2 (the Khatri–Rao product), so
    that the rank is the product of the two.
    """
    (b1, a1), (b2, a2) = w1, w2
    with np.errstate(over="ignore", invalid="ignore"):
        b = (b1[:, :, None] * b2[:, None, :]).reshape(b1.shape[0], -1)
        a = (a1[:, None, :] * a2[None, :, :]).reshape(-1, a1.shape[1])
    return b, a


def hadamard_dense(w1: Factors, w2: Factors) -> Factors:
    """Compute the same update whole, as a product with an identity.

    Its rank is the smaller of its sides.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return split((w1[0] @ w1[1]) * (w2[0] @ w2[1]))


def split(matrix: Matrix) -> Factors:
    """Write a matrix as a product with an identity.

    Its rank is the smaller of its sides.
    """
    out_features, in_features = matrix.shape
    if out_features <= in_features:
        return np.eye(out_features, dtype=np.float32), matrix
    return matrix, np.eye(in_features, dtype=np.float32)


def kronecker(w1: Factors, w2: Factors) -> Factors:
    """(B1 A1) ⊗ (B2 A2) = (B1 ⊗ B2)(A1 ⊗ A2): the rank is the product of the two."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.kron(w1[0], w2[0]), np.kron(w1[1], w2[1])


def num_bytes(rank: int, shape: tuple[int, int]) -> int:
    """Compute the bytes of a pair of that rank, for a linear of (out_features, in_features)."""
    return 4 * rank * (shape[0] + shape[1])


def slice_rows(tensor: TensorView | None, rows: slice | None) -> TensorView | None:
    """View these rows of a tensor; the tensor itself where `rows` is None."""
    if tensor is None or rows is None:
        return tensor
    array = tensor.array[rows]
    return TensorView(tensor.dtype, array.shape, array)
