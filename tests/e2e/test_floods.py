"""Floods of connections that fall silent, in the clear and with TLS, beside others' 16 streams."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaigns import default_and_campaign
from flood import FLOODS, run_flood
from server_process import ServerProcess
from tls_files import write_certificate

MAX_FILES = 700
"""Limit of the short tests' server, which leaves 350 descriptors to connections."""


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> ssl.SSLContext | None:
    if not request.param:
        return None
    write_certificate(tmp_path / "tls.pem", tmp_path / "tls.key")
    return ssl.create_default_context(cafile=tmp_path / "tls.pem")


@pytest.fixture(params=default_and_campaign([MAX_FILES, None], default=[MAX_FILES]))
def server(request: pytest.FixtureRequest, tls: ssl.SSLContext | None, tmp_path: Path) -> Iterator[ServerProcess]:
    flags = ["--memory-budget", "64MiB", "--host-cache", "64MiB", "--log-level", "warning"]
    cert = tmp_path / "tls.pem"
    if tls is not None:
        flags += ["--ssl-certfile", str(cert), "--ssl-keyfile", str(tmp_path / "tls.key")]
    server = ServerProcess(
        tmp_path / "data",
        flags=tuple(flags),
        ca=None if tls is None else cert,
        is_forked=False,
        max_files=request.param,
    )
    server.start()
    yield server
    server.kill()


@pytest.mark.slow
async def test_flood_leaves_answers_to_clients_elsewhere(server: ServerProcess, tls: ssl.SSLContext | None) -> None:
    key, others_key = server.make_tenant("acme"), server.make_tenant("globex")
    is_short = server.max_files is not None
    count, num_rounds = (500, 1) if is_short else (6000, 3)
    for flood in FLOODS:
        # connections that never shake hands were not counted at all
        for shakes_hands in (False, True) if tls is not None and flood == "silent" else (True,):
            report = await run_flood(
                server,
                flood,
                count,
                key=key,
                others_key=others_key,
                num_rounds=num_rounds,
                tls=tls,
                shakes_hands=shakes_hands,
            )
            print(report)  # noqa: T201 - the campaign's figures
            assert set(report.statuses) == {200}, str(report)
            assert report.texts == {"[DONE]"}
            if is_short:
                assert report.most_descriptors < MAX_FILES - 250, str(report)
    assert server.process is not None
    assert server.process.poll() is None
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
async def test_stalled_bodies_leave_capacity_to_shared_address(
    server: ServerProcess, tls: ssl.SSLContext | None
) -> None:
    key, others_key = server.make_tenant("acme"), server.make_tenant("globex")
    count = 400 if server.max_files is not None else 4300
    report = await run_flood(
        server,
        "bodies",
        count,
        key=key,
        others_key=others_key,
        tls=tls,
        flood_at="127.0.0.2",
        others_at="127.0.0.2",
        # of a server with few connections: until its head is read, each is its address's
        every_s=0.005 if count < 1000 else 0.0,
    )
    print(report)  # noqa: T201
    assert set(report.statuses) == {200}, str(report)
    assert report.texts == {"[DONE]"}
