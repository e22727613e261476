from __future__ import annotations

import random

from loraserve.engine.speculation.history import MAX_NAMES, MAX_TEXT_TOKENS, History
from loraserve.engine.speculation.token_index import end_hashes
from loraserve.types import Digest, TenantId

A, B = TenantId("a"), TenantId("b")
ONE, OTHER = Digest("1" * 64), Digest("2" * 64)
TEXT = list(range(100, 120))


def test_text_is_found_only_within_tenant_and_adapter():
    history = History(1 << 20)
    history.add((A, ONE), TEXT)
    index = history.get((A, ONE))
    assert index is not None
    assert index.find(end_hashes(TEXT[:8]), TEXT[:8]) is not None
    for key in ((B, ONE), (A, OTHER), (A, None), (B, None)):
        assert history.get(key) is None


def test_texts_stay_within_bytes_and_evict_least_recent():
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


def test_deleted_version_leaves_no_text():
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


def test_texts_of_deleted_version_are_forgotten_everywhere():
    # A owns sql@1, and B has used it by a grant; B owns the same bytes by another name, as C does
    c = TenantId("c")
    texts = {
        (A, ONE): [(A, "sql", 1)],
        (B, ONE): [(A, "sql", 1), (B, "own", 1)],
        (c, ONE): [(c, "sql", 1)],
        (A, OTHER): [(A, "sql", 2)],
        (A, Digest("3" * 64)): [(A, "sql", 1), (A, "more", 5)],
        (A, None): [],
    }

    def left(owner: TenantId, name: str | None, version: int | None) -> set:
        history = History(1 << 20)
        for key, versions in texts.items():
            history.add(key, TEXT, versions)
        gone = history.forget_deleted(owner, name, version)
        assert history._indices.keys() == history._versions.keys() == texts.keys() - {*gone}
        assert history.num_bytes == sum(index.num_bytes for index in history._indices.values())
        return {*history._indices}

    assert left(A, "sql", 1) == {(c, ONE), (A, OTHER), (A, None)}
    assert left(A, "sql", None) == {(c, ONE), (A, None)}
    assert left(c, "sql", 1) == texts.keys() - {(c, ONE)}
    assert left(B, "sql", 1) == texts.keys()
    # of a tenant, what it asked for goes too
    assert left(A, None, None) == {(c, ONE)}
    assert left(c, None, None) == texts.keys() - {(c, ONE)}


def test_the_names_of_the_same_bytes_are_bounded():
    history = History(1 << 20)
    for number in range(3 * MAX_NAMES):
        history.add((A, ONE), TEXT, [(A, f"n{number}", 1)])
        assert len(history._versions[A, ONE]) <= MAX_NAMES
    history.forget_deleted(A, f"n{3 * MAX_NAMES - 1}", 1)
    assert not history._indices
