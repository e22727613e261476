"""A server speaks HTTPS, and takes another certificate and other settings while streams run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from server_process import ADMIN_KEY, ServerProcess, events
from tls_files import served_serial, write_certificate

HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    cert, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    write_certificate(cert, key)
    (tmp_path / "loraserve.toml").write_text('log_level = "warning"\n')
    flags = (
        "--memory-budget",
        "64MiB",
        "--host-cache",
        "64MiB",
        "--ssl-certfile",
        str(cert),
        "--ssl-keyfile",
        str(key),
    )
    server = ServerProcess(tmp_path / "data", flags=flags, ca=cert)
    yield server
    server.kill()


def wait_for(server: ServerProcess, words: str) -> None:
    end = time.monotonic() + 20
    while words not in server.log.read_text():
        assert time.monotonic() < end, server.tail()
        time.sleep(0.05)


def hang_up(server: ServerProcess) -> None:
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGHUP)


def test_certificates_and_settings_reload_under_stream_unless_invalid(server: ServerProcess, tmp_path: Path) -> None:
    server.start()
    first = served_serial(server.port)
    with pytest.raises(httpx2.TransportError):
        httpx2.get(f"http://127.0.0.1:{server.port}/livez", timeout=5)
    body = {"model": "demo-base", "prompt": "list the tickets", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with server.client() as client:
        body["model"] = client.get(f"{server.url}/v1/models", headers=HEADERS).json()["data"][0]["id"]
        with client.stream("POST", f"{server.url}/v1/completions", json=body, headers=HEADERS) as stream:
            lines = stream.iter_lines()
            got = [next(lines)]
            second = write_certificate(tmp_path / "tls.pem", tmp_path / "tls.key")
            (tmp_path / "loraserve.toml").write_text(
                'log_level = "info"\nmax_num_seqs = 7\naccess_log = false\nretention_s = 3600\n'
                'cors_allow_origins = ["https://app.example.org"]\n'
            )
            hang_up(server)
            wait_for(server, "changed settings that need a restart: max_num_seqs")
            assert served_serial(server.port) == second != first
            page = {**HEADERS, "Origin": "https://app.example.org"}
            with server.client() as trusting:
                allowed = trusting.get(f"{server.url}/v1/models", headers=page).headers
            assert allowed["access-control-allow-origin"] == page["Origin"]
            # half a file, as a renewal that isn't done yet, and a broken one of settings
            certificate = (tmp_path / "tls.pem").read_bytes()
            (tmp_path / "tls.pem").write_bytes(certificate[:100])
            hang_up(server)
            wait_for(server, "the settings stay as they are: --ssl-certfile")
            (tmp_path / "tls.pem").write_bytes(certificate)
            (tmp_path / "loraserve.toml").write_text("log_level = [")
            hang_up(server)
            wait_for(server, "loraserve.toml is not valid TOML")
            assert served_serial(server.port) == second
            got += lines
        assert stream.status_code == 200
        assert sum(len(event["choices"]) for event in events(got)) > 0
        assert got[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in got
    log = server.log.read_text()
    for change in (
        "access_log (True -> False)",
        "cors_allow_origins (none -> https://app.example.org)",
        "log_level (warning -> info)",
        "retention_s (604800.0 -> 3600.0)",
    ):
        assert change in log, change
    # the line of the request for models would be in the access log
    assert '"path": "/v1/models"' not in log.partition("the settings were read again")[2]
    assert server.stop() == 0


def test_a_start_with_wrong_files_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    write_certificate(tmp_path / "other.pem", tmp_path / "tls.key")
    refused = server.run("serve")
    assert refused.returncode == 2, refused.stderr
    assert "key values mismatch" in refused.stderr
    assert "Traceback" not in refused.stderr
