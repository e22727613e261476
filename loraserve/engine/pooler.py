"""Make one vector of a sequence's hidden states, the same bits however the prompt was cut."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from loraserve.errors import InvalidRequest, InvariantViolation
from loraserve.types import PoolingKind, PoolingParams

_TILE_TOKENS = 64
"""Tokens that are float64 at a time: so few stay in a core's cache, in a third of the time."""

Vector = npt.NDArray[np.float64]


class Pooler:
    """Pool the hidden states of one request, step by step.

    A mean is the sum of all tokens in float64, added one after the other: so neither chunks nor
    what shares their steps change a bit of it.
    """

    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self._sum: Vector | None = None
        self._num_tokens = 0
        self.head: Tensor | None = None
        """Classification head of the request's adapter, [num_labels, hidden_size] float32, known
        once that is pinned; None where there is none.
        """

    @property
    def needs_last_token_alone(self) -> bool:
        """Whether the tokens before the last needn't be computed, if their KV is there."""
        return self._params.kind is PoolingKind.LAST

    def tokens_of(self, start: int, end: int, num_tokens: int) -> tuple[int, int]:
        """Compute the range of the tokens ``[start, end)``, counted from `start`, that are pooled.

        Args:
            num_tokens: of the whole sequence.
        """
        match self._params.kind:
            case PoolingKind.MEAN:
                return 0, end - start
            case PoolingKind.CLS:
                return 0, int(start == 0)
            case PoolingKind.LAST:
                return end - start - int(end == num_tokens), end - start

    def reset(self) -> None:
        """Forget all tokens: the sequence starts over."""
        self._sum, self._num_tokens = None, 0

    def add(self, hidden: Tensor) -> None:
        """Add the hidden states of the next tokens, [num_tokens, hidden_size], on the host."""
        for start in range(0, hidden.shape[0], _TILE_TOKENS):
            rows: Vector = hidden[start : start + _TILE_TOKENS].double().numpy()
            # NumPy adds the rows of a matrix one after the other, not in pairs
            self._sum = (rows if self._sum is None else np.concatenate([self._sum[None], rows])).sum(0)
            self._num_tokens += len(rows)

    def finish(self) -> bytes | None:
        """Compute the vector, as float32 in little-endian order; None if it isn't finite.

        Raises:
            InvalidRequest: the adapter has no head to classify with.
            InvariantViolation: no token was added.
        """
        if self._sum is None:
            raise InvariantViolation("A sequence was pooled of which no hidden state was computed.")
        vector = self._sum / self._num_tokens
        if self._params.classify:
            if self.head is None:
                raise InvalidRequest("This adapter has no classification head.", param="model")
            # row by row: a product of matrices may round otherwise by their shapes
            vector = (self.head.double().numpy() * vector).sum(1)
        else:
            vector = vector[: self._params.dimensions]
            if self._params.normalize:
                length = np.sqrt(np.square(vector).sum())
                vector = vector / length if length else vector
        with np.errstate(over="ignore"):
            pooled = vector.astype("<f4")
        return pooled.tobytes() if np.isfinite(pooled).all() else None
