"""Threads for parsing, templating and tokenizing long texts, divided among tenants."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from loraserve.background import SERVER_NICENESS, lower_thread_priority
from loraserve.limits import KIB

T = TypeVar("T")

ON_LOOP_BYTES = 2 * KIB
"""Largest request that is read on the event loop: a millisecond's work.

Longer ones are a thread's.
"""
_TRIMMED_BYTES = 256 * KIB
"""Size of a request after which memory is given back to the system."""
_TRIM_DELAY_S = 1.0
"""Delay before memory is given back: by then the answer and those beside it are sent."""


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
        self._num_threads = num_threads or _num_threads()
        self._pool = ThreadPoolExecutor(
            self._num_threads, thread_name_prefix="text", initializer=lower_thread_priority, initargs=(SERVER_NICENESS,)
        )
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._trim_timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return sum(len(line) for line in self._waiting.values())

    async def run(self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work`.

        It is run at once if the request is short, otherwise on a thread in the tenant's turn.

        Args:
            num_bytes: of the whole request; what `work` takes is in proportion to it.
        """
        if num_bytes <= ON_LOOP_BYTES:
            return work()
        await self._turn(tenant)
        loop = asyncio.get_running_loop()
        job = self._pool.submit(work)

        def ended(_: object) -> None:
            # in the thread; the loop may have ended before it
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._done, tenant, num_bytes)

        # The job itself calls it: a thread that began goes on when its client has left, and is
        # taken until it is done.
        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)

    async def _turn(self, tenant: str) -> None:
        if not self._waiting and self._may_run(tenant):
            self._running[tenant] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(tenant, deque())
        line.append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:
                # it had its turn in the same moment
                self._leave(tenant)
            raise

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(tenant)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[tenant]

    def _may_run(self, tenant: str) -> bool:
        num_own = self._running[tenant]
        return self._running.total() < self._num_threads and num_own < max(1, self._num_threads - 1)

    def _done(self, tenant: str, num_bytes: int) -> None:
        self._leave(tenant)
        if num_bytes > _TRIMMED_BYTES and self._trim_timer is None:
            self._trim_timer = asyncio.get_running_loop().call_later(_TRIM_DELAY_S, self._trim)

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._start_next()

    def _start_next(self) -> None:
        """Start waiting jobs while a thread is free, tenant by tenant in turn."""
        while True:
            tenant = next((tenant for tenant in self._waiting if self._may_run(tenant)), None)
            if tenant is None:
                return
            line = self._waiting[tenant]
            turn = line.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                self._running[tenant] += 1
            if line:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]

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
