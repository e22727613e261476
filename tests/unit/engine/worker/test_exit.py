"""An engine's end: its process is gone at once, with its exit code and all that it wrote."""

from __future__ import annotations

import subprocess
import sys

ENDING = """
import atexit, logging, sys
from loraserve.engine.worker import main

logging.basicConfig(stream=sys.stdout, format="%(message)s")
atexit.register(print, "the interpreter was torn down")
sys.stdout.write("written, ")
logging.warning("logged")
main._end_process(3)
"""


def test_process_ends_without_teardown_or_lost_output() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "written, logged\n", "")
