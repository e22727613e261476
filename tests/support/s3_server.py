"""An S3 of the tests' own: moto's server in a process of its own, on the loopback, on a free port.

Its buckets are in memory.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field

import httpx2
from server_process import environment, free_port

START_S = 60.0


@dataclass
class S3Server:
    """Runs as long as the with block."""

    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """What a program needs in its environment to find it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self) -> str:
        """A new empty bucket's name."""
        name = f"tests-{uuid.uuid4().hex}"
        httpx2.put(f"{self.url}/{name}", timeout=30).raise_for_status()
        return name

    def __enter__(self) -> S3Server:
        command = [sys.executable, "-P", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
        )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                httpx2.get(f"{self.url}/moto-api/", timeout=5)
                return self
            except httpx2.TransportError:
                assert self._process.poll() is None, f"moto's server ended with {self._process.returncode}"
                time.sleep(0.05)
        raise AssertionError(f"moto's server didn't answer within {START_S:.0f} s")

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
