"""Tenants' keys: stored as hashes, listed, bounded, and managed by keys of the tenant."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import select

from loraserve.db.models import ApiKey, AuditRow
from loraserve.db.session import Database, utc_now
from loraserve.errors import (
    AuthenticationError,
    Conflict,
    InvalidRequest,
    KeyNotFound,
    PermissionDenied,
    QuotaExceeded,
)
from loraserve.limits import LIMITS
from loraserve.tenancy.identity import tenant_keys
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.tenancy.identity.keys import IssuedKey
from loraserve.types import TenantId

READS = ("adapters:read", "keys:write")


async def test_only_hash_is_stored_and_repr_is_masked(database: Database, authenticator: Authenticator) -> None:
    acme = (await authenticator.tenants.create("acme", actor="test")).id
    made = await authenticator.keys.create(acme, name="ci", actor="test")
    assert made.secret not in repr(made)
    async with database.read() as session:
        row = (await session.scalars(select(ApiKey))).one()
    stored = repr({column.name: getattr(row, column.name) for column in ApiKey.__table__.columns})
    assert made.secret[:12] in stored
    assert made.secret[:13] not in stored


async def test_key_list_has_revoked_keys_of_tenant_alone(authenticator: Authenticator) -> None:
    acme = (await authenticator.tenants.create("acme", actor="test")).id
    globex = (await authenticator.tenants.create("globex", actor="test")).id
    made = [
        await authenticator.keys.create(acme, name=f"key {n}", actor="test", scopes=["inference"]) for n in range(3)
    ]
    await authenticator.keys.revoke(acme, made[1].record.id, actor="test")
    first = await authenticator.keys.list(acme, limit=2)
    second = await authenticator.keys.list(acme, limit=2, cursor=first.next_cursor)
    found = {record.id: record for record in first.items + second.items}
    assert set(found) == {key.record.id for key in made}
    assert [found[key.record.id].revoked_at is not None for key in made] == [False, True, False]
    assert (await authenticator.keys.list(globex)).items == ()


async def test_foreign_key_reads_as_absent_when_revoking(authenticator: Authenticator) -> None:
    acme = (await authenticator.tenants.create("acme", actor="test")).id
    globex = (await authenticator.tenants.create("globex", actor="test")).id
    made = await authenticator.keys.create(acme, name="ci", actor="test")
    texts = set()
    for key_id in (made.record.id, "01J00000000000000000000000", "no\0thing", ""):
        with pytest.raises(KeyNotFound) as caught:
            await authenticator.keys.revoke(globex, key_id, actor="test")
        texts.add(str(caught.value))
    assert len(texts) == 1
    await authenticator.authenticate(made.secret)


async def test_forbidden_tenant_scopes_are_refused(authenticator: Authenticator) -> None:
    acme = (await authenticator.tenants.create("acme", actor="test")).id
    for scopes in (["admin"], [], ["inference", "nonsense"], ["inference", "metrics:read"]):
        with pytest.raises(InvalidRequest) as caught:
            await authenticator.keys.create(acme, name="x", actor="test", scopes=scopes)
        assert caught.value.param == "scopes"
    for name in ("", "a\nb", "x" * 129):
        with pytest.raises(InvalidRequest):
            await authenticator.keys.create(acme, name=name, actor="test")


async def test_metrics_scope_is_explicit_and_exclusive(
    authenticator: Authenticator,
) -> None:
    acme = (await authenticator.tenants.create("acme", actor="test")).id
    plain = await authenticator.keys.create(acme, name="x", actor="test")
    assert plain.record.scopes == ("adapters:read", "adapters:write", "inference")
    made = await authenticator.keys.create(acme, name="prometheus", actor="test", scopes=["metrics:read"])
    caller = await authenticator.authenticate(made.secret)
    assert (caller.scopes, caller.is_admin) == ({"metrics:read"}, False)


async def test_number_of_working_keys_per_tenant_is_bounded(
    authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_keys, "LIMITS", replace(LIMITS, max_keys_per_tenant=2))
    acme = (await authenticator.tenants.create("acme", actor="test")).id
    first = await authenticator.keys.create(acme, name="1", actor="test")
    await authenticator.keys.create(acme, name="2", actor="test")
    with pytest.raises(QuotaExceeded):
        await authenticator.keys.create(acme, name="3", actor="test")
    await authenticator.keys.revoke(acme, first.record.id, actor="test")
    await authenticator.keys.create(acme, name="3", actor="test")


async def make_maker(
    authenticator: Authenticator, *scopes: str, lasts: timedelta | None = None
) -> tuple[TenantId, IssuedKey]:
    """A tenant, and a key of it that manages keys."""
    acme = (await authenticator.tenants.create("acme", actor="test")).id
    ends = None if lasts is None else utc_now() + lasts
    made = await authenticator.keys.create(
        acme, name="maker", actor="test", scopes=scopes or ("inference", *READS), expires_at=ends
    )
    return acme, made


async def test_created_key_has_usual_scopes(authenticator: Authenticator) -> None:
    acme, maker = await make_maker(authenticator)
    made = await authenticator.keys.create(acme, name="x", actor=maker.record.id, maker=maker.record.id)
    assert made.record.scopes == ("adapters:read", "inference")
    only = await authenticator.keys.create(acme, name="only", actor="test", scopes=["keys:write"])
    with pytest.raises(InvalidRequest) as caught:
        await authenticator.keys.create(acme, name="x", actor="x", maker=only.record.id)
    assert caught.value.param == "scopes"


async def test_key_gives_only_own_scopes(authenticator: Authenticator) -> None:
    acme, maker = await make_maker(authenticator)
    mine = maker.record.id
    passed_on = await authenticator.keys.create(acme, name="x", actor=mine, scopes=READS, maker=mine)
    assert passed_on.record.scopes == READS
    for scopes in (["adapters:write"], ["inference", "adapters:write"], ["metrics:read"]):
        with pytest.raises(PermissionDenied, match=scopes[-1]):
            await authenticator.keys.create(acme, name="x", actor=mine, scopes=scopes, maker=mine)


async def test_key_outlasts_no_maker(authenticator: Authenticator) -> None:
    acme, maker = await make_maker(authenticator, lasts=timedelta(days=1))
    mine, ends = maker.record.id, maker.record.expires_at
    assert ends is not None
    plain = await authenticator.keys.create(acme, name="x", actor=mine, maker=mine)
    assert plain.record.expires_at == ends
    sooner = utc_now() + timedelta(hours=1)
    made = await authenticator.keys.create(acme, name="x", actor=mine, expires_at=sooner, maker=mine)
    assert made.record.expires_at == sooner
    later = ends + timedelta(seconds=1)
    with pytest.raises(PermissionDenied, match="outlasts"):
        await authenticator.keys.create(acme, name="x", actor=mine, expires_at=later, maker=mine)
    endless = await authenticator.keys.create(acme, name="x", actor="test", scopes=["inference"])
    with pytest.raises(PermissionDenied, match="outlasts"):
        await authenticator.keys.rotate(acme, endless.record.id, overlap=timedelta(0), actor=mine, maker=mine)


async def test_key_manages_only_keys_within_own_scopes(authenticator: Authenticator) -> None:
    acme, maker = await make_maker(authenticator)
    mine = maker.record.id
    for scopes in (["adapters:write"], ["metrics:read"]):
        wider = await authenticator.keys.create(acme, name="wider", actor="test", scopes=scopes)
        with pytest.raises(PermissionDenied):
            await authenticator.keys.revoke(acme, wider.record.id, actor=mine, maker=mine)
        with pytest.raises(PermissionDenied):
            await authenticator.keys.rotate(acme, wider.record.id, overlap=timedelta(0), actor=mine, maker=mine)
        await authenticator.authenticate(wider.secret)
    within = await authenticator.keys.create(acme, name="within", actor="test", scopes=["inference"])
    await authenticator.keys.revoke(acme, within.record.id, actor=mine, maker=mine)
    with pytest.raises(AuthenticationError):
        await authenticator.authenticate(within.secret)


async def test_revoked_maker_makes_no_key(authenticator: Authenticator) -> None:
    """Also where its authentication is still cached."""
    acme, maker = await make_maker(authenticator)
    mine = maker.record.id
    other = await authenticator.keys.create(acme, name="x", actor=mine, maker=mine)
    await authenticator.keys.revoke(acme, mine, actor=mine, maker=mine)
    with pytest.raises(AuthenticationError):
        await authenticator.keys.create(acme, name="x", actor=mine, maker=mine)
    with pytest.raises(AuthenticationError):
        await authenticator.keys.rotate(acme, other.record.id, overlap=timedelta(0), actor=mine, maker=mine)
    with pytest.raises(AuthenticationError):
        await authenticator.keys.revoke(acme, other.record.id, actor=mine, maker=mine)
    # nor one that never had the scope
    with pytest.raises(AuthenticationError):
        await authenticator.keys.create(acme, name="x", actor="x", maker=other.record.id)


async def test_key_rotation_keeps_scopes_and_name(authenticator: Authenticator, database: Database) -> None:
    acme, maker = await make_maker(authenticator)
    mine = maker.record.id
    old = await authenticator.keys.create(acme, name="ci", actor=mine, scopes=["inference"], maker=mine)
    new = await authenticator.keys.rotate(acme, old.record.id, overlap=timedelta(hours=1), actor=mine, maker=mine)
    assert (new.record.name, new.record.scopes, new.record.expires_at) == ("ci", ("inference",), None)
    await authenticator.authenticate(old.secret)
    ended = next(one for one in (await authenticator.keys.list(acme)).items if one.id == old.record.id)
    assert ended.expires_at is not None
    assert ended.expires_at <= utc_now() + timedelta(hours=1)
    # its own, at once
    myself = await authenticator.keys.rotate(acme, mine, overlap=timedelta(0), actor=mine, maker=mine)
    assert (await authenticator.authenticate(myself.secret)).scopes == set(maker.record.scopes)
    with pytest.raises(AuthenticationError):
        await authenticator.authenticate(maker.secret)
    with pytest.raises(Conflict):
        await authenticator.keys.rotate(acme, mine, overlap=timedelta(0), actor="test")
    with pytest.raises(KeyNotFound):
        await authenticator.keys.rotate(acme, "absent", overlap=timedelta(0), actor="test")
    with pytest.raises(InvalidRequest, match="overlap_s"):
        await authenticator.keys.rotate(acme, new.record.id, overlap=timedelta(days=365), actor="test")
    async with database.read() as session:
        rows = (await session.scalars(select(AuditRow).where(AuditRow.action == "key.rotate"))).all()
    assert [(row.actor, row.target) for row in rows] == [(mine, old.record.id), (mine, mine)]


async def test_foreign_maker_has_no_power(authenticator: Authenticator) -> None:
    acme, maker = await make_maker(authenticator)
    globex = (await authenticator.tenants.create("globex", actor="test")).id
    theirs = await authenticator.keys.create(globex, name="x", actor="test")
    with pytest.raises(AuthenticationError):
        await authenticator.keys.create(globex, name="x", actor="x", maker=maker.record.id)
    with pytest.raises(KeyNotFound):
        await authenticator.keys.revoke(acme, theirs.record.id, actor="x", maker=maker.record.id)


async def test_ended_keys_are_kept_up_to_bound(authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_keys, "LIMITS", replace(LIMITS, max_ended_keys_per_tenant=2))
    acme, maker = await make_maker(authenticator)
    for n in range(5):
        made = await authenticator.keys.create(acme, name=f"{n}", actor="test")
        await authenticator.keys.revoke(acme, made.record.id, actor="test")
    last = await authenticator.keys.create(acme, name="last", actor="test")
    kept = [record.name for record in (await authenticator.keys.list(acme)).items]
    assert sorted(kept) == ["3", "4", "last", "maker"]
    await authenticator.authenticate(maker.secret)
    await authenticator.authenticate(last.secret)
