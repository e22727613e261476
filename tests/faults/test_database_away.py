"""The database goes away under a running server: what is known goes on, writes say when to come
back, and nothing is written by half.

LORASERVE_OUTAGE_S says for how long (60 for the whole of it); the default run's is longer than any
answer of the database is used again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from server_process import ServerProcess
from sqlalchemy import make_url
from tcp_proxy import State, TcpProxy

from loraserve import Client
from loraserve.demo.pack import adapter_dirs
from loraserve.limits import LIMITS

pytestmark = pytest.mark.postgres

OUTAGE_S = float(os.environ.get("LORASERVE_OUTAGE_S", str(LIMITS.auth_cache_s + 2)))
FLAGS = ("--memory-budget", "32MiB", "--host-cache", "32MiB", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
PROMPT = "list the tickets with age over 81"


@pytest.fixture(scope="module")
def proxy(make_postgres_url: Callable[[], str]) -> Iterator[tuple[TcpProxy, str]]:
    """A way to an empty database, and the URL through it."""
    url = make_url(make_postgres_url())
    with TcpProxy(url.host or "", url.port or 0) as proxy:
        through = url.set(host="127.0.0.1", port=proxy.local_port)
        yield proxy, through.render_as_string(hide_password=False)


@pytest.fixture(scope="module")
def server(proxy: tuple[TcpProxy, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root: Path = tmp_path_factory.mktemp("away")
    server = ServerProcess(root / "data", flags=FLAGS, variables={"LORASERVE_DATABASE_URL": proxy[1]})
    server.start()
    yield server
    assert server.stop() == 0


def complete(client: httpx2.Client, model: str) -> tuple[int, float]:
    """The status, and the seconds that it took."""
    began = time.monotonic()
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    return client.post("/v1/completions", json=body).status_code, time.monotonic() - began


@pytest.mark.parametrize("state", [State.REFUSING, State.SILENT])
def test_cached_names_and_keys_work_during_database_outage(
    proxy: tuple[TcpProxy, str], server: ServerProcess, state: State
) -> None:
    key = server.make_tenant(f"acme-{state}")
    with Client(server.url, api_key=key) as client:
        client.adapters.push(str(adapter_dirs()["sql"]), name="sql")
        client.adapters.push(str(adapter_dirs()["french"]), name="french", promote=False)
    headers = {"authorization": f"Bearer {key}"}
    alias = "/api/v1/adapters/sql/aliases/live"
    with httpx2.Client(base_url=server.url, headers=headers, timeout=60) as client:
        before = client.get(alias)
        assert complete(client, "sql")[0] == 200
        proxy[0].become(state)
        ended = time.monotonic() + OUTAGE_S
        took = []
        while time.monotonic() < ended:
            status, seconds = complete(client, "sql")
            assert status == 200
            took.append(seconds)
            time.sleep(0.05)
        # Only who finds out that it is away waits: once for the key, once for the name.
        assert sum(seconds > 1 for seconds in took) <= 3
        refused = client.put("/api/v1/adapters/sql/aliases/other", json={"version": 1})
        assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/livez").status_code == 200
        proxy[0].become(State.UP)
        deadline = time.monotonic() + 10
        while (moved := client.put("/api/v1/adapters/sql/aliases/other", json={"version": 1})).status_code == 503:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert moved.status_code == 201
        after = client.get(alias)
        assert (after.headers["etag"], after.json()) == (before.headers["etag"], before.json())
        # what was used meanwhile is counted
        deadline = time.monotonic() + 10
        while sum(one["num_requests"] for one in client.get("/api/v1/usage").json()["data"]) != len(took) + 1:
            assert time.monotonic() < deadline
            time.sleep(0.2)
