"""Tokens sampled on a GPU: each row by its own temperature, top-k, top-p and min-p, with random numbers that its seed and position give.

Needs Triton; with ``TRITON_INTERPRET=1`` it runs on CPU tensors. The rule is a row's alone: its token doesn't depend on what shares its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from typing import Protocol

import numpy as np
import torch
import triton
from torch import Tensor

from loraserve_kernels.draw_kernels import draw_kernel, search_kernel
from loraserve_kernels.errors import InvalidPlan, ShapeMismatch
from loraserve_kernels.sampling_kernels import pick_kernel, scan_kernel, weigh_kernel

MIN_TEMPERATURE = 1e-5
"""At or below this the likeliest token is taken."""

MAX_VOCAB_SIZE = 2**19 - 1
"""So many integers of 2^44 sum up to less than 2^63."""

CHUNK = 4096
"""Tokens that a program of `scan` or `weigh` reads."""

NUM_CANDIDATES = 1024
"""Top-p looks among at least so many of the likeliest tokens first, and among all only where these don't hold the mass that it asks for."""

MAX_CANDIDATES = 4096
"""A row's candidates are kept in the registers of one program."""

MAX_GROUPS = 4096
BLOCK = 2048
NUM_WARPS = 8

_MASK64 = (1 << 64) - 1


