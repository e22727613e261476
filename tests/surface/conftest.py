"""Golden files: what users, dashboards and other programs can see of loraserve.

A test computes one part of the surface from the code, and compares it with its file in `golden/`. A
difference is a change of the surface. Where it is meant, rewrite the files, and review their diff
like code:

    LORASERVE_TEST_RECORD_SURFACE=1 .venv/bin/python -P -m pytest tests/surface

Files whose name ends in `_texts` hold wording alone, which may change; all others hold the
contract.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from whole_app import app, client, model_dir, services, started

__all__ = ["app", "client", "model_dir", "services", "started"]

FOLDER = Path(__file__).parent / "golden"
RECORD_VARIABLE = "LORASERVE_TEST_RECORD_SURFACE"

Golden = Callable[[str, Iterable[str]], None]


@pytest.fixture
def golden() -> Golden:
    """Return a function that compares lines with a golden file,
    or rewrites the file when recording.
    """

    def compare(name: str, lines: Iterable[str]) -> None:
        path = FOLDER / name
        found = "".join(f"{line.rstrip()}\n" for line in lines)
        if os.environ.get(RECORD_VARIABLE):
            path.parent.mkdir(exist_ok=True)
            path.write_text(found, encoding="utf-8")
            return
        stored = path.read_text(encoding="utf-8") if path.exists() else ""
        if found != stored:
            diff = difflib.unified_diff(
                stored.splitlines(), found.splitlines(), f"golden/{name}", "the code", lineterm=""
            )
            pytest.fail(
                "\n".join(
                    [
                        f"The surface in golden/{name} changed:",
                        *diff,
                        f"If that is meant: {RECORD_VARIABLE}=1 .venv/bin/python -P -m pytest tests/surface",
                    ]
                ),
                pytrace=False,
            )

    return compare
