"""Logits of the tokens that grammars allow: a packed bitmask for each constrained row.

Needs Triton; with ``TRITON_INTERPRET=1`` it runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.errors import InvalidPlan, TensorMismatch

BLOCK = 2048
"""Tokens that a program masks."""

NUM_WARPS = 8

# No draw ever ends there. It is finite, also divided by the least temperature, 1e-5, so that the
# row still counts as finite.
LOWEST = tl.constexpr(-1e33)


class MaskRows:
    """Bitmasks of a step's rows on the device, filled from two alternating pinned buffers.

    Addresses are fixed for life; one step at a time.

    Attributes:
        words: [max_num_seqs, ceil(vocab_size / 32)] int32: bit ``i % 32`` of word ``i // 32`` is
            set where token i is allowed.
        is_masked: [max_num_seqs] int32: whether the row has a mask.
        num_rows: rows of the step that was filled in last.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows = 0
        self.max_num_seqs, self.num_words = max_num_seqs, -(-vocab_size // 32)
        pinned = device.type == "cuda"
        shape = (max_num_seqs, self.num_words + 1)
        # the last column is whether the row has a mask: one copy sends both
        self._rows = torch.zeros(shape, dtype=torch.int32, device=device)
        self.words, self.is_masked = self._rows[:, :-1], self._rows[:, -1]
        self._staged = [torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._hosts = [staged.numpy() for staged in self._staged]
        self._turn = 0

    def fill(self, masks: Sequence[npt.NDArray[np.uint32] | None]) -> None:
        """Send the masks of a step's rows to the device in one copy, which doesn't wait.

        By the next fill but one it must be done.

        Args:
            masks: of each row, [num_words]; None: all tokens are allowed.

        Raises:
            InvalidPlan: more rows than there is room for; the last step stands.
        """
        count = len(masks)
        if count > self.max_num_seqs:
            raise InvalidPlan(f"{count} rows with masks; there is room for {self.max_num_seqs}")
        host = self._hosts[self._turn]
        for row, mask in enumerate(masks):
            host[row, -1] = mask is not None
            if mask is not None:
                host[row, :-1] = mask.view(np.int32)
        self._rows[:count].copy_(self._staged[self._turn][:count], non_blocking=True)
        self._turn = 1 - self._turn
        self.num_rows = count


def allowed_logits(logits: Tensor, rows: MaskRows) -> Tensor:
    """Mask logits with `LOWEST` for tokens that masks don't allow, [num_rows, vocab_size].

    A logit that isn't finite stays, so that its row is still found out. One launch; no
    synchronisation.

    Args:
        logits: [num_rows, vocab_size] float32, contiguous in the last dim; kept.

    Raises:
        TensorMismatch: shapes, dtypes, strides or devices disagree.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise TensorMismatch(
            f"logits are {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}; "
            "expected torch.float32 [num_rows, vocab_size], contiguous in the last dim"
        )
    num_rows, vocab_size = logits.shape
    if num_rows != rows.num_rows or -(-vocab_size // 32) != rows.num_words or logits.device != rows.words.device:
        raise TensorMismatch(
            f"logits are {tuple(logits.shape)} on {logits.device}; {rows.num_rows} rows of {rows.num_words} words were "
            f"filled in on {rows.words.device}"
        )
    out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    if num_rows:
        mask_kernel[(triton.cdiv(vocab_size, BLOCK), num_rows)](
            logits,
            rows.words,
            rows.is_masked,
            out,
            logits.stride(0),
            rows.words.stride(0),
            vocab_size,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def mask_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [num_rows, vocab_size] float32
    words_ptr,  # [num_rows, num_words] int32
    is_masked_ptr,  # [num_rows] int32, as far apart as the words' rows
    out_ptr,  # [num_rows, vocab_size] float32, contiguous
    stride_logits,
    stride_words,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    x = tl.load(logits_ptr + row * stride_logits + ids, mask=is_token, other=0.0)
    if tl.load(is_masked_ptr + row * stride_words) != 0:
        words = tl.load(words_ptr + row * stride_words + ids // 32, mask=is_token, other=0)
        is_kept = (((words >> (ids % 32)) & 1) != 0) | ~(tl.abs(x) < float("inf"))
        x = tl.where(is_kept, x, LOWEST)
    tl.store(out_ptr + row * vocab_size + ids, x, mask=is_token)
