"""A processor with AVX2 alone, for which a wider one passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraserve_kernels.cpu import instructions

FEATURES = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+cx16,+64bit"
NUMBA = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": FEATURES}
"""Environment in which numba compiles for it."""

wider_processor = pytest.mark.skipif("avx512" not in instructions.onednn(), reason="the other tests use AVX2 here")


def run_tests(*names: str) -> None:
    """Run these files' other tests once more, for such a processor."""
    files = [str(Path(__file__).with_name(name)) for name in names]
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "not avx2"],
        env={**os.environ, **NUMBA},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
