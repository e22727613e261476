"""Keep the garbage collector from traversing the objects of all modules again and again."""

from __future__ import annotations

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Collect nothing while test modules are imported, and all that they import."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect as ever, but leave out what there is."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the interpreter's end free it: triton's library reports each object that it doesn't."""
    gc.unfreeze()
