"""Anthropic's Claude Code, the program, with its own prompt and tools.

Its notes about commits, which it puts before each question, are off: the bundled model knows its
own questions alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from probe import KEY, QUESTION, TEXT_MODEL, URL, feature, run
from relay import relayed

PROGRAM = Path(sys.prefix) / "node_modules/.bin/claude"
_SCRATCH = tempfile.TemporaryDirectory(prefix="claude-code-", ignore_cleanup_errors=True)
FOLDER = Path(_SCRATCH.name)
SETTINGS = {"attribution": {"commit": "", "pr": ""}}


def claude(model: str, *options: str, url: str = URL) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), "-p", "--settings", json.dumps(SETTINGS), "--model", model, *options, QUESTION]
    environment = {
        **os.environ,
        "HOME": str(FOLDER),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return subprocess.run(
        command,
        env=environment,
        cwd=FOLDER,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@feature
def chat() -> str:
    return _checked(claude(TEXT_MODEL)).strip()


@feature
def stream() -> list[str]:
    printed = _checked(claude(TEXT_MODEL, "--output-format", "stream-json", "--verbose", "--include-partial-messages"))
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    deltas = [line["event"].get("delta", {}) for line in lines if line["type"] == "stream_event"]
    return [delta["text"] for delta in deltas if delta.get("type") == "text_delta"]


@feature
def sent_and_ignored() -> dict[str, Any]:
    """Return the fields of its request, and those that the server names as left out."""
    with relayed(URL) as (url, exchanges):
        _checked(claude(TEXT_MODEL, url=url))
    exchange = exchanges[-1]
    return {
        "status": exchange.status,
        "sent": sorted(exchange.request),
        "ignored": exchange.headers.get("x-loraserve-ignored", ""),
    }


@feature
def unknown_model() -> str:
    done = claude("absent")
    assert done.returncode, done.stdout
    return done.stdout


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


run()
