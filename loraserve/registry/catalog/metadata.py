"""Metadata of adapters and versions: notes, tags, and the adapter's fallback."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loraserve.db.models import Adapter, AdapterVersion
from loraserve.db.session import Clock, Database
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS
from loraserve.registry.changes import record_change
from loraserve.registry.model_name import BASE_FALLBACK, check_alias_name
from loraserve.registry.records import AdapterRecord, VersionRecord
from loraserve.registry.repository import AdapterRepository
from loraserve.types import TenantId

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}", re.ASCII)
_LAYOUT = frozenset("\n\r\t")
"""Control characters that are valid in notes."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Changes to metadata; fields that are None stay as they are."""

    notes: str | None = None
    tags: Mapping[str, str] | None = None
    """Complete set of tags; other tags are removed."""
    fallback: str | None = None
    """Version number, alias or ``base``; empty for none. Adapters only."""

    def __post_init__(self) -> None:
        """Check the texts and the tags.

        Raises:
            InvalidRequest: a text is too long, has characters that don't print, or there are too
                many tags.
        """
        if self.notes is not None:
            if len(self.notes.encode("utf-8", "replace")) > LIMITS.max_notes_bytes:
                raise InvalidRequest(f"Notes should have at most {LIMITS.max_notes_bytes} bytes.", param="notes")
            if any(_is_control(letter) and letter not in _LAYOUT for letter in self.notes):
                raise InvalidRequest("Notes should be text, without control characters.", param="notes")
        if self.tags is not None:
            _check_tags(self.tags)


class MetadataEditor:
    """Edits metadata of all tenants' adapters.

    A change is durable, and has its audit row, when the call returns.

    Args:
        on_change: called with tenant and adapter name after a change is durable.
    """

    def __init__(self, database: Database, on_change: Callable[[TenantId, str], None], *, clock: Clock) -> None:
        self._database = database
        self._on_change = on_change
        self._clock = clock

    async def edit(self, tenant: TenantId, name: str, edit: Edit, *, actor: str) -> AdapterRecord:
        """Set the adapter's notes, tags and fallback.

        Raises:
            InvalidRequest: the fallback isn't valid.
            AdapterNotFound
            VersionNotFound, AliasNotFound: the adapter has no such version or alias for the
                fallback.
        """
        now = self._clock()
        async with self._database.write() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            name = adapter.name
            changed = _write(adapter, edit)
            if edit.fallback is not None:
                fallback = await _checked_fallback(repository, adapter, edit.fallback)
                if fallback != adapter.fallback:
                    adapter.fallback = fallback
                    changed["fallback"] = fallback
            if changed:
                repository.touch(adapter, now)
                record_change(session, repository, "adapter.edit", name, actor=actor, now=now, **changed)
            await session.flush()
            record = (await repository.adapter_records([adapter]))[0]
        self._on_change(tenant, name)
        return record

    async def edit_version(self, tenant: TenantId, name: str, number: int, edit: Edit, *, actor: str) -> VersionRecord:
        """Set the version's notes and tags.

        Raises:
            AdapterNotFound, VersionNotFound
        """
        now = self._clock()
        async with self._database.write() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            name = adapter.name
            row = await repository.version(adapter, number)
            if changed := _write(row, edit):
                repository.touch(adapter, now)
                record_change(session, repository, "version.edit", f"{name}@{number}", actor=actor, now=now, **changed)
            await session.flush()
            return await repository.version_record(adapter, row)


def _write(row: Adapter | AdapterVersion, edit: Edit) -> dict[str, str | int | None]:
    """Write notes and tags to the row; return what changed, for the audit, without their texts."""
    changed: dict[str, str | int | None] = {}
    if edit.notes is not None and edit.notes != row.notes:
        row.notes = edit.notes
        changed["notes_length"] = len(edit.notes)
    if edit.tags is not None and dict(edit.tags) != row.tags:
        row.tags = dict(edit.tags)
        changed["num_tags"] = len(edit.tags)
    return changed


async def _checked_fallback(repository: AdapterRepository, adapter: Adapter, fallback: str) -> str | None:
    if not fallback:
        return None
    if fallback == BASE_FALLBACK:
        return BASE_FALLBACK
    if fallback.isascii() and fallback.isdigit():
        # the length of the largest number
        number = int(fallback) if len(fallback) <= 10 else 0
        return str((await repository.version(adapter, number)).number)
    try:
        check_alias_name(fallback)
    except InvalidRequest:
        raise InvalidRequest(
            "fallback should be a version's number, an alias, base, or null.", param="fallback"
        ) from None
    return repository.alias_record(adapter, await repository.alias(adapter, fallback), fallback).name


def _check_tags(tags: Mapping[str, str]) -> None:
    """Check the number of tags and each of them.

    Raises:
        InvalidRequest: there are too many tags, or one isn't valid. The message doesn't repeat it.
    """
    if len(tags) > LIMITS.max_tags:
        raise InvalidRequest(f"There are {len(tags)} tags; at most {LIMITS.max_tags} are allowed.", param="tags")
    for key, value in tags.items():
        if not _TAG.fullmatch(key):
            raise InvalidRequest(f"A tag's name should match {_TAG.pattern}.", param="tags")
        if len(value) > LIMITS.max_tag_value_length or any(map(_is_control, value)):
            raise InvalidRequest(
                f"A tag's value should be text of at most {LIMITS.max_tag_value_length} characters, in one line.",
                param=f"tags.{key}",
            )


def _is_control(letter: str) -> bool:
    return unicodedata.category(letter) in ("Cc", "Cs")
