"""Processes of a server have no secret in their environment that they don't need."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import ADMIN_KEY, ServerProcess


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(below for child in children for below in descendants(child))]


@pytest.mark.slow
def test_engine_environment_has_no_key(tmp_path: Path) -> None:
    variables = {"HF_TOKEN": "hf_of_the_tests", "OTEL_EXPORTER_OTLP_HEADERS": "api-key=of-the-tests"}
    server = ServerProcess(tmp_path / "data", variables=variables, is_forked=False)
    server.start()
    try:
        assert server.process is not None
        assert ADMIN_KEY in Path(f"/proc/{server.process.pid}/environ").read_text()
        found = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in descendants(server.process.pid)}
        assert server.engine_pid() in found
        for environment in found.values():
            for secret in (ADMIN_KEY, *variables.values()):
                assert secret.encode() not in environment
    finally:
        server.kill()
