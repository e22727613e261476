"""Processes of ours that begin as forks of one that has imported what they import.

A server and its engine import for seconds and then start in less than one, and tests start a
hundred of them. `Zygote.spawn` runs a module of ours as ``python -P -m MODULE`` would, as a child
of the process that asks, with its own environment, folder and descriptors. Tests of a start itself,
of memory, or of what the environment does to the interpreter or to numba (LD_PRELOAD,
NUMBA_CPU_NAME) start Python instead.

As a program: ``python zygote.py DESCRIPTOR``, where requests come in.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_MAX_REQUEST_BYTES = 1 << 18
SERVER, ENGINE = "loraserve.cli.main", "loraserve.engine.worker.main"
_ENGINES_MODULES = (ENGINE, "loraserve.engine.worker.startup")
IMPORTS = {SERVER: (SERVER, "loraserve.settings", "loraserve.api.server", *_ENGINES_MODULES), ENGINE: _ENGINES_MODULES}
"""The modules that a zygote imports before it runs one; a server forks a zygote for its engines."""
ENGINES_NAME = "engine-fork"
"""The name of an engine's fork in /proc, whose command line is the zygote's."""
_create_subprocess_exec = asyncio.create_subprocess_exec
_LOCK = threading.Lock()
"""One fork at a time: that a process adopts forks is set for all of its threads."""
_zygote: Zygote | None = None


class Zygote:
    """A process that forks itself on request, and ends with the process that made this."""

    def __init__(self, requests: socket.socket, end: Callable[[], object]) -> None:
        self._socket, self._end = requests, end

    @classmethod
    def start(cls) -> Zygote:
        """Start one that has yet to import."""
        ours, theirs = _connection()
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {name: value for name, value in os.environ.items() if not name.startswith("LORASERVE_")}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=variables | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
            )
        made = cls(ours, process.wait)
        atexit.register(made.close)
        return made

    @classmethod
    def fork(cls) -> Zygote:
        """Fork this process, before it has a thread, as one that has imported the same."""
        ours, theirs = _connection()
        pid = os.fork()
        if pid == 0:
            ours.close()
            serve(theirs)
            os._exit(0)
        theirs.close()
        return cls(ours, lambda: os.waitpid(pid, 0))

    def spawn(
        self, module: str, arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, descriptors: Sequence[int]
    ) -> int:
        """Run `module`, one of `IMPORTS`, in a fork, and return its pid: a child of this process.

        Args:
            arguments: ``sys.argv[1:]``.
            descriptors: its stdin, stdout and stderr.
        """
        request = {"module": module, "arguments": list(arguments), "env": dict(env), "cwd": str(cwd)}
        with _LOCK, _adopting():
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
            return int(self._socket.recv(64))

    def close(self) -> None:
        """End the zygote; what was forked goes on."""
        self._socket.close()
        self._end()


def _connection() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def zygote() -> Zygote:
    """Return this process's zygote, started if it has none."""
    global _zygote
    with _LOCK:
        if _zygote is None:
            _zygote = Zygote.start()
        return _zygote


@contextlib.contextmanager
def _adopting() -> Any:
    """Have forks whose parent ends become children of this process; afterwards of init again."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


class ForkedProcess:
    """A fork, with the part of `subprocess.Popen` that tests use."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: int, errors: int | None = None
    ) -> None:
        """Run ``[python, "-P", "-m", MODULE, *arguments]``; stdout and stderr are `output`, or
        stderr is `errors`.
        """
        with open(os.devnull, "rb") as nothing:
            self.pid = zygote().spawn(
                command[3],
                command[4:],
                env=env,
                cwd=cwd,
                descriptors=[nothing.fileno(), output, output if errors is None else errors],
            )
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self._reap(os.WNOHANG)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise subprocess.TimeoutExpired after `timeout` seconds."""
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                # not select.select: a test may hold more descriptors than that takes
                waiting = select.poll()
                waiting.register(descriptor, select.POLLIN)
                ready = waiting.poll(None if timeout is None else timeout * 1000)
            finally:
                os.close(descriptor)
            if not ready:
                raise subprocess.TimeoutExpired("loraserve", timeout or 0.0)
            self._reap(0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _reap(self, options: int) -> None:
        pid, status = os.waitpid(self.pid, options)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)


class AsyncForkedProcess:
    """A fork, with the part of `asyncio.subprocess.Process` that `EngineProcess` uses."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Run ``[python, "-P", "-m", MODULE, *arguments]`` with a pipe as stdin."""
        theirs, ours = os.pipe()
        try:
            self.pid = zygote().spawn(command[3], command[4:], env=env, cwd=Path.cwd(), descriptors=[theirs, 1, 2])
        finally:
            os.close(theirs)
        self.returncode: int | None = None
        self.stdin = _Pipe(ours)
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(self.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


class _Pipe:
    """The writing end of a pipe that takes a config at once."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb")

    def write(self, data: bytes) -> None:
        self._file.write(data)

    async def drain(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


async def create_engine(*command: Any, **options: Any) -> Any:
    """Do what asyncio.create_subprocess_exec does, but start an engine as a fork."""
    if command[1:4] != ("-P", "-m", ENGINE):
        return await _create_subprocess_exec(*command, **options)
    return AsyncForkedProcess(command, options["env"])


def serve(requests: socket.socket) -> None:
    """Fork for each request, until the other end is closed."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 3)
        if not data:
            return
        request = json.loads(data)
        _prepare(request["module"])
        gc.collect()
        # what forks only read is shared by them
        gc.freeze()
        ours, theirs = os.pipe()
        between = os.fork()
        if between == 0:
            # the fork's parent ends at once, and the process that asks becomes its parent
            parent = os.getpid()
            if pid := os.fork():
                os.write(theirs, str(pid).encode())
                os._exit(0)
            for descriptor in (requests.detach(), ours, theirs):
                os.close(descriptor)
            while os.getppid() == parent:
                time.sleep(0.0005)
            _run(request, descriptors)
        os.waitpid(between, 0)
        requests.send(os.read(ours, 64))
        for descriptor in (ours, theirs, *descriptors):
            os.close(descriptor)


@functools.cache
def _prepare(module: str) -> None:
    """Do once what every start of `module` does before it reads its configuration."""
    for name in IMPORTS[module]:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        from numba.core.registry import cpu_target

        from loraserve_kernels.cpu.compilation.catalog import KERNELS

        for name, _ in KERNELS.values():
            importlib.import_module(f"loraserve_kernels.cpu.{name}")
        # tables of types and functions, made when the first kernel is loaded
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
    if module == SERVER:
        from fastapi.routing import iter_route_contexts

        from loraserve.api import app

        for _ in iter_route_contexts(app._routes(has_console=True, has_router_metrics=False)):
            pass


def _run(request: dict[str, Any], descriptors: list[int]) -> None:
    """Become the process that was asked for, and end with it."""
    global _zygote
    # not at the top: it is one of the modules that requests name
    from loraserve import faults

    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["module"] == ENGINE:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ENGINES_NAME.encode(), 0, 0, 0)
    sys.argv = [request["module"], *request["arguments"]]
    faults._arm_from_environment()
    if request["module"] == SERVER:
        _zygote = Zygote.fork()
        asyncio.create_subprocess_exec = create_engine
    code = 70
    try:
        # as ``python -m`` does: it becomes __main__
        runpy._run_module_as_main(request["module"])  # type: ignore[attr-defined]
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        # as an interpreter ends: threads are waited for, exit functions called
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # not this namespace's: what runs as __main__ gets it
    import zygote as imported

    imported.serve(socket.socket(fileno=int(sys.argv[1])))
