"""The server in a fork per start, so that it can be killed and started again a few times a second.

On the loopback, on a free port.

All of it is real but the engine's process: a stand-in with a base of its own certifies whatever it
is asked, and answers with one letter. As a program:

    python forked_server.py BASE.json KEY=VALUE… < commands

KEY=VALUE are settings of loraserve serve, and limits.KEY=VALUE of Limits.

A line ``start`` on stdin, or ``start POINT=ACTION`` (as in LORASERVE_FAULTS), forks a server; its
pid is a line on stdout, and so is how it ended (the number of the signal, negative). At the end of
stdin it is killed.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
from server_process import ADMIN_KEY, START_S, environment, free_port

from loraserve.demo.pack import base_dir
from loraserve.limits import LIMITS
from loraserve.types import BaseSpec


@dataclass
class ForkedServer:
    """A server over `data_dir`, for a process that kills it.

    A with block, or `close`, ends what was started.
    """

    data_dir: Path
    base: BaseSpec
    settings: dict[str, str] = field(default_factory=dict)
    """Of ``loraserve serve``; ``limits.KEY`` is another bound than `Limits` has."""
    port: int = field(default_factory=free_port)
    pid: int | None = None
    _program: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.data_dir.with_name(self.data_dir.name + ".log")

    def start(self, faults: str = "") -> None:
        """Return once it is ready; with `faults`, once it listens (it may not live to be ready)."""
        program = self._start_program()
        assert program.stdin is not None
        program.stdin.write(f"start {faults}\n")
        program.stdin.flush()
        self.pid = int(program.stdout.readline())  # type: ignore[union-attr]
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                if httpx2.get(f"{self.url}/readyz", timeout=5).status_code == 200:
                    return
            except httpx2.TransportError:
                if faults and not Path(f"/proc/{self.pid}").exists():
                    return
            assert self._lives(), f"the server ended by itself:\n{self.tail()}"
            time.sleep(0.005)
        raise AssertionError(f"the server wasn't ready in {START_S:.0f} s:\n{self.tail()}")

    def kill(self) -> None:
        """It is gone without having done anything more."""
        assert self.end(signal.SIGKILL) == -signal.SIGKILL, f"the server ended by itself:\n{self.tail()}"

    def end(self, number: signal.Signals) -> int:
        """Send it a signal and return how it ended: its exit code,
        or minus the number of the signal that ended it.
        """
        assert self.pid is not None
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass
        ended = int(self._start_program().stdout.readline())  # type: ignore[union-attr]
        self.pid = None
        return ended

    def close(self) -> None:
        if self._program is not None:
            self._program.communicate()
            self._program = None

    def __enter__(self) -> ForkedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def _lives(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return False
        return state != "Z"

    def _start_program(self) -> subprocess.Popen[str]:
        if self._program is None:
            base = self.data_dir.with_name(self.data_dir.name + ".base.json")
            base.write_bytes(msgspec.json.encode(self.base))
            settings = {"model": str(base_dir()), "data_dir": str(self.data_dir), "port": str(self.port)}
            settings |= {"grace_s": "5"} | self.settings
            path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
            command = [
                sys.executable,
                "-P",
                __file__,
                str(base),
                *(f"{key}={value}" for key, value in settings.items()),
            ]
            with self.log.open("ab") as log:
                self._program = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=self.data_dir.parent,
                    env=environment(LORASERVE_ADMIN_KEY=ADMIN_KEY, PYTHONPATH=path),
                )
        return self._program


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[2:])
    for name in [name for name in given if name.startswith("limits.")]:
        # before anything reads one
        object.__setattr__(LIMITS, name.removeprefix("limits."), float(given.pop(name)))
    from loraserve.api import server
    from loraserve.engine_client.client import EngineClient
    from loraserve.engine_client.messages import GenerateRequest
    from loraserve.engine_client.output import Chunk
    from loraserve.faults import arm
    from loraserve.settings import Settings
    from loraserve.types import AdapterRef, AdapterResidency, BasePrecision, Certificate, Digest, FinishReason

    base = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=BaseSpec)
    settings = Settings.load(**given)

    class StandIn(EngineClient):
        """Up at once, with `base`; finds every adapter right, and holds none."""

        async def start(self) -> None:
            self._supervisor._base, self._supervisor.is_up = base, True

        @property
        def is_live(self) -> bool:
            return True

        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
            """So many tokens as are wanted, one every few milliseconds."""
            for left in reversed(range(request.params.max_tokens)):
                await asyncio.sleep(0.003)
                yield Chunk(
                    text="x",
                    token_ids=(1,),
                    logprobs=None,
                    prompt_logprobs=None,
                    finish_reason=None if left else FinishReason.LENGTH,
                    stop_reason=None,
                    num_cached_tokens=0,
                    queue_s=0.0,
                    adapter_s=0.0,
                    prefill_s=0.0,
                )

        async def measure_base(self) -> BasePrecision | str:
            return "this engine is a test's"

        async def verify(self, ref: AdapterRef) -> Certificate:
            return Certificate(
                verdict="passed",
                max_difference=0.0,
                mean_difference=0.0,
                base_difference=0.0,
                tolerance=1.0,
                max_effect=0.0,
                top1_agreement=1.0,
                precision_loss=0.0,
                num_probe_tokens=1,
                seconds=0.0,
            )

        async def warm(self, ref: AdapterRef) -> None:
            return None

        async def pin(self, ref: AdapterRef) -> None:
            return None

        async def unpin(self, ref: AdapterRef) -> None:
            return None

        async def residency(self, only: Collection[Digest] | None = None) -> tuple[AdapterResidency, ...]:
            return ()

    server.EngineClient = StandIn  # type: ignore[attr-defined]

    def run(faults: str) -> None:
        os.dup2(2, 1)
        point, _, action = faults.partition("=")
        if not point:
            os._exit(server.serve(settings))
        with arm(point, action):
            os._exit(server.serve(settings))

    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            try:
                run(line.strip().partition(" ")[2])
            finally:
                os._exit(70)
        os.write(1, f"{child}\n".encode())
        status = wait(child)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def wait(child: int) -> int:
    """The child's status, once it has ended; it is killed when nobody is there to send commands."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        # readable without a command having been due: the end of stdin
        if select.select([sys.stdin], [], [], 0.002)[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            sys.exit(0)


if __name__ == "__main__":
    main()
