"""The command line in this process: one of its own takes most of a second to import a command."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import server_process

from loraserve.cli.main import app


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def environment(**variables: str) -> dict[str, str]:
    """Return `server_process.environment` for a wide screen without colors."""
    return server_process.environment(COLUMNS="200", NO_COLOR="1", **variables)


def run_here(*arguments: str | Path, stdin: str = "", **variables: str) -> Done:
    """Run ``loraserve ARGUMENTS`` to its end, with `variables` and none of loraserve's besides."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(**variables), clear=True),
        mock.patch("sys.stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as caught,
    ):
        app([str(argument) for argument in arguments], prog_name="loraserve")
    return Done(int(caught.value.code or 0), out.getvalue(), err.getvalue())
