"""Splits, shadows and fallbacks on a real engine, and what of it is billed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

PROMPT = "list the tickets with age over 81"


def until(read: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The first of what `read` gives that is something."""
    deadline = time.monotonic() + timeout_s
    while not (found := read()):
        assert time.monotonic() < deadline, "it didn't happen in time"
        time.sleep(0.05)
    return found


@pytest.mark.campaign
def test_shadow_is_unbilled_and_fallback_replaces_damaged_version(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    server.start()
    try:
        key = server.make_tenant("acme")
        with Client(server.url, api_key=key) as client:
            for name in ("sql", "french"):
                # two versions of one name, which answer differently
                client.adapters.push(str(adapter_dirs()[name]), name="help", promote=name == "sql")
        http = httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)

        def ask(**body: Any) -> httpx2.Response:
            whole = {"model": "help", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **body}
            response = http.post("/v1/completions", json=whole)
            assert response.status_code == 200, response.text
            return response

        alone = {version: ask(model=f"help@{version}").json()["choices"][0]["text"] for version in (1, 2)}
        assert alone[1] != alone[2]
        body = {"version": 1, "shadow": {"version": 2, "share": 1}}
        assert http.put("/api/v1/adapters/help/aliases/live", json=body).status_code == 200
        answers = []

        def compared() -> Any:
            # a copy gives way where the server is busy: it is one of many requests that has one
            answers.append(ask())
            return http.get("/api/v1/adapters/help/aliases/live/shadow").json()["data"]

        rows = until(compared)
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {alone[1]}
        # one an hour
        assert len(rows) <= 2
        for row in rows:
            assert (row["version"], row["shadow_version"], row["num_failed"]) == (1, 2, 0)
            assert row["num_equal"] == 0
            assert row["num_requests"] > 0
            assert row["live_ms"] > 0
            assert row["shadow_ms"] > 0

        used = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)

        def billed() -> Any:
            data = http.get("/api/v1/usage?group_by=adapter,version").json()["data"]
            tokens = {line["version"]: line["completion_tokens"] for line in data}
            return tokens if tokens.get(1, 0) >= used + 8 else None

        tokens = until(billed)
        assert tokens[2] <= 8, "what its copies made is nobody's"

        # the second version answers, until its bytes are damaged
        assert http.patch("/api/v1/adapters/help", json={"fallback": 1}).status_code == 200
        assert http.put("/api/v1/adapters/help/aliases/live", json={"version": 2}).status_code == 200
        assert ask().headers["x-loraserve-adapter"] == "help@2"
        blob = http.get("/api/v1/adapters/help/versions/2/files/adapter_model.safetensors").headers["etag"].strip('"')
        http.close()
        # another engine, which has nothing in memory
        server.kill()
        path = next(server.data_dir.rglob(blob))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)
        server.start()
        http = httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        first = ask()
        assert first.headers["x-loraserve-adapter"] == "help@1; fallback-from=help@2; reason=adapter_corrupt"
        assert first.json()["choices"][0]["text"] == alone[1]
        told = "help@1; fallback-from=help@2; reason=adapter_quarantined"
        until(lambda: ask().headers["x-loraserve-adapter"] == told)
        http.close()
        assert server.stop() == 0
    finally:
        server.kill()
