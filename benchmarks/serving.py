"""A server to measure: its models made once, itself started with an empty data directory,
and gone afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.real_model import make_real_base
from loraserve import Client

HERE = Path(__file__).resolve().parent
TENANT = "bench"
READY_TIMEOUT_S = 300.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def script(name: str, *arguments: str | int, env: dict[str, str] | None = None) -> str:
    """Run one of this folder's scripts; its standard output."""
    command = [sys.executable, "-P", str(HERE / name), *map(str, arguments)]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    ).stdout


def module(name: str, *arguments: str | int | Path, is_asked: bool = False) -> subprocess.Popen[str]:
    """One of this package's modules, started in a process of its own;
    its standard output is a pipe.

    Args:
        is_asked: so is its standard input.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE if is_asked else None, stdout=subprocess.PIPE, text=True, cwd=HERE.parent
    )


def last_line(process: subprocess.Popen[str]) -> Any:
    """Return what a module printed as JSON in its last line, once it has ended.

    Raises:
        SystemExit: it failed.
    """
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with {process.returncode}")
    return json.loads(output.strip().splitlines()[-1])


def make_base(size: str) -> Path:
    """Return the folder of the base, random or `real`; it's made once and kept."""
    model = HERE / "models" / size
    if size == "real":
        try:
            return make_real_base(model)
        except RuntimeError as error:
            sys.exit(f"--size real: {error}")
    if not (model / "tokenizer_config.json").exists():
        say(f"making base {size} …")
        script("make_model.py", size, str(model))
    return model


@dataclass(frozen=True, slots=True)
class Server:
    """A running `loraserve serve`, a tenant's key for it, an admin's,
    and where it keeps its data.
    """

    url: str
    key: str
    admin_key: str
    pid: int
    data: Path

    def load(self, models: str, num_models: int, concurrency: int, seed: int, vocab: int, **lengths: int) -> Any:
        """One burst of requests; the load generator's figures.

        Args:
            lengths: ``prompt_tokens`` and ``output_tokens``.
        """
        arguments: list[str | int] = [
            "--url",
            self.url,
            "--models",
            models,
            "--adapters",
            num_models,
            "--concurrency",
            concurrency,
        ]
        for name, value in {**lengths, "seed": seed, "vocab": vocab}.items():
            arguments += [f"--{name.replace('_', '-')}", value]
        return json.loads(script("load.py", *arguments, env={"LORASERVE_API_KEY": self.key}))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serve(
    model: Path,
    quantize: str,
    adapters: Sequence[Path] = (),
    flags: Sequence[str] = (),
    dtype: str = "float32",
    words: Sequence[str] = ("serve",),
) -> Iterator[Server]:
    """A server with these adapters pushed through its API; stopped, and its data gone, afterwards.

    Args:
        flags: more of the command's.
        words: the command, ``serve`` or ``cluster up``.
    """
    admin_key, data = secrets.token_urlsafe(32), Path(tempfile.mkdtemp(prefix="loraserve-bench-"))
    port = free_port()
    command = [sys.executable, "-P", "-m", "loraserve.cli.main", *words]
    command += ["--model", str(model), "--model-id", "base", "--port", str(port), "--data-dir", str(data)]
    command += ["--quantize", quantize, "--dtype", dtype, "--log-level", "warning", *flags]
    log = data / "server.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            # Ray's workers import what lies in the folder, before what PYTHONPATH names
            command,
            stdout=sink,
            stderr=sink,
            cwd=data,
            env={**os.environ, "LORASERVE_ADMIN_KEY": admin_key},
        )
    try:
        _wait_until_ready(process, url, log)
        _wait_until_measured(url, admin_key)
        with Client(url, api_key=admin_key) as admin:
            admin.tenants.create(TENANT)
            key = admin.keys.create(TENANT, name="bench").key
        with Client(url, api_key=key) as client:
            for directory in adapters:
                client.adapters.push(directory, name=directory.name)
        yield Server(url, key, admin_key, process.pid, data)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(data, ignore_errors=True)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/readyz").status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"the server isn't ready; its last words:\n{log.read_text()[-4000:]}")


def _wait_until_measured(url: str, admin_key: str) -> None:
    """Wait for what a new registry's server does once, beside requests: measure its base."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    with Client(url, api_key=admin_key) as admin:
        while time.monotonic() < deadline:
            base = admin.base()
            if base.precision is not None or base.precision_note:
                return
            time.sleep(0.2)
    raise SystemExit(f"the base's precision wasn't measured within {READY_TIMEOUT_S:g} s")
