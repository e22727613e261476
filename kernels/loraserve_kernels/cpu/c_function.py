"""Kernels as C functions, compiled by numba or read from its cache.

Before it reads its cache, numba imports and registers everything that it can compile, which takes
a third of a second and serves compilations alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from numba import types
from numba.core.ccallback import CFunc

_KNOWN = ("0.68.",)
"""Versions of numba whose cache can be read as here; others read it their own way.

Machine code that refers to a symbol which isn't registered ends the process.
"""


def c_function(kernel: Callable[[int], None]) -> Any:
    """Return the kernel as a C function of an address: ``.address``, ``.ctypes``."""
    if not numba.__version__.startswith(_KNOWN):
        return numba.cfunc(types.void(types.intp), cache=True)(kernel)
    function: Any = CFunc(kernel, ((types.intp,), types.void), locals={}, options={})
    function.enable_caching()
    function._cache.load_overload = functools.partial(_load, function._cache)
    function.compile()
    return function


def _load(cache: Any, signature: Any, context: Any) -> Any:
    """Read a kernel from numba's cache; None if it isn't there."""
    _register_runtime()
    with cache._guard_against_spurious_io_errors():
        return cache._load_overload(signature, context)


@functools.cache
def _register_runtime() -> None:
    """Make numba's memory management known to what is loaded: exceptions' code refers to it."""
    from numba.core.runtime import _nrt_python

    for name, address in _nrt_python.c_helpers.items():
        llvmlite.binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
