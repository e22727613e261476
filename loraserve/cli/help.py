"""Help as plain text.

It has a section for each group of options, every flag whole at 80 columns, values named by what
they hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from loraserve import errors

VALUES: dict[type, str] = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}
"""Names of values by type, for options without a metavar."""
FIRST_COLUMN = 32
_NO_CHOICE = re.compile(r"(?:Value error, )?(?P<words>'(?P<value>.*)' is not one of (?P<choices>'.*')\.)")


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _guessing():
            return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_sections(self, ctx, formatter)


class Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _guessing():
            return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_sections(self, ctx, formatter)
        self.format_commands(ctx, formatter)


class App(typer.Typer):
    """A noun of the command line, with help as above."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=Group, rich_markup_mode=None, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, **({"cls": Command} | options))


@contextmanager
def _guessing() -> Iterator[None]:
    """Add the choice that may be meant to the error of a mistyped one: ``--format jsn``.

    Typer does so for commands and flags.
    """
    try:
        yield
    except typer.BadParameter as error:
        found = _NO_CHOICE.fullmatch(error.message)
        if found is not None:
            guess = errors.closest(found["value"], re.findall(r"'([^']*)'", found["choices"]))
            error.message = found["words"] + ("" if guess is None else f" Did you mean {guess!r}?")
        raise


def _write_sections(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        is_argument = param.param_type_name == "argument"
        if param.metavar is None and not is_argument:
            param.metavar = _value_name(param, ctx)
        record = param.get_help_record(ctx)
        if record is None:
            continue
        title = getattr(param, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
        # the name of an argument describes what it holds
        names = record[0].partition(" <")[0] if is_argument else record[0]
        sections.setdefault(title, []).append((names, record[1]))
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records, col_max=FIRST_COLUMN)


def _value_name(param: Any, ctx: Any) -> str | None:
    """List the choices of an option, or name its type's values."""
    descriptor = getattr(param, "type_descriptor", None)
    if descriptor is None:
        return None
    if descriptor.is_choice:
        return str(param.display_type(ctx)).strip("<>")
    kind = descriptor.annotation
    return VALUES.get(next(iter(get_args(kind)), kind))
