"""Kernels with one piece of their source replaced."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from pathlib import Path
from typing import Any


def mutant_of(kernel: Any, old: str, new: str, folder: Path) -> Any:
    """The same kernel from a copy of its module in which `old`, which stands there once,
    is `new`.

    What it computes may be no number: numpy's warnings of that are off until the test ends.
    """
    warnings.simplefilter("ignore", RuntimeWarning)
    module = inspect.getmodule(kernel.fn)
    assert module is not None
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{module.__name__} has {source.count(old)} times: {old}"
    path = folder / f"{module.__name__.rpartition('.')[2]}_mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return getattr(mutant, kernel.fn.__name__)
