"""The engine process: read an EngineConfig from stdin, load the base, step until stopped.

    python -m loraserve.engine.worker.main INPUT_ENDPOINT OUTPUT_ENDPOINT SERVER_PID < config.json

Only the steps' thread touches the engine. It takes messages between steps, sends outputs, and sends
a heartbeat: a late one means that steps are late. Another thread reports its progress
(`loraserve.engine.worker.pulse`), also while the base is loaded or within a step. On SIGUSR1 the
stacks of all threads are written, whatever they hang in.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from loraserve import faults
from loraserve.background import collector_paused
from loraserve.config import EngineConfig
from loraserve.engine.worker.pulse import Pulses
from loraserve.engine_client import messages as m
from loraserve.errors import EngineError, LoraserveError
from loraserve.progress import Progress
from loraserve.types import AdapterRef

# `main` loads torch once the process can report that it is being loaded
if TYPE_CHECKING:
    from loraserve.engine.engine import Engine
    from loraserve.engine.verification.verifier import Verifier
    from loraserve.engine.worker.startup import EngineParts

logger = logging.getLogger("loraserve.engine")

_PR_SET_PDEATHSIG = 1
_IDLE_POLL_MS = 100
_EXPECTING_POLL_MS = 20
"""Timeout while an event is expected that rings the wakeup; some things change with time alone."""
_SOON_POLL_MS = 1
"""Timeout while an adapter is copied to the device, and once after a step.

