"""Instruction sets of this processor that each library uses.

Each library has a dispatch, and a variable that lowers it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from loraserve_kernels.cpu.lora.apply import HAS_NUMBA

_LADDER = (
    "sse41",
    "avx",
    "avx2",
    "avx2_vnni",
    "avx512_core",
    "avx512_core_vnni",
    "avx512_core_bf16",
    "avx512_core_amx",
)
"""oneDNN's names, each with everything before it save avx2_vnni, which few processors have without
AVX-512.
"""

_FBGEMM = {1: "avx2", 2: "avx512", 3: "avx512_ymm", 4: "avx512_vnni", 5: "avx512_vnni_ymm"}
"""`fbgemm::inst_set_t`."""


@functools.cache
def onednn() -> str:
    """Detect the widest set that oneDNN may use.

    It is the processor's, or less where ONEDNN_MAX_CPU_ISA sets it.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return platform.machine()
    bound = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    bound = bound.lower()
    own = _processor()
    if bound not in _LADDER:
        return own
    return _LADDER[min(_LADDER.index(bound), _LADDER.index(own))]


@functools.cache
def fbgemm() -> str:
    """Detect the set that fbgemm dispatches to.

    Where fbgemm can't be queried, it is torch's own name for it.
    """
    try:
        ask = ctypes.CDLL(
            str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
        )._ZN6fbgemm20fbgemmInstructionSetEv
    except (OSError, AttributeError):
        return aten()
    ask.restype = ctypes.c_int
    return _FBGEMM.get(ask(), aten())


def aten() -> str:
    """Detect the set that torch's own operators dispatch to; ATEN_CPU_CAPABILITY lowers it."""
    return torch.backends.cpu.get_cpu_capability().lower()


@functools.cache
def numba() -> str:
    """Detect the set that numba's kernels are compiled for."""
    if not HAS_NUMBA:
        return "none"
    from loraserve_kernels.cpu.simd import LANES

    if platform.machine() not in ("x86_64", "AMD64"):
        return platform.machine()
    return "avx512" if LANES == 16 else "avx2"


def gpu(device: torch.device) -> str:
    """Detect a GPU's compute capability; ``interpreter`` where Triton's kernels run on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _processor() -> str:
    """Detect the widest of oneDNN's sets that the processor has."""
    has: Sequence[tuple[str, bool]] = (
        ("avx512_core_amx", torch.cpu._is_amx_tile_supported()),
        ("avx512_core_bf16", torch.cpu._is_avx512_bf16_supported()),
        ("avx512_core_vnni", torch.cpu._is_vnni_supported() and torch.cpu._is_avx512_supported()),
        ("avx512_core", torch.cpu._is_avx512_supported()),
        ("avx2", torch.cpu._is_avx2_supported()),
    )
    return next((name for name, is_there in has if is_there), "sse41")


def choose_functions() -> None:
    """Have MKL choose its vector functions for this process, before several threads share one.

    It is cheap: call it once, before the first elementwise function that many threads share.

    MKL chooses the machine code of each of its vector functions at the first call. Where several
    threads make that call at once, one of them may be given the code of the lowest accuracy (errors
    near 1e-4), for its part of that one call. A table of angles that is made so is wrong for as
    long as the process lives.

    Source: pytorch issue 188792.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.cos, torch.sin, torch.sqrt, torch.exp, torch.log, torch.tanh):
            function(one)
