"""Tests marked ``interpreted`` run in one child process of pytest, where Triton interprets its kernels on the CPU.

Triton decides on its first import, for the whole process, whether kernels are interpreted or compiled; other tests here compile them. So the child runs every
marked test of the session at once, with ``TRITON_INTERPRET=1``, beside this process, and each one's outcome is reported here under its own name. `tests/conftest.py`
imports the hooks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_REPORT = "LORASERVE_TEST_INTERPRETED_REPORT"
_CHILD: pytest.StashKey[_Child] = pytest.StashKey()


class _Child:
    """The process that interprets, from its start to its outcomes."""

    def __init__(self, ids: list[str], root: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._report, self._words = folder / "outcomes", folder / "words"
        environment = {**os.environ, _REPORT: str(self._report), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *ids]
        with self._words.open("w") as words:
            self._process = subprocess.Popen(command, cwd=root, env=environment, stdout=words, stderr=words)
        self._outcomes: dict[str, tuple[str, str]] | None = None

    def outcome(self, nodeid: str) -> tuple[str, str]:
        """Wait for the child; return what became of a test, and the text to it."""
        if self._outcomes is None:
            self._process.wait()
            lines = self._report.read_text().splitlines() if self._report.exists() else []
            self._outcomes = {nodeid: (outcome, text) for nodeid, outcome, text in map(json.loads, lines)}
        last_words = self._words.read_text()[-3000:]
        return self._outcomes.get(nodeid, ("failed", f"the child process didn't run this test:\n{last_words}"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _dot_by_element() -> None:
    """Have the interpreter sum each element of a product in one order, whatever its place and its neighbours, as a GPU's matrix units do.

    Its own products are NumPy's matmul, and some of OpenBLAS's kernels (Haswell's, Zen's) round a row by its place in a tile: tests that a row's bits depend on that row alone
    would fail or pass by the processor they run on.
    """
    from triton.runtime import interpreter  # only here: on its first import Triton decides whether it interprets

    by_blas = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.dtype.primitive_bitwidth == 8 or b.dtype.primitive_bitwidth == 8:
            return by_blas(self, a, b, d, *precision)
        product = np.einsum("...mk,...kn->...mn", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def pytest_configure() -> None:
    if _REPORT in os.environ:
        _dot_by_element()


def _is_interpreted(item: pytest.Item) -> bool:
    return item.get_closest_marker("interpreted") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's tests come first: kernels are compiled here, one after the other and on one core, while the child interprets on another. No clock is read there."""
    items.sort(key=lambda item: 1 if _is_interpreted(item) else 2 * (item.path.parent.name != "triton"))


def pytest_collection_finish(session: pytest.Session) -> None:
    ids = [item.nodeid for item in session.items if _is_interpreted(item)]
    if ids and _REPORT not in os.environ and not session.config.option.collectonly:
        session.stash[_CHILD] = _Child(ids, session.config.rootpath)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _CHILD in session.stash:
        session.stash[_CHILD].close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if _REPORT in os.environ or not _is_interpreted(pyfuncitem):
        return None
    outcome, text = pyfuncitem.session.stash[_CHILD].outcome(pyfuncitem.nodeid)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)
    if outcome == "skipped":
        pytest.skip(text)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _REPORT in os.environ and (report.when == "call" or not report.passed):
        with Path(os.environ[_REPORT]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, report.longreprtext]) + "\n")
