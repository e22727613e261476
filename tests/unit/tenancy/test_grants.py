"""Grants: who may use whose adapter, and from when to when."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from sqlalchemy import select

from loraserve.db.models import Adapter, AuditRow, Grant, Tenant
from loraserve.db.session import Database, utc_now
from loraserve.errors import AdapterNotFound, GrantNotFound, InvalidRequest, TenantNotFound
from loraserve.limits import LIMITS
from loraserve.registry.catalog.grants import Grants
from loraserve.registry.repository import AdapterRepository
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.types import TenantId

pytestmark = pytest.mark.postgres


@dataclass
class World:
    """acme, which has the adapter ``sql``; globex and initech, which don't."""

    database: Database
    authenticator: Authenticator
    grants: Grants
    acme: TenantId
    globex: TenantId
    told: list[tuple[TenantId, str]] = field(default_factory=list)

    async def push(self, owner: TenantId, name: str) -> None:
        async with self.database.write() as session:
            await AdapterRepository(session, owner).adapter_to_publish(name, utc_now())

    async def remove(self, owner: TenantId, name: str) -> None:
        async with self.database.write() as session:
            repository = AdapterRepository(session, owner)
            await repository.delete_adapter(await repository.adapter(name), utc_now())

    async def holders(self, name: str) -> list[str]:
        """Return the ids of the tenants that a grant of the adapter names."""
        query = select(Grant.tenant_id).join(Adapter, Adapter.id == Grant.adapter_id).where(Adapter.name == name)
        async with self.database.read() as session:
            return list((await session.scalars(query)).all())

    async def names(self, name: str = "sql") -> list[str]:
        return [record.tenant for record in (await self.grants.list(self.acme, name)).items]


@pytest.fixture
async def world(database: Database, authenticator: Authenticator) -> World:
    tenants = [await authenticator.tenants.create(name, actor="test") for name in ("acme", "globex", "initech")]
    told: list[tuple[TenantId, str]] = []
    grants = Grants(database, lambda owner, name: told.append((owner, name)))
    world = World(database, authenticator, grants, tenants[0].id, tenants[1].id, told)
    await world.push(world.acme, "sql")
    return world


async def test_a_grant_is_made_once(world: World) -> None:
    first, is_new = await world.grants.create(world.acme, "sql", "globex", actor="test")
    again, is_newer = await world.grants.create(world.acme, "sql", "globex", actor="test")
    assert (is_new, is_newer) == (True, False)
    assert first == again == await world.grants.get(world.acme, "sql", "globex")
    assert world.told == [(world.acme, "sql")]


async def test_revoked_grant_is_not_found(world: World) -> None:
    await world.grants.create(world.acme, "sql", "globex", actor="test")
    await world.grants.delete(world.acme, "sql", "globex", actor="test")
    with pytest.raises(GrantNotFound):
        await world.grants.get(world.acme, "sql", "globex")
    with pytest.raises(GrantNotFound):
        await world.grants.delete(world.acme, "sql", "globex", actor="test")
    assert world.told == [(world.acme, "sql")] * 2


async def test_only_the_owner_grants(world: World) -> None:
    for call in (
        lambda: world.grants.create(world.globex, "sql", "initech", actor="test"),
        lambda: world.grants.get(world.globex, "sql", "initech"),
        lambda: world.grants.list(world.globex, "sql"),
        lambda: world.grants.delete(world.globex, "sql", "initech", actor="test"),
    ):
        with pytest.raises(AdapterNotFound):
            await call()


async def test_absent_tenant_reads_like_tenant_without_grant(world: World) -> None:
    texts = set()
    for name in ("globex", "nobody"):
        with pytest.raises(GrantNotFound) as caught:
            await world.grants.get(world.acme, "sql", name)
        texts.add(str(caught.value).replace(name, "X"))
    assert len(texts) == 1


async def test_grant_does_not_reveal_tenant_existence(world: World) -> None:
    said = []
    for name in ("globex", "nobody"):
        made, is_new = await world.grants.create(world.acme, "sql", name, actor="test")
        again = await world.grants.create(world.acme, "sql", name, actor="test")
        assert again == (made, False)
        assert await world.grants.get(world.acme, "sql", name) == made
        said.append((made.adapter, made.tenant.replace(name, "X"), is_new))
    assert said[0] == said[1]
    assert await world.names() == ["globex", "nobody"]
    for name in ("globex", "nobody"):
        await world.grants.delete(world.acme, "sql", name, actor="test")
    assert await world.names() == []
    with pytest.raises(TenantNotFound):
        await world.authenticator.tenants.get("nobody")
    assert "nobody" not in [record.name for record in (await world.authenticator.tenants.list()).items]


async def test_tenant_created_later_receives_grants_by_name(world: World) -> None:
    await world.push(world.globex, "own")
    await world.grants.create(world.acme, "sql", "umbrella", actor="test")
    await world.grants.create(world.globex, "own", "umbrella", actor="test")
    made = (await world.authenticator.tenants.create("umbrella", actor="test")).id
    assert await world.holders("sql") == await world.holders("own") == [made]
    assert await world.grants.create(world.acme, "sql", "umbrella", actor="test") == (
        await world.grants.get(world.acme, "sql", "umbrella"),
        False,
    )


