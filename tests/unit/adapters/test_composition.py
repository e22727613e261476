"""Which weighted sums of adapters are the same."""

from __future__ import annotations

from loraserve.adapters.composition import composition_digest, merged
from loraserve.types import AdapterPart, AdapterRef, Digest, TenantId


def part(digest: str, weight: float, name: str = "a") -> AdapterPart:
    blob = Digest("b" * 64)
    ref = AdapterRef(
        tenant=TenantId("t"), name=name, version=1, digest=Digest(digest * 64), config_blob=blob, weights_blob=blob
    )
    return AdapterPart(adapter=ref, weight=weight)


def test_order_and_names_do_not_matter() -> None:
    one = composition_digest([part("1", 0.3), part("2", 0.7)])
    assert one == composition_digest([part("2", 0.7, "x"), part("1", 0.3, "y")])
    assert len(one) == 64


def test_digests_and_weights_do() -> None:
    sums = [
        [part("1", 0.3), part("2", 0.7)],
        [part("1", 0.7), part("2", 0.3)],
        [part("1", 0.3), part("3", 0.7)],
        [part("1", 0.3), part("2", 0.7000000000000001)],
        [part("1", 0.3)],
    ]
    assert len({composition_digest(parts) for parts in sums}) == len(sums)


def test_same_adapter_twice_gets_sum_of_weights() -> None:
    twice = [part("1", 0.1), part("2", 1.0), part("1", 0.2), part("1", 0.3)]
    again = [part("1", 0.3), part("1", 0.2), part("1", 0.1), part("2", 1.0)]
    assert (
        composition_digest(twice) == composition_digest(again) == composition_digest([part("1", 0.6), part("2", 1.0)])
    )
    assert [(p.adapter.digest[0], p.weight) for p in merged(twice)] == [("1", 0.6), ("2", 1.0)]


def test_cancelling_weights_leave_no_update() -> None:
    assert [p.adapter.digest[0] for p in merged([part("1", 0.5), part("2", 1.0), part("1", -0.5)])] == ["2"]
