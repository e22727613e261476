"""A server without keys, and the command line and the SDK that have none."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import ServerProcess

from loraserve import Client, errors
from loraserve.demo.pack import adapter_dirs

FLAGS = ("--memory-budget", "64MiB", "--host-cache", "64MiB")


def test_local_server_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORASERVE_API_KEY", raising=False)
    server = ServerProcess(tmp_path / "data", flags=(*FLAGS, "--no-auth"))
    server.start()
    try:
        assert "requests without a key are an admin's, for the tenant default" in server.log.read_text()
        name, folder = next(iter(adapter_dirs().items()))
        with Client(server.url) as client:
            client.adapters.push(folder, name=name)
            assert client.completions.create(model=name, prompt="x", max_tokens=1).choices
        server.variables["LORASERVE_URL"] = server.url.removeprefix("http://")
        shown = server.run("adapter", "list", "--format", "quiet")
        assert (shown.returncode, shown.stdout.split()) == (0, [name]), shown.stderr
    finally:
        assert server.stop() == 0


def test_foreign_address_needs_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORASERVE_API_KEY", raising=False)
    server = ServerProcess(tmp_path / "data", flags=(*FLAGS, "--no-auth", "--host", "0.0.0.0"))
    refused = server.run("serve")
    assert refused.returncode == 2
    assert "--no-auth makes every request an admin's" in refused.stderr
    server.flags = FLAGS
    server.start()
    try:
        with Client(server.url) as client, pytest.raises(errors.ConfigError, match="LORASERVE_API_KEY"):
            client.base()
    finally:
        assert server.stop() == 0
