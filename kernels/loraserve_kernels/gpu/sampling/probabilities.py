"""Common parts of the sampling kernels.

They are floats as integers whose order is theirs, probabilities as integers whose sums are exact,
and counted random numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# how a row's token is chosen
GREEDY = tl.constexpr(0)
BY_ID = tl.constexpr(1)
BY_LOGIT = tl.constexpr(2)
# by logit, among all tokens rather than among candidates
BY_SEARCH = tl.constexpr(3)

NO_TOKEN = tl.constexpr(2**31 - 1)
# e^-32 of the likeliest token's probability is none
DEPTH = tl.constexpr(32.0)

_ONE = tl.constexpr(2.0**44)
# log2(e) as the sum of two float32, and ln(2)
_LOG2E = tl.constexpr(1.4426950216293335)
_LOG2E_REST = tl.constexpr(1.925963033500e-08)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def way_of(temperature, top_k, top_p, vocab_size):  # type: ignore[no-untyped-def]
    is_cut = (top_p < 1.0) | ((top_k > 0) & (top_k < vocab_size))
    return tl.where(temperature > 0.0, tl.where(is_cut, BY_LOGIT, BY_ID), GREEDY)


@triton.jit
def key_of(x):  # type: ignore[no-untyped-def]
    """Convert the float to its rank in the order of floats, uint32, above 0.

    Both zeros have one place.
    """
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(x < 0.0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def float_of(key):  # type: ignore[no-untyped-def]
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_of(s, top):  # type: ignore[no-untyped-def]
    """``2^44 · exp(s - top)`` as int64, for scaled logits s up to top; 0 for NaN and for -inf.

    Written so that the compiler has nothing to fuse: equal logits weigh the same wherever they are
    weighed.
    """
    depth = tl.minimum(top - s, 64.0)
    power = depth * _LOG2E
    # what the product's rounding took away
    rest = tl.fma(depth, _LOG2E_REST, tl.fma(depth, _LOG2E, -power))
    weight = tl.exp2(-power)
    return (tl.fma(weight * -_LN2, rest, weight) * _ONE).to(tl.int64)


@triton.jit
def floor_of(top, depth):  # type: ignore[no-untyped-def]
    """Find the smallest float32 that isn't below ``top - depth``; `depth` is float64."""
    exact = top.to(tl.float64) - depth
    near = exact.to(tl.float32)
    return tl.where(near.to(tl.float64) < exact, float_of(key_of(near) + 1), near)


@triton.jit
def random_bits(seed, position):  # type: ignore[no-untyped-def]
    """Generate 64 random bits of an int64 seed and position.

    The upper 53 are the digits of a number in [0, 1). Source: SplitMix64 (Steele, Lea, Flood 2014),
    seeded by the seed and stepped to the position.
    """
    z = seed.to(tl.uint64, bitcast=True) * 0xD1342543DE82EF95
    z += position.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15
    for _ in tl.static_range(2):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
    return z


@triton.jit
def share_of(bits, mass):  # type: ignore[no-untyped-def]
    """Multiply the random number by an int64 mass, rounded down: below the mass."""
    return tl.umulhi((bits >> 11) << 11, mass.to(tl.uint64)).to(tl.int64)


@triton.jit
def kept_of(top_p, mass):  # type: ignore[no-untyped-def]
    """Compute the mass that top-p keeps at least."""
    kept = tl.ceil(mass.to(tl.float64) * top_p).to(tl.int64)
    return tl.minimum(tl.maximum(kept, 1), mass)
