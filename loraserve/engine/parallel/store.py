"""The file by which the ranks of a group find each other."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import FileStore

_TIMEOUT = timedelta(hours=1)
"""Longer than the load of any base: a rank that dies is noticed by its process."""


def open_store(path: str, num_ranks: int) -> FileStore:
    """Open the group's store, which is made by the first rank that opens it."""
    store = FileStore(path, num_ranks)
    store.set_timeout(_TIMEOUT)
    return store
