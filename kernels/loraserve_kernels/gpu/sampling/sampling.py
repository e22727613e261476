"""Tokens sampled on a GPU, each row by its own temperature, top-k, top-p and min-p.

A row's seed and position give its random numbers. Needs Triton; with ``TRITON_INTERPRET=1`` it runs
on CPU tensors. The rule is a row's alone: its token doesn't depend on what shares its step.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.device import registers, roomy
from loraserve_kernels.gpu.sampling.draw import draw_kernel, search_kernel
from loraserve_kernels.gpu.sampling.kernels import pick_kernel, scan_kernel, weigh_kernel
from loraserve_kernels.gpu.sampling.sampling_rows import CHUNK, MAX_CANDIDATES, SamplingRows

__all__ = ["SamplingRows", "sample", "top_logprobs"]

MAX_VOCAB_SIZE = 2**19 - 1
"""Number of integers of 2^44 whose sum is below 2^63."""

BLOCK = 2048
"""Tokens that a pass of the search over a whole row takes at a time."""

NUM_WARPS = 8


def sample(logits: Tensor, rows: SamplingRows, tokens_out: Tensor, finite_out: Tensor) -> None:
    """Write every row's next token, and whether all of its logits are finite.

    Where they aren't, the token is any. A greedy row gets its likeliest token, of equal ones the
    first. Another row gets the token at which the running sum of its distribution passes the random
    number of (seed, position): softmax(row / temperature), cut to the top_k likeliest, then to the
    fewest that hold top_p of what is left, then to those with at least min_p times the likeliest
    one's probability. The sum runs in order of ids, or with top-k or top-p from the likeliest down,
    equal ones by id.

    Two launches where all rows are greedy, else five; no synchronisation. May be captured in a CUDA
    graph, after one call outside, and replayed after any later ``rows.fill`` for which `is_greedy`
    is the same.

    Args:
        logits: [num_rows, vocab_size] float32, contiguous in the last dim; kept. Rows behind those
            of ``rows`` are greedy.
        tokens_out: [num_rows] int64, contiguous.
        finite_out: [num_rows] bool, contiguous.

    Raises:
        TensorMismatch: shapes, dtypes, strides or devices disagree, or the vocabulary is larger
            than `MAX_VOCAB_SIZE`.

    Source: candidates by the largest of each group as in Dr. Top-k (Gaihre et al., SC 2021), a
    search in place of a sort as in FlashInfer's sampling.
    """
    num_rows, vocab_size = _check(logits)
    if not rows.num_rows <= num_rows <= rows.max_num_seqs or vocab_size > MAX_VOCAB_SIZE:
        raise TensorMismatch(
            f"logits are {tuple(logits.shape)}; {rows.num_rows} rows were filled in, {rows.max_num_seqs} rows "
            f"of {MAX_VOCAB_SIZE} tokens are the most"
        )
    for name, out, dtype in (("tokens_out", tokens_out, torch.int64), ("finite_out", finite_out, torch.bool)):
        if out.shape != (num_rows,) or out.dtype != dtype or out.stride(0) != 1 or out.device != logits.device:
            raise TensorMismatch(
                f"{name} is {out.dtype} {tuple(out.shape)} on {out.device}; "
                f"expected {dtype} ({num_rows},) on {logits.device}"
            )
    if logits.device != rows.device:
        raise TensorMismatch(f"logits are on {logits.device}, their parameters on {rows.device}")
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
        maxnreg=roomy(None, registers(NUM_WARPS, 1)),
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
        maxnreg=roomy(None, registers(NUM_WARPS, 1)),
        enable_fp_fusion=False,
    )


def top_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log probability of each row's token, and of its k likeliest tokens.

    They are [num_rows] and [num_rows, k]; the latter's ids are [num_rows, k] int64, best first.
    Natural logarithms of the raw distribution, float32. No synchronisation; allocates, as torch's
    operators do.

    Args:
        logits: [num_rows, vocab_size] float32, as the model gave them.
        tokens: [num_rows] int64.
        k: at least 1, at most the vocabulary's size.

    Raises:
        TensorMismatch: shapes or dtypes disagree, or k is out of range.
    """
    num_rows, vocab_size = _check(logits)
    if tokens.shape != (num_rows,) or tokens.dtype != torch.int64 or not 1 <= k <= vocab_size:
        raise TensorMismatch(
            f"tokens are {tokens.dtype} {tuple(tokens.shape)} and k is {k}; "
            f"expected torch.int64 ({num_rows},) and 1 to {vocab_size}"
        )
    mass = logits.logsumexp(dim=1, keepdim=True)
    values, ids = logits.topk(k, dim=1)
    return (logits.gather(1, tokens[:, None]) - mass)[:, 0], values - mass, ids


def _check(logits: Tensor) -> tuple[int, int]:
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1 or logits.shape[1] == 0:
        raise TensorMismatch(
            f"logits are {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}; "
            "expected torch.float32 [num_rows, vocab_size], contiguous in the last dim"
        )
    return logits.shape[0], logits.shape[1]
