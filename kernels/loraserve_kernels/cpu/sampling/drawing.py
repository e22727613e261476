"""Tokens that are drawn from the distributions of a step's rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA
from loraserve_kernels.errors import TensorMismatch

_MIN_WIDTH = 16
"""Tokens of the narrowest row that the kernel takes: a group of its sums."""
_MIN_PARALLEL_LOGITS = 1 << 14
"""Logits that aren't worth waking a second thread for."""
_MAX_THREADS = 8
"""Threads that draw: each has scratch of 16 bytes a token of the vocabulary."""
_TOP_P_CANDIDATES = 1024
"""Tokens that top-p sorts first; they nearly always hold the mass that it needs."""


class Draw(NamedTuple):
    """Rule by which a row's token is drawn.

    The distribution is softmax(row / temperature), cut to the `top_k` likeliest tokens, then to the
    fewest that hold `top_p` of the rest, then to those with `min_p` times the largest probability:
    the order of transformers and vLLM. The token is the one at which its running sum passes
    `uniform`: by id where neither `top_k` nor `top_p` cuts, else likeliest first.
    """

    temperature: float
    top_k: int
    """0: all tokens."""
    top_p: float
    min_p: float
    uniform: float
    """In [0, 1)."""


def draw(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    """Draw a token of each of these rows, and overwrite them.

    A row's token depends neither on other rows nor on the processor.

    Args:
        logits: [num_rows, width] float32 on the CPU, without NaN and +inf; a row has a token that
            isn't -inf.
        rows: numbers of rows, no two the same.
        draws: one for each of `rows`.

    Raises:
        TensorMismatch: a row has NaN or +inf, or no token that isn't -inf.
    """
    width = logits.shape[1]
    if HAS_NUMBA and width >= _MIN_WIDTH and logits.stride(1) == 1 and logits.dtype == torch.float32:
        return _draw_numba(logits, rows, draws)
    return [draw_torch(logits[row], of_row) for row, of_row in zip(rows, draws, strict=True)]


def _draw_numba(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    from loraserve_kernels.cpu.sampling import drawing_kernel as k

    call, address, _ = _compiled()
    width, count = logits.shape[1], len(rows)
    rules = np.array(draws, dtype=np.float64).reshape(count, k.NUM_RULES)
    no_cut = (rules[:, k.TOP_K] <= 0) | (rules[:, k.TOP_K] > width)
    rules[no_cut, k.TOP_K] = width
    first, row_bytes = logits.data_ptr(), logits.stride(0) * logits.element_size()
    addresses = np.array([first + row * row_bytes for row in rows], dtype=np.int64)
    num_threads = min(count, threads.num_threads(), _MAX_THREADS) if count * width > _MIN_PARALLEL_LOGITS else 1
    scratch = np.empty(num_threads * k.scratch_words(width), dtype=np.int64)
    out, memory = np.empty(count, dtype=np.int64), np.zeros(k.NUM_WORDS, dtype=np.int64)
    arrays = (addresses, rules, out, scratch)
    memory[k.NUM_ROWS :] = (count, width, *(array.ctypes.data for array in arrays))
    threads.run(call, address, int(memory.ctypes.data), num_threads)
    tokens: list[int] = out.tolist()
    if k.NO_TOKEN in tokens:
        raise TensorMismatch(f"row {rows[tokens.index(k.NO_TOKEN)]} of the logits is no distribution's")
    return tokens


def draw_torch(row: Tensor, of_row: Draw) -> int:
    """`draw` of one row, in PyTorch.

    Args:
        row: [width] float32; isn't overwritten.
    """
    candidates, probabilities = _candidates(row / of_row.temperature, of_row.top_k, of_row.top_p)
    keep = len(probabilities)
    if of_row.top_p < 1.0:
        # The token that crosses top_p stays.
        mass_before = probabilities.cumsum(0) - probabilities
        keep = max(1, int((mass_before < of_row.top_p * probabilities.sum()).sum()))
    probabilities = probabilities[:keep]
    if of_row.min_p > 0.0:
        probabilities = torch.where(probabilities >= of_row.min_p * probabilities.max(), probabilities, 0.0)
    cumulative = probabilities.cumsum(0)
    index = int(torch.searchsorted(cumulative, of_row.uniform * float(cumulative[-1]), right=True))
    index = min(index, int(probabilities.nonzero()[-1]))
    return index if candidates is None else int(candidates[index])


def _candidates(scaled: Tensor, top_k: int, top_p: float) -> tuple[Tensor | None, Tensor]:
    """Compute token ids (None: all, in order) and float64 probabilities, sorted if cut."""
    width = scaled.shape[0]
    # float64: a running sum over a whole vocabulary must not lose the tail.
    probabilities = torch.softmax(scaled.double(), dim=0)
    if 0 < top_k < width:
        values, ids = probabilities.topk(top_k)
        return ids, values
    if top_p >= 1.0:
        return None, probabilities
    count = min(_TOP_P_CANDIDATES, width)
    values, ids = probabilities.topk(count)
    if count < width and float(values.sum()) < top_p:
        values, ids = probabilities.sort(descending=True, stable=True)
    else:
        # cut against the whole mass, not the candidates' own
        rest = torch.zeros(1, dtype=values.dtype) + max(0.0, 1.0 - float(values.sum()))
        values, ids = torch.cat([values, rest]), torch.cat([ids, ids[-1:]])
    return ids, values


def warm_up() -> None:
    """Compile the kernel, or read it from numba's cache."""
    if HAS_NUMBA:
        _compiled()


@functools.cache
def _compiled() -> tuple[Callable[[int], None], int, Any]:
    from loraserve_kernels.cpu.sampling import drawing_kernel

    handle = drawing_kernel.compiled()
    return handle.ctypes, handle.address, handle
