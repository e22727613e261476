"""A process that compiles kernels next to an engine: its interpreter stays free.

    python -P -m loraserve_kernels.cpu.compilation.helper NEEDED,… LATER,…

The needed kernels are compiled at once, in turn with the engine; then the later ones, with the
lowest claim on the processor.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from loraserve_kernels.cpu.compilation.kernel_cache import kernel_cache

logger = logging.getLogger(__name__)

_KEPT = frozenset({"PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "LANG", "XDG_CACHE_HOME"})
_KEPT_PREFIXES = ("NUMBA_", "PYTHON", "LC_")
_PR_SET_PDEATHSIG = 1
_LATER_NICENESS = 10


def start_helper(needed: Sequence[str], later: Sequence[str] = ()) -> subprocess.Popen[bytes] | None:
    """Start a process that compiles what the machine's cache lacks.

    It ends with the thread that started it, and sees nothing of this process' secrets.

    Returns:
        None where the cache lacks nothing, or there is no cache.
    """
    cache = kernel_cache()
    if cache is None:
        return None
    lists = [[name for name in names if not cache.is_compiled(name)] for names in (needed, later)]
    if not any(lists):
        return None
    environment = {
        name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)
    }
    command = [sys.executable, "-P", "-m", __name__, *map(",".join, lists)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)  # noqa: S603 (ours)
    except OSError as error:
        logger.warning("no process beside the engine compiles kernels: %s", error)
        return None
    threading.Thread(target=process.wait, name="kernel-compiler", daemon=True).start()
    return process


def compile_apart(name: str) -> None:
    """Wait until a process beside this one has compiled the kernel; no-op if the cache has it.

    Where that process fails, the caller compiles the kernel itself when it loads it.
    """
    helper = start_helper((name,))
    if helper is not None and (code := helper.wait()) != 0:
        logger.warning("the process that compiled %s ended with code %d", name, code)


def _end_with_the_parent(parent: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _names(listed: str) -> Iterable[str]:
    return filter(None, listed.split(","))


def main(arguments: Sequence[str]) -> int:
    """Run the process; return its exit code."""
    _end_with_the_parent(os.getppid())
    from loraserve_kernels.cpu.compilation.compiler import compile_all

    needed, later = map(_names, arguments)
    compile_all(needed)
    os.nice(_LATER_NICENESS)
    compile_all(later)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
