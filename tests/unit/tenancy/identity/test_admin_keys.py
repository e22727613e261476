"""Operators' keys have roles, end within the bound, and are never all gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from loraserve.db import audit
from loraserve.db.models import ApiKey
from loraserve.db.session import Database, utc_now
from loraserve.errors import AuthenticationError, Conflict, InvalidRequest, KeyNotFound, QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.auth import Authenticator


class Clock:
    """The time of day, and the monotonic one, as a test wants them."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def now(self) -> datetime:
        return utc_now() + timedelta(seconds=self.passed_s)

    def monotonic(self) -> float:
        return self.passed_s


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    yield database
    await database.dispose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def opened(database: Database, clock: Clock, admin_key: str | None = None) -> tuple[Authenticator, str | None]:
    authenticator = Authenticator(database, admin_key=admin_key, clock=clock.now, monotonic=clock.monotonic)
    return authenticator, await authenticator.open()


async def is_valid(authenticator: Authenticator, secret: str) -> bool:
    try:
        await authenticator.authenticate(secret)
    except AuthenticationError:
        return False
    return True


async def test_each_role_has_exact_scopes(database: Database, clock: Clock) -> None:
    authenticator, first = await opened(database, clock)
    assert first is not None
    admin = await authenticator.authenticate(first)
    assert (admin.is_admin, admin.is_operator, admin.sees_all) == (True, True, True)
    found = {}
    for role in ("operator:read", "metrics:read"):
        made = await authenticator.admin_keys.create(name=role, role=role, actor="x")
        found[role] = await authenticator.authenticate(made.secret)
        assert made.secret not in repr(made)
    reader, scraper = found.values()
    assert (reader.is_admin, reader.is_operator, reader.sees_all) == (False, True, True)
    assert reader.scopes == {"operator:read", "adapters:read", "metrics:read"}
    assert (scraper.is_admin, scraper.is_operator, scraper.sees_all) == (False, False, False)
    assert scraper.scopes == {"metrics:read"}
    roles = [(record.name, record.role, record.tenant) for record in (await authenticator.admin_keys.list()).items]
    assert roles == [
        ("first admin key", "admin", None),
        ("operator:read", "operator:read", None),
        ("metrics:read", "metrics:read", None),
    ]


async def test_rotated_key_ends_immediately_or_after_overlap(database: Database, clock: Clock) -> None:
    authenticator, _ = await opened(database, clock, "a" * 32)
    keys = authenticator.admin_keys
    old = await keys.create(name="ci", role="operator:read", actor="x")
    assert await is_valid(authenticator, old.secret)
    new = await keys.rotate(old.record.id, overlap=timedelta(0), actor="x")
    assert (new.record.name, new.record.role) == ("ci", "operator:read")
    assert not await is_valid(authenticator, old.secret)
    last = await keys.rotate(new.record.id, overlap=timedelta(hours=1), actor="x")
    assert await is_valid(authenticator, new.secret)
    assert await is_valid(authenticator, last.secret)
    clock.passed_s += 3601
    assert not await is_valid(authenticator, new.secret)
    assert await is_valid(authenticator, last.secret)
    with pytest.raises(Conflict, match="revoked or expired"):
        await keys.rotate(old.record.id, overlap=timedelta(0), actor="x")
    entries = (await audit.list_entries(database, None, limit=10)).items
    assert [entry.action for entry in entries[:3]] == ["admin_key.rotate", "admin_key.rotate", "admin_key.create"]
    assert entries[0].detail == {"name": "ci", "role": "operator:read", "by": last.record.id, "overlap_s": 3600.0}


async def test_revocation_is_immediate_locally_and_bounded_elsewhere(database: Database, clock: Clock) -> None:
    here, _ = await opened(database, clock, "a" * 32)
    there, _ = await opened(database, clock, "a" * 32)
    made = await here.admin_keys.create(name="ci", role="admin", actor="x")
    assert await is_valid(here, made.secret)
    assert await is_valid(there, made.secret)
    await here.admin_keys.revoke(made.record.id, actor="x")
    await here.admin_keys.revoke(made.record.id, actor="x")
    assert not await is_valid(here, made.secret)
    clock.passed_s += LIMITS.auth_cache_s + 0.1
    assert not await is_valid(there, made.secret)


