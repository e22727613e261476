"""Names of adapters in a registry: equal without regard to case, and read in one order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from loraserve.db.names import name_key
from loraserve.errors import AdapterNotFound, AlreadyExists, Conflict, InvalidRequest, ModelNotFound
from loraserve.registry.catalog.metadata import Edit
from loraserve.registry.model_name import parse_model
from loraserve.registry.records import AliasTarget
from loraserve.registry.registry import Registry
from loraserve.types import AdapterRef, TenantId

NAMES = ("Qwen/My-LoRA", "Policy", "x:v2")
Publish = Callable[..., Awaitable[Any]]


async def resolve(registry: Registry, tenant: TenantId, model: str, base: str = "base") -> AdapterRef:
    return await registry.resolve(tenant, parse_model(model, base))


@pytest.mark.parametrize("name", NAMES)
async def test_name_is_found_in_any_case(publish: Publish, registry: Registry, acme: TenantId, name: str) -> None:
    await publish(name)
    for spelling in (name, name.lower(), name.upper()):
        assert (await registry.get(acme, spelling)).name == name
        assert (await registry.get_version(acme, spelling, 1)).name == name
        for model in (spelling, f"{spelling}@1", f"{spelling}@live", f"base:{spelling}"):
            assert (await resolve(registry, acme, model)).name == name
    assert [one.model for one in await registry.list_servable(acme)] == [name]
    assert [row.name for row in (await registry.list_owned(acme, limit=9, cursor=None, digests=None)).items] == [name]


async def test_push_differing_only_in_case_names_existing_adapter(
    publish: Publish, registry: Registry, acme: TenantId
) -> None:
    await publish("Policy")
    for seed, is_dry_run in ((0, False), (1, False), (0, True), (1, True)):
        with pytest.raises(Conflict, match='adapter "Policy"'):
            await publish("policy", seed=seed, is_dry_run=is_dry_run)
    assert (await registry.get(acme, "policy")).num_versions == 1
    with pytest.raises(AlreadyExists, match='"Policy"'):
        await registry.restorer.restore(acme, "POLICY", actor="x")


async def test_other_tenant_has_the_same_name(
    publish: Publish, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    await publish("Policy")
    with pytest.raises(AdapterNotFound):
        await registry.get(globex, "Policy")
    await publish("policy", tenant=globex)
    assert (await registry.get(globex, "POLICY")).name == "policy"
    assert (await resolve(registry, acme, "policy")).tenant == acme


async def test_deleted_name_is_free_in_any_case(publish: Publish, registry: Registry, acme: TenantId) -> None:
    await publish("Policy")
    forgotten: list[str] = []
    registry.on_delete = lambda _, name, __: forgotten.append(name)
    await resolve(registry, acme, "policy")
    await registry.delete(acme, "POLICY", actor="x")
    assert forgotten == ["Policy"]
    for spelling in ("Policy", "policy"):
        with pytest.raises(ModelNotFound):
            await resolve(registry, acme, spelling)
    assert (await registry.restorer.restore(acme, "policy", actor="x")).name == "Policy"
    await registry.delete(acme, "policy", actor="x")
    await publish("pOLICY", seed=2)
    assert (await registry.get(acme, "policy")).name == "pOLICY"
    entries = (await registry.list_audit(acme)).items
    assert [entry.target for entry in entries if entry.action == "adapter.delete"] == ["Policy", "Policy"]


async def test_changes_take_any_case_and_record_name(publish: Publish, registry: Registry, acme: TenantId) -> None:
    await publish("Policy", seed=1)
    await publish("Policy", seed=2)
    assert (await resolve(registry, acme, "policy")).version == 2
    record, _ = await registry.aliases.set(acme, "policy", "live", AliasTarget(1), actor="x")
    assert record.adapter == "Policy"
    # what was cached under another case is stale
    assert (await resolve(registry, acme, "policy")).version == 1
    await registry.metadata.edit(acme, "POLICY", Edit(notes="n"), actor="x")
    await registry.grants.create(acme, "pOLICY", "globex", actor="x")
    assert [grant.adapter for grant in (await registry.grants.list(acme, "policy")).items] == ["Policy"]
    await registry.delete_version(acme, "policy", 2, actor="x")
    targets = {entry.target for entry in (await registry.list_audit(acme)).items}
    assert targets == {"acme", "Policy", "Policy@1", "Policy@2", "Policy@live"}


async def test_own_name_hides_granted_adapter(
    publish: Publish, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    await publish("x")
    await publish("Org/Y", seed=1)
    for name in ("x", "org/y"):
        await registry.grants.create(acme, name, "globex", actor="x")
    for model in ("acme/x", "ACME/X", "base:acme/x", "acme/x@1"):
        assert (await resolve(registry, globex, model)).tenant == acme
    for model in ("acme/org/y", "acme/Org/Y@live"):
        assert (await resolve(registry, globex, model)).name == "Org/Y"
    listed = [one.model for one in await registry.list_servable(globex)]
    assert listed == ["acme/Org/Y", "acme/x"]
    await publish("Acme/X", tenant=globex, seed=5)
    for model in ("acme/x", "ACME/X", "base:acme/x", "acme/x@1"):
        assert (await resolve(registry, globex, model)).tenant == globex
    with pytest.raises(ModelNotFound):
        await resolve(registry, globex, "acme/x@2")
    assert [one.model for one in await registry.list_servable(globex)] == ["Acme/X", "acme/Org/Y"]
    await registry.delete(globex, "acme/x", actor="x")
    assert (await resolve(registry, globex, "acme/x")).tenant == acme


async def test_own_path_comes_before_owners_short_name(publish: Publish, registry: Registry, acme: TenantId) -> None:
    await publish("x")
    assert (await resolve(registry, acme, "acme/x")).name == "x"
    await publish("acme/x", seed=1)
    assert (await resolve(registry, acme, "acme/x")).name == "acme/x"
    assert (await resolve(registry, acme, "acme/acme/x")).name == "acme/x"
    assert (await resolve(registry, acme, "x")).name == "x"


async def test_name_with_other_base_prefix_keeps_meaning(publish: Publish, registry: Registry, acme: TenantId) -> None:
    await publish("tiny:x", seed=1)
    await publish("x", seed=2)
    # after the server's base was called tiny
    for model in ("tiny:x", "Tiny:X", "tiny:tiny:x"):
        assert (await resolve(registry, acme, model, "tiny")).name == "tiny:x"
    await registry.delete(acme, "tiny:x", actor="x")
    assert (await resolve(registry, acme, "tiny:x", "tiny")).name == "x"


async def test_names_are_listed_without_regard_to_case(publish: Publish, registry: Registry, acme: TenantId) -> None:
    names = ["A", "a-b", "B/c", "b:d", "Z", "z.z"]
    for seed, name in enumerate(reversed(names)):
        await publish(name, seed=seed)
    found, cursor = [], None
    owned, position = [], None
    for _ in names:
        page = await registry.list(acme, limit=1, cursor=cursor)
        versions = await registry.list_owned(acme, limit=1, cursor=position, digests=None)
        found += [one.name for one in page.items]
        owned += [one.name for one in versions.items]
        cursor, position = page.next_cursor, versions.next_cursor
    assert found == owned == sorted(names, key=name_key)
    assert (cursor, position) == (None, None)


@pytest.mark.parametrize("name", ["org/Base:1", "ORG/BASE:1:x"])
async def test_name_of_base_syntax_is_refused(publish: Publish, name: str) -> None:
    with pytest.raises(InvalidRequest, match="base model's id") as caught:
        await publish(name)
    assert caught.value.param == "name"
