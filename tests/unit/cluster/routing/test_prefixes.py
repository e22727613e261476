"""Hashes of prompts' beginnings."""

from __future__ import annotations

from loraserve.cluster.routing.routed_request import TOKENS_PER_PREFIX, prefix_hashes
from loraserve.types import Digest, TenantId

A, B = TenantId("a"), TenantId("b")
TOKENS = list(range(3 * TOKENS_PER_PREFIX + 5))


def test_equal_beginnings_have_equal_hashes_until_difference() -> None:
    other = [*TOKENS]
    other[2 * TOKENS_PER_PREFIX] += 1
    one, two = prefix_hashes(A, None, TOKENS), prefix_hashes(A, None, other)
    assert len(one) == 3
    assert one[:2] == two[:2]
    assert one[2] != two[2]


def test_tenants_and_adapters_share_no_prefix() -> None:
    hashes = [*prefix_hashes(A, None, TOKENS), *prefix_hashes(B, None, TOKENS)]
    hashes += prefix_hashes(A, Digest("a" * 64), TOKENS)
    assert len(set(hashes)) == 9


def test_short_prompt_has_no_prefix() -> None:
    assert prefix_hashes(A, None, TOKENS[: TOKENS_PER_PREFIX - 1]) == ()