async def test_last_admin_key_is_rotatable_but_not_revocable(database: Database, clock: Clock) -> None:
    authenticator, first = await opened(database, clock)
    keys = authenticator.admin_keys
    await keys.create(name="reader", role="operator:read", actor="x")
    record = (await keys.list()).items[0]
    with pytest.raises(Conflict, match="last admin key") as caught:
        await keys.revoke(record.id, actor="x")
    assert f"admin-key rotate {record.id}" in str(caught.value.hint)
    new = await keys.rotate(record.id, overlap=timedelta(0), actor="x")
    assert first is not None
    assert not await is_valid(authenticator, first)
    # where LORASERVE_ADMIN_KEY works, it may go
    other, _ = await opened(database, clock, "b" * 32)
    await other.admin_keys.revoke(new.record.id, actor="x")
    assert (await other.authenticate("b" * 32)).is_admin
    # and a start without any makes one
    _, made = await opened(database, clock)
    assert made is not None


async def test_bad_input_is_refused_by_name(database: Database, clock: Clock, subtests: Any) -> None:
    authenticator, _ = await opened(database, clock, "a" * 32)
    keys = authenticator.admin_keys
    for param, how in (
        ("role", {"role": "root"}),
        ("role", {"role": ""}),
        ("role", {"role": "inference"}),
        ("name", {"name": ""}),
        ("name", {"name": "a" * 129}),
        ("name", {"name": "a\n"}),
        ("expires_at", {"expires_at": utc_now() - timedelta(days=1)}),
    ):
        with subtests.test(f"{param} {how}"):
            with pytest.raises(InvalidRequest) as caught:
                await keys.create(**{"name": "x", "role": "admin", "actor": "x", **how})
            assert caught.value.param == param
    made = await keys.create(name="x", role="admin", actor="x")
    for overlap in (timedelta(seconds=-1), timedelta(seconds=LIMITS.max_key_overlap_s + 1)):
        with pytest.raises(InvalidRequest, match="overlap_s"):
            await keys.rotate(made.record.id, overlap=overlap, actor="x")
    tenant = (await authenticator.tenants.create("acme", actor="x")).id
    theirs = await authenticator.keys.create(tenant, name="x", actor="x")
    for key_id in ("absent", "../x", "é", theirs.record.id):
        with pytest.raises(KeyNotFound):
            await keys.revoke(key_id, actor="x")
        with pytest.raises(KeyNotFound):
            await keys.rotate(key_id, overlap=timedelta(0), actor="x")


async def test_number_of_admin_keys_is_bounded(database: Database, clock: Clock) -> None:
    authenticator, _ = await opened(database, clock, "a" * 32)
    for _ in range(LIMITS.max_admin_keys):
        made = await authenticator.admin_keys.create(name="x", role="metrics:read", actor="x")
    with pytest.raises(QuotaExceeded):
        await authenticator.admin_keys.create(name="x", role="admin", actor="x")
    # a rotation takes no more room than it makes
    with pytest.raises(QuotaExceeded):
        await authenticator.admin_keys.rotate(made.record.id, overlap=timedelta(1), actor="x")
    await authenticator.admin_keys.rotate(made.record.id, overlap=timedelta(0), actor="x")


async def test_unknown_role_grants_no_access(database: Database, clock: Clock) -> None:
    authenticator, _ = await opened(database, clock, "a" * 32)
    made = await authenticator.admin_keys.create(name="x", role="admin", actor="x")
    for role in (None, "root"):
        async with database.write() as session:
            row = await session.get(ApiKey, made.record.id)
            assert row is not None
            row.role = role
        assert not await is_valid(authenticator, made.secret)
