"""Runs a compiled kernel on PyTorch's own threads.

numba's parallel layers would bring a second pool that fights torch's for the cores, need a library
that may be missing, or (workqueue) end the process when two threads launch at once. A kernel here
is a C function that any number of threads enter and that shares its work out by an atomic counter;
it's right with one thread. The threads are OpenMP's, the same ones that torch's operators have just
used, so none is woken that isn't warm.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_RUNTIME = re.compile(r"\s(/\S*lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*)$")


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """Find the OpenMP runtime that torch has loaded; None where there is none.

    It is GNU's, or Intel's or LLVM's, which offer GNU's entries too.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {match[1] for line in lines if (match := _RUNTIME.search(line))}
    # torch's own first: another package may have brought a second runtime
    for path in sorted(paths, key=lambda path: "/torch" not in path):
        library = ctypes.CDLL(path)
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


@functools.cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    library = _runtime()
    if library is None:
        return None
    function = library.GOMP_parallel
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keep torch's operators on this thread within the block.

    It is for work during the step, such as packing an adapter: every thread that runs a parallel
    operator gets a pool of its own, and once there are more threads than cores, OpenMP's threads
    sleep instead of spinning between two operators. Each one of the step's then waits for a thread
    to wake, 75 µs on one machine.
    """
    library = _runtime()
    if library is None:
        yield
        return
    # this thread's own setting, unlike torch.set_num_threads, which is partly the process's
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)


def run(kernel: Callable[[int], None], address: int, args: int, num_threads: int) -> None:
    """Have up to `num_threads` threads enter a kernel; return when all have left it.

    The caller is among them. The GIL is released meanwhile.

    Args:
        kernel: the kernel as ctypes calls it.
        address: its address.
        args: what every thread is given.
    """
    if num_threads > 1 and (parallel := _gomp_parallel()) is not None:
        parallel(address, args, num_threads, 0)
    else:
        kernel(args)


def num_threads() -> int:
    return torch.get_num_threads()
