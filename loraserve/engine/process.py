"""One incarnation of the engine process: its sockets, its start, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from loraserve.config import EngineConfig
from loraserve.engine import messages as m
from loraserve.errors import EngineUnavailable, LoraserveError, error_from_code

logger = logging.getLogger(__name__)


_ENVIRONMENT = {
    # waiting threads that spin take the cores that the server and the loaders need
    "OMP_WAIT_POLICY": "PASSIVE",
    # the base's weights lie in huge pages: a step of 32 sequences takes a twentieth less (110M parameters in float32)
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Of the engine's process, where the server's own says nothing else."""


class EngineProcess:
    """Starts ``python -m loraserve.engine.worker`` and carries messages to and from it.

    Args:
        on_message: called on the event loop with everything the engine sends after Ready.
    """

    def __init__(self, config: EngineConfig, on_message: Callable[[m.EngineOutput], None]) -> None:
        self.last_message_s = time.monotonic()
        self.ready: m.Ready | None = None
        self._config = config
        self._on_message = on_message
        self._dir = tempfile.mkdtemp(prefix="loraserve-engine-")  # 0700: only we can reach the sockets
        self._context = zmq.asyncio.Context()
        # Plain, not asyncio: sending never waits (no high-water mark), so it may be called from anywhere on the loop.
        self._inputs: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)
        self._outputs = self._context.socket(zmq.PULL)
        self._inputs.setsockopt(zmq.SNDHWM, 0)
        self._inputs.setsockopt(zmq.LINGER, 0)
        self._outputs.setsockopt(zmq.RCVHWM, 0)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[m.Ready] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> m.Ready:
        """Start the process and return once the base is loaded.

        Raises:
            LoraserveError: what the engine said was wrong (ModelError, ConfigError, …).
            EngineUnavailable: it ended without saying why.
        """
        endpoints = [f"ipc://{self._dir}/{name}" for name in ("inputs", "outputs")]
        self._inputs.bind(endpoints[0])
        self._outputs.bind(endpoints[1])
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the current folder isn't where the engine's modules are
            "-m",
            "loraserve.engine.worker",
            *endpoints,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            env={**_ENVIRONMENT, **os.environ},
        )
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stdin.write(msgspec.json.encode(self._config))
                await stdin.drain()
            stdin.close()
        self._reader = asyncio.create_task(self._read(), name="engine-reader")
        exited = asyncio.create_task(self._process.wait())
        try:
            pending: set[asyncio.Future[Any]] = {self._ready, exited}
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                # Its last words may still be in the socket.
                await asyncio.wait({self._ready}, timeout=0.5)
            if not self._ready.done():
                raise EngineUnavailable(
                    f"The engine process ended with code {exited.result()} before the base was loaded."
                )
            return self._ready.result()
        finally:
            exited.cancel()

    async def wait(self) -> int:
        """Return the exit code once the process has ended."""
        if self._process is None:
            return 0
        return await self._process.wait()

    def send(self, message: m.EngineInput) -> None:
        """Send, without waiting. To a dead engine it's a no-op: whoever waits for an answer learns of the death elsewhere."""
        with contextlib.suppress(zmq.ZMQError):
            self._inputs.send(m.encode_input(message), zmq.NOBLOCK)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def close(self, grace_s: float = 5.0) -> None:
        """Ask it to stop, kill it when it doesn't within the grace, and free sockets and files."""
        if self._process is not None and self._process.returncode is None:
            self.send(m.Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                self.kill()
                await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen, whoever waits or not
        self._inputs.close(0)
        self._outputs.close(0)
        self._context.term()
        shutil.rmtree(self._dir, ignore_errors=True)

    async def _read(self) -> None:
        try:
            while True:
                message = m.decode_output(await self._outputs.recv())
                self.last_message_s = time.monotonic()
                self._take(message)
        except Exception:
            # nobody would hear this engine any more: the next one starts from what is known
            logger.exception("a message of the engine process makes no sense; it is killed")
            self.kill()

    def _take(self, message: m.EngineOutput) -> None:
        match message:
            case m.Ready():
                self.ready = message
                if not self._ready.done():
                    self._ready.set_result(message)
            case m.Fatal(code=code, message=text, hint=hint):
                error: LoraserveError = error_from_code(code, text)
                error.hint = hint
                if self._ready.done():
                    logger.error("the engine process can't go on: %s", error)
                else:
                    self._ready.set_exception(error)
            case _:
                self._on_message(message)
