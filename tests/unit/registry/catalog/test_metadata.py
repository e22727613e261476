"""Notes, tags and fallbacks, and what a fallback keeps from going."""

from __future__ import annotations

from typing import Any

import pytest

from loraserve.db.session import Database
from loraserve.errors import AliasNotFound, Conflict, InvalidRequest, VersionNotFound
from loraserve.limits import LIMITS
from loraserve.registry.catalog.metadata import Edit
from loraserve.registry.model_name import parse_terms
from loraserve.registry.records import AliasTarget
from loraserve.registry.registry import Registry
from loraserve.registry.repository import AdapterRepository
from loraserve.types import TenantId

SQL = parse_terms("sql", "base")


async def quarantine(database: Database, tenant: TenantId, number: int) -> None:
    async with database.write() as session:
        repository = AdapterRepository(session, tenant)
        row = await repository.version(await repository.adapter("sql"), number)
        row.state = "quarantined"


async def test_omitted_metadata_fields_stay_unchanged(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish()
    await registry.metadata.edit(
        acme, "sql", Edit(notes="first\nline", tags={"team": "data"}, fallback="base"), actor="x"
    )
    record = await registry.metadata.edit(acme, "sql", Edit(tags={"env": "prod"}), actor="x")
    assert (record.notes, record.tags, record.fallback) == ("first\nline", {"env": "prod"}, "base")
    emptied = await registry.metadata.edit(acme, "sql", Edit(notes="", tags={}, fallback=""), actor="x")
    assert (emptied.notes, emptied.tags, emptied.fallback) == ("", {}, None)
    assert await registry.get(acme, "sql") == emptied


async def test_version_has_separate_notes(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish(seed=1)
    await publish(seed=2)
    await registry.metadata.edit_version(acme, "sql", 1, Edit(notes="the old one", tags={"a": "b"}), actor="x")
    found = await registry.get_version(acme, "sql", 1)
    assert (found.notes, found.tags) == ("the old one", {"a": "b"})
    assert (await registry.get_version(acme, "sql", 2)).notes == ""
    with pytest.raises(VersionNotFound):
        await registry.metadata.edit_version(acme, "sql", 3, Edit(notes="x"), actor="x")


async def test_audit_names_changed_fields_without_contents(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish()
    for _ in range(2):
        await registry.metadata.edit(acme, "sql", Edit(notes="MARKER", tags={"a": "MARKER"}, fallback="1"), actor="x")
    entries = [row for row in (await registry.list_audit(acme)).items if row.action == "adapter.edit"]
    assert [row.detail for row in entries] == [{"notes_length": 6, "num_tags": 1, "fallback": "1"}]


@pytest.mark.parametrize(
    ("edit", "param"),
    [
        ({"notes": "x" * (LIMITS.max_notes_bytes + 1)}, "notes"),
        ({"notes": "a\0b"}, "notes"),
        ({"notes": "\x1b[31m"}, "notes"),
        ({"tags": {str(number): "" for number in range(LIMITS.max_tags + 1)}}, "tags"),
        ({"tags": {"": "x"}}, "tags"),
        ({"tags": {"a b": "x"}}, "tags"),
        ({"tags": {"a": "x" * (LIMITS.max_tag_value_length + 1)}}, "tags.a"),
        ({"tags": {"a": "x\ny"}}, "tags.a"),
    ],
)
def test_invalid_metadata_is_refused_by_field(edit: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Edit(**edit)
    assert caught.value.param == param


async def test_fallback_must_be_base_or_existing_target(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish()
    for fallback, error in (
        ("2", VersionNotFound),
        ("9" * 5000, VersionNotFound),
        ("canary", AliasNotFound),
        ("latest", InvalidRequest),
        ("a b", InvalidRequest),
    ):
        with pytest.raises(error):
            await registry.metadata.edit(acme, "sql", Edit(fallback=fallback), actor="x")
    assert (await registry.get(acme, "sql")).fallback is None


@pytest.mark.parametrize(("fallback", "answers"), [("1", 1), ("old", 1), ("base", None)])
async def test_a_fallback_answers_for_a_version_in_quarantine(
    publish: Any, registry: Registry, database: Database, acme: TenantId, fallback: str, answers: int | None
) -> None:
    for seed in range(2):
        await publish(seed=seed)
    await registry.aliases.set(acme, "sql", "old", AliasTarget(1), actor="x")
    await registry.metadata.edit(acme, "sql", Edit(fallback=fallback), actor="x")
    await quarantine(database, acme, 2)
    registry.forget(acme, "sql")
    bound = await registry.bind(acme, SQL, sticky=None)
    assert (None if bound.adapter is None else bound.adapter.version) == answers
    assert bound.fell_back_from is not None
    assert (bound.fell_back_from.version, bound.fell_back_for) == (2, "adapter_quarantined")
    assert [one.name for one in await registry.list_servable(acme)] == ["sql"]


async def test_fallback_version_or_alias_is_not_deleted(publish: Any, registry: Registry, acme: TenantId) -> None:
    for seed in range(2):
        await publish(seed=seed)
    await registry.metadata.edit(acme, "sql", Edit(fallback="1"), actor="x")
    with pytest.raises(Conflict, match="it is the adapter's fallback"):
        await registry.delete_version(acme, "sql", 1, actor="x")
    await registry.aliases.set(acme, "sql", "old", AliasTarget(1), actor="x")
    await registry.metadata.edit(acme, "sql", Edit(fallback="old"), actor="x")
    with pytest.raises(Conflict, match="it is the adapter's fallback"):
        await registry.aliases.delete(acme, "sql", "old", actor="x")


async def test_reused_name_starts_without_old_notes(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish()
    await registry.metadata.edit(acme, "sql", Edit(notes="n", tags={"a": "b"}, fallback="base"), actor="x")
    await registry.delete(acme, "sql", actor="x")
    await publish()
    record = await registry.get(acme, "sql")
    assert (record.notes, record.tags, record.fallback) == ("", {}, None)
