"""What a shell offers after Tab, asked as the completion scripts of shells ask it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import environment
from server_process import ServerProcess

from loraserve import Client

from .conftest import variables_for

COMMAND = "from loraserve.cli.main import main; main()"
PATIENT = f"from loraserve.cli.adapters import completion; completion.MAX_WAIT_S = 30.0; {COMMAND}"
"""The command line, and one that waits for its server however busy the machine is."""


def ask(shell: str, line: str, code: str = PATIENT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Ask what may stand at the end of a line, as the script of this shell does."""
    words = line.split(" ")
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(**asked, **variables, _LORASERVE_COMPLETE=f"complete_{shell}"),
    )


@pytest.fixture
def named(client: Client, sql_dir: Path, real_server: ServerProcess) -> dict[str, str]:
    """The environment of a tenant with the adapters tab-one and tab-two."""
    if "tabs" not in [tenant.name for tenant in client.tenants.list()]:
        client.tenants.create("tabs")
    key = client.keys.create("tabs", name="tab").key
    with Client(real_server.url, api_key=key) as tenant:
        for name in ("tab-one", "tab-two", "other"):
            tenant.adapters.push(sql_dir, name=name)
    return variables_for(real_server) | {"LORASERVE_API_KEY": key}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_offers_the_tenants_adapters(named: dict[str, str], shell: str) -> None:
    offered = ask(shell, "loraserve adapter show tab-", **named)
    assert offered.stderr == ""
    if shell == "zsh":
        assert offered.stdout == '_arguments \'*: :(("tab-one"\n"tab-two"))\'\n'
    else:
        assert offered.stdout.split() == ["tab-one", "tab-two"]


def test_sums_are_completed_term_by_term(named: dict[str, str]) -> None:
    assert ask("bash", "loraserve run other+0.5*tab-", **named).stdout.split() == [
        "other+0.5*tab-one",
        "other+0.5*tab-two",
    ]
    # another tenant's key sees none of them
    assert ask("bash", "loraserve run tab-", **named | {"LORASERVE_API_KEY": "sk-lora-wrong"}).stdout.strip() == ""


def test_absent_or_hanging_server_completes_silently_and_quickly(unused_tcp_port: int) -> None:
    away = {"LORASERVE_URL": f"http://127.0.0.1:{unused_tcp_port}", "LORASERVE_API_KEY": "sk-lora-x"}
    for variables in (away, {}):
        silent = ask("bash", "loraserve adapter show s", **variables)
        assert (silent.stdout.strip(), silent.stderr) == ("", "")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        hangs = away | {"LORASERVE_URL": f"http://127.0.0.1:{listener.getsockname()[1]}"}
        began = time.monotonic()
        ask("bash", "loraserve adapter show s", COMMAND, **away)
        start_s = time.monotonic() - began
        began = time.monotonic()
        silent = ask("bash", "loraserve adapter show s", COMMAND, **hangs)
        assert time.monotonic() - began < 3 * start_s + 3
        assert (silent.stdout.strip(), silent.stderr) == ("", "")


def test_names_with_shell_syntax_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraserve.cli.adapters import completion

    class Hostile:
        """A server whose names are commands."""

        def __init__(self, *_: object, **__: object) -> None:
            self.models = self

        def __enter__(self) -> Hostile:
            return self

        def __exit__(self, *_: object) -> None: ...

        def list(self) -> list[Any]:
            from types import SimpleNamespace

            return [SimpleNamespace(id=name) for name in ("$(id)", "a;id", "a`id`", "a\nb", "good", "a b", "--help")]

    monkeypatch.setattr("loraserve.sdk.Client", Hostile)
    context: Callable[[], Any] = lambda: type("Context", (), {"params": {}})()  # noqa: E731
    assert completion.model_names(context(), "") == ["good"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_script_for_bash_works_in_bash(named: dict[str, str], tmp_path: Path) -> None:
    script = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND],
        capture_output=True,
        text=True,
        env=environment(_LORASERVE_COMPLETE="source_bash"),
    ).stdout
    command = tmp_path / "loraserve"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -c "{PATIENT}" "$@"\n')
    command.chmod(0o700)
    commands = f"""{script}
COMP_WORDS=(loraserve adapter show tab-) COMP_CWORD=3
_loraserve_completion loraserve
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    path = f"{tmp_path}:{environment()['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", commands], capture_output=True, text=True, env=environment(**named, PATH=path)
    )
    assert done.stdout.split() == ["tab-one", "tab-two"], done.stderr
