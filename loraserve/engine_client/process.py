"""Engine process: its start, sockets, liveness and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq

from loraserve.config import EngineConfig
from loraserve.engine_client import messages as m
from loraserve.engine_client.stacks import dump_stacks, innermost, state_of
from loraserve.engine_client.vitals import Vitals, core_wait_s
from loraserve.errors import EngineDied, LoraserveError, error_from_code

logger = logging.getLogger(__name__)


_ENVIRONMENT = {
    # spinning threads would take the cores that the server and the loaders need
    "OMP_WAIT_POLICY": "PASSIVE",
    # with weights in huge pages a step of 32 sequences takes a twentieth less (110M parameters in
    # float32)
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Defaults for the environment of the engine's process."""

_KEPT_PREFIXES = ("LORASERVE_TEST_",)
_KEPT = frozenset({"LORASERVE_LOG_LEVEL", "LORASERVE_FAULTS"})
_SECRETS = frozenset(
    {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"}
    | {f"OTEL_EXPORTER_OTLP_{kind}HEADERS" for kind in ("", "TRACES_", "METRICS_", "LOGS_")}
)
"""Variables that the server alone needs. The bucket's credentials are the engine's too."""

KILL_PATIENCE_S = 10.0
"""Seconds that a killed process may take to end.

In an uninterruptible wait for a disk or a device it takes longer.
"""
_MAX_TICK_S = 0.25
_TICKS_PER_TIMEOUT = 8
_LOG_INTERVAL_S = 5.0
"""Seconds after which a stage of a start that lasts is logged again."""

_HINT = (
    "If it hangs in a kernel again, try another --quantize or --dtype; if the machine is just slow, raise"
    " --engine-hang-timeout."
)


class EngineProcess:
    """Start ``loraserve.engine.worker.main``, exchange messages with it, notice when it hangs.

    A process hangs if its working thread reaches none of its marks (`loraserve.progress`) or sends
    nothing for too long. A load or a step that progresses, however slowly, doesn't hang; nor does a
    process that waits for a core, on a busy machine or with a small share of one.

    Args:
        on_message: called on the event loop with everything the engine sends after Ready, except
            pulses.
        hang_timeout_s: seconds without progress, once the base is loaded.
        load_timeout_s: the same before.

    Attributes:
        vitals: progress of the process.
        was_stopped: whether it hangs because something outside stopped it; known once `hung` has
            returned.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[m.EngineOutput], None],
        *,
        hang_timeout_s: float,
        load_timeout_s: float,
    ) -> None:
        self.ready: m.Ready | None = None
        self.was_stopped = False
        self._hang_timeout_s, self._load_timeout_s = hang_timeout_s, load_timeout_s
        self._tick_s = min(_MAX_TICK_S, hang_timeout_s / _TICKS_PER_TIMEOUT)
        self.vitals = Vitals(max_tick_s=2 * self._tick_s, core_wait_s=lambda: core_wait_s(self.pid))
        self._stages = _StageLog(self.vitals)
        self._config = config
        self._on_message = on_message
        self._dir = tempfile.mkdtemp(prefix="loraserve-engine-")  # 0700: no other user reaches the sockets
        # not zmq.asyncio's: without a high-water mark sending never waits, and receiving by its
        # futures costs the server 45 µs a step more
        self._context = zmq.Context()
        self._inputs: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._outputs: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._inputs.setsockopt(zmq.SNDHWM, 0)
        self._inputs.setsockopt(zmq.LINGER, 0)
        self._outputs.setsockopt(zmq.RCVHWM, 0)
        self._process: asyncio.subprocess.Process | None = None
        self._is_listening = False
        self._num_messages = 0
        """Messages of the engine's working thread, which the watcher notes at its next tick."""
        self._watcher: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[m.Ready] = asyncio.get_running_loop().create_future()
        self._hung: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> m.Ready:
        """Start the process and return once the base is loaded.

        Raises:
            LoraserveError: the engine reported it (ModelError, ConfigError, …).
            EngineDied: it ended without a reason, or hangs.
        """
        endpoints = [f"ipc://{self._dir}/{name}" for name in ("inputs", "outputs")]
        self._inputs.bind(endpoints[0])
        self._outputs.bind(endpoints[1])
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the current folder isn't where the engine's modules are
            "-m",
            "loraserve.engine.worker.main",
            *endpoints,
            str(os.getpid()),
            str(self._stacks_path),
            stdin=asyncio.subprocess.PIPE,
            env={**_ENVIRONMENT, **_without_secrets(os.environ)},
        )
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stdin.write(msgspec.json.encode(self._config))
                await stdin.drain()
            stdin.close()
        self._listen()
        self._watcher = asyncio.create_task(self._watch(), name="engine-watcher")
        exited = asyncio.create_task(self._process.wait())
        try:
            pending: set[asyncio.Future[Any]] = {self._ready, exited, self._hung}
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done() and exited.done():
                # its last message may still be in the socket
                await asyncio.wait({self._ready}, timeout=0.5)
            if self._ready.done():
                ready = self._ready.result()
                self._stages.end()
                return ready
            if exited.done():
                raise EngineDied(f"it {self.describe_end(exited.result())}; its last report: {self.vitals.doing}")
            raise EngineDied(f"it {self._hung.result()}")
        finally:
            exited.cancel()

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit code."""
        if self._process is None:
            return 0
        return await self._process.wait()

    async def hung(self) -> str:
        """Wait until the process hangs; return where, as in "the engine …".

        The log has its stack then.
        """
        return await asyncio.shield(self._hung)

    def describe_end(self, code: int) -> str:
        """Describe how the process ended, as in "the engine …"."""
        if code >= 0:
            return f"ended with code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        # the kernel's OOM killer leaves no other trace here
        why = " (probably by the system, for lack of memory: see the system's log)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{why}"

    def send(self, message: m.EngineInput) -> None:
        """Send without waiting; no-op if the engine is dead, which its supervisor notices."""
        with contextlib.suppress(zmq.ZMQError):
            self._inputs.send(m.encode_input(message), zmq.NOBLOCK)

    def kill(self) -> None:
        """Send SIGKILL; no-op if the process has ended."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def close(self, grace_s: float = 5.0) -> None:
        """Request the process to stop, kill it after `grace_s`, and free sockets and files."""
        if self._process is not None and self._process.returncode is None:
            self.send(m.Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                self.kill()
                await self._reap()
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        self._stop_listening()
        self._hung.cancel()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # mark it retrieved
        self._inputs.close(0)
        self._outputs.close(0)
        self._context.term()
        shutil.rmtree(self._dir, ignore_errors=True)

    async def _reap(self) -> None:
        """Wait for the end of the killed process, but only for so long."""
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), KILL_PATIENCE_S)
            except TimeoutError:
                logger.error("the engine's process %d was killed and hasn't ended; it is abandoned", self._process.pid)

    @property
    def _stacks_path(self) -> Path:
        return Path(self._dir) / "stacks"

    async def _watch(self) -> None:
        """Count seconds without progress, log a load's progress, find out where a process hangs."""
        try:
            num_messages = 0
            vitals = self.vitals
            while True:
                await asyncio.sleep(self._tick_s)
                if num_messages != self._num_messages:
                    num_messages = self._num_messages
                    vitals.note_message()
                vitals.tick()
                if not self._ready.done():
                    self._stages.look()
                timeout_s = self._hang_timeout_s if self._ready.done() else self._load_timeout_s
                if vitals.stuck_s > timeout_s:
                    self._note_hang(await self._examine(timeout_s))
                    return
        except Exception:
            logger.exception("watching the engine's process failed")
            self._note_hang("can't be watched any more")

    def _note_hang(self, reason: str) -> None:
        if not self._hung.done():
            self._hung.set_result(reason)

    async def _examine(self, timeout_s: float) -> str:
        """Find where a process hangs that made no progress for that long; log its stack."""
        doing, pid = self.vitals.doing, self.pid or 0
        state = state_of(pid)
        if state in ("T", "t"):
            self.was_stopped = True
            by = "SIGSTOP" if state == "T" else "a debugger"
            return (
                f"was stopped by {by} for {timeout_s:g} s while it was {doing};"
                " a stopped process can't report its stack"
            )
        where = "its Python stack is unavailable: it " + (
            "waits for a disk or a device (state D)"
            if state == "D"
            else "answers no signal"
            if self.vitals.has_spoken
            else "never reported anything"
        )
        if self.vitals.has_spoken:
            stacks = await dump_stacks(pid, self._stacks_path)
            if stacks:
                logger.error("the engine hangs while it is %s. %s Its Python stacks:\n%s", doing, _HINT, stacks)
                where = f"it hangs in {innermost(stacks)} (its whole stack is in the log)"
        return f"made no progress for {timeout_s:g} s while it was {doing}; {where}"

    def _listen(self) -> None:
        """Take messages from now on, as they come."""
        self._is_listening = True
        loop = asyncio.get_running_loop()
        loop.add_reader(self._outputs.fileno(), self._receive)
        loop.call_soon(self._receive)

    def _stop_listening(self) -> None:
        if self._is_listening:
            self._is_listening = False
            asyncio.get_running_loop().remove_reader(self._outputs.fileno())

    def _receive(self) -> None:
        """Take the next message, and schedule another turn.

        ZeroMQ's descriptor signals messages once, however many there are. Readers have their turn
        before the next one, so that a step's tokens aren't joined with another's where the server
        is late.
        """
        if not self._is_listening:
            return
        try:
            message = m.decode_output(self._outputs.recv(zmq.NOBLOCK))
            if isinstance(message, m.Pulse):
                self.vitals.note_pulse(message.num_moves, message.what, message.doing)
            else:
                self._num_messages += 1
                if isinstance(message, m.Ready | m.Fatal):
                    self._take(message)
                else:
                    self._on_message(message)
        except zmq.Again:
            return
        except Exception:
            # this engine can't be heard any more: the next one starts from what is known
            logger.exception("the engine process sent an invalid message and is killed")
            self._stop_listening()
            self.kill()
        else:
            asyncio.get_running_loop().call_soon(self._receive)

    def _take(self, message: m.Ready | m.Fatal) -> None:
        """Take the first message, or the last of an engine that can't continue."""
        match message:
            case m.Ready():
                self.ready = message
                if not self._ready.done():
                    self._ready.set_result(message)
            case m.Fatal(code=code, message=text, hint=hint):
                error: LoraserveError = error_from_code(code, text)
                error.hint = hint
                if self._ready.done():
                    logger.error("the engine process can't continue: %s", error)
                else:
                    self._ready.set_exception(error)


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that the engine may have: no key, and none of the server's settings."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _SECRETS
        and (not name.upper().startswith("LORASERVE_") or name in _KEPT or name.startswith(_KEPT_PREFIXES))
    }


class _StageLog:
    """Log what a starting engine does, as often as it is looked at.

    A stage between two looks is missed; one that was seen is logged with its seconds once it ends,
    which tells what a slow start was slow at.
    """

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._stage = ""
        self._began_s = self._logged_s = time.monotonic()

    def look(self) -> None:
        """Log a stage that has begun, or that has lasted for `_LOG_INTERVAL_S` more."""
        now, vitals = time.monotonic(), self._vitals
        if vitals.what != self._stage:
            self._log(f"the engine is {vitals.doing}")
            self._stage, self._logged_s, self._began_s = vitals.what, now, now
        elif now - self._logged_s > _LOG_INTERVAL_S and vitals.quiet_s < _LOG_INTERVAL_S:
            logger.info("the engine is %s, for %.0f s now", vitals.doing, now - self._began_s)
            self._logged_s = now

    def end(self) -> None:
        """Log that the engine is ready."""
        self._log("the engine is ready")

    def _log(self, what: str) -> None:
        took = f" ({self._stage} took {time.monotonic() - self._began_s:.1f} s)" if self._stage else ""
        logger.info("%s%s", what, took)
