"""Coroutines of commands. asyncio is loaded when one runs: that takes a tenth of `--help`."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on an event loop of its own, and return its result."""
    import asyncio

    return asyncio.run(coroutine)
