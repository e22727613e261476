from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs


def push_all(url: str, key: str) -> None:
    with Client(url, api_key=key) as client:
        for name, path in adapter_dirs().items():
            client.adapters.push(str(path), name=name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on the bundled base with a few KV blocks and sequences less than the load asks
    for.
    """
    root: Path = tmp_path_factory.mktemp("e2e")
    server = ServerProcess(
        root / "data",
        flags=(
            "--memory-budget",
            "16MiB",
            "--host-cache",
            "64MiB",
            "--max-num-seqs",
            "24",
            "--max-num-batched-tokens",
            "96",
        ),
    )
    server.start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def key(server: ServerProcess) -> str:
    """A tenant's key; the tenant has the seven adapters."""
    key = server.make_tenant("acme")
    push_all(server.url, key)
    return key
