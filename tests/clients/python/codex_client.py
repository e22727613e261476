"""OpenAI's Codex CLI, the program, in its default configuration but for the provider."""

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

PROGRAM = Path(sys.prefix) / "node_modules/.bin/codex"
_SCRATCH = tempfile.TemporaryDirectory(prefix="codex-", ignore_cleanup_errors=True)
FOLDER = Path(_SCRATCH.name)


def codex(model: str, *options: str, url: str = URL) -> subprocess.CompletedProcess[str]:
    provider = {"name": "loraserve", "base_url": f"{url}/v1", "env_key": "LORASERVE_KEY", "wire_api": "responses"}
    # TOML's inline table
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    command = [str(PROGRAM), "exec", *options, "--skip-git-repo-check", "-m", model]
    command += ["-c", 'model_provider="lora"', "-c", f"model_providers.lora={{{table}}}", QUESTION]
    environment = {"CODEX_HOME": str(FOLDER), "LORASERVE_KEY": KEY}
    return run_program(command, FOLDER, environment)


@feature
def chat() -> str:
    return printed_by(codex(TEXT_MODEL)).strip()


@feature
def sent_and_ignored() -> dict[str, Any]:
    """Return the tools of its request, and what the server names as left out."""
    with relayed(URL) as (url, exchanges):
        printed_by(codex(TEXT_MODEL, url=url))
    (exchange,) = exchanges
    return {
        "status": exchange.status,
        "sent": sorted({tool["type"] for tool in exchange.request["tools"]}),
        "ignored": exchange.headers.get("x-loraserve-ignored", ""),
    }


@feature
def unknown_model() -> str:
    done = codex("absent", "--json")
    assert done.returncode, done.stdout
    events = map(json.loads, done.stdout.splitlines())
    return next(event["message"] for event in events if event["type"] == "error")


run()
