"""Parsers of arguments: versions, names of folders, splits, tags, instants and durations."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import typer

_ON_HUB = re.compile(r"hf:/{0,2}([^@:]+)(?:@[^:]+)?(?::(.+))?")
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_EXAMPLES = {"WEIGHT": "90", "SHARE": "0.1"}


def split_version(text: str) -> tuple[str, int | None]:
    """Split ``NAME`` or ``NAME@VERSION`` into its two parts.

    Raises:
        typer.BadParameter: the part after the ``@`` isn't a version's number.
    """
    name, at, version = text.partition("@")
    if not at:
        return name, None
    if not version.isdecimal():
        raise typer.BadParameter(f"{text!r} should have a version's number after the @, such as {name}@3.")
    return name, int(version)


def split_versions(text: str) -> tuple[str, tuple[int, ...]]:
    """Split ``NAME`` or ``NAME@VERSION,VERSION`` into the name and the versions, none or several.

    Raises:
        typer.BadParameter: the part after the ``@`` isn't a list of versions' numbers, or has one
            twice.
    """
    name, at, listed = text.partition("@")
    if not at:
        return name, ()
    words = [word.strip() for word in listed.split(",")]
    if not all(word.isdecimal() for word in words):
        raise typer.BadParameter(f"{text!r} should have versions' numbers after the @, such as {name}@3,4.")
    numbers = [int(word) for word in words]
    if len(set(numbers)) != len(numbers):
        raise typer.BadParameter(f"{text!r} names a version twice.")
    return name, tuple(numbers)


def folder_name(source: str) -> str:
    """Name an adapter after the folder, GGUF file or repository that it is pushed from.

    A trainer's ``checkpoint-900`` has the name of the folder around it.

    Raises:
        typer.BadParameter: it is MLflow's, or no adapter can have that name.
    """
    from loraserve.limits import ADAPTER_NAME_PATTERN, LIMITS
    from loraserve.sdk.files.mlflow_source import is_mlflow

    if is_mlflow(source):
        raise typer.BadParameter("is needed for what MLflow keeps, which has no folder's name.", param_hint="--name")
    on_hub = _ON_HUB.fullmatch(source)
    path = Path(source).expanduser().resolve() if on_hub is None else Path(*(part for part in on_hub.groups() if part))
    folder = path.parent if _CHECKPOINT.fullmatch(path.name) else path
    name = folder.name.removesuffix(".gguf")
    if len(name) > LIMITS.max_adapter_name_length or not re.fullmatch(ADAPTER_NAME_PATTERN, name, re.ASCII):
        raise typer.BadParameter(
            f"is needed: the folder's name {name[:64]!r} can't be an adapter's, which has letters, digits, . _ and -, "
            "and begins with a letter or a digit.",
            param_hint="--name",
        )
    return name


def version_numbers(text: str, what: str) -> dict[int, float]:
    """Parse ``3=90,4=10`` as version → number.

    Raises:
        typer.BadParameter: it isn't such a list, or it names a version twice.
    """
    found: dict[int, float] = {}
    for part in text.split(","):
        version, _, number = (word.strip() for word in part.partition("="))
        try:
            key, value = int(version), float(number)
        except ValueError:
            key, value = 0, 0.0
        if key < 1 or not 0 < value < float("inf"):
            raise typer.BadParameter(f"{part.strip()!r} should be VERSION={what}, such as 3={_EXAMPLES[what]}.")
        if key in found:
            raise typer.BadParameter(f"{text!r} names version {key} twice.")
        found[key] = value
    return found


def key_values(items: Sequence[str], what: str) -> dict[str, str]:
    """Parse ``KEY=VALUE`` texts as a mapping.

    Raises:
        typer.BadParameter: one has no ``=`` or no key.
    """
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"{item!r} should be {what}.")
        found[key.strip()] = value.strip()
    return found


def request_fields(items: Sequence[str], taken: Collection[str]) -> dict[str, object]:
    """Parse ``NAME=JSON`` texts as fields of a request; what isn't JSON is a text.

    Raises:
        typer.BadParameter: one has no ``=``, or is written by the command already.
    """
    found: dict[str, object] = {}
    for name, value in key_values(items, "NAME=JSON, such as top_k=5").items():
        if name in taken:
            raise typer.BadParameter(f"--field {name}: the command has an argument or a flag for it.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def instant(text: str | None) -> datetime | None:
    """Parse a date or an instant in ISO 8601; UTC unless it names a zone.

    Raises:
        typer.BadParameter: it isn't one.
    """
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} should be a date or an instant, such as 2026-03-01 or 2026-03-01T12:00Z."
        ) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


_DURATION = re.compile(r"([0-9]{1,6})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def duration(text: str | None) -> timedelta | None:
    """Parse a duration: ``90s``, ``15m``, ``12h``, ``30d`` or ``4w``.

    Raises:
        typer.BadParameter: it isn't one.
    """
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} should be a time such as 15m, 12h or 30d.")
    return timedelta(seconds=int(match[1]) * _SECONDS[match[2]])
