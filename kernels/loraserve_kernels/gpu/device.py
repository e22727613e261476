"""Facts about the machine that Triton's kernels run on."""

from __future__ import annotations

from functools import cache

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors: ``TRITON_INTERPRET=1`` before
Triton's first import.

For tests.
"""

PROGRAMS_PER_MULTIPROCESSOR = 4

MAX_REGISTERS = 65536 // (4 * 32 * PROGRAMS_PER_MULTIPROCESSOR)
"""Registers of a thread that let so many programs of four warps run at once.

Left alone, the compiler takes more for some kernels than they need.
"""


@cache
def num_programs(device: torch.device) -> int:
    """Programs of a persistent grid: as many as the device runs at once."""
    if device.type == "cuda":
        multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count
        return multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    # the interpreter runs programs one after the other
    return 3
