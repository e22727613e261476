"""Programs that are clients, run without a person, on the question that every client asks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

TIMEOUT_S = 120


def run_program(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, which is its home, and wait until it ends.

    Args:
        environment: variables beside this process's own.
    """
    return subprocess.run(
        command,
        env={**os.environ, "HOME": str(folder), **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def printed_by(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a program printed; AssertionError if it ended badly."""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
