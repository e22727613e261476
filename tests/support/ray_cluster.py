"""A cluster on Ray Serve in processes of its own: started, killed in parts, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from server_process import ADMIN_KEY, environment, free_port

from loraserve.demo.pack import base_dir

START_S, STOP_S = 300.0, 120.0
REPLICA = b"ray::ServeReplica:loraserve:engine"
INGRESS = b"ray::ServeReplica:loraserve:ingress"
ENGINE = b"loraserve.engine.worker.main"


@dataclass
class RayCluster:
    """``loraserve cluster up`` on this machine."""

    data_dir: Path
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    ready_s: float = 0.0
    """Seconds that its last start took."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.data_dir.with_name(self.data_dir.name + ".log")

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", "loraserve.cli.main", "cluster", *words, "--data-dir", str(self.data_dir)]

    @property
    def environment(self) -> dict[str, str]:
        return environment(**{"LORASERVE_ADMIN_KEY": ADMIN_KEY, **self.variables})

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Return what another command about the cluster says."""
        return subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, timeout=STOP_S
        )

    def start(self) -> RayCluster:
        """Return once it says that it is ready."""
        began = time.monotonic()
        command = self.command("up", "--model", str(base_dir()), "--port", str(self.port), *self.flags)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.data_dir.parent, env=self.environment, start_new_session=True
            )
        while "Ready at" not in self.tail():
            assert self.process.poll() is None, f"the cluster ended with {self.process.returncode}:\n{self.tail()}"
            assert time.monotonic() - began < START_S, f"the cluster wasn't ready in {START_S:.0f} s:\n{self.tail()}"
            time.sleep(0.2)
        self.ready_s = time.monotonic() - began
        return self

    def stop(self) -> int:
        """End it as an orchestrator does; return its exit code."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the cluster didn't stop in {STOP_S:.0f} s:\n{self.tail()}") from None

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""

    def pids(self, kind: bytes) -> list[int]:
        """The processes of one kind, of this cluster alone."""
        assert self.process is not None
        mine = {self.process.pid}
        found = []
        # a parent may have a higher number than its child: as often as there are generations
        for _ in range(6):
            for pid, parent, command in _processes():
                if parent in mine:
                    mine.add(pid)
                    if pid not in found and kind in command:
                        found.append(pid)
        return sorted(found)

    def kill(self, kind: bytes, *, which: int = 0) -> int:
        """Kill one process of a kind, once there is one, and return its number."""
        deadline = time.monotonic() + START_S
        while not (found := self.pids(kind)):
            assert time.monotonic() < deadline, f"no {kind.decode()} runs"
            time.sleep(0.1)
        pid = found[which % len(found)]
        os.kill(pid, signal.SIGKILL)
        return pid

    def make_tenant(self, name: str) -> str:
        """Make a tenant and return a key of it."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        with httpx2.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=60) as client:
            client.post("/tenants", json={"name": name}).raise_for_status()
            key: str = client.post(f"/tenants/{name}/keys", json={"name": "tests"}).raise_for_status().json()["key"]
        return key

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, labels in the name."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        answer = httpx2.get(f"{self.url}/metrics", headers=headers, timeout=30).raise_for_status()
        lines = [line for line in answer.text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def num_ready(self) -> int:
        return int(self.metrics()['loraserve_cluster_replicas{state="ready"}'])


def _processes() -> Iterator[tuple[int, int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                yield int(entry.name), parent, (entry / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
