"""Simon Willison's `llm`, the command, with models of its extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from probe import BASE_URL, JSON_MODEL, KEY, MAX_TOKENS, QUESTION, SCHEMA, TEXT_MODEL, feature, run

_SCRATCH = tempfile.TemporaryDirectory(prefix="llm-", ignore_cleanup_errors=True)
FOLDER = Path(_SCRATCH.name)
FACTS = {"api_base": BASE_URL, "supports_schema": True, "api_key_name": "loraserve"}
# YAML takes JSON
(FOLDER / "extra-openai-models.yaml").write_text(
    json.dumps([{"model_id": name, "model_name": name, **FACTS} for name in (TEXT_MODEL, JSON_MODEL, "absent")])
)
(FOLDER / "keys.json").write_text(json.dumps({"loraserve": KEY}))


def llm(model: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "llm"), "-m", model, "-o", "temperature", "0"]
    command += ["-o", "max_tokens", str(MAX_TOKENS), *options, QUESTION]
    environment = {**os.environ, "LLM_USER_PATH": str(FOLDER)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@feature
def chat() -> str:
    return _checked(llm(TEXT_MODEL, "--no-stream")).strip()


@feature
def stream() -> list[str]:
    # the command prints pieces as they come, and joins them
    text = _checked(llm(TEXT_MODEL)).strip()
    return [text[:1], text[1:]]


@feature
def parse() -> dict[str, Any]:
    return json.loads(_checked(llm(JSON_MODEL, "--schema", json.dumps(SCHEMA))))


@feature
def unknown_model() -> str:
    done = llm("absent", "--no-stream")
    assert done.returncode, done.stdout
    return done.stderr


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


run()
