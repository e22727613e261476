"""Sums of versions: which they are, what they are called, and who may use them."""

from __future__ import annotations

from typing import Any

import pytest

from loraserve.adapters.composition import composition_digest
from loraserve.errors import AdapterQuarantined, InvalidRequest, LoraserveError, ModelNotFound
from loraserve.registry.composition import label, versions_of
from loraserve.registry.model_name import parse_terms
from loraserve.registry.registry import Registry
from loraserve.types import AdapterRef, TenantId


async def composed(registry: Registry, tenant: TenantId, model: str) -> AdapterRef | None:
    return await registry.compose(tenant, parse_terms(model, "base"))


async def text_of(awaitable: Any) -> tuple[type[LoraserveError], str]:
    with pytest.raises(LoraserveError) as caught:
        await awaitable
    return type(caught.value), str(caught.value)


async def test_sum_names_versions_and_weights(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish("b", seed=1)
    await publish("a", seed=2)
    await publish("a", seed=3)
    ref = await composed(registry, acme, "0.50*b+a")
    assert ref is not None
    assert (ref.name, ref.tenant, label(ref)) == ("a@2+0.5*b@1", acme, "a@2+0.5*b@1")
    assert [(part.adapter.name, part.adapter.version, part.weight) for part in ref.parts] == [
        ("a", 2, 1.0),
        ("b", 1, 0.5),
    ]
    assert ref.digest == composition_digest(ref.parts)
    assert [one.name for one in versions_of(ref)] == ["a", "b"]
    assert ref == await composed(registry, acme, "a@2+0.25*b@1+0.25*b")
    assert ref.parts[1].adapter == (await registry.get_version(acme, "b", 1)).ref


async def test_sum_may_reduce_to_adapter_or_base(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish("a", seed=1)
    await publish("b", seed=2)
    plain = (await registry.get_version(acme, "a", 1)).ref
    for model in ("a", "1*a", "0.1*a+0.2*a@1+0.7*a", "a+0*b", "a+b+-1*b@live", "a+1e-400*b"):
        assert await composed(registry, acme, model) == plain
    for model in ("base", "0*a", "0.1*a+0.2*a+-0.3*a", "a+-1*a+b+-1*b"):
        assert await composed(registry, acme, model) is None
    half = await composed(registry, acme, "0.5*a")
    assert half is not None
    assert (half.name, len(half.parts)) == ("0.5*a@1", 1)
    assert half.digest != plain.digest


async def test_same_bytes_under_two_names_count_once(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish("a", seed=1)
    await publish("z", seed=1)
    assert await composed(registry, acme, "a+-1*z") is None
    twice = await composed(registry, acme, "z+a")
    assert twice is not None
    assert twice.name == "2*a@1"


async def test_total_weight_per_version_is_bounded(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish("a")
    with pytest.raises(InvalidRequest):
        await composed(registry, acme, "10*a+0.5*a")
    assert await composed(registry, acme, "10*a+0.5*a+-1*a") is not None


async def test_sum_uses_current_version_of_each_part(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish("a", seed=1)
    await publish("b", seed=2)
    before = await composed(registry, acme, "a+b")
    await publish("b", seed=3)
    moved = await composed(registry, acme, "a+b")
    assert before is not None
    assert moved is not None
    assert (before.name, moved.name) == ("a@1+b@1", "a@1+b@2")
    await registry.delete(acme, "b", actor="x")
    with pytest.raises(ModelNotFound):
        await composed(registry, acme, "a+b")


async def test_other_tenants_part_reads_as_absent(
    publish: Any, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    await publish("mine", seed=1)
    await publish("theirs", seed=2, tenant=globex)
    # that it drops out of the sum doesn't tell that it is there
    for model in ("mine+{}", "mine+0.5*{}@1", "mine+0*{}", "{}+mine"):
        foreign = await text_of(composed(registry, acme, model.format("theirs")))
        absent = await text_of(composed(registry, acme, model.format("absent")))
        assert foreign == (absent[0], absent[1].replace("absent", "theirs"))
        assert foreign[0] is ModelNotFound


async def test_a_part_in_quarantine_is_refused(
    publish: Any, certified: Registry, certifying: Any, acme: TenantId, make_certificate: Any
) -> None:
    await publish("a", seed=1, via=certified)
    certifying.outcome = make_certificate(verdict="failed")
    await publish("b", seed=2, via=certified)
    with pytest.raises(AdapterQuarantined, match="b@1"):
        await composed(certified, acme, "a+b@1")
