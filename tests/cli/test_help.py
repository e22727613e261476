"""Help that is read at 80 columns, and flags that are settings."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from loraserve.cli.local.serve_flags import SECTIONS, SWITCHES, VALUES
from loraserve.cli.main import app
from loraserve.settings import Settings


def help_text(*names: str) -> str:
    command: Any = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]
    context = command.make_context(" ".join(names), [], resilient_parsing=True, terminal_width=80)
    return str(command.get_help(context))


def test_each_setting_except_admin_key_is_serve_flag() -> None:
    flags = " ".join(SECTIONS.values()).split()
    assert sorted(flags) == sorted(Settings.model_fields.keys() - {"admin_key"})
    assert {name for name in flags if Settings.model_fields[name].annotation is bool} == SWITCHES
    assert set(" ".join(VALUES.values()).split()) <= set(flags)


@pytest.mark.parametrize("command", ["serve", "plan", "doctor"])
def test_flags_are_whole_and_described_at_80_columns(command: str) -> None:
    text = help_text(command)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text.replace(",…", "").replace(":///…", "").replace("://…", "")
    words = " ".join(text.split())
    for name in " ".join(SECTIONS.values()).split():
        if f"--{name.replace('_', '-')} " in words:
            assert f"[env var: LORASERVE_{name.upper()}" in words


def test_help_defaults_match_settings() -> None:
    words = " ".join(help_text("serve").split())
    assert "[env var: LORASERVE_PORT; default: 8000]" in words
    assert "[env var: LORASERVE_HOST_CACHE; default: 4GiB]" in words
    assert "[env var: LORASERVE_CUDA_GRAPHS; default: on]" in words
    assert re.search(r"--memory-budget BYTES .*? \[env var: LORASERVE_MEMORY_BUDGET\]", words)
