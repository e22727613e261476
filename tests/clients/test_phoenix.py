"""Traces of this server as Arize Phoenix receives, reads and returns them."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_process import ADMIN_KEY, ServerProcess, free_port

from loraserve.demo.frames import Compare
from loraserve.demo.pack import adapter_dirs

from .conftest import ENVIRONMENTS
from .table import HERE, ROOT

START_S = 300
RECEIVED_S = 60
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def phoenix(tmp_path: Path) -> Iterator[str]:
    """Address of a Phoenix that has no traces yet."""
    folder = ENVIRONMENTS / "phoenix"
    if not (folder / ".installed").is_file():
        pytest.skip("phoenix isn't installed: make clients CLIENTS=phoenix installs and tests it")
    port = free_port()
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PHOENIX_WORKING_DIR": str(tmp_path),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    log = tmp_path / "phoenix.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [folder / "bin" / "phoenix", "serve"], cwd=tmp_path, env=environment, stdout=output, stderr=output
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while not _is_ready(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def received_spans(url: str, count: int) -> dict[str, dict[str, Any]]:
    """Return the trace's spans by name, once there are that many."""
    deadline = time.monotonic() + RECEIVED_S
    while True:
        answer = httpx2.get(
            f"{url}/v1/projects/default/spans", params={"trace_id": TRACE, "limit": 100}, timeout=30
        ).raise_for_status()
        spans = {span["name"]: span for span in answer.json()["data"]}
        if len(spans) >= count or time.monotonic() > deadline:
            return spans
        time.sleep(0.5)


@pytest.mark.clients
def test_phoenix_shows_generation_of_adapter(phoenix: str, tmp_path: Path) -> None:
    flags = ("--memory-budget", "64MiB", "--trace-endpoint", phoenix)
    server = ServerProcess(tmp_path / "data", flags=flags, variables={"OTEL_BSP_SCHEDULE_DELAY": "200"})
    server.start()
    try:
        with server.admin() as client:
            client.adapters.push(adapter_dirs()["sql"], name="sql")
        messages = [{"role": "user", "content": Compare("list", "tickets", "age", "over", 81).prompt}]
        answer = httpx2.post(
            f"{server.url}/v1/chat/completions",
            json={"model": "sql", "messages": messages, "temperature": 0},
            headers={"authorization": f"Bearer {ADMIN_KEY}", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"},
            timeout=60,
        ).raise_for_status()
        names = {"POST /v1/chat/completions", "admission", "chat sql", "queue", "adapter_load", "prefill", "decode"}
        spans = received_spans(phoenix, len(names))
    finally:
        assert server.stop() == 0
    assert names <= set(spans)
    request, generation = spans["POST /v1/chat/completions"], spans["chat sql"]
    assert request["parent_id"] == "00f067aa0ba902b7"
    assert request["attributes"]["http.response.status_code"] == 200
    assert generation["parent_id"] == request["context"]["span_id"]
    assert {spans[name]["parent_id"] for name in ("queue", "prefill", "decode")} == {generation["context"]["span_id"]}
    # Phoenix knows the span as a model's answer, and reads its tokens
    assert generation["span_kind"] == "LLM"
    usage, attributes = answer.json()["usage"], generation["attributes"]
    assert attributes["llm.model_name"] == "sql"
    assert attributes["llm.token_count.prompt"] == usage["prompt_tokens"]
    assert attributes["llm.token_count.completion"] == usage["completion_tokens"]
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.response.model"] == "sql@1"
    assert attributes["gen_ai.provider.name"] == "loraserve"


def test_tracing_page_names_tested_phoenix() -> None:
    found = re.search(r"^arize-phoenix==(\S+)", (HERE / "requirements" / "phoenix.txt").read_text(), re.MULTILINE)
    assert found
    assert f"Arize Phoenix {found[1]}" in (ROOT / "docs" / "observability.md").read_text()
