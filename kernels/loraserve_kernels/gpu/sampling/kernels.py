"""Tokens from logits, as Triton kernels.

`scan` and `pick` serve every row, and `weigh` those that are drawn, by the kernels of `draw`. A
row's probabilities are kept as integers, ``2^44 · exp(s - top)`` of its scaled logits s. Their sums
are exact in any order: a row's token depends on nothing but the row, whichever of the ways below it
takes.

A row without top-k and top-p is drawn in order of ids: from the chunks' masses comes the chunk, and
from the chunk's tokens the token.

A row with either is drawn in order of logits, best first, equal ones by id, without sorting it: a
search over the 32 bits of a float finds the logit at which a count or a mass is passed. `scan`
leaves the largest logit of each group of neighbours; the n-th largest of those is a bound that at
least n tokens reach, seldom many more; `weigh` gathers these candidates, and `draw` searches among
them. Where they aren't enough, `search` goes through the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraserve_kernels.gpu.sampling.probabilities import (
    BY_ID,
    BY_LOGIT,
    GREEDY,
    NO_TOKEN,
    float_of,
    floor_of,
    key_of,
    way_of,
    weight_of,
)


@triton.jit  # type: ignore[untyped-decorator]
def scan_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [num_rows, vocab_size] float32
    temperature_ptr,  # float32; not read unless HAS_DRAWS, nor are the next two
    top_k_ptr,  # int32
    top_p_ptr,  # float64
    chunk_tops_ptr,  # [num_rows, num_chunks] float32: the largest logit
    chunk_tokens_ptr,  # [num_rows, num_chunks] int32: the first token that has it
    chunk_finite_ptr,  # [num_rows, num_chunks] int32
    group_tops_ptr,  # [num_rows, num_groups] float32; written where the row needs it
    stride_logits,
    vocab_size,
    num_groups,
    HAS_DRAWS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    groups = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + row * stride_logits + ids, mask=ids < vocab_size, other=float("-inf"))
    is_finite = (tl.abs(x) < float("inf")) | (ids >= vocab_size)
    # a row with others is reported, its token is any
    x = tl.where(is_finite, x, float("-inf"))
    group_tops = tl.max(x, axis=1)
    top = tl.max(group_tops, axis=0)
    token = tl.min(tl.min(tl.where(x == top, ids, NO_TOKEN), axis=1), axis=0)
    place = row * tl.num_programs(0) + chunk
    tl.store(chunk_tops_ptr + place, top)
    tl.store(chunk_tokens_ptr + place, token)
    tl.store(chunk_finite_ptr + place, tl.min(tl.min(is_finite.to(tl.int32), axis=1), axis=0))
    if HAS_DRAWS:
        temperature, top_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row)
        if way_of(temperature, tl.load(top_k_ptr + row), top_p, vocab_size) == BY_LOGIT:
            tl.store(group_tops_ptr + row * num_groups + groups, group_tops, mask=groups < num_groups)


@triton.jit  # type: ignore[untyped-decorator]
def pick_kernel(  # type: ignore[no-untyped-def]
    chunk_tops_ptr,
    chunk_tokens_ptr,
    chunk_finite_ptr,
    group_tops_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    tokens_ptr,  # [num_rows] int64: the likeliest
    finite_ptr,  # [num_rows] bool
    ways_ptr,  # [num_rows] int32, and so the rest; not written unless HAS_DRAWS
    tops_ptr,  # float32: the largest scaled logit
    bounds_ptr,  # float32: the smallest scaled logit of a candidate
    counts_ptr,  # int32: zeroed for `weigh`
    vocab_size,
    num_chunks,
    num_groups,
    num_wanted,  # candidates for top-p without top-k; all tokens are candidates where these are more than groups
    HAS_DRAWS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK_CHUNKS)
    is_chunk = chunks < num_chunks
    places = row * num_chunks + chunks
    chunk_tops = tl.load(chunk_tops_ptr + places, mask=is_chunk, other=float("-inf"))
    chunk_tokens = tl.load(chunk_tokens_ptr + places, mask=is_chunk, other=NO_TOKEN)
    is_finite = tl.min(tl.load(chunk_finite_ptr + places, mask=is_chunk, other=1), axis=0)
    top = tl.max(chunk_tops, axis=0)
    token = tl.min(tl.where(chunk_tops == top, chunk_tokens, NO_TOKEN), axis=0)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(finite_ptr + row, is_finite != 0)
    if HAS_DRAWS:
        temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
        way = way_of(temperature, top_k, tl.load(top_p_ptr + row), vocab_size)
        way = tl.where(is_finite != 0, way, GREEDY)
        tl.store(ways_ptr + row, way)
        if way != GREEDY:
            tl.store(tops_ptr + row, tl.div_rn(top, temperature))
        if way == BY_LOGIT:
            tl.store(counts_ptr + row, 0)
            wanted = tl.where((top_k > 0) & (top_k < vocab_size), top_k, num_wanted)
            groups = tl.arange(0, BLOCK_GROUPS)
            group_tops = tl.load(group_tops_ptr + row * num_groups + groups, mask=groups < num_groups, other=0.0)
            keys = tl.where(groups < num_groups, key_of(group_tops), 0)
            # bit by bit, the largest key that `wanted` groups reach
            key = tl.full((), 0, tl.uint32)
            bit = tl.full((), 0x80000000, tl.uint32)
            for _ in range(32):
                trial = key | bit
                key = tl.where(tl.sum((keys >= trial).to(tl.int32), axis=0) >= wanted, trial, key)
                bit = bit >> 1
            bound = tl.where(wanted > num_groups, float("-inf"), float_of(key))
            tl.store(bounds_ptr + row, tl.div_rn(bound, temperature))


@triton.jit  # type: ignore[untyped-decorator]
def weigh_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    temperature_ptr,
    depth_ptr,  # float64: how far below the top logit min-p cuts
    ways_ptr,
    tops_ptr,
    bounds_ptr,
    counts_ptr,  # of candidates, also of those for which there is no room
    candidates_ptr,  # [num_rows, MAX_CANDIDATES] float32: logits, in no order
    candidate_ids_ptr,  # [num_rows, MAX_CANDIDATES] int32
    masses_ptr,  # [num_rows, num_chunks] int64
    stride_logits,
    vocab_size,
    MAX_CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    way = tl.load(ways_ptr + row)
    if way != GREEDY:
        temperature, top = tl.load(temperature_ptr + row), tl.load(tops_ptr + row)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * stride_logits + ids, mask=ids < vocab_size, other=float("-inf"))
        s = tl.div_rn(x, temperature)
        floor = tl.where(way == BY_ID, floor_of(top, tl.load(depth_ptr + row)), float("-inf"))
        weights = tl.where(s >= floor, weight_of(s, top), 0)
        tl.store(masses_ptr + row * tl.num_programs(0) + chunk, tl.sum(weights, axis=0))
        if way == BY_LOGIT:
            is_candidate = (s >= tl.load(bounds_ptr + row)) & (ids < vocab_size)
            ranks = tl.cumsum(is_candidate.to(tl.int32), axis=0)
            count = tl.sum(is_candidate.to(tl.int32), axis=0)
            # chunks take places in any order, and nothing later depends on it
            places = tl.atomic_add(counts_ptr + row, count, sem="relaxed") + ranks - 1
            is_kept = is_candidate & (places < MAX_CANDIDATES)
            tl.store(candidates_ptr + row * MAX_CANDIDATES + places, x, mask=is_kept)
            tl.store(candidate_ids_ptr + row * MAX_CANDIDATES + places, ids, mask=is_kept)
