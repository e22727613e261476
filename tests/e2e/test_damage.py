"""Stored bytes that rot under a running server: never served, quarantined,
and mended by the same push.
"""

from __future__ import annotations

import time
from pathlib import Path

import httpx2
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs


def ask(server: ServerProcess, key: str, model: str) -> httpx2.Response:
    body = {"model": model, "prompt": "list the tickets with age over 81", "max_tokens": 4, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def flip_a_byte_of_the_largest_blob(data_dir: Path) -> None:
    blobs = [path for path in data_dir.rglob("*") if path.is_file() and len(path.name) == 64]
    path = max(blobs, key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_flipped_byte_is_never_served_and_push_repairs(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    server.start()
    try:
        key = server.make_tenant("acme")
        with Client(server.url, api_key=key) as client:
            client.adapters.push(str(adapter_dirs()["sql"]), name="sql")
        before = ask(server, key, "sql").json()["choices"][0]["text"]
        # another engine, which has nothing in memory
        server.kill()
        server.start()
        flip_a_byte_of_the_largest_blob(server.data_dir)
        with Client(server.url, api_key=key) as client:
            client.adapters.push(str(adapter_dirs()["french"]), name="french")
        first = ask(server, key, "sql")
        assert (first.status_code, first.json()["error"]["code"]) == (503, "adapter_corrupt")
        deadline = time.monotonic() + 10
        while (again := ask(server, key, "sql")).status_code != 409 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "adapter_quarantined")
        assert "damaged" in again.json()["error"]["message"]
        assert ask(server, key, "french").status_code == 200
        with Client(server.url, api_key=key) as client:
            version = client.adapters.push(str(adapter_dirs()["sql"]), name="sql")
        assert (version.version, version.state) == (1, "ready")
        mended = ask(server, key, "sql")
        assert (mended.status_code, mended.json()["choices"][0]["text"]) == (200, before)
        assert server.stop() == 0
    finally:
        server.kill()
