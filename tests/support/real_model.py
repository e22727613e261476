"""A trained base for tests: the benchmarks', SmolLM2-135M-Instruct (benchmarks/real_model.py).

LORASERVE_TEST_REAL_MODEL names its directory. `.ci/run` makes it, where the package can be had.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    # `benchmarks` isn't installed: it is found in the checkout
    sys.path.append(str(ROOT))

VARIABLE = "LORASERVE_TEST_REAL_MODEL"


def find_real_model() -> Path:
    """Return the directory of the base; skip where none is named."""
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"needs {VARIABLE}=DIR, of: python -m benchmarks.real_model DIR (98 MB)")
    return Path(named)
