"""Secrets: random, checked, hashed, shown once."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from loraserve.db.models import ApiKey
from loraserve.db.session import Database
from loraserve.errors import InvalidRequest, KeyNotFound, QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.tenancy.identity import keys
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.tenancy.identity.keys import hash_secret, is_well_formed, make_secret


def test_a_secret_holds_256_bits_and_a_checksum() -> None:
    secret = make_secret()
    assert secret.startswith("sk-lora-")
    assert len(secret) == len("sk-lora-") + 43 + 6
    assert is_well_formed(secret)
    assert make_secret(lambda n: b"\xff" * n) != make_secret(lambda n: b"\xfe" + b"\xff" * (n - 1))
    assert len({make_secret() for _ in range(100)}) == 100


def test_any_changed_letter_is_noticed() -> None:
    secret = make_secret(lambda n: bytes(range(n)))
    for place in range(len(secret)):
        other = "A" if secret[place] != "A" else "B"
        assert not is_well_formed(secret[:place] + other + secret[place + 1 :])
    for wrong in ("", "sk-lora-", secret[:-1], secret + "0", "é" * 57, secret.replace("sk", "\udc80k")):
        assert not is_well_formed(wrong)


def test_the_hash_needs_the_pepper() -> None:
    assert hash_secret("a", b"1") != hash_secret("a", b"2")


async def test_only_hash_is_stored_and_repr_is_masked(database: Database, authenticator: Authenticator) -> None:
    acme = (await authenticator.tenants.create("acme", actor="test")).id
    made = await authenticator.keys.create(acme, name="ci", actor="test")
    assert made.secret not in repr(made)
    async with database.read() as session:
        row = (await session.scalars(select(ApiKey))).one()
    stored = repr({column.name: getattr(row, column.name) for column in ApiKey.__table__.columns})
    assert made.secret[:12] in stored
    assert made.secret[:13] not in stored


async def test_key_list_includes_revoked_and_excludes_other_tenants(authenticator: Authenticator) -> None:
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


async def test_other_tenants_key_reads_as_absent_when_revoking(authenticator: Authenticator) -> None:
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
    from dataclasses import replace

    monkeypatch.setattr(keys, "LIMITS", replace(LIMITS, max_keys_per_tenant=2))
    acme = (await authenticator.tenants.create("acme", actor="test")).id
    first = await authenticator.keys.create(acme, name="1", actor="test")
    await authenticator.keys.create(acme, name="2", actor="test")
    with pytest.raises(QuotaExceeded):
        await authenticator.keys.create(acme, name="3", actor="test")
    await authenticator.keys.revoke(acme, first.record.id, actor="test")
    await authenticator.keys.create(acme, name="3", actor="test")
