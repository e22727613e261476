"""Inspection of a version's extra files before it becomes one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from loraserve.adapters.config.generation_config import read_generation_config
from loraserve.adapters.digest import version_digest
from loraserve.adapters.extra_files import FILE_NAMES, ExtraFiles
from loraserve.errors import (
    AdapterFormatError,
    AdapterRejected,
    AdapterUnsupported,
    InvalidRequest,
)
from loraserve.registry.health.checks import PASSED
from loraserve.registry.health.inspection import Inspected
from loraserve.text.reasoning import REASONING_FORMATS
from loraserve.text.template_worker import TemplateAnswer
from loraserve.text.tool_parsers.table import TOOL_FORMATS
from loraserve.types import BaseSpec, TenantId

InspectTemplate = Callable[[TenantId, str], Awaitable[TemplateAnswer]]
"""Function that returns what a template of the tenant is like."""
CHECK = "extra_files"
"""Name of the check that lists which extra files a version has, and what of them is ignored."""


async def inspect_extra_files(
    tenant: TenantId, extras: ExtraFiles, base: BaseSpec, inspect_template: InspectTemplate | None
) -> list[dict[str, Any]]:
    """Check a version's extra files: one check, or none where there are no files.

    Args:
        inspect_template: None: this server has no process for templates.

    Raises:
        AdapterRejected: one can't be used; lists every reason.
        InvalidRequest: there is a template, and no process for it.
        EngineUnavailable: its process can't be started.
    """
    given = extras.as_bytes()
    if not given:
        return []
    found = [
        f"{FILE_NAMES[name]} ({len(given[name])} bytes)" for name in given if not name.endswith(("_parser", "_kwargs"))
    ]
    errors: list[AdapterRejected] = []
    for name, value, known in (
        ("tool_parser", extras.tool_parser, TOOL_FORMATS),
        ("reasoning_parser", extras.reasoning_parser, REASONING_FORMATS),
    ):
        if value is not None and value not in known:
            errors.append(AdapterUnsupported(f"{name} isn't known. Expected one of: {_listed(known)}."))
        elif value is not None:
            found.append(f"{name} {value}")
    if extras.chat_template_kwargs is not None:
        found.append(f"chat_template_kwargs {extras.chat_template_kwargs}")
    if extras.generation_config is not None:
        try:
            added_end = 0 if extras.tokenizer is None else extras.tokenizer.added_end
            _, ignored = read_generation_config(extras.generation_config, max(base.vocab_size, added_end))
        except AdapterRejected as error:
            errors.append(error)
        else:
            found += [f"ignored in generation_config.json: {_listed(ignored)}"] if ignored else []
    if extras.chat_template is not None:
        if inspect_template is None:
            raise InvalidRequest("This server takes no chat templates of versions.", param="chat_template")
        answer = await inspect_template(tenant, extras.chat_template.decode())
        errors += [
            AdapterFormatError(f"{FILE_NAMES['chat_template']}: {problem.rstrip('.')}.") for problem in answer.problems
        ]
        found += [f"the template refuses some messages: {answer.refused.rstrip('.')}"] if answer.refused else []
    if errors:
        problems = tuple(problem for error in errors for problem in error.problems)
        raise type(errors[0])(f"The version's extra files can't be used: {problems[0]}", problems=problems)
    return [{"name": CHECK, "status": PASSED, "detail": "; ".join(found)}]


def with_extra_files(inspected: Inspected, extras: ExtraFiles, checks: Iterable[dict[str, Any]]) -> Inspected:
    """Extend the inspection to the whole version."""
    return replace(
        inspected,
        digest=version_digest(inspected.digest, extras),
        checks=(*inspected.checks, *checks),
        extras=extras.described(),
        files=extras,
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
