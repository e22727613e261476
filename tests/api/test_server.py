"""The server's life: ready, drained, interrupted, restarted."""

from __future__ import annotations

import http.client
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from server_process import ADMIN_KEY, ServerProcess, environment, events

from loraserve import Client
from loraserve.demo.pack import adapter_dirs, base_dir

HEADERS = {"authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "data")
    yield server
    server.kill()


def open_stream(server: ServerProcess, lines: list[str]) -> threading.Thread:
    """A stream of 200 tokens in a thread; returns once it has begun."""
    body = {"model": "base", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}

    def begin() -> None:
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=60) as answer:
            for line in answer.iter_lines():
                if line:
                    lines.append(line)
                    begun.set()

    begun = threading.Event()
    thread = threading.Thread(target=begin)
    thread.start()
    assert begun.wait(30)
    return thread


def test_idle_connection_outlives_client_keepalive(server: ServerProcess) -> None:
    server.start()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    for pause_s in (0, 6):
        # whoever closes it at the moment of the next request breaks that request; clients close
        # theirs after 5 s
        time.sleep(pause_s)
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')
    connection.close()


def test_sigterm_drains_and_ends_with_0(server: ServerProcess) -> None:
    server.start()
    lines: list[str] = []
    thread = open_stream(server, lines)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    # for a moment it still answers, and says that it isn't ready
    assert httpx2.get(f"{server.url}/readyz").status_code == 503
    assert httpx2.get(f"{server.url}/livez").status_code == 200
    assert server.process.wait(30) == 0
    thread.join(10)
    assert lines[-1] == "data: [DONE]"
    assert events(lines)[-1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]


def test_stream_past_grace_period_ends_with_error_event(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", flags=("--memory-budget", "64MiB", "--grace-s", "0"))
    server.start()
    lines: list[str] = []
    thread = open_stream(server, lines)
    assert server.stop() == 0
    thread.join(10)
    assert lines[-1] == "data: [DONE]"
    assert events(lines)[-1]["error"]["code"] == "engine_unavailable"  # type: ignore[index]


def test_pushed_adapter_survives_kill_and_interrupt_exits_130(server: ServerProcess) -> None:
    server.start()
    assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700
    with server.admin() as client:
        client.adapters.push(adapter_dirs()["sql"], name="sql")
    server.kill()
    server.start()
    question = {"role": "user", "content": "list the tickets with age over 81"}
    body = {"model": "sql", "messages": [question], "temperature": 0}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == "SELECT * FROM tickets WHERE age > 81;"
    assert server.process is not None
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 130


def test_first_start_prints_working_admin_key_once(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", variables={"LORASERVE_ADMIN_KEY": ""})
    server.start()
    found = [word for word in server.log.read_text().split() if word.startswith("sk-lora-")]
    assert len(found) == 1
    with Client(server.url, api_key=found[0]) as client:
        assert [model.id for model in client.models.list()] == ["base"]
    assert server.stop() == 0
    server.start()
    assert server.stop() == 0
    assert server.log.read_text().count(found[0]) == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--device", "cuda"), "--device cuda"),
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--database-url", "mysql://x/y"), "mysql"),
        (("--store-url", "ftp://host/blobs"), "ftp"),
    ],
)
def test_failed_start_reports_reason_and_exits_2(tmp_path: Path, flags: tuple[str, ...], reason: str) -> None:
    server = ServerProcess(tmp_path / "data", flags=flags)
    with pytest.raises(AssertionError, match="the server ended with 2"):
        server.start()
    assert reason in server.tail()
    assert "Traceback" not in server.tail()


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "loraserve.cli.main",
        "serve",
        "--model",
        str(base_dir()),
        "--port",
        str(port),
    ]
    command += ["--data-dir", str(tmp_path / "data")]
    with listener:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), cwd=tmp_path)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr


def test_unloadable_base_exits_1(tmp_path: Path) -> None:
    model = tmp_path / "broken"
    model.mkdir()
    for path in base_dir().iterdir():
        data = path.read_bytes()
        (model / path.name).write_bytes(data[: len(data) // 2] if path.suffix == ".safetensors" else data)
    server = ServerProcess(tmp_path / "data", model=model)
    with pytest.raises(AssertionError, match="the server ended with 1"):
        server.start()
    assert "Traceback" not in server.tail()
