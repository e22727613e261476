"""Tests marked ``interpreted`` run in one child process of pytest, where Triton interprets its kernels on the CPU.

Triton decides on its first import, for the whole process, whether kernels are interpreted or compiled; other tests here compile them. So the child runs every
marked test of the session at once, with ``TRITON_INTERPRET=1``, and each one's outcome is reported here under its own name. `tests/conftest.py` imports the hooks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_REPORT = "LORASERVE_TEST_INTERPRETED_REPORT"
_OUTCOMES: pytest.StashKey[tuple[dict[str, tuple[str, str]], str]] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if _REPORT in os.environ or pyfuncitem.get_closest_marker("interpreted") is None:
        return None
    session = pyfuncitem.session
    if _OUTCOMES not in session.stash:
        ids = [item.nodeid for item in session.items if item.get_closest_marker("interpreted")]
        session.stash[_OUTCOMES] = _run_child(ids, session.config.rootpath)
    outcomes, last_words = session.stash[_OUTCOMES]
    outcome, text = outcomes.get(
        pyfuncitem.nodeid, ("failed", f"the child process didn't run this test:\n{last_words}")
    )
    if outcome == "failed":
        pytest.fail(text, pytrace=False)
    if outcome == "skipped":
        pytest.skip(text)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _REPORT in os.environ and (report.when == "call" or not report.passed):
        with Path(os.environ[_REPORT]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, report.longreprtext]) + "\n")


def _run_child(ids: list[str], root: Path) -> tuple[dict[str, tuple[str, str]], str]:
    """Return each test's outcome and text, and what the child said last."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "outcomes"
        environment = {**os.environ, _REPORT: str(report), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *ids]
        child = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        lines = report.read_text().splitlines() if report.exists() else []
    outcomes = {nodeid: (outcome, text) for nodeid, outcome, text in map(json.loads, lines)}
    return outcomes, f"{child.stdout[-3000:]}{child.stderr[-3000:]}"
