"""numba's cache, which processes that compile different kernels share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = ("dot", "int4-dot", "nf4", "int4", "f16")
WARM_UP = "from loraserve_kernels.cpu.linear import decoded; decoded.warm_up({kind!r})"
MULTIPLY = """
import torch
from loraserve_kernels.common.quantized import quantize
from loraserve_kernels.cpu.linear import decoded, gemm

torch.manual_seed(0)
x = torch.randint(-127, 128, (9, 128)).float()
x[:, 0] = 127.0
weight = torch.randn(48, 128)
int8, int4, nf4 = quantize(weight, "int8"), quantize(weight, "int4", 64), quantize(weight, "nf4", 64)
for rounded, y in (
    (int8, gemm.int8_linear(x, gemm.pack_int8(int8.codes, int8.scales.flatten(), "numba-dot"))),
    (int4, gemm.int4_linear(x, decoded.pack_group_dot(int4))),
    (nf4, decoded.linear(x, decoded.pack(nf4))),
    (int4, decoded.linear(x, decoded.pack(int4))),
):
    torch.testing.assert_close(y, x @ rounded.dequantize(torch.float32).T, rtol=1e-4, atol=1e-2)
half = weight.half()
torch.testing.assert_close(decoded.linear(x, decoded.pack_half(half)), x @ half.float().T, rtol=1e-4, atol=1e-2)
"""


@pytest.mark.campaign
def test_kernels_that_different_processes_compiled_are_themselves(tmp_path: Path) -> None:
    """Each process numbers anew what it compiles; numba finds machine code by name and number."""
    for code in (*(WARM_UP.format(kind=kind) for kind in KINDS), MULTIPLY):
        subprocess.run(
            [sys.executable, "-P", "-c", code], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, check=True
        )
