from __future__ import annotations

import random

from loraserve.engine.speculation.history import MAX_TEXT_TOKENS, History
from loraserve.engine.speculation.token_index import end_hashes
from loraserve.types import Digest, TenantId

A, B = TenantId("a"), TenantId("b")
ONE, OTHER = Digest("1" * 64), Digest("2" * 64)
TEXT = list(range(100, 120))


def test_a_text_is_found_by_its_own_tenant_and_adapter_alone():
    history = History(1 << 20)
    history.add((A, ONE), TEXT)
    index = history.get((A, ONE))
    assert index is not None
    assert index.find(end_hashes(TEXT[:8]), TEXT[:8]) is not None
    for key in ((B, ONE), (A, OTHER), (A, None), (B, None)):
        assert history.get(key) is None


def test_texts_stay_within_their_bytes_and_the_least_recently_used_are_forgotten():
    history = History(256 << 10)
    rng = random.Random(0)
    keys = [(A, Digest(f"{i:064}")) for i in range(50)]
    history.add(keys[0], TEXT)
    for key in keys[1:]:
        history.add(key, [rng.randrange(1000) for _ in range(rng.choice([8, 200, 3000]))])
        assert history.get(keys[0]) is not None
        assert history.num_bytes <= 256 << 10
        assert history.num_bytes == sum(index.num_bytes for index in history._indices.values())
    assert history.get(keys[1]) is None
    assert len(history) < 50


def test_of_a_long_text_the_end_is_kept():
    history = History(1 << 20)
    history.add((A, None), list(range(10 * MAX_TEXT_TOKENS)))
    index = history.get((A, None))
    assert index is not None
    assert len(index) == MAX_TEXT_TOKENS + 1


def test_a_version_that_is_gone_leaves_no_text():
    history = History(1 << 20)
    for key in ((A, ONE), (B, ONE), (A, OTHER), (A, None)):
        history.add(key, TEXT)
    history.forget(ONE)
    assert [key in history._indices for key in ((A, ONE), (B, ONE), (A, OTHER), (A, None))] == [
        False,
        False,
        True,
        True,
    ]
    assert history.num_bytes == sum(index.num_bytes for index in history._indices.values())