class SamplingParams(Protocol):
    """How one row's token is chosen."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int:
        """0: all tokens."""

    @property
    def top_p(self) -> float:
        """1: all tokens."""

    @property
    def min_p(self) -> float:
        """0: all tokens."""

    @property
    def seed(self) -> int:
        """Taken modulo 2^64."""


class SamplingRows:
    """How each row of a step is sampled, and scratch memory. Addresses are fixed for life; one step at a time.

    Attributes:
        num_rows: of the step that was filled in last; 0 before. Rows behind them count as greedy.
        is_greedy: no row draws: `sample` reads the logits once and launches half of its kernels. A CUDA graph keeps what this was when it was captured.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        """Allocate for steps of up to `max_num_seqs` rows: on the device and, pinned beside a GPU, in the host's memory."""
        self.num_rows = 0
        self.is_greedy = True
        self.max_num_seqs = max_num_seqs
        self.device = device
        self._rows = torch.zeros((5, max_num_seqs), dtype=torch.int64, device=device)
        self.seed, self.position = self._rows[0], self._rows[1]
        self.top_p, self.depth = self._rows[2].view(torch.float64), self._rows[3].view(torch.float64)
        self.top_k = self._rows[4].view(torch.int32)[:max_num_seqs]
        self.temperature = self._rows[4].view(torch.float32)[max_num_seqs:]
        pinned = device.type == "cuda"
        self._staged = [torch.zeros((5, max_num_seqs), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._hosts = [staged.numpy() for staged in self._staged]
        self._turn = 0
        self._scratch: _Scratch | None = None

    def fill(self, params: Sequence[SamplingParams], positions: Sequence[int]) -> None:
        """Describe the next step and send it to the device in one copy, which doesn't wait: by the next fill but one it must be done.

        Args:
            params: of each row.
            positions: of each row's token in its sequence.

        Raises:
            InvalidPlan: more rows than there is room for, or not as many positions; the last step stands.
        """
        count = len(params)
        if count > self.max_num_seqs or len(positions) != count:
            raise InvalidPlan(
                f"{count} rows with {len(positions)} positions to sample; there is room for {self.max_num_seqs}"
            )
        host = self._hosts[self._turn]
        temperature = np.array([p.temperature for p in params], dtype=np.float64)
        host[0].view(np.uint64)[:count] = [p.seed & _MASK64 for p in params]
        host[1, :count] = positions
        host[2].view(np.float64)[:count] = [p.top_p for p in params]
        host[3].view(np.float64)[:count] = [-log(p.min_p) if p.min_p > 0 else inf for p in params]
        host[4].view(np.int32)[:count] = [p.top_k for p in params]
        drawn = np.where(temperature > MIN_TEMPERATURE, temperature, 0.0)
        temperatures = host[4].view(np.float32)[self.max_num_seqs :]
        temperatures[:count], temperatures[count:] = drawn, 0.0
        self._rows.copy_(self._staged[self._turn], non_blocking=True)
        self._turn = 1 - self._turn
        self.num_rows = count
        self.is_greedy = not drawn.any()

    def scratch(self, vocab_size: int) -> _Scratch:
        """Return the kernels' memory, allocated at its first use for logits of this width."""
        if self._scratch is None or self._scratch.vocab_size != vocab_size:
            self._scratch = _Scratch(self.max_num_seqs, vocab_size, self.device)
        return self._scratch


class _Scratch:
    """What the kernels leave one another."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.num_chunks = -(-vocab_size // CHUNK)
        self.group = group_size(vocab_size)
        self.num_groups = -(-vocab_size // self.group)
        # half of the groups at most: the more of them, the more tokens of the same groups reach the bound as well
        wanted = min(NUM_CANDIDATES, self.num_groups // 2)
        self.num_wanted = wanted if vocab_size > MAX_CANDIDATES else self.num_groups + 1

        def rows(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros((max_num_seqs, *width), dtype=dtype, device=device)

        self.chunk_tops = rows(torch.float32, self.num_chunks)
        self.chunk_tokens = rows(torch.int32, self.num_chunks)
        self.chunk_finite = rows(torch.int32, self.num_chunks)
        self.group_tops = rows(torch.float32, self.num_groups)
        self.ways, self.counts = rows(torch.int32), rows(torch.int32)
        self.tops, self.bounds = rows(torch.float32), rows(torch.float32)
        self.candidates = rows(torch.float32, MAX_CANDIDATES)
        self.candidate_ids = rows(torch.int32, MAX_CANDIDATES)
        self.masses = rows(torch.int64, self.num_chunks)


def group_size(vocab_size: int) -> int:
    """Neighbours whose largest logit stands for them: few enough that there are more groups than candidates, wherever there are that many tokens."""
    size: int = triton.next_power_of_2(-(-vocab_size // MAX_GROUPS))
    return max(8, size)


def sample(logits: Tensor, rows: SamplingRows, tokens_out: Tensor, finite_out: Tensor) -> None:
    """Write every row's next token, and whether all of its logits are finite; where they aren't, the token is any.

    A greedy row gets its likeliest token, of equal ones the first. Another row gets the token at which the running sum of its distribution passes the
    random number of (seed, position): softmax(row / temperature), cut to the top_k likeliest, then to the fewest that hold top_p of what is left, then to those
    with at least min_p times the likeliest one's probability. The sum runs in order of ids, or with top-k or top-p from the likeliest down, equal ones by id.

    Two launches where all rows are greedy, else five; no synchronisation. May be captured in a CUDA graph, after one call outside, and replayed after any later
    ``rows.fill`` for which `is_greedy` is the same.

    Args:
        logits: [num_rows, vocab_size] float32, contiguous in the last dim; kept. Rows behind those of ``rows`` are greedy.
        tokens_out: [num_rows] int64, contiguous.
        finite_out: [num_rows] bool, contiguous.

    Raises:
        ShapeMismatch: shapes, dtypes, strides or devices disagree, or the vocabulary is larger than `MAX_VOCAB_SIZE`.

    Source: the bound from groups' maxima is the two-stage top-k of Dr. Top-k (SC 2021); the search without sorting as in FlashInfer's sampling (arXiv:2501.01005).
    """
    num_rows, vocab_size = _check(logits)
    if not rows.num_rows <= num_rows <= rows.max_num_seqs or vocab_size > MAX_VOCAB_SIZE:
        raise ShapeMismatch(
            f"logits are {tuple(logits.shape)}; {rows.num_rows} rows were filled in, {rows.max_num_seqs} rows "
            f"of {MAX_VOCAB_SIZE} tokens are the most"
        )
    for name, out, dtype in (("tokens_out", tokens_out, torch.int64), ("finite_out", finite_out, torch.bool)):
        if out.shape != (num_rows,) or out.dtype != dtype or out.stride(0) != 1 or out.device != logits.device:
            raise ShapeMismatch(
                f"{name} is {out.dtype} {tuple(out.shape)} on {out.device}; expected {dtype} ({num_rows},) on {logits.device}"
            )
    if logits.device != rows.device:
        raise ShapeMismatch(f"logits are on {logits.device}, their parameters on {rows.device}")
    if num_rows == 0:
        return
    scratch, has_draws = rows.scratch(vocab_size), not rows.is_greedy
    by_chunk = (scratch.num_chunks, num_rows)
    block_chunks: int = triton.next_power_of_2(scratch.num_chunks)
    scan_kernel[by_chunk](
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        scratch.chunk_tops,
        scratch.chunk_tokens,
        scratch.chunk_finite,
        scratch.group_tops,
        logits.stride(0),
        vocab_size,
        scratch.num_groups,
        HAS_DRAWS=has_draws,
        CHUNK=CHUNK,
        GROUP=scratch.group,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    pick_kernel[(num_rows,)](
        scratch.chunk_tops,
        scratch.chunk_tokens,
        scratch.chunk_finite,
        scratch.group_tops,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        tokens_out,
        finite_out,
        scratch.ways,
        scratch.tops,
        scratch.bounds,
        scratch.counts,
        vocab_size,
        scratch.num_chunks,
        scratch.num_groups,
        scratch.num_wanted,
        HAS_DRAWS=has_draws,
        BLOCK_CHUNKS=block_chunks,
        BLOCK_GROUPS=triton.next_power_of_2(scratch.num_groups),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    if not has_draws:
        return
    weigh_kernel[by_chunk](
        logits,
        rows.temperature,
        rows.depth,
        scratch.ways,
        scratch.tops,
        scratch.bounds,
        scratch.counts,
        scratch.candidates,
        scratch.candidate_ids,
        scratch.masses,
        logits.stride(0),
        vocab_size,
        MAX_CANDIDATES=MAX_CANDIDATES,
        CHUNK=CHUNK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    draw_kernel[(num_rows,)](
        logits,
        rows.seed,
        rows.position,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.depth,
        scratch.ways,
        scratch.tops,
        scratch.bounds,
        scratch.counts,
        scratch.candidates,
        scratch.candidate_ids,
        scratch.masses,
        tokens_out,
        logits.stride(0),
        vocab_size,
        scratch.num_chunks,
        MAX_CANDIDATES=MAX_CANDIDATES,
        CHUNK=CHUNK,
        BLOCK_CHUNKS=block_chunks,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    search_kernel[(num_rows,)](
        logits,
        rows.seed,
        rows.position,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.depth,
        scratch.ways,
        scratch.tops,
        scratch.masses,
        tokens_out,
        logits.stride(0),
        vocab_size,
        scratch.num_chunks,
        BLOCK_CHUNKS=block_chunks,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def top_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log probability of each row's token [num_rows], and of its k likeliest tokens [num_rows, k] with their ids [num_rows, k] int64, best first.

    Natural logarithms of the raw distribution, float32. No synchronisation; allocates, as torch's operators do.

    Args:
        logits: [num_rows, vocab_size] float32, as the model gave them.
        tokens: [num_rows] int64.
        k: at least 1, at most the vocabulary's size.

    Raises:
        ShapeMismatch: shapes or dtypes disagree, or k is out of range.
    """
    num_rows, vocab_size = _check(logits)
    if tokens.shape != (num_rows,) or tokens.dtype != torch.int64 or not 1 <= k <= vocab_size:
        raise ShapeMismatch(
            f"tokens are {tokens.dtype} {tuple(tokens.shape)} and k is {k}; "
            f"expected torch.int64 ({num_rows},) and 1 to {vocab_size}"
        )
    mass = logits.logsumexp(dim=1, keepdim=True)
    values, ids = logits.topk(k, dim=1)
    return (logits.gather(1, tokens[:, None]) - mass)[:, 0], values - mass, ids


def _check(logits: Tensor) -> tuple[int, int]:
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1 or logits.shape[1] == 0:
        raise ShapeMismatch(
            f"logits are {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}; "
            "expected torch.float32 [num_rows, vocab_size], contiguous in the last dim"
        )
    return logits.shape[0], logits.shape[1]
