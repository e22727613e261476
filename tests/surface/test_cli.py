"""The command line: its commands and flags, their help, and exit codes."""

from __future__ import annotations

import inspect
import io
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from loraserve import errors, sdk
from loraserve.cli.main import app
from loraserve.demo.pack import base_dir

from .describing import type_text, value_text

WIDTH = 100


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Yield each command's whole name, itself and its context, sorted by name."""

    def walk(command: Any, name: str, parent: Any) -> Iterator[tuple[str, Any, Any]]:
        # rich's boxes differ between its versions
        command.rich_markup_mode = None
        context = command.make_context(
            name, [], parent=parent, resilient_parsing=True, terminal_width=WIDTH, color=False
        )
        yield context.command_path, command, context
        for child, sub_command in sorted(getattr(command, "commands", {}).items()):
            yield from walk(sub_command, child, context)

    return walk(typer.main.get_command(app), "loraserve", None)


def parameter(param: Any, hints: dict[str, Any]) -> str:
    """Return everything of a flag or an argument that a caller can rely on."""
    type_ = type_text(hints[param.name]) if param.name in hints else "-"
    facts = [f"{param.param_type_name} {' '.join(param.opts)}"]
    if param.param_type_name == "argument":
        facts[0] = f"argument {param.metavar or param.name}"
    if param.secondary_opts:
        facts.append(f"off {' '.join(param.secondary_opts)}")
    facts += [f"type {type_}", f"default {value_text(param.default)}"]
    facts += [f"{bound} {getattr(param, bound)}" for bound in ("min", "max") if getattr(param, bound, None) is not None]
    if param.nargs != 1:
        facts.append(f"nargs {param.nargs}")
    if param.envvar:
        facts.append(f"env {param.envvar}")
    flags = {
        "required": param.required,
        "hidden": param.hidden,
        "flag": getattr(param, "is_flag", False),
        "repeatable": getattr(param, "multiple", False),
    }
    return "; ".join([*facts, *(name for name, is_set in flags.items() if is_set)])


def test_commands_and_flags(golden: Callable[..., None]) -> None:
    lines = []
    for name, command, _ in commands():
        callback = inspect.unwrap(command.callback) if command.callback else None
        hints = typing.get_type_hints(callback) if callback else {}
        marks = " (hidden)" * bool(command.hidden) + " (deprecated)" * bool(command.deprecated)
        lines.append(f"{name}{marks}")
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        options = [param for param in command.params if param.param_type_name != "argument"]
        lines += [f"    {parameter(param, hints)}" for param in arguments]
        lines += sorted(f"    {parameter(param, hints)}" for param in options)
    golden("cli.txt", lines)


def test_help(golden: Callable[..., None]) -> None:
    lines = []
    for name, command, context in commands():
        lines += [f"$ {name} --help", *context.get_help().splitlines()]
        panels: dict[str, list[str]] = {}
        for param in command.params:
            if getattr(param, "rich_help_panel", None):
                panels.setdefault(param.rich_help_panel, []).append(param.opts[0])
        lines += [f"Panel {title}: {' '.join(names)}" for title, names in panels.items()]
        lines += ["", ""]
    golden("cli_texts.txt", lines)


@pytest.fixture
def exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., int]:
    """Return a function that runs the command line in an empty folder,
    and returns its exit code.
    """
    monkeypatch.chdir(tmp_path)
    command = typer.main.get_command(app)

    def run(*arguments: str) -> int:
        for name in ("URL", "API_KEY", "TENANT", "FORMAT", "MODEL", "CONFIG"):
            monkeypatch.delenv(f"LORASERVE_{name}", raising=False)
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        with pytest.raises(SystemExit) as caught:
            command.main(list(arguments), prog_name="loraserve")
        capsys.readouterr()
        return int(caught.value.code or 0)

    return run


def test_exit_codes(
    golden: Callable[..., None], exit_code: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(base_dir())
    calls = [
        (),
        ("--help",),
        ("--version",),
        ("--no-such-flag",),
        ("no-such-command",),
        ("adapter",),
        ("adapter", "push"),
        ("adapter", "push", "no-such-directory", "--name", "x"),
        ("--format", "no-such-format", "ps"),
        ("ps",),
        ("serve",),
        ("serve", "--model", "MODEL", "--port", "no-such-port"),
        ("plan", "--model", "MODEL", "--device", "cpu"),
        ("plan", "--model", "MODEL", "--device", "cpu", "--ranks", "8", "--memory-budget", "64MiB"),
        ("plan", "--model", "MODEL", "--device", "cpu", "--ranks", "64", "--memory-budget", "1MiB"),
        ("adapter", "show", "sql@not-a-number"),
    ]
    lines = [
        f"$ {' '.join(('loraserve', *call))} -> {exit_code(*(model if word == 'MODEL' else word for word in call))}"
        for call in calls
    ]

    def run_into(error: BaseException) -> int:
        def fail(*_arguments: object, **_named: object) -> None:
            raise error

        monkeypatch.setattr(sdk, "Client", fail)
        return exit_code("ps")

    raised = [cls("failed") for name, cls in sorted(vars(errors).items()) if _is_error(cls)]
    lines += [f"{type(error).__name__} -> {run_into(error)}" for error in raised]
    lines += [f"Ctrl-C in a command -> {run_into(KeyboardInterrupt())}"]
    golden("exit_codes.txt", lines)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, errors.LoraserveError)
