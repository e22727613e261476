"""Answers made of records: of one, of a page of them, of an adapter and a version."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from loraserve.adapters.extra_files import FILE_NAMES
from loraserve.contract import result
from loraserve.contract.adapter import Adapter, ExtraFile, Version
from loraserve.contract.result import Result, sent_as
from loraserve.registry.health.checks import WARNINGS
from loraserve.registry.records import OTHER_BASE
from loraserve.types import Digest, VersionExtras

if TYPE_CHECKING:
    from loraserve.db.paging import Page
    from loraserve.registry.records import AdapterRecord, VersionRecord

R = TypeVar("R", bound=Result)
T = TypeVar("T")


def resource_of(kind: type[R], record: object, **changes: Any) -> R:
    """Make the answer that shows a record: each field is the attribute of its name.

    Args:
        changes: fields that the record lacks or has in another form.

    Raises:
        AttributeError: the record lacks a field that is always sent.
        ValidationError: a change is no field of the answer.
    """
    names = [name for name in kind.model_fields if name not in changes]
    values = {
        name: getattr(record, name)
        for name in names
        if hasattr(record, name) or not sent_as(kind.model_fields[name]).is_optional
    }
    return kind.model_validate(values | changes, from_attributes=True, extra="forbid")


def page_of(page: Page[T], convert: Callable[[T], R]) -> result.Page[R]:
    return result.Page(data=[convert(item) for item in page.items], next_cursor=page.next_cursor)


def version_of(record: VersionRecord, served: Digest | None) -> Version:
    """Show the version as a server of the base `served` does.

    None: its base isn't loaded yet.
    """
    extras = record.extras or VersionExtras()
    return resource_of(
        Version,
        record,
        state=record.state if served in (None, record.base_digest) else OTHER_BASE,
        warnings=[check["detail"] for check in record.checks if check["status"] in WARNINGS],
        extra_files=[
            ExtraFile(name=FILE_NAMES[part], size_bytes=file.num_bytes, sha256=file.blob)
            for part, file in (
                ("chat_template", extras.chat_template),
                ("generation_config", extras.generation_config),
                ("tokenizer", extras.tokenizer),
            )
            if file is not None
        ],
        tool_parser=extras.tool_parser,
        reasoning_parser=extras.reasoning_parser,
        chat_template_kwargs=json.loads(extras.chat_template_kwargs or "{}"),
    )


def adapter_of(record: AdapterRecord, served: Digest | None) -> Adapter:
    """Show the adapter as a server of the base `served` does.

    None: its base isn't loaded yet.
    """
    num_own = record.num_versions if served is None else record.num_versions_by_base.get(served, 0)
    return resource_of(Adapter, record, num_versions_of_another_base=record.num_versions - num_own)
