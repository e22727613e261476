"""A real server in a process of its own, for tests that start, kill and restart one.

On the loopback, on a free port.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from zygote import ENGINE, ENGINES_NAME, ForkedProcess

from loraserve import Client
from loraserve.demo.pack import base_dir

ADMIN_KEY = "admin-key-of-the-tests-0123456789"
START_S, STOP_S = 600.0, 30.0


def environment(**variables: str) -> dict[str, str]:
    """This process's variables without loraserve's own, and then `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LORASERVE_")}
    return kept | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | variables


_PORTS = range(15_000, 30_000)
"""Below those that Linux gives to clients: floods of other tests take thousands of these, and one
that was free would be a client's before it is listened at.
"""


def free_port() -> int:
    """Return a port that nothing listens at, and that no client gets."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@dataclass
class ServerProcess:
    """``loraserve serve`` over a data folder that outlives it."""

    data_dir: Path
    model: Path = field(default_factory=base_dir)
    flags: tuple[str, ...] = ("--memory-budget", "64MiB", "--host-cache", "64MiB")
    variables: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    is_forked: bool = True
    """Whether it starts as a fork of a process that has imported what it imports (`zygote`)."""
    ca: Path | None = None
    """Certificate to trust, if it speaks HTTPS."""
    max_files: int | None = None
    """Limit of its open files, of a server that isn't forked; None: this process's."""
    process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def url(self) -> str:
        return f"http{'s' if self.ca else ''}://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.data_dir.with_name(self.data_dir.name + ".log")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Return what a command line that ends by itself says, with the server's variables.

        `serve` gets the server's flags too: a start that is refused.
        """
        command = [sys.executable, "-P", "-m", "loraserve.cli.main", *words]
        if words == ("serve",):
            command = self._command
        cwd, env = self.data_dir.parent, self._environment
        if not self.is_forked:
            return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=START_S)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = ForkedProcess(command, env=env, cwd=cwd, output=output.fileno(), errors=errors.fileno())
            try:
                code = process.wait(START_S)
            finally:
                process.kill()
            for file in (output, errors):
                file.seek(0)
            return subprocess.CompletedProcess(command, code, output.read(), errors.read())

    @property
    def _command(self) -> list[str]:
        command = [sys.executable, "-P", "-m", "loraserve.cli.main", "serve", "--model", str(self.model)]
        command += ["--port", str(self.port), "--data-dir", str(self.data_dir), *self.flags]
        limit = [] if self.max_files is None else ["sh", "-c", f'ulimit -n {self.max_files} && exec "$@"', "serve"]
        return [*limit, *command]

    @property
    def _environment(self) -> dict[str, str]:
        return environment(**{"LORASERVE_ADMIN_KEY": ADMIN_KEY, **self.variables})

    def start(self) -> ServerProcess:
        """Return once it is ready."""
        with self.log.open("ab") as log:
            if self.is_forked:
                self.process = ForkedProcess(
                    self._command, env=self._environment, cwd=self.data_dir.parent, output=log.fileno()
                )
            else:
                self.process = subprocess.Popen(
                    self._command, stdout=log, stderr=log, cwd=self.data_dir.parent, env=self._environment
                )
        deadline = time.monotonic() + START_S
        with self.client() as client:
            while time.monotonic() < deadline:
                assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.tail()}"
                with contextlib.suppress(httpx2.TransportError):
                    if client.get(f"{self.url}/readyz").status_code == 200:
                        return self
                # each look takes some milliseconds that the start could use
                time.sleep(0.1)
        raise AssertionError(f"the server wasn't ready in {START_S:.0f} s:\n{self.tail()}")

    def is_ready(self) -> bool:
        """Return whether it takes requests now."""
        with self.client() as client:
            return client.get(f"{self.url}/readyz").status_code == 200

    def client(self) -> httpx2.Client:
        """Return a client that trusts its certificate."""
        verify = True if self.ca is None else ssl.create_default_context(cafile=self.ca)
        return httpx2.Client(timeout=5, verify=verify)

    def stop(self) -> int:
        """Ask it to stop, as an orchestrator does; return its exit code."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server didn't stop in {STOP_S:.0f} s:\n{self.tail()}") from None

    def kill(self) -> None:
        """End it without a chance to do anything, its engine too (which else notices within a
        heartbeat).
        """
        engine = self.engine_pid()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if engine is not None:
            try:
                os.kill(engine, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def engine_pid(self) -> int | None:
        """The engine process that this server has now."""
        if self.process is None:
            return None
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (entry / "cmdline").read_bytes()
                name = (entry / "comm").read_text().strip()
            except (OSError, IndexError):
                continue
            if parent == self.process.pid and (ENGINE.encode() in command or name == ENGINES_NAME):
                return int(entry.name)
        return None

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def admin(self) -> Client:
        return Client(self.url, api_key=ADMIN_KEY)

    def make_tenant(self, name: str, limits: dict[str, int] | None = None) -> str:
        """Make a tenant and return a key of it."""
        headers, body = {"Authorization": f"Bearer {ADMIN_KEY}"}, {"name": name, "limits": limits or {}}
        with self.client() as client:
            client.post(f"{self.url}/api/v1/tenants", json=body, headers=headers).raise_for_status()
            answer = client.post(f"{self.url}/api/v1/tenants/{name}/keys", json={"name": "tests"}, headers=headers)
        key: str = answer.raise_for_status().json()["key"]
        return key

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, labels in the name."""
        answer = httpx2.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).raise_for_status()
        lines = [line for line in answer.text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def events(lines: list[str]) -> list[dict[str, object]]:
    """The JSON of a stream's ``data:`` lines, ``[DONE]`` left out."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]