async def test_grants_to_names_leave_no_rows_behind(world: World) -> None:
    """An owner could fill the table of tenants otherwise, name by name."""

    async def rows() -> list[str]:
        async with world.database.read() as session:
            return sorted((await session.scalars(select(Tenant.name))).all())

    before = await rows()
    await world.push(world.acme, "json")
    for adapter in ("sql", "json"):
        await world.grants.create(world.acme, adapter, "umbrella", actor="k")
        await world.grants.create(world.acme, adapter, "globex", actor="k")
    assert await rows() == sorted([*before, "umbrella"])
    await world.grants.delete(world.acme, "sql", "umbrella", actor="k")
    assert await rows() == sorted([*before, "umbrella"])
    await world.grants.delete(world.acme, "json", "umbrella", actor="k")
    await world.grants.delete(world.acme, "json", "globex", actor="k")
    assert await rows() == before
    await world.grants.create(world.acme, "json", "hooli", actor="k")
    await world.authenticator.tenants.create("hooli", actor="test")
    assert await rows() == sorted([*before, "hooli"])
    assert await world.names("json") == ["hooli"]


@pytest.mark.parametrize("name", ["no name\n", "ACME"])
async def test_invalid_tenant_name_is_refused(world: World, name: str) -> None:
    with pytest.raises(TenantNotFound, match="There is no such tenant"):
        await world.grants.create(world.acme, "sql", name, actor="test")


async def test_tenant_cannot_grant_adapter_to_same_tenant(world: World) -> None:
    with pytest.raises(InvalidRequest):
        await world.grants.create(world.acme, "sql", "acme", actor="test")


async def test_grants_are_listed_by_name_over_pages(world: World) -> None:
    for name in ("initech", "globex"):
        await world.grants.create(world.acme, "sql", name, actor="test")
    first = await world.grants.list(world.acme, "sql", limit=1)
    second = await world.grants.list(world.acme, "sql", limit=1, cursor=first.next_cursor)
    assert [record.tenant for record in first.items + second.items] == ["globex", "initech"]
    assert second.next_cursor is None


async def test_deleted_tenants_grant_is_not_inherited_by_name(world: World) -> None:
    await world.grants.create(world.acme, "sql", "globex", actor="test")
    await world.authenticator.tenants.delete("globex", actor="test")
    # its owner doesn't learn of the delete
    assert await world.names() == ["globex"]
    new = (await world.authenticator.tenants.create("globex", actor="test")).id
    assert await world.names() == ["globex"]
    assert await world.holders("sql") == [world.globex]
    before = await world.grants.get(world.acme, "sql", "globex")
    # until it is granted to it, which looks as if nothing had happened
    assert await world.grants.create(world.acme, "sql", "globex", actor="test") == (before, False)
    assert await world.holders("sql") == [new]


async def test_grants_to_tenants_of_same_name_appear_once(world: World) -> None:
    await world.grants.create(world.acme, "sql", "globex", actor="test")
    await world.authenticator.tenants.delete("globex", actor="test")
    new = (await world.authenticator.tenants.create("globex", actor="test")).id
    async with world.database.write() as session:
        # as an earlier release wrote it
        (old,) = (await session.scalars(select(Grant))).all()
        session.add(
            Grant(adapter_id=old.adapter_id, tenant_id=new, created_at=utc_now(), created_by="test"),
        )
    assert await world.names() == ["globex"]
    assert (await world.grants.get(world.acme, "sql", "globex")).created_at > old.created_at
    await world.grants.delete(world.acme, "sql", "globex", actor="test")
    assert await world.holders("sql") == []


async def test_adapter_republished_after_delete_has_no_grants(world: World) -> None:
    await world.grants.create(world.acme, "sql", "globex", actor="test")
    await world.remove(world.acme, "sql")
    with pytest.raises(AdapterNotFound):
        await world.names()
    await world.push(world.acme, "sql")
    assert await world.names() == []


async def test_grants_per_adapter_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.registry.catalog.grants.LIMITS", LIMITS.__class__(max_grants_per_adapter=1))
    await world.grants.create(world.acme, "sql", "globex", actor="test")
    with pytest.raises(InvalidRequest, match="1 grants"):
        await world.grants.create(world.acme, "sql", "initech", actor="test")
    await world.grants.delete(world.acme, "sql", "globex", actor="test")
    await world.grants.create(world.acme, "sql", "initech", actor="test")


async def test_grants_are_audited_as_the_owners(world: World) -> None:
    await world.grants.create(world.acme, "sql", "globex", actor="key-1")
    await world.grants.delete(world.acme, "sql", "globex", actor="key-2")
    async with world.database.read() as session:
        rows = (
            await session.scalars(select(AuditRow).where(AuditRow.action.like("grant.%")).order_by(AuditRow.id))
        ).all()
    assert [(row.action, row.tenant_id, row.actor, row.target, row.detail) for row in rows] == [
        ("grant.create", world.acme, "key-1", "sql", {"tenant": "globex"}),
        ("grant.delete", world.acme, "key-2", "sql", {"tenant": "globex"}),
    ]


async def test_owner_cannot_fill_other_tenants_model_list(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.registry.catalog.grants.LIMITS", LIMITS.__class__(max_grants_per_tenant=1))
    await world.push(world.acme, "law")
    await world.push(world.globex, "own")
    await world.grants.create(world.acme, "sql", "globex", actor="test")
    with pytest.raises(InvalidRequest, match="1 of this owner's adapters"):
        await world.grants.create(world.acme, "law", "globex", actor="test")
    await world.grants.create(world.acme, "law", "initech", actor="test")
    await world.grants.create(world.globex, "own", "initech", actor="test")
    # what is deleted is in no list
    await world.remove(world.acme, "sql")
    await world.grants.create(world.acme, "law", "globex", actor="test")
