"""The engine's process is stopped under a server, or never gets ready: what clients,
probes and operators see.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_process import ADMIN_KEY, ServerProcess, environment, events

from loraserve import Client
from loraserve.demo.pack import adapter_dirs, base_dir

HANG_S = 7
READY_BOUND_S = 5
NUM_STREAMS = 6


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    flags = ("--memory-budget", "64MiB", "--host-cache", "64MiB", "--engine-hang-timeout", str(HANG_S))
    server = ServerProcess(tmp_path / "data", flags=flags)
    server.start()
    yield server
    server.kill()


def stream(url: str, key: str, model: str, number: int, begun: list[float]) -> str:
    """Return a whole streamed answer; append to `begun` when its pieces came."""
    body = {"model": model, "prompt": f"list the tickets with age over {number}", "max_tokens": 120}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    lines = []
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                begun.append(time.monotonic())
    assert lines[-1] == "data: [DONE]"
    pieces: list[Any] = [choice for event in events(lines) for choice in event["choices"]]  # type: ignore[attr-defined]
    assert pieces[-1]["finish_reason"] == "length"
    return "".join(piece["text"] for piece in pieces)


def test_stopped_engine_is_replaced_under_running_streams(server: ServerProcess) -> None:
    key = server.make_tenant("acme")
    with Client(server.url, api_key=key) as client:
        for style in ("sql", "french"):
            client.adapters.push(str(adapter_dirs()[style]), name=style)
    models = ("base", "sql", "french")
    asked = [(models[number % len(models)], number) for number in range(NUM_STREAMS)]
    wanted = [stream(server.url, key, *one, []) for one in asked]
    engine = server.engine_pid()
    assert engine is not None
    begun: list[list[float]] = [[] for _ in asked]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams: list[Future[str]] = [
            pool.submit(stream, server.url, key, *one, begun[n]) for n, one in enumerate(asked)
        ]
        while not all(begun):
            time.sleep(0.005)
        os.kill(engine, signal.SIGSTOP)
        stopped_s = time.monotonic()
        assert not any(future.done() for future in streams)

        # its own timeout, however long the engine stands still
        body = {"model": "sql", "prompt": "list the tickets", "max_tokens": 8, "timeout": 0.5}
        headers = {"authorization": f"Bearer {key}"}
        late = httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30)
        assert time.monotonic() - stopped_s < 4
        assert late.json()["error"]["code"] == "deadline_exceeded"

        probe = httpx2.get(f"{server.url}/readyz")
        while probe.status_code == 200:
            assert time.monotonic() - stopped_s < READY_BOUND_S
            time.sleep(0.05)
            probe = httpx2.get(f"{server.url}/readyz")
        assert probe.status_code == 503
        assert probe.json()["detail"].startswith("The engine made no progress for ")
        assert httpx2.get(f"{server.url}/livez").status_code == 200
        assert [future.result(60) for future in streams] == wanted
    assert httpx2.get(f"{server.url}/readyz").status_code == 200
    metrics = server.metrics()
    assert (metrics["loraserve_engine_restarts_total"], metrics["loraserve_engine_hangs_total"]) == (1, 1)
    assert server.engine_pid() != engine
    assert f"was stopped by SIGSTOP for {HANG_S} s" in server.log.read_text()
    assert server.stop() == 0


def test_stopped_engine_does_not_outlive_server(server: ServerProcess) -> None:
    """It can't notice by itself that the server is gone; and it holds the base's memory."""
    engine = server.engine_pid()
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    deadline_s = time.monotonic() + 5
    while is_there(engine):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_engine_never_ready_fails_start_with_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "loraserve.cli.main", "serve", "--model", str(base_dir()), "--port", "0"]
    variables = environment(LORASERVE_ADMIN_KEY=ADMIN_KEY, LORASERVE_FAULTS="model.tensor=kill@5")
    done = subprocess.run(
        [*command, "--data-dir", str(tmp_path / "data")], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.count("the engine died before it was ready") == 3
    assert (
        "The engine died 3 times in a row before it was ready. The last time, it was killed by SIGKILL" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert "loraserve plan" in done.stderr
