"""What every command has in common."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from typer.main import get_command

from loraserve.cli.main import app

SERVERS = {"serve", "demo", "cluster up"}
"""They print a log, and a tour for people."""
DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def commands(group: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    inner = getattr(group, "commands", {})
    if not inner or getattr(group, "invoke_without_command", False):
        yield " ".join(words), group
    for name, command in inner.items():
        yield from commands(command, (*words, name))


COMMANDS = dict(commands(get_command(app)))


def test_every_command_has_the_three_formats() -> None:
    lacking = [
        name
        for name, command in COMMANDS.items()
        if "--format" not in {flag for one in command.params for flag in one.opts}
    ]
    assert set(lacking) == SERVERS


def test_each_command_and_option_has_help() -> None:
    assert [name for name, command in COMMANDS.items() if not (command.help or "").strip()] == []


def test_every_command_is_in_the_docs() -> None:
    text = DOCS.read_text()
    assert [name for name in COMMANDS if not re.search(rf"`loraserve {name}[ `]", text)] == []


def test_each_option_in_docs_exists() -> None:
    options = {
        flag for command in COMMANDS.values() for one in command.params for flag in (*one.opts, *one.secondary_opts)
    }
    # but those of programs that install it
    text = re.sub(r"`(pip|pipx|uvx) [^`]*`", "", DOCS.read_text())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
    assert sorted(named - options - {"--help", "--install-completion"}) == []
