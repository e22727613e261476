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

# of a multiprocessor, and the most of a thread that are handed out in eights
_REGISTERS = 65536
_MAX_REGISTERS = 248


def registers(num_warps: int, num_programs: int) -> int:
    """Compute the registers of a thread that let that many programs of that many warps run at once.

    Left alone, the compiler takes more for some kernels than they need.
    """
    return min(_MAX_REGISTERS, _REGISTERS // (32 * num_warps * num_programs) // 8 * 8)


MAX_REGISTERS = registers(4, PROGRAMS_PER_MULTIPROCESSOR)
"""Registers of a thread that let the programs of a persistent grid run at once."""


@cache
def is_hopper() -> bool:
    """Check whether kernels are compiled for an H100, an H200 or a GH200.

    True where there is no GPU, and nothing is launched.
    """
    try:
        arch = 90 if INTERPRETED else triton.runtime.driver.active.get_current_target().arch
    except RuntimeError:
        # Triton's, of a machine without a driver
        return True
    return isinstance(arch, int) and arch // 10 == 9


def roomy(hopper: int | None, others: int) -> int | None:
    """Choose the bound of a thread's registers: the one for Hopper, or the one for other GPUs.

    Tile sizes are chosen for Hopper. With its bounds, some versions of the compiler keep a register
    or two in memory on others, whose shared memory has room for fewer programs anyway.
    """
    return hopper if is_hopper() else others


@cache
def num_programs(device: torch.device) -> int:
    """Programs of a persistent grid: as many as the device runs at once."""
    if device.type == "cuda":
        multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count
        return multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    # the interpreter runs programs one after the other
    return 3
