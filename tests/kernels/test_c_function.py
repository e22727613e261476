"""Kernels read from numba's cache without what numba needs for compiling."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from loraserve_kernels.cpu import c_function

KERNELS = """
import sys
import numpy as np
from loraserve_kernels.cpu import c_function as module
from loraserve_kernels.cpu.c_function import c_function
from loraserve_kernels.cpu.simd import fetch_add, load_int

def divide(args):
    fetch_add(args, load_int(args, 1) // load_int(args, 2))

def negate(args):
    fetch_add(args, -load_int(args, 1))

if "unknown" in sys.argv:
    module._KNOWN = ()

def run(kernel, *arguments):
    words = np.array([0, *arguments])
    function = c_function(kernel)
    function.ctypes(words.ctypes.data)
    return f"{kernel.__name__} {words[0]} cached={function.cache_hits} lean={'numba.np.arrayobj' not in sys.modules}"

print(run(divide, 17, 5))
if "zero" in sys.argv:
    print(run(divide, 17, 0))
if "negate" in sys.argv:
    print(run(negate, 4))
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "some_kernels.py"
    path.write_text(KERNELS)
    return path


def run(kernels: Path, *arguments: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-P", kernels, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"NUMBA_CACHE_DIR": str(kernels.parent / "cache")},
    )
    return done.stdout.splitlines(), done.stderr


def test_a_cached_kernel_is_read_without_what_compiles_kernels(kernels: Path) -> None:
    is_known = numba.__version__.startswith(c_function._KNOWN)
    assert run(kernels) == (["divide 3 cached=0 lean=False"], "")
    # what it raises is shown and ends nothing, as in any C function of numba's
    found, errors = run(kernels, "zero")
    assert found == [f"divide {quotient} cached=1 lean={is_known}" for quotient in (3, 0)]
    assert "ZeroDivisionError" in errors
    # a kernel that isn't there is compiled beside one that is
    found, errors = run(kernels, "negate")
    assert found == [f"divide 3 cached=1 lean={is_known}", "negate -4 cached=0 lean=False"]
    assert run(kernels, "unknown") == (["divide 3 cached=1 lean=False"], "")
