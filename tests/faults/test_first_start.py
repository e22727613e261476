"""The start of a server on a core that it hardly gets: slow, and no hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from server_process import ServerProcess

PATIENCE_S = 900.0
SHARE_NICENESS = 10
"""Of two busy processes on a core, the nicer one then gets about a tenth of it."""


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="what waits for a core is Linux's count")
def test_engine_starts_on_tenth_of_core(tmp_path: Path) -> None:
    """Its imports alone take longer than a load may stand still."""
    core = {max(os.sched_getaffinity(0))}
    busy = f"import os\nos.sched_setaffinity(0, {core})\nwhile True: pass"
    nice = f"os.sched_setaffinity(0, {core})\nos.nice({SHARE_NICENESS})"
    run = f"import os, sys\n{nice}\nos.execv(sys.argv[1], sys.argv[1:])"
    server = ServerProcess(tmp_path / "data", flags=("--engine-hang-timeout", "2"), is_forked=False)
    rival = subprocess.Popen([sys.executable, "-c", busy])
    with (tmp_path / "log").open("ab") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-c", run, *server._command], env=server._environment, stdout=log_file, stderr=log_file
        )
    try:
        began, is_ready = time.monotonic(), False
        with server.client() as client:
            while not is_ready and time.monotonic() - began < PATIENCE_S:
                assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
                try:
                    is_ready = client.get(f"{server.url}/readyz", timeout=30).status_code == 200
                except httpx2.TransportError:
                    time.sleep(1)
        log = (tmp_path / "log").read_text()
        assert is_ready, log[-2000:]
        assert "died before it was ready" not in log
        # where a load may stand still for four times two seconds, this one did for longer
        assert time.monotonic() - began > 8
    finally:
        rival.kill()
        process.kill()
        rival.wait()
        process.wait()
