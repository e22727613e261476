"""A store is served by the registry that it belongs to, and by no other: an empty, a foreign or an
older one is refused, and takes no blob.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from s3_server import S3Server
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

PROMPT = "list the tickets with age over 81"


@dataclass
class Place:
    """Place with two registries and one store."""

    one: ServerProcess
    other: ServerProcess

    def blobs(self, server: ServerProcess) -> set[Path]:
        return {path for path in (server.data_dir / "blobs").rglob("*") if len(path.name) == 64}


@pytest.fixture(params=["sqlite and a directory", pytest.param("postgres and a bucket", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite and a directory":
        variables = {"LORASERVE_STORE_URL": f"file://{tmp_path / 'one' / 'blobs'}"}
        place = Place(
            ServerProcess(tmp_path / "one", variables=variables), ServerProcess(tmp_path / "two", variables=variables)
        )
        yield place
    else:
        make_url: Callable[[], str] = request.getfixturevalue("make_postgres_url")
        with S3Server() as s3:
            variables = {**s3.variables, "LORASERVE_STORE_URL": f"s3://{s3.make_bucket()}/blobs"}
            place = Place(
                *(
                    ServerProcess(tmp_path / name, variables={**variables, "LORASERVE_DATABASE_URL": make_url()})
                    for name in ("one", "two")
                )
            )
            yield place
    for server in (place.one, place.other):
        server.kill()


def push(server: ServerProcess, key: str, name: str) -> None:
    with Client(server.url, api_key=key) as client:
        client.adapters.push(str(adapter_dirs()[name]), name=name)


def answer(server: ServerProcess, key: str, name: str) -> str:
    with Client(server.url, api_key=key) as client:
        return client.completions.create(model=name, prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text


def test_foreign_registry_is_refused_until_operator_adopts_store(place: Place) -> None:
    one, other = place.one, place.other
    one.start()
    key = one.make_tenant("acme")
    push(one, key, "sql")
    text = answer(one, key, "sql")
    refused = other.run("serve")
    assert refused.returncode == 2, refused.stderr
    assert "belongs to registry" in refused.stderr
    assert "loraserve db adopt-store" in refused.stderr
    assert "Traceback" not in refused.stderr
    # saying it without --yes changes nothing
    said = other.run("db", "adopt-store", "--data-dir", str(other.data_dir))
    assert said.returncode == 2
    assert re.search(r"^unknown +2$", said.stdout, re.MULTILINE)
    assert other.run("serve").returncode == 2
    # the first goes on, and starts again
    assert answer(one, key, "sql") == text
    assert one.stop() == 0
    one.start()
    assert answer(one, key, "sql") == text
    assert one.stop() == 0
    adopted = other.run("db", "adopt-store", "--data-dir", str(other.data_dir), "--yes")
    assert adopted.returncode == 0, adopted.stderr
    other.start()
    assert other.stop() == 0
    assert one.run("serve").returncode == 2


@pytest.mark.campaign
def test_lost_database_is_not_replaced_over_full_store(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    server.start()
    try:
        key = server.make_tenant("acme")
        push(server, key, "sql")
        assert server.stop() == 0
        stored = {path for path in (tmp_path / "data" / "blobs").rglob("*") if len(path.name) == 64}
        assert len(stored) == 2
        shutil.copytree(server.data_dir, tmp_path / "backup")
        server.start()
        push(server, key, "french")
        assert server.stop() == 0
        # an empty one
        for name in ("registry.db", "registry.db-wal", "registry.db-shm"):
            (server.data_dir / name).unlink(missing_ok=True)
        refused = server.run("serve")
        assert refused.returncode == 2, refused.stderr
        assert "belongs to registry" in refused.stderr
        # a backup from before the last start
        shutil.copyfile(tmp_path / "backup" / "registry.db", server.data_dir / "registry.db")
        refused = server.run("serve")
        assert refused.returncode == 2, refused.stderr
        assert "later state of this registry" in refused.stderr
        assert server.run("db", "adopt-store", "--data-dir", str(server.data_dir), "--yes").returncode == 0
        server.start()
        assert answer(server, key, "sql")
        push(server, key, "french")
        assert server.stop() == 0
    finally:
        server.kill()