Neither the end of a copy nor memory freed by a step rings the wakeup.
"""


class Wakeup:
    """End the step thread's wait for messages, from any thread.

    The thread waits for the read end of a pipe as well as its sockets. Looking each millisecond
    instead would cost loaders the interpreter's lock, and a request that waits for its adapter up
    to a millisecond more.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        for fd in (self._read_fd, self._write_fd):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        """Return the descriptor that is readable after `ring`."""
        return self._read_fd

    def ring(self) -> None:
        """End the wait, or the next one. Takes a microsecond.

        No-op if the last ring wasn't heard yet.
        """
        # full: it has been rung often enough
        with suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Hear what was rung so far."""
        with suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def close(self) -> None:
        """Close the pipe; no thread may ring any more."""
        os.close(self._read_fd)
        os.close(self._write_fd)


class Worker:
    """Move messages between the sockets and the engine."""

    def __init__(
        self,
        config: EngineConfig,
        engine: Engine,
        verifier: Verifier,
        inputs: zmq.Socket[bytes],
        outputs: zmq.Socket[bytes],
        wakeup: Wakeup,
        server_pid: int,
        progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._progress = progress or Progress()
        self._engine = engine
        self._verifier = verifier
        self._inputs = inputs
        self._outputs = outputs
        self._wakeup = wakeup
        self._poller = zmq.Poller()
        self._poller.register(inputs, zmq.POLLIN)
        self._poller.register(wakeup, zmq.POLLIN)
        # an argument, since the server may die while the base is loaded
        self._server_pid = server_pid
        self._is_stopping = False
        self._last_heartbeat_s = 0.0
        self._warming: dict[int, AdapterRef] = {}
        self._was_busy = False

    def run(self) -> None:
        """Step until a stop is requested, or until the server is gone."""
        while not self._is_stopping:
            self._receive()
            self._progress.tick()
            if self._engine.has_requests:
                faults.hit("engine.before_step")
                outputs = self._engine.step()
                # before the requests that met it fail: the next ones find the version in quarantine
                self._report_corruptions()
                if outputs:
                    self._send(m.StepOutputs(outputs=tuple(outputs)))
                    faults.hit("engine.after_outputs")
            else:
                self._progress.begin("waiting for requests")
                self._engine.pager.poll()
            replies = self._verifier.poll()
            self._report_corruptions()
            self._answer_warmed()
            for reply in replies:
                self._send(reply)
            self._beat()

    def _receive(self) -> None:
        """Handle all messages; if no step could do anything, wait a little for one."""
        timeout_ms = self._timeout_ms()
        # what the last step freed is allocated at the next poll, which rings nothing
        ready = dict(self._poller.poll(min(timeout_ms, _SOON_POLL_MS) if self._was_busy else timeout_ms))
        self._was_busy = timeout_ms == 0
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        if self._inputs not in ready:
            return
        while True:
            try:
                raw = self._inputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(m.decode_input(raw))

    def _timeout_ms(self) -> int:
        """Compute how long to wait for a message, or for a background thread."""
        engine = self._engine
        if engine.has_requests and not engine.is_waiting:
            return 0
        if engine.pager.is_copying:
            return _SOON_POLL_MS
        is_expecting = engine.has_requests or self._warming or self._verifier.is_active
        return _EXPECTING_POLL_MS if is_expecting else _IDLE_POLL_MS

    def _handle(self, message: m.EngineInput) -> None:
        match message:
            case m.AddRequest():
                self._engine.add(message)
            case m.AbortRequest(request_id=request_id):
                self._engine.abort(request_id)
            case m.WarmAdapter(call_id=call_id, adapter=adapter):
                self._warming[call_id] = adapter
            case m.VerifyAdapter(call_id=call_id, adapter=adapter):
                self._verifier.start(call_id, adapter)
            case m.MeasureBase(call_id=call_id):
                self._verifier.measure_base(call_id)
            case m.AbortVerification(call_id=call_id):
                self._verifier.abort(call_id)
            case m.PinAdapter(call_id=call_id, adapter=adapter, is_pinned=is_pinned):
                self._engine.pager.set_operator_pin(adapter, is_pinned)
                if is_pinned:
                    self._warming[call_id] = adapter
                else:
                    self._send(m.CallReply(call_id=call_id))
            case m.DiscardAdapter(digest=digest):
                self._engine.discard(digest)
            case m.ForgetTexts(owner=owner, name=name, version=version):
                self._engine.forget_texts(owner, name, version)
            case m.QueryResidency(call_id=call_id, only=only):
                adapters = tuple(self._engine.pager.residency(only))
                self._send(m.ResidencyReply(call_id=call_id, adapters=adapters))
            case m.Shutdown():
                self._is_stopping = True

    def _report_corruptions(self) -> None:
        for corruption in self._engine.pager.take_corruptions():
            logger.error("blob %s of adapter %s is damaged or missing", corruption.blob, corruption.digest)
            self._send(m.AdapterDamaged(digest=corruption.digest, blob=corruption.blob))

    def _answer_warmed(self) -> None:
        if not self._warming:
            return
        from loraserve.types import Residency

        for call_id, ref in list(self._warming.items()):
            match self._engine.pager.request(ref):
                case Residency.RESIDENT:
                    reply = m.CallReply(call_id=call_id)
                case Residency.FAILED:
                    reply = _failed_reply(call_id, self._engine.pager.error(ref.digest))
                case _:
                    continue
            del self._warming[call_id]
            self._send(reply)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat_s < self._config.heartbeat_s:
            return
        self._last_heartbeat_s = now
        self._send(m.Heartbeat(stats=self._engine.stats()))
        if os.getppid() != self._server_pid:
            logger.warning("the server process has ended: stopping")
            self._is_stopping = True

    def _send(self, message: m.EngineOutput) -> None:
        self._outputs.send(m.encode_output(message))


def _failed_reply(call_id: int, error: LoraserveError | None) -> m.CallReply:
    return m.CallReply(
        call_id=call_id,
        error_code=error.code if error is not None else LoraserveError.code,
        error_message=str(error) if error is not None else "The adapter could not be loaded.",
    )


def main() -> int:
    """Run the engine process; return its exit code."""
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("LORASERVE_LOG_LEVEL", "INFO").upper(),
        format="%(levelname)s %(name)s: %(message)s",
    )
    # Ctrl-C and SIGTERM may go to the whole process group: the server drains first, then stops the
    # engine.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _end_with_the_server()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    progress = Progress()
    _dump_stacks_on_signal(sys.argv[4] if len(sys.argv) > 4 else None)
    context = zmq.Context()
    inputs: zmq.Socket[bytes] = context.socket(zmq.PULL)
    outputs: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    for socket in (inputs, outputs):
        socket.setsockopt(zmq.SNDHWM if socket is outputs else zmq.RCVHWM, 0)
    outputs.setsockopt(zmq.LINGER, 1000)
    inputs.connect(sys.argv[1])
    outputs.connect(sys.argv[2])
    parts: EngineParts | None = None
    wakeup = Wakeup()
    server_pid = int(sys.argv[3])
    pulses = Pulses(context, sys.argv[2], progress, config.heartbeat_s, server_pid)
    pulses.start()
    # steps of a load are few and long; those of a running engine are too many to report each
    progress.on_begin = pulses.send_now
    try:
        progress.begin("importing torch and the kernels")
        with collector_paused():
            from loraserve.engine.worker.startup import build_engine

        parts = build_engine(config, wakeup.ring, progress)
        progress.on_begin = None
        outputs.send(m.encode_output(parts.ready))
        Worker(config, parts.engine, parts.verifier, inputs, outputs, wakeup, server_pid, progress).run()
    except LoraserveError as error:
        outputs.send(m.encode_output(m.Fatal(code=error.code, message=error.message, hint=error.hint)))
        return 1
    except Exception as error:
        if parts is not None:
            raise
        # the next try would end as this one did
        logger.exception("the engine could not be started; it failed while it was %s", progress)
        reason = f"The engine could not be started: {type(error).__name__} while it was {progress}: {error}"
        outputs.send(
            m.encode_output(m.Fatal(code=EngineError.code, message=reason, hint="Its traceback is in the log."))
        )
        return 1
    finally:
        pulses.stop()
        if parts is not None:
            parts.close()
        wakeup.close()
        inputs.close()
        outputs.close()
        context.term()
    return 0


def _end_with_the_server() -> None:
    """Have the system kill this process when the server ends, even if it hangs.

    Linux watches the server's thread that started it. The next heartbeat notices a server that is
    gone already.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _dump_stacks_on_signal(path: str | None) -> None:
    """Append all Python stacks to the file, or stderr, on each SIGUSR1, even in C code."""
    # open as long as the process: the handler writes to its descriptor
    file = sys.stderr if path is None else open(path, "a")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def _end_process(code: int) -> NoReturn:
    """End the process without tearing the interpreter down.

    That takes half a second to free what the system frees at once (modules, weights, a GPU's
    context), and libraries warn of their objects that `collector_paused` left alone. `main` has
    closed what must be closed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end_process(main())
