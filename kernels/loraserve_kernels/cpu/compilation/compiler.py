"""Compile kernels with numba into the machine's cache, or read them from it.

Processes that need the same kernels at the same time share the work: each kernel has a lock, and
its holder compiles.
"""

# numba has no types
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import caching

from loraserve_kernels.cpu.compilation.catalog import load_kernel
from loraserve_kernels.cpu.compilation.kernel_cache import KernelCache, kernel_cache

_PACKAGE = Path(__file__).resolve().parents[2]


class KernelLocator(caching._CacheLocator):  # type: ignore[misc]
    """Point numba for machine code of this package to `kernel_cache`'s folder.

    The folder's name is a hash of the sources, so that a file's code is always fresh.
    """

    def __init__(self, cache: KernelCache, line: int) -> None:
        self._cache, self._line = cache, line

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> KernelLocator | None:
        cache = kernel_cache()
        if cache is None or not Path(inspect.getfile(py_func)).resolve().is_relative_to(_PACKAGE):
            return None
        locator = cls(cache, py_func.__code__.co_firstlineno)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator

    def get_cache_path(self) -> str:
        return str(self._cache.directory)

    def get_source_stamp(self) -> str:
        return self._cache.directory.name

    def get_disambiguator(self) -> str:
        return str(self._line)


@functools.cache
def _use_kernel_cache() -> None:
    """Have numba look for the machine's cache first, then where it always does."""
    ours = f"{KernelLocator.__module__}.{KernelLocator.__qualname__}"
    usual = numba.config.CACHE_LOCATOR_CLASSES or ",".join(
        locator.__name__ for locator in caching.CacheImpl._locator_classes
    )
    numba.config.CACHE_LOCATOR_CLASSES = f"{ours},{usual}"


def compile_kernel(function: Callable[[Any], None]) -> Any:
    """Compile a C function of its argument block's address, or read it from the cache.

    Args:
        function: takes the address; its name is unlike any other kernel's.
    """
    _use_kernel_cache()
    compile_it = numba.cfunc(types.void(types.intp), cache=True)
    cache = kernel_cache()
    if cache is None:
        return compile_it(function)
    with cache.claim(function.__name__):
        handle = compile_it(function)
        cache.note_compiled(function.__name__)
    return handle


def compile_all(
    names: Iterable[str],
    on_compiled: Callable[[int], object] = lambda num_done: None,
    on_wait: Callable[[], object] = lambda: None,
) -> None:
    """Compile kernels that no other process compiles now, then wait for the others.

    Args:
        names: keys of `catalog.KERNELS`.
        on_compiled: called with how many are done, after each.
        on_wait: called about every 50 ms while another process compiles.
    """
    cache, num_done, waiting = kernel_cache(), 0, []
    for name in names:
        if cache is None:
            load_kernel(name)
        else:
            with cache.claim(name, patience_s=0) as is_ours:
                if not is_ours:
                    waiting.append(name)
                    continue
                load_kernel(name)
        num_done += 1
        on_compiled(num_done)
    for name in waiting:
        if cache is not None:
            with cache.claim(name, on_wait=on_wait):
                load_kernel(name)
        num_done += 1
        on_compiled(num_done)
