"""Resources that several nouns share: their base, pages, adapters and versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from loraserve.adapters.extra_files import FILE_NAMES
from loraserve.registry.health.checks import WARNINGS
from loraserve.registry.records import OTHER_BASE
from loraserve.types import Digest, VersionExtras

if TYPE_CHECKING:
    from loraserve.db.paging import Page
    from loraserve.registry.records import AdapterRecord, VersionRecord

R = TypeVar("R", bound="Resource")
T = TypeVar("T")


class Resource(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)

    @classmethod
    def of(cls, record: object) -> Self:
        """Return the resource of a record, field by attribute."""
        return cls.model_validate(record)


class PageResource(Resource, Generic[R]):
    data: list[R]
    next_cursor: str | None
    """Pass it as ``cursor`` for the next page; null: this is the last."""


def page_of(page: Page[T], convert: Callable[[T], R]) -> PageResource[R]:
    return PageResource(data=[convert(item) for item in page.items], next_cursor=page.next_cursor)


class ExtraFileResource(Resource):
    """File of a version beside its config and its weights."""

    name: str
    size_bytes: int
    sha256: str


class VersionResource(Resource):
    name: str
    version: int | None
    """null: a dry run of bytes that aren't published."""
    digest: str
    state: str
    """State: ready; quarantined; other_base (this server serves another base); checked (a dry
    run's).
    """
    base_digest: str
    """Digest of the base that the version was made for."""
    size_bytes: int
    rank: int
    target_modules: list[str]
    dtype: str
    aliases: list[str]
    notes: str | None
    """null in lists, unless their URL has include=notes."""
    tags: dict[str, str]
    created_at: datetime
    checks: list[dict[str, Any]]
    warnings: list[str]
    """Findings of the checks that don't prevent serving."""
    extra_files: list[ExtraFileResource]
    """Files for chats with the version. Without a template, chats use the base's."""
    tool_parser: str | None
    """Format of its tool calls; null: recognized in its template, or the base's."""
    reasoning_parser: str | None
    """Format of its reasoning; null: recognized in its template, or the base's."""
    chat_template_kwargs: dict[str, Any]
    """Variables that it sets for its chat template; those of a request go before them."""

    @classmethod
    def on_base(cls, record: VersionRecord, served: Digest | None) -> VersionResource:
        """Return the version as a server of the base `served` shows it.

        None: its base isn't loaded yet.
        """
        state = record.state if served in (None, record.base_digest) else OTHER_BASE
        warnings = [check["detail"] for check in record.checks if check["status"] in WARNINGS]
        extras = record.extras or VersionExtras()
        files = [
            ExtraFileResource(name=FILE_NAMES[part], size_bytes=file.num_bytes, sha256=file.blob)
            for part, file in (
                ("chat_template", extras.chat_template),
                ("generation_config", extras.generation_config),
                ("tokenizer", extras.tokenizer),
            )
            if file is not None
        ]
        added = {
            "state": state,
            "warnings": warnings,
            "extra_files": files,
            "tool_parser": extras.tool_parser,
            "reasoning_parser": extras.reasoning_parser,
            "chat_template_kwargs": json.loads(extras.chat_template_kwargs or "{}"),
        }
        return cls.model_validate(_values(record) | added)


class SplitResource(Resource):
    version: int
    weight: float


class AdapterResource(Resource):
    name: str
    aliases: dict[str, int]
    """Version of each alias; of a split, the version with the largest weight."""
    splits: dict[str, list[SplitResource]]
    """Versions and weights of the aliases that share their traffic between several."""
    num_versions: int
    num_versions_of_another_base: int
    """Number of versions made for another base than this server's, which doesn't serve them."""
    latest_version: int | None
    notes: str | None
    """null in lists, unless their URL has include=notes."""
    tags: dict[str, str]
    fallback: str | None
    """Answers if the requested version can't: a version's number, an alias, or ``base``. null:
    nothing does.
    """
    created_at: datetime
    updated_at: datetime

    @classmethod
    def on_base(cls, record: AdapterRecord, served: Digest | None) -> AdapterResource:
        """Return the adapter as a server of the base `served` shows it.

        None: its base isn't loaded yet.
        """
        num_own = record.num_versions if served is None else record.num_versions_by_base.get(served, 0)
        return cls.model_validate(_values(record) | {"num_versions_of_another_base": record.num_versions - num_own})


def _values(record: VersionRecord | AdapterRecord) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
