"""Counts of each tenant's adapters, from a request's arrival to its end."""

from __future__ import annotations

import pytest

from loraserve.api.metrics.adapter_load import AdapterLoad
from loraserve.limits import LIMITS
from loraserve.types import AdapterPart, AdapterRef, Digest, TenantId

ACME, GLOBEX = TenantId("1"), TenantId("2")
NAMES = ("sql",)


def make_ref(tenant: TenantId = ACME, name: str = "sql", *, version: int = 1, digest: str = "aa") -> AdapterRef:
    blob = Digest("bb")
    return AdapterRef(
        tenant=tenant, name=name, version=version, digest=Digest(digest), config_blob=blob, weights_blob=blob
    )


@pytest.fixture
def load() -> AdapterLoad:
    return AdapterLoad()


def test_request_waits_until_first_token_then_runs(load: AdapterLoad) -> None:
    use = load.begin(make_ref(), NAMES)
    assert (load.waiting_names(), load.running_names(), load.num_running(make_ref())) == (["sql"], [], 0)
    for _ in range(2):
        use.answer()
        assert (load.waiting_names(), load.running_names(), load.num_running(make_ref())) == ([], ["sql"], 1)
    for _ in range(2):
        use.end()
        assert (load.waiting_names(), load.running_names(), load.num_running(make_ref())) == ([], [], 0)
    use.answer()
    assert load.running_names() == []


def test_request_without_token_leaves_no_counts(load: AdapterLoad) -> None:
    first, second = load.begin(make_ref(), NAMES), load.begin(make_ref(), NAMES)
    first.end()
    assert load.waiting_names() == ["sql"]
    second.end()
    assert load.waiting_names() == load.running_names() == []


def test_equal_bytes_of_two_tenants_are_counted_apart(load: AdapterLoad) -> None:
    mine, theirs = make_ref(ACME), make_ref(GLOBEX)
    load.begin(mine, ["sql"]).answer()
    load.begin(theirs, ["acme/sql"])
    assert (load.running_names(), load.waiting_names()) == (["sql"], ["acme/sql"])
    assert (load.num_running(mine), load.num_running(theirs)) == (1, 0)


def test_equal_bytes_under_two_names_are_counted_apart(load: AdapterLoad) -> None:
    load.begin(make_ref(), NAMES).answer()
    for other in (make_ref(name="copy"), make_ref(version=2), make_ref(digest="cc")):
        assert (load.num_running(other), load.uses_per_s(other)) == (0, 0.0)


def test_sum_counts_each_part_and_never_base(load: AdapterLoad) -> None:
    parts = (make_ref(name="a", digest="a1"), make_ref(GLOBEX, "b", digest="b1"))
    total = AdapterRef(
        tenant=ACME,
        name="a@1+0.5*b@1",
        version=0,
        digest=Digest("cc"),
        config_blob=Digest(""),
        weights_blob=Digest(""),
        parts=tuple(AdapterPart(adapter=part, weight=0.5) for part in parts),
    )
    load.begin(None, ()).answer()
    load.begin(total, ["a", "globex/b"]).answer()
    assert load.running_names() == ["a", "globex/b"]
    assert [load.num_running(part) for part in parts] == [1, 1]


def test_adapter_unrequested_by_clients_is_counted_unnamed(load: AdapterLoad) -> None:
    load.begin(make_ref(), ()).answer()
    assert (load.running_names(), load.num_running(make_ref())) == ([], 1)


def test_uses_fade_and_the_longest_unused_are_forgotten() -> None:
    now_s = 0.0
    load = AdapterLoad(max_versions=1, clock=lambda: now_s)
    load.begin(make_ref(), NAMES).end()
    fresh = load.uses_per_s(make_ref())
    now_s = 600.0
    assert 0.0 < load.uses_per_s(make_ref()) < fresh / 7
    load.begin(make_ref(name="other"), NAMES).end()
    assert load.uses_per_s(make_ref()) == 0.0


def test_last_requested_names_lead_to_digests(load: AdapterLoad) -> None:
    for number in range(LIMITS.max_named_residents + 2):
        load.begin(make_ref(digest=f"d{number}"), [f"a{number}"]).end()
    load.begin(make_ref(digest="new"), ["a2"]).end()
    known = load.named_digests()
    assert len(known) == LIMITS.max_named_residents
    assert (ACME, "a1") not in known
    assert known[ACME, "a2"] == "new"


def test_same_name_in_two_tenants_gives_two_digests(load: AdapterLoad) -> None:
    load.begin(make_ref(ACME, digest="mine"), NAMES, ["acme"]).end()
    load.begin(make_ref(GLOBEX, digest="theirs"), NAMES, ["globex"]).end()
    load.begin(make_ref(ACME, digest="mine"), ["acme/sql"], ["acme"]).end()
    assert load.named_digests() == {
        ("acme", "sql"): "mine",
        ("acme", "acme/sql"): "mine",
        ("globex", "sql"): "theirs",
    }


def test_many_names_of_tenant_evict_no_foreign_names(load: AdapterLoad) -> None:
    load.begin(make_ref(GLOBEX, digest="theirs"), NAMES).end()
    for number in range(2 * LIMITS.max_named_residents):
        load.begin(make_ref(digest=f"d{number}"), [f"a{number}"]).end()
    assert load.named_digests()[GLOBEX, "sql"] == "theirs"
    assert len(load.named_digests()) == LIMITS.max_named_residents
