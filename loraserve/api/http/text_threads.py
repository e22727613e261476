"""Threads for parsing, templating and tokenizing long texts, divided among tenants."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from loraserve.background import SERVER_NICENESS, lower_thread_priority
from loraserve.limits import KIB
from loraserve.tenancy.limits.turns import TenantTurns

T = TypeVar("T")

ON_LOOP_BYTES = 2 * KIB
"""Largest request that is read on the event loop: a millisecond's work.

Longer ones are a thread's.
"""
_TRIMMED_BYTES = 256 * KIB
"""Size of a request after which memory is given back to the system."""
_TRIM_DELAY_S = 1.0
"""Delay before memory is given back: by then the answer and those computed with it are sent."""


def _num_threads() -> int:
    # An eighth of the cores, so that the engine's steps keep theirs; two at least, so that a tenant
    # leaves one free.
    return max(2, min(8, (os.cpu_count() or 1) // 8))


class TextThreads:
    """Runs requests' work on texts on a few threads that stand back for the steps.

    Tenants have turns, request by request; and one of them never has all threads, so that another's
    short prompt doesn't wait for its long ones.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        count = num_threads or _num_threads()
        self._pool = ThreadPoolExecutor(
            count, thread_name_prefix="text", initializer=lower_thread_priority, initargs=(SERVER_NICENESS,)
        )
        self._turns = TenantTurns(count)
        self._trim_timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return self._turns.num_waiting

    async def run(self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Run `work` to its result.

        It is run at once if the request is short, otherwise on a thread in the tenant's turn.

        Args:
            num_bytes: of the whole request; what `work` takes is in proportion to it.
        """
        if num_bytes <= ON_LOOP_BYTES:
            return work()
        await self._turns.take(tenant)
        loop = asyncio.get_running_loop()
        job = self._pool.submit(work)

        def ended(_: object) -> None:
            # in the thread; the loop may have ended before it
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._done, tenant, num_bytes)

        # The job itself calls it: a thread that began continues when its client has left, and is
        # taken until it is done.
        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)

    def _done(self, tenant: str, num_bytes: int) -> None:
        self._turns.give_back(tenant)
        if num_bytes > _TRIMMED_BYTES and self._trim_timer is None:
            self._trim_timer = asyncio.get_running_loop().call_later(_TRIM_DELAY_S, self._trim)

    def _trim(self) -> None:
        self._trim_timer = None
        self._pool.submit(give_memory_back)


def give_memory_back() -> None:
    """Give freed memory back to the system.

    glibc keeps it otherwise, but for the end of each thread's arena.
    """
    if _libc is not None:
        _libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError):
        # musl has none
        return None
    return libc


_libc = _glibc()
