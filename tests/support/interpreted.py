"""Tests marked ``interpreted`` run in a child process of pytest,
where Triton interprets its kernels on the CPU.

Triton decides on its first import, for the whole process, whether kernels are interpreted or
compiled; other tests compile them. So a pytest with such tests starts a child at the first one,
with ``TRITON_INTERPRET=1``, asks it for one test after the other, and reports the child's reports
as its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_CONNECTION = "LORASERVE_TEST_INTERPRETED_SOCKET"
"""In the child, the file descriptor of the socket that connects it with its parent."""
_CHILD: pytest.StashKey[_Child] = pytest.StashKey()


class _Child:
    """A pytest process that interprets, and runs the tests that it is asked for."""

    def __init__(self, items: list[pytest.Item], config: pytest.Config) -> None:
        """Start the process; it collects the modules of `items`."""
        self._config = config
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name) / "output"
        paths = sorted({str(item.path) for item in items})
        command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-m", "interpreted"]
        self._socket, theirs = socket.socketpair()
        variables = {_CONNECTION: str(theirs.fileno()), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        with theirs, self._output.open("w") as output:
            self._process = subprocess.Popen(
                [*command, *paths],
                cwd=config.rootpath,
                env={**os.environ, **variables},
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
            )
        self._connection = self._socket.makefile("rw")

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        """Run a test in the child and return its reports.

        Args:
            nextitem: the test to be asked for next, so that the child keeps the fixtures that both
                use.
        """
        following = _name(nextitem) if nextitem is not None and _is_interpreted(nextitem) else None
        reports = []
        try:
            print(json.dumps([_name(item), following]), file=self._connection, flush=True)
            while data := json.loads(self._connection.readline() or '"gone"'):
                if data == "gone":
                    return [self._lost(item)]
                if isinstance(data["longrepr"], list):
                    # JSON has no tuples; a skip's place and reason are one.
                    data["longrepr"] = tuple(data["longrepr"])
                report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
                # xdist appends a group's name to the names that its workers report.
                report.nodeid = item.nodeid
                reports.append(report)
        except OSError:
            return [self._lost(item)]
        return reports

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        text = f"the child process didn't run this test:\n{self._output.read_text()[-3000:]}"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")

    def close(self) -> None:
        """End the process: without a connection it has nothing to do."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._socket.close()
        self._process.wait()
        self._folder.cleanup()


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("@")[0]


def _is_interpreted(item: pytest.Item) -> bool:
    return item.get_closest_marker("interpreted") is not None


def _dot_by_element() -> None:
    """Have the interpreter sum each element of a product in one order,
    whatever its place and its neighbours.

    A GPU's matrix units do so. The interpreter's own products are NumPy's matmul, and some of
    OpenBLAS's kernels (Haswell's, Zen's) round a row by its place in a tile: tests that a row's
    bits depend on that row alone would fail or pass by the processor they run on.
    """
    from triton.runtime import interpreter  # only here: on its first import Triton decides whether it interprets

    by_blas = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.dtype.primitive_bitwidth == 8 or b.dtype.primitive_bitwidth == 8:
            return by_blas(self, a, b, d, *precision)
        product = np.einsum("...mk,...kn->...mn", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _patch_language_once() -> None:
    """Patch Triton's language at a process's first kernel instead of at each call of a device
    function; a fifth of the time.

    The interpreter undoes its patches after each kernel, for the sake of processes that compile
    kernels too.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    done: set[frozenset[int]] = set()

    def patch_once(function: Any) -> Any:
        languages = (interpreter.tl, interpreter.tl.core)
        seen = frozenset(id(value) for value in function.__globals__.values() if any(value is one for one in languages))
        if not seen or seen not in done:
            patch(function)
            done.add(seen)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _remember_dtypes() -> None:
    """Look a dtype of Triton's up once: the interpreter makes its table anew at each operation,
    a tenth of the time.
    """
    from triton.runtime import interpreter

    look_up = functools.cache(interpreter._get_np_dtype)

    def get_np_dtype(dtype: Any) -> np.dtype[Any]:
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else look_up(dtype.scalar)

    interpreter._get_np_dtype = get_np_dtype


def _remember_shapes() -> None:
    """Make the shape of a tensor and the name of its type once: the interpreter makes them anew at
    each operation, a quarter of the time.
    """
    import triton.language.core as tl

    @functools.cache
    def tensor_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    @functools.cache
    def block_shape(shape: tuple[int, ...], element: str) -> tuple[Any, int, str]:
        sizes = tl.tuple(shape)
        return sizes, tl.validate_block_shape(sizes), f"<{sizes}, {element}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensor_shape(tuple(type.shape) if type.is_block() else ())

    make_block_type = tl.block_type.__init__

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        if not shape:
            make_block_type(self, element_ty, shape)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = block_shape(tuple(tl._unwrap_shape(shape)), str(element_ty))

    tl.tensor.__init__ = make_tensor
    tl.block_type.__init__ = make_block


def _leave_sums_of_integers_unchecked() -> None:
    """Compute sums and products of integers as a GPU does, without asking each whether it fits: a
    third of the time, for offsets into tensors of a few KiB.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def pytest_configure(config: pytest.Config) -> None:
    if _CONNECTION in os.environ:
        config.pluginmanager.register(_Reporter(config))
        _dot_by_element()
        _patch_language_once()
        _remember_dtypes()
        _remember_shapes()
        _leave_sums_of_integers_unchecked()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put interpreted tests first, so that they fall to one worker, which starts one child."""
    items.sort(key=lambda item: not _is_interpreted(item))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Have an interpreted test run in the child."""
    if _CONNECTION in os.environ or not _is_interpreted(item):
        return None
    stash = item.session.stash
    if _CHILD not in stash:
        stash[_CHILD] = _Child([other for other in item.session.items if _is_interpreted(other)], item.config)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in stash[_CHILD].run(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Fixtures of the test before this one that the next one doesn't share.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _CHILD in session.stash:
        session.stash[_CHILD].close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In the child, run the tests that the parent asks for."""
    if _CONNECTION not in os.environ or session.testsfailed:
        return None
    items = {item.nodeid: item for item in session.items}
    with open(int(os.environ[_CONNECTION]), closefd=False) as requests:
        for line in requests:
            name, following = json.loads(line)
            item, nextitem = items[name], items.get(following)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            _report(None)
    return True


def _report(data: dict[str, Any] | None) -> None:
    """Write a report to the parent; None ends a test's reports."""
    os.write(int(os.environ[_CONNECTION]), f"{json.dumps(data)}\n".encode())


class _Reporter:
    """Sends a child's reports to its parent."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _report(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
