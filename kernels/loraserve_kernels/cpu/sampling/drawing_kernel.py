"""Draws of tokens, each from its row's distribution; compiled by numba.

A row's logits become weights e^((logit - largest) / temperature), in place, and their sum the
distribution's total. Nothing is sorted but the tokens among which a border lies: weights fall into
buckets by the highest bits of their float32, of which each has a count and a mass, so that a cut
(`top_k`, `top_p`, `min_p`) and the drawn number lie in one bucket each.

A row's token depends on nothing else, neither on the other rows nor on the processor: sums are
taken in one order whatever the width of its vectors.
"""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.simd import (
    F32,
    LANES,
    STAMP,
    add,
    choose_below,
    divide,
    exp,
    fetch_add,
    larger,
    load,
    load_double,
    load_int,
    load_int32,
    load_one,
    max_lanes,
    splat,
    store,
    store_double,
    store_int,
    store_one,
    sum_lanes,
)

# The argument block, in int64 words. The two counters are on cache lines of their own.
CLAIMED, ENTERED, NUM_ROWS, WIDTH, ROWS, RULES, OUT, SCRATCH, NUM_WORDS = 0, 8, 16, 17, 18, 19, 20, 21, 22
"""ROWS: of the address of each row's logits. RULES: of `NUM_RULES` float64 for each row. OUT: of an
int64 for each row. SCRATCH: of `scratch_words(width)` for each thread.
"""
TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM, NUM_RULES = 0, 1, 2, 3, 4, 5
"""TOP_K is the row's width where there is no cut, TOP_P then 1."""

NO_TOKEN = -1
"""The token of a row that isn't a distribution's."""

_GROUP, _BLOCK = 16, 512
"""Weights that every processor adds in one order, of which a row has a whole group at least
(`drawing._MIN_WIDTH`); and weights that have a sum of their own.
"""
_ONE_BITS, _BUCKET_SHIFT = 0x3F800000, 19
"""float32 of 1.0, the largest weight; bits below a bucket's, of which a power of 2 has 16."""
_WEIGHTLESS = _ONE_BITS >> _BUCKET_SHIFT
"""The last bucket, of tokens that weigh nothing."""
_NUM_BUCKETS = _WEIGHTLESS + 1
_WORD = 8

# A thread's scratch, in words of 8 bytes: counts and masses of buckets, a number on its own, sums
# and maxima of blocks, the tokens that were counted, and the keys of one bucket's.
_COUNTS, _MASSES, _CELL, _BLOCKS = 0, _NUM_BUCKETS, 2 * _NUM_BUCKETS, 2 * _NUM_BUCKETS + 1


