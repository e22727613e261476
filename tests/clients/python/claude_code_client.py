"""Anthropic's Claude Code, the program, with its own prompt and tools.

Its notes about commits, which it puts before each question, are off: the bundled model knows its
own questions alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from probe import KEY, QUESTION, TEXT_MODEL, URL, feature, run
from program import printed_by, run_program
from relay import relayed

PROGRAM = Path(sys.prefix) / "node_modules/.bin/claude"
_SCRATCH = tempfile.TemporaryDirectory(prefix="claude-code-", ignore_cleanup_errors=True)
FOLDER = Path(_SCRATCH.name)
SETTINGS = {"attribution": {"commit": "", "pr": ""}}


def claude(model: str, *options: str, url: str = URL) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), "-p", "--settings", json.dumps(SETTINGS), "--model", model, *options, QUESTION]
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return run_program(command, FOLDER, environment)


@feature
def chat() -> str:
    return printed_by(claude(TEXT_MODEL)).strip()


@feature
def stream() -> list[str]:
    printed = printed_by(
        claude(TEXT_MODEL, "--output-format", "stream-json", "--verbose", "--include-partial-messages")
    )
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    deltas = [line["event"].get("delta", {}) for line in lines if line["type"] == "stream_event"]
    return [delta["text"] for delta in deltas if delta.get("type") == "text_delta"]


@feature
def sent_and_ignored() -> dict[str, Any]:
    """Return the fields of its request, and those that the server names as left out."""
    with relayed(URL) as (url, exchanges):
        printed_by(claude(TEXT_MODEL, url=url))
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


run()
