"""From a secret to a caller: revoked, expired and foreign ones are refused alike."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

import pytest

from loraserve.db.session import Database
from loraserve.errors import (
    AlreadyExists,
    AuthenticationError,
    ConfigError,
    Conflict,
    DatabaseUnavailable,
    InvalidRequest,
    TenantNotFound,
)
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.tenancy.identity.keys import make_secret
from loraserve.tenancy.identity.policy import NO_POLICY, TenantLimits
from loraserve.tenancy.identity.tenants import TenantChange

ADMIN_KEY = "an admin key of enough characters"


async def test_key_authenticates_owning_tenant(authenticator: Authenticator) -> None:
    acme = await authenticator.tenants.create("acme", actor="test")
    key = await authenticator.keys.create(acme.id, name="ci", actor="test", scopes=["inference"])
    caller = await authenticator.authenticate(key.secret)
    assert (caller.tenant, caller.tenant_name, caller.key_id) == (acme.id, "acme", key.record.id)
    assert caller.scopes == {"inference"}
    assert not caller.is_admin
    assert not caller.sees_all


async def test_only_first_start_creates_admin_key(database: Database) -> None:
    secret = await Authenticator(database).open()
    assert secret is not None
    second = Authenticator(database)
    assert await second.open() is None
    caller = await second.authenticate(secret)
    assert caller.is_admin
    assert caller.sees_all
    assert caller.tenant_name == "default"


async def test_configured_admin_key_prevents_key_creation(database: Database) -> None:
    assert await Authenticator(database, admin_key="a" * 32).open() is None
    assert await Authenticator(database).open() is not None


async def test_configured_admin_key_works_while_configured(database: Database, authenticator: Authenticator) -> None:
    caller = await authenticator.authenticate("an admin key of enough characters")
    assert (caller.is_admin, caller.key_id) == (True, "admin")
    other = Authenticator(database)
    await other.open()
    with pytest.raises(AuthenticationError):
        await other.authenticate("an admin key of enough characters")


def test_short_admin_key_is_refused_without_repetition() -> None:
    with pytest.raises(ConfigError, match="31 characters") as caught:
        Authenticator(None, admin_key="s" * 31)  # type: ignore[arg-type]
    assert "sss" not in str(caught.value)


async def test_every_bad_key_is_refused_with_same_text(authenticator: Authenticator) -> None:
    acme = await authenticator.tenants.create("acme", actor="test")
    revoked = await authenticator.keys.create(acme.id, name="x", actor="test")
    await authenticator.authenticate(revoked.secret)
    await authenticator.keys.revoke(acme.id, revoked.record.id, actor="test")
    texts = set()
    for secret in (
        revoked.secret,
        make_secret(),
        "",
        "sk-lora-x",
        "an admin key of enough character",
        "ü" * 40,
        "\udc80",
    ):
        with pytest.raises(AuthenticationError) as caught:
            await authenticator.authenticate(secret)
        texts.add(str(caught.value))
    assert len(texts) == 1


async def test_a_key_expires(database: Database) -> None:
    now = datetime(2026, 11, 21, tzinfo=UTC)
    authenticator = Authenticator(database, admin_key="a" * 32, clock=lambda: now)
    await authenticator.open()
    acme = await authenticator.tenants.create("acme", actor="test")
    expires_at = now + timedelta(hours=1)
    key = await authenticator.keys.create(acme.id, name="x", actor="test", expires_at=expires_at)
    await authenticator.authenticate(key.secret)
    now = expires_at
    with pytest.raises(AuthenticationError):
        await authenticator.authenticate(key.secret)
    with pytest.raises(InvalidRequest):
        await authenticator.keys.create(acme.id, name="x", actor="test", expires_at=now)


async def test_a_revocation_elsewhere_takes_effect_within_five_seconds(
    database: Database, authenticator: Authenticator
) -> None:
    now = 100.0
    other = Authenticator(database, admin_key="a" * 32, monotonic=lambda: now)
    await other.open()
    acme = await authenticator.tenants.create("acme", actor="test")
    key = await authenticator.keys.create(acme.id, name="x", actor="test")
    await other.authenticate(key.secret)
    await authenticator.keys.revoke(acme.id, key.record.id, actor="test")
    now = 105.01
    with pytest.raises(AuthenticationError):
        await other.authenticate(key.secret)


async def test_known_keys_work_for_minute_of_database_outage(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    authenticator = Authenticator(database, admin_key="a" * 32, monotonic=lambda: now)
    await authenticator.open()
    acme = await authenticator.tenants.create("acme", actor="test")
    known, unknown = [await authenticator.keys.create(acme.id, name="x", actor="test") for _ in range(2)]
    await authenticator.authenticate(known.secret)

    def refuse() -> Any:
        raise ConnectionRefusedError

    monkeypatch.setattr(database, "_readers", refuse)
    now = 160.0
    assert (await authenticator.authenticate(known.secret)).tenant == acme.id
    with pytest.raises(Exception, match="can't be reached"):
        await authenticator.authenticate(unknown.secret)
    now = 166.0
    with pytest.raises(Exception, match="can't be reached"):
        await authenticator.authenticate(known.secret)
    monkeypatch.undo()
    now = 170.0
    await authenticator.authenticate(known.secret)


async def test_admin_acts_for_named_tenant(authenticator: Authenticator) -> None:
    acme = await authenticator.tenants.create("acme", actor="test")
    admin = await authenticator.authenticate("an admin key of enough characters")
    acting = await authenticator.act_for(admin, "acme")
    assert (acting.tenant, acting.tenant_name, acting.is_admin, acting.sees_all) == (acme.id, "acme", True, False)
    for name in ("nobody", "ACME", "", "a" * 100, "\0"):
        with pytest.raises(TenantNotFound):
            await authenticator.act_for(admin, name)


async def test_tenant_key_acts_only_for_owning_tenant(authenticator: Authenticator) -> None:
    acme = await authenticator.tenants.create("acme", actor="test")
    await authenticator.tenants.create("globex", actor="test")
    key = await authenticator.keys.create(acme.id, name="x", actor="test")
    caller = await authenticator.authenticate(key.secret)
    assert await authenticator.act_for(caller, "acme") is caller
    texts = set()
    for name in ("globex", "absent"):
        with pytest.raises(TenantNotFound) as caught:
            await authenticator.act_for(caller, name)
        texts.add(str(caught.value))
    assert len(texts) == 1


async def test_deleted_tenants_keys_and_name_stop_immediately(authenticator: Authenticator) -> None:
    acme = await authenticator.tenants.create("acme", actor="test")
    key = await authenticator.keys.create(acme.id, name="x", actor="test")
    admin = await authenticator.authenticate("an admin key of enough characters")
    await authenticator.authenticate(key.secret)
    await authenticator.act_for(admin, "acme")
    await authenticator.tenants.delete("acme", actor="test")
    with pytest.raises(AuthenticationError):
        await authenticator.authenticate(key.secret)
    with pytest.raises(TenantNotFound):
        await authenticator.act_for(admin, "acme")


async def test_reused_name_is_a_different_tenant(authenticator: Authenticator) -> None:
    first = await authenticator.tenants.create("acme", actor="test")
    with pytest.raises(AlreadyExists):
        await authenticator.tenants.create("acme", actor="test")
    key = await authenticator.keys.create(first.id, name="x", actor="test")
    await authenticator.tenants.delete("acme", actor="test")
    second = await authenticator.tenants.create("acme", actor="test", limits=TenantLimits(max_adapters=3))
    assert second.id != first.id
    assert (await authenticator.tenants.get("acme")).limits.max_adapters == 3
    with pytest.raises(AuthenticationError):
        await authenticator.authenticate(key.secret)


async def test_a_changed_policy_goes_with_callers_at_once(authenticator: Authenticator) -> None:
    acme = await authenticator.tenants.create("acme", actor="test")
    key = await authenticator.keys.create(acme.id, name="x", actor="test")
    admin = await authenticator.authenticate(ADMIN_KEY)
    assert (await authenticator.authenticate(key.secret)).policy == NO_POLICY
    assert (await authenticator.act_for(admin, "acme")).policy == NO_POLICY
    change = TenantChange({"requests_per_minute": 60}, weight=2.0)
    await authenticator.tenants.update("acme", change, actor="test")
    for caller in (await authenticator.authenticate(key.secret), await authenticator.act_for(admin, "acme")):
        assert (caller.policy.limits.requests_per_minute, caller.policy.weight) == (60, 2.0)


async def test_admin_without_named_tenant_gets_default_policy(authenticator: Authenticator) -> None:
    await authenticator.authenticate(ADMIN_KEY)
    await authenticator.tenants.update("default", TenantChange(weight=2.0), actor="test")
    assert (await authenticator.authenticate(ADMIN_KEY)).policy.weight == 2.0


async def test_admin_key_works_during_database_outage(
    authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> NoReturn:
        raise DatabaseUnavailable("away")

    monkeypatch.setattr(authenticator._database, "read", away)
    caller = await authenticator.authenticate(ADMIN_KEY)
    assert (caller.is_admin, caller.policy) == (True, NO_POLICY)


async def test_policy_change_elsewhere_is_seen_within_cache_lifetime(
    database: Database, authenticator: Authenticator
) -> None:
    now = [0.0]
    here = Authenticator(database, admin_key=ADMIN_KEY, monotonic=lambda: now[0])
    await here.open()
    acme = await authenticator.tenants.create("acme", actor="test")
    key = await authenticator.keys.create(acme.id, name="x", actor="test")
    await here.authenticate(key.secret)
    await authenticator.tenants.update("acme", TenantChange(weight=2.0), actor="test")
    now[0] = LIMITS.auth_cache_s + 0.1
    assert (await here.authenticate(key.secret)).policy.weight == 2.0


async def test_the_default_tenant_stays(authenticator: Authenticator) -> None:
    with pytest.raises(Conflict):
        await authenticator.tenants.delete("default", actor="test")


async def test_tenants_are_listed_by_name_over_pages(authenticator: Authenticator) -> None:
    for name in ("b", "a"):
        await authenticator.tenants.create(name, actor="test")
    first = await authenticator.tenants.list(limit=2)
    second = await authenticator.tenants.list(limit=2, cursor=first.next_cursor)
    assert [tenant.name for tenant in first.items + second.items] == ["a", "b", "default"]


@pytest.mark.parametrize(
    "limits", [{"max_adapters": -1}, {"max_stored_bytes": 1 << 62}, {"max_kv_share": 1.1}, {"max_kv_share": 0}]
)
def test_impossible_limits_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="limits"):
        TenantLimits(**limits)
