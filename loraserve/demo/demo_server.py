"""A loraserve server of one's own.

It is a process on a demo's base, its data in a directory, gone when the block ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx2

from loraserve.demo.demo_model import DemoModel
from loraserve.engine_client.vitals import Vitals, core_wait_s
from loraserve.errors import ConfigError, EngineUnavailable

HOST = "127.0.0.1"
DEFAULT_PORT = 8000
_SILENCE_S, _STOP_S = 120.0, 15.0
"""Seconds without any answer after which a server is given up, without those in which it waited for
a core; and seconds that it may take to stop.
"""
_POLL_S, _ANSWER_S, _MAX_TICK_S = 0.1, 1.0, 2.0
_FIRST_TOLD_S, _TELL_EVERY_S = 2.0, 15.0
_LOG_TAIL_LINES = 15
_HINT = (
    "Start it again: kernels that were compiled are kept. On a busy machine, or one with a small share of a core, the "
    "first start takes minutes."
)


@dataclass(slots=True)
class DemoServer:
    """`start` and `stop` it as often as you like: what is in `data_dir` stays."""

    data_dir: Path
    port: int
    model: DemoModel
    quantize: str = "none"
    """Format that the base's linears are rounded to, as for ``serve``."""
    tell: Callable[[str], object] | None = None
    """Function that is called with what a server that takes long to start is at, when that changes
    and after each 15 s of it.
    """
    admin_key: str = field(default_factory=lambda: f"sk-admin-{secrets.token_urlsafe(24)}", repr=False)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start the server; it answers when this returns.

        Raises:
            ConfigError: another program has the port, or the base has a format of its own.
            EngineUnavailable: the server ended, or isn't ready in time; the message has what it was
                at and the end of its log.
        """
        if self.model.is_quantized:
            check_float(self.model.title, self.quantize)
        check_port(self.port)
        model = self.model
        command = [sys.executable, "-m", "loraserve.cli.main", "serve", "--model", str(model.base)]
        command += ["--model-id", model.base_id, "--base-names", ",".join(model.base_names)]
        command += ["--host", HOST, "--port", str(self.port), "--data-dir", str(self.data_dir)]
        if self.quantize != "none":
            command += ["--quantize", self.quantize]
        command += ["--host-cache", "256MiB", "--grace-s", "2", *model.serve_flags]
        # Another server's settings, in the environment or in a loraserve.toml, are not this one's.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LORASERVE_")}
        environment |= {"LORASERVE_ADMIN_KEY": self.admin_key, "OMP_WAIT_POLICY": "PASSIVE"}
        with self._log_path.open("ab") as log:
            # A session of its own: a Ctrl-C in the terminal is for the tour, which stops the server
            # in good order.
            self._process = subprocess.Popen(  # noqa: S603
                command, cwd=self.data_dir, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self._wait_until_ready(self._process)

    def stop(self) -> int | None:
        """End the process and return its exit code, or None if it wasn't running.

        It is gone when this returns.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def __enter__(self) -> DemoServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def _log_path(self) -> Path:
        return self.data_dir / "server.log"

    def log_tail(self) -> str:
        """Read the last lines that the server wrote."""
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the server is ready, however long its engine takes as long as it progresses.

        The server watches its engine, and ends where none can be had: there is one clock. Here only
        a server that logs nothing is given up.
        """
        began = told = time.monotonic()
        detail = said = ""
        silence = Vitals(_MAX_TICK_S, core_wait_s=lambda: core_wait_s(process.pid))
        with httpx2.Client(timeout=_ANSWER_S, trust_env=False) as client:
            while process.poll() is None:
                now = time.monotonic()
                silence.tick()
                if silence.stuck_s > _SILENCE_S:
                    self.stop()
                    raise EngineUnavailable(
                        f"The server has said nothing for {_SILENCE_S:g} s. {detail}\n{self._log_end()}", hint=_HINT
                    )
                try:
                    answer = client.get(f"{self.url}/readyz")
                    silence.note_message()
                    if answer.status_code == httpx2.codes.OK:
                        return
                    detail = answer.json().get("detail", "")
                except (httpx2.TransportError, ValueError):
                    pass  # nobody listens yet
                is_news = detail != said and now - began > _FIRST_TOLD_S
                if self.tell is not None and detail and (is_news or now - told > _TELL_EVERY_S):
                    told, said = now, detail
                    self.tell(f"{now - began:3.0f} s  {detail}")
                time.sleep(_POLL_S)
        raise EngineUnavailable(f"The server ended with code {process.returncode}. {self._log_end()}", hint=_HINT)

    def _log_end(self) -> str:
        """Format the end of the log as part of a message."""
        tail = self.log_tail()
        return f"Its log ends:\n{tail}" if tail else "Its log is empty."


def check_float(title: str, quantize: str) -> None:
    """Check that nothing rounds a base that has a format of its own.

    Raises:
        ConfigError: something does.
    """
    if quantize != "none":
        raise ConfigError(
            f"{title} is served in the format of its file; it can't be rounded to {quantize}.",
            hint=f"The bundled pack can: loraserve demo --model pack --quantize {quantize}",
        )


def check_port(port: int) -> None:
    """Raise ConfigError where another program listens at the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} of {HOST} can't be used: {error.strerror}.",
                hint="Choose another: loraserve demo --port 0",
            ) from error


def choose_port(port: int | None) -> int:
    """Choose the port: a free one for 0; for None the default, or a free one if it is taken."""
    if port:
        return port
    if port is None:
        try:
            check_port(DEFAULT_PORT)
            return DEFAULT_PORT
        except ConfigError:
            pass
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
