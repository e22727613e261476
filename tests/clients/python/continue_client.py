"""Continue's command line, headless, with its own prompt and tools, and one tool of an MCP server.

It has no setting that demands a tool of the first step alone: the relay adds that to its first
request.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from probe import (
    BASE_URL,
    DESCRIPTION,
    JSON_MODEL,
    KEY,
    MAX_TOKENS,
    QUESTION,
    RESULT,
    SCHEMA,
    TEXT_MODEL,
    URL,
    feature,
    run,
)
from program import printed_by, run_program
from relay import relayed

PROGRAM = Path(sys.prefix) / "node_modules/.bin/cn"
_SCRATCH = tempfile.TemporaryDirectory(prefix="continue-", ignore_cleanup_errors=True)
FOLDER = Path(_SCRATCH.name)
CALLS = FOLDER / "calls.jsonl"
"""Arguments of each call, as the tool got them."""
MCP_SERVER = FOLDER / "mcp_server.py"
MCP_SERVER.write_text(
    f"""
import json, sys

TOOL = {{"name": "query", "description": {DESCRIPTION!r}, "inputSchema": {SCHEMA!r}}}
ABOUT = {{"capabilities": {{"tools": {{}}}}, "serverInfo": {{"name": "tables", "version": "1"}}}}
for line in sys.stdin:
    request = json.loads(line)
    parameters = request.get("params", {{}})
    match request["method"]:
        case "initialize":
            result = {{"protocolVersion": parameters["protocolVersion"], **ABOUT}}
        case "tools/list":
            result = {{"tools": [TOOL]}}
        case "tools/call":
            with open({str(CALLS)!r}, "a") as calls:
                calls.write(json.dumps(parameters["arguments"]) + "\\n")
            result = {{"content": [{{"type": "text", "text": {RESULT!r}}}]}}
        case _:
            result = {{}}
    if "id" in request:
        print(json.dumps({{"jsonrpc": "2.0", "id": request["id"], "result": result}}), flush=True)
"""
)


def cn(model: str, *options: str, base_url: str = BASE_URL, has_tool: bool = False) -> subprocess.CompletedProcess[str]:
    entry = {"name": model, "provider": "openai", "model": model, "apiBase": base_url, "apiKey": KEY}
    entry |= {"roles": ["chat"], "defaultCompletionOptions": {"temperature": 0, "maxTokens": MAX_TOKENS}}
    config: dict[str, Any] = {"name": "loraserve", "version": "0.0.1", "schema": "v1", "models": [entry]}
    if has_tool:
        config["mcpServers"] = [{"name": "tables", "command": sys.executable, "args": [str(MCP_SERVER)]}]
    # YAML takes JSON
    (FOLDER / "config.yaml").write_text(json.dumps(config))
    command = [str(PROGRAM), "-p", "--config", str(FOLDER / "config.yaml"), *options, QUESTION]
    return run_program(command, FOLDER, {"CONTINUE_TELEMETRY_ENABLED": "0"})


@feature
def chat() -> str:
    return printed_by(cn(TEXT_MODEL)).strip()


@feature
def stream() -> list[str]:
    """Return the pieces that the server sent, of a text that the command prints at its end."""
    with relayed(URL) as (url, exchanges):
        text = printed_by(cn(TEXT_MODEL, base_url=f"{url}/v1")).strip()
    (exchange,) = exchanges
    deltas = [chunk["choices"][0]["delta"] for chunk in exchange.events() if chunk["choices"]]
    pieces = [delta["content"] for delta in deltas if delta.get("content")]
    assert "".join(pieces) == text, (pieces, text)
    return pieces


@feature
def agent() -> dict[str, Any]:
    forced = {"tool_choice": {"type": "function", "function": {"name": "query"}}}
    with relayed(URL, added=forced) as (url, exchanges):
        text = printed_by(cn(JSON_MODEL, "--auto", base_url=f"{url}/v1", has_tool=True)).strip()
    # a tool's message has the parts of MCP's content, as JSON
    parts = [message["content"] for message in exchanges[-1].request["messages"] if message["role"] == "tool"]
    results = [part["text"] for part_list in map(json.loads, parts) for part in part_list]
    return {"calls": [json.loads(line) for line in CALLS.read_text().splitlines()], "results": results, "text": text}


@feature
def unknown_model() -> str:
    done = cn("absent")
    assert done.returncode, done.stdout
    return done.stdout + done.stderr


run()
