"""The database's file is damaged before a start, or goes away under a running server: said in a
sentence, and nothing acknowledged is lost.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from campaigns import default_and_campaign
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs
from loraserve.errors import DatabaseUnavailable

FLAGS = ("--memory-budget", "32MiB", "--host-cache", "32MiB", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
PROMPT = "list the tickets with age over 81"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "data", flags=FLAGS)
    server.start()
    yield server
    server.kill()


def complete(server: ServerProcess, key: str) -> int:
    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).status_code


@pytest.mark.parametrize("how", default_and_campaign(["renamed", "replaced"], default=["renamed"]))
def test_missing_database_file_refuses_pushes_until_restored(server: ServerProcess, tmp_path: Path, how: str) -> None:
    key = server.make_tenant("acme")
    path, away = server.data_dir / "registry.db", tmp_path / "away.db"
    with Client(server.url, api_key=key, max_retries=0) as client:
        client.adapters.push(str(adapter_dirs()["sql"]), name="sql")
        assert complete(server, key) == 200
        empty = tmp_path / "empty.db"
        if how == "replaced":
            assert server.run("db", "upgrade", "--database-url", f"sqlite:///{empty}").returncode == 0
        path.rename(away)
        if how == "replaced":
            shutil.copyfile(empty, path)
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable) as refused:
                client.adapters.push(str(adapter_dirs()["french"]), name="french")
            assert (refused.value.status_code, refused.value.code) == (503, "database_unavailable")
        tenant = httpx2.post(
            f"{server.url}/api/v1/tenants", json={"name": "late"}, headers={"authorization": f"Bearer {ADMIN_KEY}"}
        )
        assert (tenant.status_code, tenant.json()["code"]) == (503, "database_unavailable")
        ready = httpx2.get(f"{server.url}/readyz")
        assert (ready.status_code, ready.json()["database"]) == (200, "unavailable")
        # what is known is served on, for longer than any answer of the database is used again
        for _ in range(5):
            assert complete(server, key) == 200
            time.sleep(1.5)
        assert path.exists() is (how == "replaced")
        away.rename(path)
        pushed = client.adapters.push(str(adapter_dirs()["french"]), name="french")
        assert pushed.version == 1
        assert "database" not in httpx2.get(f"{server.url}/readyz").json()
    assert server.stop() == 0
    server.start()
    with Client(server.url, api_key=key) as client:
        assert sorted(adapter.name for adapter in client.adapters.list()) == ["french", "sql"]
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()


def test_damaged_database_fails_start_with_single_sentence(server: ServerProcess) -> None:
    key = server.make_tenant("acme")
    with Client(server.url, api_key=key) as client:
        client.adapters.push(str(adapter_dirs()["sql"]), name="sql")
    assert server.stop() == 0
    path = server.data_dir / "registry.db"
    whole = path.read_bytes()
    for data in (
        whole[: len(whole) // 2],
        whole[:100],
        b"\x07" * 100 + whole[100:],
        whole[: 8 * 4096] + b"\x55" * 4096 + whole[9 * 4096 :],
    ):
        path.write_bytes(data)
        refused = server.run("serve")
        assert refused.returncode == 1, refused.stderr
        assert f"{path} is damaged, truncated, or no database at all" in refused.stderr
        assert "Traceback" not in refused.stderr
    path.write_bytes(whole)
    server.start()
    assert complete(server, key) == 200
    # cut to nothing it is no empty registry: its store says whose it is
    assert server.stop() == 0
    path.write_bytes(b"")
    refused = server.run("serve")
    assert (refused.returncode, "belongs to registry" in refused.stderr) == (2, True)
