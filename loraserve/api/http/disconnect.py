"""Work that ends when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

T = TypeVar("T")


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has left.

    The body must have been read: what comes next on the connection is its end.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its result; cancel it once the client has left.

    The body must have been read.

    Raises:
        ClientDisconnect: the client left before.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        watcher.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.shield(asyncio.gather(task, watcher, return_exceptions=True))
        # a failed task has this frame in its error's
        del task, watcher
