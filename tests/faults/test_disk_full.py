"""A disk that fills up under a running server, for real: a small file system of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client, errors
from loraserve.demo.pack import adapter_dirs

PROMPT = "list the tickets with age over 81"
FLAGS = ("--memory-budget", "32MiB", "--host-cache", "32MiB", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for 16 MiB."""
    folder = tmp_path / "data"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a file system can't be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """`path` takes all the room that there is."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_full_disk_refuses_only_writes_without_requiring_restart(small_disk: Path) -> None:
    server = ServerProcess(small_disk, flags=FLAGS)
    server.start()
    try:
        key = server.make_tenant("acme")
        with (
            Client(server.url, api_key=key) as client,
            httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as raw,
        ):
            for name in ("sql", "spare"):
                client.adapters.push(str(adapter_dirs()[name if name == "sql" else "french"]), name=name)
            server.make_tenant("spare")
            admin = {"authorization": f"Bearer {ADMIN_KEY}", "x-tenant": "acme"}

            def complete(model: str) -> int:
                body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
                return raw.post("/v1/completions", json=body).status_code

            assert complete("sql") == 200
            fill(small_disk / "ballast")
            with pytest.raises(errors.StorageFull):
                client.adapters.push(str(adapter_dirs()["french"]), name="french")
            assert [complete("sql") for _ in range(5)] == [200] * 5
            assert raw.get("/api/v1/adapters/sql").status_code == 200
            assert raw.get("/api/v1/adapters/french").status_code == 404
            assert list((small_disk / "blobs" / "staging").iterdir()) == []
            # reading reads, and deleting makes room
            assert raw.get("/api/v1/usage").status_code == 200
            assert raw.get("/api/v1/usage?group_by=adapter,hour").status_code == 200
            for path in ("adapters/spare", "tenants/spare"):
                assert raw.delete(f"/api/v1/{path}", headers=admin).status_code == 204
            (small_disk / "ballast").unlink()
            client.adapters.push(str(adapter_dirs()["french"]), name="french")
            assert complete("french") == 200
            # what was used while the disk was full is counted
            deadline = time.monotonic() + 10
            while sum(one["num_requests"] for one in raw.get("/api/v1/usage").json()["data"]) != 7:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert server.stop() == 0
    finally:
        server.kill()
