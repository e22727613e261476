"""The token at which a row's running sum passes its random number, as Triton kernels.

`draw` finds it, or leaves the row to `search`. What a distribution is cut by, and in what order its
sum runs, stands in sampling_kernels. Here a cut is a mass: of the tokens in order, as many are kept
as hold it. So top-k, top-p and min-p each give a mass, the smallest counts, and the random number's
share of it names the token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraserve_kernels.gpu.sampling.probabilities import (
    BY_ID,
    BY_LOGIT,
    BY_SEARCH,
    DEPTH,
    NO_TOKEN,
    float_of,
    floor_of,
    kept_of,
    key_of,
    random_bits,
    share_of,
    weight_of,
)


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    keys, weights, row_ptr, size, temperature, top, key1, key2, key3, OF_MASS: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the tokens, or sum the mass, that have these keys or higher ones.

    They are the given tokens or, with IS_WHOLE, the row's.
    """
    if IS_WHOLE:
        offs = tl.arange(0, BLOCK)
        sum1 = tl.zeros((BLOCK,), tl.int64)
        sum2 = tl.zeros((BLOCK,), tl.int64)
        sum3 = tl.zeros((BLOCK,), tl.int64)
        for start in tl.range(0, size, BLOCK, num_stages=3):
            x = tl.load(row_ptr + start + offs, mask=start + offs < size, other=float("nan"))
            s = tl.div_rn(x, temperature)
            # no token has the key 0
            row_keys = tl.where(start + offs < size, key_of(s), 0)
            part = weight_of(s, top) if OF_MASS else tl.full((BLOCK,), 1, tl.int64)
            sum1 += tl.where(row_keys >= key1, part, 0)
            sum2 += tl.where(row_keys >= key2, part, 0)
            sum3 += tl.where(row_keys >= key3, part, 0)
    else:
        part = weights if OF_MASS else tl.full((BLOCK,), 1, tl.int64)
        sum1 = tl.where(keys >= key1, part, 0)
        sum2 = tl.where(keys >= key2, part, 0)
        sum3 = tl.where(keys >= key3, part, 0)
    return tl.sum(sum1, axis=0), tl.sum(sum2, axis=0), tl.sum(sum3, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _mass_from(  # type: ignore[no-untyped-def]
    keys, weights, row_ptr, size, temperature, top, key, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    mass, _, _ = _sums(keys, weights, row_ptr, size, temperature, top, key, key, key, True, IS_WHOLE, BLOCK)
    return mass


@triton.jit  # type: ignore[untyped-decorator]
def _passing(  # type: ignore[no-untyped-def]
    keys, weights, row_ptr, size, temperature, top, low, target, OF_MASS: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the highest key at which the sum passes the target, and the sum above it.

    The sum is over the key and all above; the sum from `low` on does pass.
    """
    high = key_of(top) + 1
    above = tl.full((), 0, tl.int64)
    while high - low > 1:
        step = (high - low + 3) // 4
        last = high - 1
        key1 = low + step
        key2, key3 = tl.minimum(key1 + step, last), tl.minimum(key1 + 2 * step, last)
        sum1, sum2, sum3 = _sums(
            keys, weights, row_ptr, size, temperature, top, key1, key2, key3, OF_MASS, IS_WHOLE, BLOCK
        )
        if sum1 <= target:
            high, above = key1, sum1
        elif sum2 <= target:
            low, high, above = key1, key2, sum2
        elif sum3 <= target:
            low, high, above = key2, key3, sum3
        else:
            low = key3
    return low, above


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    keys, weights, row_ptr, size, temperature, top, lowest, floor, top_k, top_p, mass, bits, vocab_size,
    IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the key of the token to take, and its rank among those that share it.

    Args:
        lowest: all tokens have it or a higher one.
        mass: of the whole row.
    """
    # below this nothing has any mass
    low = tl.maximum(lowest, key_of(top - DEPTH))
    if (top_k > 0) & (top_k < vocab_size):
        count = top_k.to(tl.int64)
        key, num_above = _passing(
            keys, weights, row_ptr, size, temperature, top, lowest, count - 1, False, IS_WHOLE, BLOCK
        )
        mass = _mass_from(keys, weights, row_ptr, size, temperature, top, key + 1, IS_WHOLE, BLOCK)
        mass += (count - num_above) * weight_of(float_of(key), top)
    if top_p < 1.0:
        # the token that crosses it stays
        last = kept_of(top_p, mass) - 1
        key, mass = _passing(keys, weights, row_ptr, size, temperature, top, low, last, True, IS_WHOLE, BLOCK)
        weight = tl.maximum(weight_of(float_of(key), top), 1)
        mass += ((last - mass) // weight + 1) * weight
    if floor > float("-inf"):
        reached = _mass_from(keys, weights, row_ptr, size, temperature, top, key_of(floor), IS_WHOLE, BLOCK)
        mass = tl.minimum(mass, reached)
    target = share_of(bits, mass)
    key, above = _passing(keys, weights, row_ptr, size, temperature, top, low, target, True, IS_WHOLE, BLOCK)
    rank = (target - above) // tl.maximum(weight_of(float_of(key), top), 1)
    return key, rank.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [num_rows, vocab_size] float32
    seed_ptr,  # [num_rows] int64, and so the rest
    position_ptr,  # int64
    temperature_ptr,  # float32
    top_k_ptr,  # int32
    top_p_ptr,  # float64
    depth_ptr,  # float64
    ways_ptr,  # int32; becomes BY_SEARCH where candidates aren't enough
    tops_ptr,  # float32
    bounds_ptr,  # float32
    counts_ptr,  # int32
    candidates_ptr,  # [num_rows, MAX_CANDIDATES] float32
    candidate_ids_ptr,  # [num_rows, MAX_CANDIDATES] int32
    masses_ptr,  # [num_rows, num_chunks] int64
    tokens_ptr,  # [num_rows] int64
    stride_logits,
    vocab_size,
    num_chunks,
    MAX_CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    way = tl.load(ways_ptr + row)
    temperature, top = tl.load(temperature_ptr + row), tl.load(tops_ptr + row)
    if way == BY_ID:
        chunks = tl.arange(0, BLOCK_CHUNKS)
        masses = tl.load(masses_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0)
        target = share_of(random_bits(tl.load(seed_ptr + row), tl.load(position_ptr + row)), tl.sum(masses, axis=0))
        chunk = tl.sum((tl.cumsum(masses, axis=0) <= target).to(tl.int32), axis=0)
        target -= tl.sum(tl.where(chunks < chunk, masses, 0), axis=0)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * stride_logits + ids, mask=ids < vocab_size, other=float("-inf"))
        s = tl.div_rn(x, temperature)
        weights = tl.where(s >= floor_of(top, tl.load(depth_ptr + row)), weight_of(s, top), 0)
        token = chunk * CHUNK + tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
        tl.store(tokens_ptr + row, tl.minimum(token, vocab_size - 1).to(tl.int64))
    elif way == BY_LOGIT:
        chunks = tl.arange(0, BLOCK_CHUNKS)
        masses = tl.load(masses_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0)
        mass = tl.sum(masses, axis=0)
        top_k, top_p, count = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(counts_ptr + row)
        offs = tl.arange(0, MAX_CANDIDATES)
        is_token = offs < count
        x = tl.load(candidates_ptr + row * MAX_CANDIDATES + offs, mask=is_token, other=float("-inf"))
        ids = tl.load(candidate_ids_ptr + row * MAX_CANDIDATES + offs, mask=is_token, other=NO_TOKEN)
        s = tl.div_rn(x, temperature)
        weights = weight_of(s, top)
        # no token has the key 0
        keys = tl.where(is_token, key_of(s), 0)
        if (top_k > 0) & (top_k < vocab_size):
            is_enough = count >= top_k
        else:
            is_enough = tl.sum(weights, axis=0) >= kept_of(top_p, mass)
        if is_enough & (count <= MAX_CANDIDATES):
            key, rank = _choose(
                keys,
                weights,
                candidates_ptr,
                0,
                temperature,
                top,
                key_of(tl.load(bounds_ptr + row)),
                floor_of(top, tl.load(depth_ptr + row)),
                top_k,
                top_p,
                mass,
                random_bits(tl.load(seed_ptr + row), tl.load(position_ptr + row)),
                vocab_size,
                False,
                MAX_CANDIDATES,
            )
            # candidates stand in no order: the id that has that many before it
            ids = tl.where(keys == key, ids, NO_TOKEN)
            low = tl.full((), -1, tl.int32)
            high = tl.max(tl.where(keys == key, ids, -1), axis=0)
            while high - low > 1:
                middle = (low + high) // 2
                if tl.sum((ids <= middle).to(tl.int32), axis=0) > rank:
                    high = middle
                else:
                    low = middle
            tl.store(tokens_ptr + row, tl.maximum(high, 0).to(tl.int64))
        else:
            tl.store(ways_ptr + row, BY_SEARCH)


@triton.jit  # type: ignore[untyped-decorator]
def search_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    seed_ptr,
    position_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    depth_ptr,
    ways_ptr,
    tops_ptr,
    masses_ptr,
    tokens_ptr,
    stride_logits,
    vocab_size,
    num_chunks,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(ways_ptr + row) == BY_SEARCH:
        temperature, top = tl.load(temperature_ptr + row), tl.load(tops_ptr + row)
        row_ptr = logits_ptr + row * stride_logits
        chunks = tl.arange(0, BLOCK_CHUNKS)
        masses = tl.load(masses_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0)
        key, rank = _choose(
            0,
            0,
            row_ptr,
            vocab_size,
            temperature,
            top,
            key_of(tl.full((), float("-inf"), tl.float32)),
            floor_of(top, tl.load(depth_ptr + row)),
            tl.load(top_k_ptr + row),
            tl.load(top_p_ptr + row),
            tl.sum(masses, axis=0),
            random_bits(tl.load(seed_ptr + row), tl.load(position_ptr + row)),
            vocab_size,
            True,
            BLOCK,
        )
        offs = tl.arange(0, BLOCK)
        token = tl.full((), 0, tl.int32)
        num_seen = tl.full((), 0, tl.int32)
        start = tl.full((), 0, tl.int32)
        while (start < vocab_size) & (num_seen <= rank):
            ids = start + offs
            x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("nan"))
            is_tied = (key_of(tl.div_rn(x, temperature)) == key).to(tl.int32)
            ranks = num_seen + tl.cumsum(is_tied, axis=0) - 1
            token = tl.maximum(token, tl.max(tl.where((is_tied > 0) & (ranks <= rank), ids, 0), axis=0))
            num_seen += tl.sum(is_tied, axis=0)
            start += BLOCK
        tl.store(tokens_ptr + row, token.to(tl.int64))
