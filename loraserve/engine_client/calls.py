"""Questions to the engine that wait for their replies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loraserve.errors import LoraserveError


class PendingCalls:
    """Match replies to calls by their ids."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()

    def next_id(self) -> int:
        """Generate a new id, for a call or for a message without one."""
        return next(self._ids)

    @contextmanager
    def open(self, call_id: int) -> Iterator[asyncio.Future[Any]]:
        """Yield the future of a call's reply; a reply after the block is ignored."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._futures[call_id] = future
        try:
            yield future
        finally:
            self._futures.pop(call_id, None)

    def answer(self, call_id: int, value: object) -> None:
        """Complete a call; no-op if it is over."""
        future = self._futures.pop(call_id, None)
        if future is not None and not future.done():
            future.set_result(value)

    def refuse(self, call_id: int, error: LoraserveError) -> None:
        """Fail a call; no-op if it is over."""
        future = self._futures.pop(call_id, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: LoraserveError) -> None:
        """Fail every call."""
        for call_id in list(self._futures):
            self.refuse(call_id, error)
