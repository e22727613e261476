"""Measure what a step pays where a library multiplies in the middle of it.

Kernels of our own run one after the other in one region of threads (`cpu.program`). A library's
product ends that region: threads wake for it, and wake again for the region behind it, and the
interpreter launches both. Of a step with few rows that is more than the product itself.
"""

from __future__ import annotations

import functools
import threading
import time

import numpy as np

from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA

_RUNS = 41
_WAKES = 2
"""Regions that a library's product adds to a step: its own, and what is left of the program."""


def cut_s(num_threads: int) -> float:
    """Estimate the processor's seconds, those of all threads, that one cut of a step costs.

    It compares with a kernel's seconds on one thread: a step divides these among its threads.
    """
    return _WAKES * num_threads * region_s(num_threads)


@functools.cache
def region_s(num_threads: int) -> float:
    """Measure the seconds from the start of an empty region of sleeping threads to its end.

    It is the median of some, measured on a thread of its own, whose team ends with it: a second
    team would stay and take the step's threads their cores.
    """
    if not HAS_NUMBA or num_threads < 2:
        return 0.0
    found: list[float] = []
    thread = threading.Thread(target=_measure, args=(num_threads, found))
    thread.start()
    thread.join()
    return sorted(found)[len(found) // 2]


def _measure(num_threads: int, found: list[float]) -> None:
    from loraserve_kernels.cpu.linear import row_quantization as k

    handle = k.compiled()
    # no rows: a thread that enters leaves
    args = np.zeros(k.NUM_WORDS, dtype=np.int64)
    for _ in range(_RUNS):
        began = time.perf_counter()
        threads.run(handle.ctypes, handle.address, args.ctypes.data, num_threads)
        found.append(time.perf_counter() - began)
