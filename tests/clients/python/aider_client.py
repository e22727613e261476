"""aider, the command, which asks and edits nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from probe import BASE_URL, KEY, MAX_TOKENS, QUESTION, TEXT_MODEL, feature, run

_SCRATCH = tempfile.TemporaryDirectory(prefix="aider-", ignore_cleanup_errors=True)
FOLDER = Path(_SCRATCH.name)
MODELS = (f"openai/{TEXT_MODEL}", "openai/absent")
# the bundled model reads the last message, to which aider adds its reminder by default
(FOLDER / "settings.yml").write_text(
    # YAML takes JSON
    json.dumps([{"name": name, "reminder": "sys", "extra_params": {"max_tokens": MAX_TOKENS}} for name in MODELS])
)


def aider(model: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "aider"), "--model", model, "--model-settings-file", "settings.yml"]
    command += ["--edit-format", "ask", "--no-git", "--no-pretty", "--no-check-update", "--no-show-model-warnings"]
    command += ["--no-analytics", "--yes-always", *options, "--message", QUESTION]
    environment = {**os.environ, "HOME": str(FOLDER), "OPENAI_API_BASE": BASE_URL, "OPENAI_API_KEY": KEY}
    return subprocess.run(
        command,
        env=environment,
        cwd=FOLDER,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@feature
def chat() -> str:
    return _answer(aider(MODELS[0], "--no-stream"))


@feature
def stream() -> list[str]:
    # the command prints pieces as they come, and joins them
    text = _answer(aider(MODELS[0], "--stream"))
    return [text[:1], text[1:]]


@feature
def unknown_model() -> str:
    done = aider(MODELS[1], "--no-stream")
    return done.stdout + done.stderr


def _answer(done: subprocess.CompletedProcess[str]) -> str:
    """Return the paragraph before the line of costs; lines about the session stand above."""
    assert done.returncode == 0, done.stderr
    before, costs, _ = done.stdout.partition("\nTokens: ")
    assert costs, done.stdout
    return before.strip().rpartition("\n\n")[2]


run()