@numba.njit
def scratch_words(width):  # type: ignore[no-untyped-def]
    """Count the int64 words of scratch that a thread needs for rows of a width."""
    return _BLOCKS + 2 * (-(-width // _BLOCK)) + 2 * width


@numba.njit
def _weigh_group(x, at, peak, temperature, floor):  # type: ignore[no-untyped-def]
    """Compute the weights of `LANES` logits; 0 below the floor."""
    weights = exp(divide(add(load(x, at, F32), peak), temperature))
    return choose_below(weights, floor, splat(np.float32(0)), weights)


@numba.njit
def _weigh(x, width, temperature, min_weight, blocks):  # type: ignore[no-untyped-def]
    """Replace a row's logits by their weights, and note each block's sum and largest.

    Return the sum of all.
    """
    largest = load(x, width - LANES, F32)
    for k in range(0, width - LANES, LANES):
        largest = larger(load(x, k, F32), largest)
    peak = splat(-max_lanes(largest))
    divisor, floor, zero = splat(temperature), splat(min_weight), splat(np.float32(0))
    # what follows the last whole group overlaps with it: computed before that is overwritten
    whole, end = width // _GROUP * _GROUP, width - _GROUP
    end_low = _weigh_group(x, end, peak, divisor, floor)
    end_high = _weigh_group(x, end + _GROUP - LANES, peak, divisor, floor)
    total, num_blocks = 0.0, (width + _BLOCK - 1) // _BLOCK
    for block in range(num_blocks):
        start = block * _BLOCK
        low_sum, high_sum, low_max = zero, zero, zero
        for k in range(start, min(start + _BLOCK, whole), _GROUP):
            low = _weigh_group(x, k, peak, divisor, floor)
            store(x, k, low)
            low_sum, low_max = add(low_sum, low), larger(low, low_max)
            if LANES < _GROUP:
                high = _weigh_group(x, k + LANES, peak, divisor, floor)
                store(x, k + LANES, high)
                high_sum, low_max = add(high_sum, high), larger(high, low_max)
        block_sum, block_max = np.float64(sum_lanes(add(low_sum, high_sum))), max_lanes(low_max)
        if block == num_blocks - 1 and whole < width:
            store(x, end, end_low)
            store(x, end + _GROUP - LANES, end_high)
            for k in range(whole, width):
                weight = load_one(x, k, F32)
                block_sum += np.float64(weight)
                block_max = max(block_max, weight)
        store_double(blocks, block, block_sum)
        store_one(blocks, 2 * (num_blocks + block), block_max)
        total += block_sum
    return total


@numba.njit
def _bucket(weights, index, stride):  # type: ignore[no-untyped-def]
    """Find the bucket of a weight: the heavier, the lower."""
    return (_ONE_BITS - load_int32(weights, index * stride)) >> _BUCKET_SHIFT


@numba.njit
def _draw_by_id(x, width, total, uniform, blocks):  # type: ignore[no-untyped-def]
    """Draw from all weights, in the order of the tokens."""
    target, passed, block = uniform * total, 0.0, 0
    num_blocks = (width + _BLOCK - 1) // _BLOCK
    while block < num_blocks - 1 and passed + load_double(blocks, block) <= target:
        passed += load_double(blocks, block)
        block += 1
    # rounding may leave the target behind the last of them
    token = -1
    for k in range(block * _BLOCK, min((block + 1) * _BLOCK, width)):
        weight = np.float64(load_one(x, k, F32))
        if weight > 0:
            token, passed = k, passed + weight
            if passed > target:
                return token
    while token < 0 and block > 0:
        block -= 1
        for k in range(block * _BLOCK, (block + 1) * _BLOCK):
            if load_one(x, k, F32) > 0:
                token = k
    return token


@numba.njit
def _sift(keys, first, end):  # type: ignore[no-untyped-def]
    """Move a heap's element down to its place."""
    key, at = load_int(keys, first), first
    while True:
        child = 2 * at + 1
        if child >= end:
            break
        if child + 1 < end and load_int(keys, child + 1) > load_int(keys, child):
            child += 1
        if load_int(keys, child) <= key:
            break
        store_int(keys, at, load_int(keys, child))
        at = child
    store_int(keys, at, key)


@numba.njit
def _sort_bucket(x, bucket, candidates, num_candidates, keys):  # type: ignore[no-untyped-def]
    """Sort the tokens of a bucket, heaviest first and equal ones by id; return how many there are.

    A key has the token in its lower half.
    """
    count = 0
    for index in range(num_candidates):
        token = load_int(candidates, index)
        if _bucket(x, token, 1) == bucket:
            store_int(keys, count, ((_ONE_BITS - load_int32(x, token)) << 32) | token)
            count += 1
    for first in range(count // 2 - 1, -1, -1):
        _sift(keys, first, count)
    for end in range(count - 1, 0, -1):
        last = load_int(keys, end)
        store_int(keys, end, load_int(keys, 0))
        store_int(keys, 0, last)
        _sift(keys, 0, end)
    return count


@numba.njit
def _token_of(keys, index):  # type: ignore[no-untyped-def]
    return load_int(keys, index) & 0xFFFFFFFF


@numba.njit
def _clear(counts, masses):  # type: ignore[no-untyped-def]
    for bucket in range(_NUM_BUCKETS):
        store_int(counts, bucket, 0)
        store_double(masses, bucket, 0.0)


@numba.njit
def _last_bucket(width, top_k, top_p, total, scratch):  # type: ignore[no-untyped-def]
    """Find a bucket behind which no token can be kept."""
    counts, cell, num_blocks = scratch + _COUNTS * _WORD, scratch + _CELL * _WORD, (width + _BLOCK - 1) // _BLOCK
    maxima = scratch + (_BLOCKS + num_blocks) * _WORD
    if top_k >= width:
        # tokens lighter than this have less than 1 - top_p together
        store_one(cell, 0, np.float32((1.0 - top_p) * total / width))
        return min(_bucket(cell, 0, 1), _WEIGHTLESS - 1)
    # as many blocks as tokens are kept have one at least as heavy as the lightest of their maxima
    for block in range(num_blocks):
        bucket = _bucket(maxima, block, 2)
        store_int(counts, bucket, load_int(counts, bucket) + 1)
    seen, last = 0, _NUM_BUCKETS - 1
    for bucket in range(_NUM_BUCKETS):
        seen += load_int(counts, bucket)
        if seen >= top_k:
            last = bucket
            break
    for block in range(num_blocks):
        store_int(counts, _bucket(maxima, block, 2), 0)
    return min(last, _WEIGHTLESS - 1)


@numba.njit
def _count(x, width, last, scratch):  # type: ignore[no-untyped-def]
    """Count and sum the tokens of the buckets up to `last`, and list them; return how many."""
    counts, masses, num_blocks = scratch + _COUNTS * _WORD, scratch + _MASSES * _WORD, (width + _BLOCK - 1) // _BLOCK
    maxima = scratch + (_BLOCKS + num_blocks) * _WORD
    candidates, count = scratch + (_BLOCKS + 2 * num_blocks) * _WORD, 0
    for block in range(num_blocks):
        if _bucket(maxima, block, 2) > last:
            continue
        for token in range(block * _BLOCK, min((block + 1) * _BLOCK, width)):
            bucket = _bucket(x, token, 1)
            if bucket <= last:
                store_int(counts, bucket, load_int(counts, bucket) + 1)
                store_double(masses, bucket, load_double(masses, bucket) + np.float64(load_one(x, token, F32)))
                store_int(candidates, count, token)
                count += 1
    return count


@numba.njit
def _mass_of_heaviest(x, top_k, candidates, num_candidates, keys, counts, masses):  # type: ignore[no-untyped-def]
    """Sum the weights of the `top_k` heaviest tokens."""
    seen, mass, bucket = 0, 0.0, 0
    while bucket < _NUM_BUCKETS and seen + load_int(counts, bucket) <= top_k:
        seen, mass = seen + load_int(counts, bucket), mass + load_double(masses, bucket)
        bucket += 1
    if seen < top_k and bucket < _NUM_BUCKETS:
        _sort_bucket(x, bucket, candidates, num_candidates, keys)
        for index in range(top_k - seen):
            mass += np.float64(load_one(x, _token_of(keys, index), F32))
    return mass


@numba.njit
def _draw_by_weight(x, width, top_k, top_p, min_p, uniform, total, scratch):  # type: ignore[no-untyped-def]
    """Draw from the tokens that the cuts keep, heaviest first.

    Kept are the `top_k` heaviest; of these as many as reach `top_p` of their mass, the one that
    passes it included; of these the ones of `min_p` at least, the heaviest being 1.
    """
    num_blocks = (width + _BLOCK - 1) // _BLOCK
    counts, masses, cell = scratch + _COUNTS * _WORD, scratch + _MASSES * _WORD, scratch + _CELL * _WORD
    candidates = scratch + (_BLOCKS + 2 * num_blocks) * _WORD
    keys = candidates + width * _WORD
    _clear(counts, masses)
    num_candidates = _count(x, width, _last_bucket(width, top_k, top_p, total, scratch), scratch)

    limit = np.inf
    if top_p < 1.0:
        limit = total
        if top_k < width:
            limit = _mass_of_heaviest(x, top_k, candidates, num_candidates, keys, counts, masses)
        limit *= top_p
    store_one(cell, 0, np.float32(min_p))
    floor_bucket = _bucket(cell, 0, 1)

    # buckets that are kept whole, then those of the next one's tokens that are
    seen, mass, cut = 0, 0.0, 0
    while (
        cut < floor_bucket
        and seen + load_int(counts, cut) <= min(top_k, num_candidates)
        and (mass + load_double(masses, cut) < limit or load_int(counts, cut) == 0)
    ):
        seen, mass = seen + load_int(counts, cut), mass + load_double(masses, cut)
        cut += 1
    whole_mass, num_kept = mass, 0
    if seen < num_candidates and seen < top_k and (mass < limit or seen == 0):
        count = _sort_bucket(x, cut, candidates, num_candidates, keys)
        for index in range(count):
            weight = load_one(x, _token_of(keys, index), F32)
            if seen > 0 and (seen >= top_k or mass >= limit or weight < np.float32(min_p)):
                break
            seen, mass, num_kept = seen + 1, mass + np.float64(weight), num_kept + 1

    target, passed = uniform * mass, 0.0
    if target >= whole_mass and num_kept > 0:
        # the cut's bucket, which is sorted already
        passed = whole_mass
        for index in range(num_kept):
            passed += np.float64(load_one(x, _token_of(keys, index), F32))
            if passed > target:
                return _token_of(keys, index)
        return _token_of(keys, num_kept - 1)
    bucket, filled = 0, 0
    while bucket < cut:
        if load_int(counts, bucket) > 0:
            filled = bucket
            if passed + load_double(masses, bucket) > target:
                break
        passed += load_double(masses, bucket)
        bucket += 1
    if bucket == cut:
        # rounding has left the target behind the last of them
        bucket, passed = filled, passed - load_double(masses, filled)
    count = _sort_bucket(x, bucket, candidates, num_candidates, keys)
    for index in range(count):
        passed += np.float64(load_one(x, _token_of(keys, index), F32))
        if passed > target:
            return _token_of(keys, index)
    return _token_of(keys, count - 1)


@numba.njit
def _draw(args, row, scratch):  # type: ignore[no-untyped-def]
    width, x = load_int(args, WIDTH), load_int(load_int(args, ROWS), row)
    rules = load_int(args, RULES) + row * NUM_RULES * _WORD
    top_k, top_p = np.int64(load_double(rules, TOP_K)), load_double(rules, TOP_P)
    min_p, uniform = load_double(rules, MIN_P), load_double(rules, UNIFORM)
    is_cut = top_k < width or top_p < 1.0
    # without another cut the tokens below min_p weigh nothing
    floor = np.float32(0.0 if is_cut else min_p)
    blocks = scratch + _BLOCKS * _WORD
    total = _weigh(x, width, np.float32(load_double(rules, TEMPERATURE)), floor, blocks)
    if not total >= 1.0:
        # NaN or +inf is among the logits, or nothing else than -inf
        token = NO_TOKEN
    elif is_cut:
        token = _draw_by_weight(x, width, top_k, top_p, min_p, uniform, total, scratch)
    else:
        token = _draw_by_id(x, width, total, uniform, blocks)
    store_int(load_int(args, OUT), row, token)


@functools.cache
def compiled() -> Any:
    """Load the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = STAMP

    def draw_tokens(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            thread = fetch_add(args + ENTERED * _WORD, 1)
            scratch = load_int(args, SCRATCH) + thread * scratch_words(load_int(args, WIDTH)) * _WORD
            while True:
                row = fetch_add(args, 1)
                if row >= load_int(args, NUM_ROWS):
                    return
                _draw(args, row, scratch)

    return compile_kernel(draw_tokens)
