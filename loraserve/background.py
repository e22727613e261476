"""Work beside an engine's steps: thread priorities, throttles, periodic tasks, retries, garbage."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Container, Hashable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Generic, TypeVar

from loraserve.errors import LoraserveError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

LOADER_NICENESS = 5
"""Niceness of adapter loaders: a third of a step thread's weight where cores are scarce.

Measured on two cores taken wholly by steps and other work, with loads of 9 MB without end: a step
took a sixth longer, instead of nearly half again with loaders at niceness 0, and a load two to
three times as long (1.1 s instead of 0.4 s). SCHED_IDLE and niceness 19 spared the steps no more,
and a load took 5 to 15 s while a request waited for it. A loader holds the interpreter's lock for a
quarter of its 32 ms of work: hashing, reading, checking and packing release it.
"""
SERVER_NICENESS = 10
"""Niceness of the server's threads: a tenth of a step's weight.

They check and hash uploads, and tokenize long prompts.
"""
BACKGROUND_NICENESS = 19
"""Niceness of work that no request waits for; the highest there is."""

MIN_WORK_S = 0.002
"""Seconds of work that are worth a pause; shorter pauses cost more than they spare."""
LONG_STEP_PATIENCE_S = 0.25
"""Seconds that a pause is prolonged by until a long step is over.

Long steps may follow each other without end.
"""

UPLOAD_PAUSE_FACTOR = 5.0
"""Seconds of pause per second of an upload's work: all uploads together take a sixth of a core."""
UPLOAD_MAX_PAUSE_S = 0.5
"""Cap on the pause after one piece of an upload; its client waits."""
UPLOAD_MAX_WAIT_S = 5.0
"""Cap on an upload's wait for its own pause and those queued before it."""

STEP_SHARE = 0.0125
"""Share of the processors that background work in the engine takes while requests are computed.

Measured on two processors (`benchmarks.churn`: 32 streams, a cold adapter a second, uploads without
end), relative to runs without cold adapters and uploads: p99 between tokens 0.99, tokens/s 0.96,
and a certificate each 6 s. With twice this share: 1.10 to 1.15, 0.92, and a certificate each 3.3 s.
"""
STEP_MAX_PAUSE_S = 2.0
"""Cap on the pause after one piece of background work in the engine."""

Pause = Callable[[], float]
"""Function that a thread calls between the pieces of its work.

It returns the seconds that it paused there.
"""


def lower_thread_priority(niceness: int, *, is_idle: bool = False) -> None:
    """Schedule this thread, and those it starts, after the threads of the steps.

    No-op on systems other than Linux.

    Args:
        niceness: added to the thread's own.
        is_idle: run only on idle processors (SCHED_IDLE) where the system supports it. Since Linux
            6.6 a thread that is only nice ends its time slice of some milliseconds first, and a
            step's threads wait for each other hundreds of times. On a busy machine an idle thread
            gets a 300th of a core. Most users can't undo it.
    """
    # on other systems a thread's id may be another process's
    if sys.platform != "linux":
        return
    thread_id = threading.get_native_id()
    with suppress(OSError):
        niceness += os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, min(niceness, BACKGROUND_NICENESS))
        if is_idle:
            os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage within the block, and leave what it made out of every later collection.

    For imports: modules live as long as the process, and each full collection would traverse their
    objects (a million of torch's), the last one at the process's end. A server ends 0.6 s sooner
    on a slow core, an engine starts 0.3 s sooner.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Throttle:
    """Pause work between its pieces while steps are computed on the same processors.

    A lower priority alone doesn't spare the steps: threads share caches, memory and often a core's
    units, and a step waits for the slowest of its threads. Pauses of all threads and tasks queue
    up, so that together they take no more processor time than one of them.

    Attributes:
        is_needed: whether any work is ever paused.
    """

    def __init__(
        self,
        pause_factor: float = UPLOAD_PAUSE_FACTOR,
        *,
        max_pause_s: float = UPLOAD_MAX_PAUSE_S,
        max_wait_s: float = UPLOAD_MAX_WAIT_S,
        is_serving: Callable[[], bool] | None = None,
        threads: Executor | None = None,
    ) -> None:
        """Make a throttle with these bounds on its pauses.

        Args:
            pause_factor: seconds of pause per second of work.
            max_pause_s: cap on the pause after one piece of work.
            max_wait_s: cap on a pause including those queued before it.
            is_serving: return whether requests are computed on this machine's processors now; None:
                as `note` said last.
            threads: runs the work of `run_in_pieces`; None: the event loop's default executor.
        """
        self.is_needed = pause_factor > 0
        self._factor, self._max_pause_s, self._max_wait_s = pause_factor, max_pause_s, max_wait_s
        self._threads = threads
        self._changed = threading.Condition()
        self._is_step_serving = self._is_step_long = False
        self._is_serving = is_serving or (lambda: self._is_step_serving)
        # when all pauses so far will be over, on the monotonic clock
        self._paused_until_s = 0.0

    @classmethod
    def beside_steps(cls, num_processors: float) -> Throttle:
        """Return a throttle that leaves `STEP_SHARE` of the processors to background work.

        `note` tells it of the steps.

        Args:
            num_processors: processors that steps compute on; with infinitely many nothing is
                paused.
        """
        factor = max(0.0, 1 / (STEP_SHARE * num_processors) - 1)
        return cls(factor, max_pause_s=STEP_MAX_PAUSE_S, max_wait_s=math.inf)

    def urgent(self, pause_factor: float) -> Throttle:
        """Return a throttle beside the same steps for shorter work, whose pauses queue apart.

        Args:
            pause_factor: seconds of pause per second of that work.
        """
        return Throttle(pause_factor, max_pause_s=self._max_pause_s, is_serving=self._is_serving, threads=self._threads)

    def note(self, *, is_serving: bool, is_long: bool = False) -> None:
        """Note what the steps' thread computes from now on. Doesn't block.

        Args:
            is_serving: whether the step computes requests.
            is_long: whether the step takes longer than others: it has prompts, or loads run beside
                it.
        """
        is_less = (self._is_step_serving and not is_serving) or (self._is_step_long and not is_long)
        self._is_step_serving, self._is_step_long = is_serving, is_long
        # A paused thread of the lowest priority may be preempted while it holds the lock: its pause
        # is over soon anyway.
        if is_less and self._changed.acquire(blocking=False):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on a thread, then pause; return its result."""
        result, work_s = await asyncio.to_thread(_timed, work)
        if self._is_serving():
            await asyncio.sleep(self._queue(work_s))
        return result

    async def run_in_pieces(self, work: Callable[[Pause], T]) -> T:
        """Run `work` on a thread, where it calls its argument between its pieces.

        Return its result.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(self.on_thread()))

    def on_thread(self) -> Pause:
        """Return a function for the calling thread to call between the pieces of its work."""
        began_s = thread_time()

        def pause() -> float:
            nonlocal began_s
            work_s = thread_time() - began_s
            if not self.is_needed or (work_s < MIN_WORK_S and not self._is_step_long):
                return 0.0
            paused_s = self._pause(work_s)
            began_s = thread_time()
            return paused_s

        return pause

    def _pause(self, work_s: float) -> float:
        """Block the thread until it may go on after so much work; return the seconds."""
        if not self._is_serving():
            return 0.0
        began_s = monotonic()
        self._block(self._queue(work_s))
        return monotonic() - began_s

    def _queue(self, work_s: float) -> float:
        """Return the seconds until work may go on: its own pause follows those queued before."""
        with self._changed:
            now_s = monotonic()
            until_s = max(self._paused_until_s, now_s) + min(self._factor * work_s, self._max_pause_s)
            self._paused_until_s = min(until_s, now_s + self._max_wait_s)
            return self._paused_until_s - now_s

    def _block(self, seconds: float) -> None:
        """Block the thread for so long, or until no requests are computed.

        Then, for a while, until no long step is.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_serving(), seconds)
            self._changed.wait_for(lambda: not (self._is_step_serving and self._is_step_long), LONG_STEP_PATIENCE_S)
            if not self._is_serving():
                # pauses that follow needn't wait for the rest of this one
                self._paused_until_s = 0.0


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work` and the seconds of processor time that it took."""
    began_s = thread_time()
    result = work()
    return result, thread_time() - began_s


class BackgroundTask:
    """Run an async function again and again, from `start` until `close`.

    Log what it raises and go on.

    Args:
        name: of the asyncio task.
        work: called once an interval.
        interval_s: seconds between the end of one call and the next one; a function is asked each
            time.
        failure: log message for a call that raised, such as "the pins can't be compared".
        logger: of the module that owns the task.
        level: level for a `LoraserveError`; any other error is a bug and is logged with its
            traceback.
        first_delay_s: seconds before the first call; None: one interval.
        logs_once: log only the first of consecutive failures.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[object]],
        interval_s: float | Callable[[], float],
        *,
        failure: str,
        logger: logging.Logger,
        level: int = logging.WARNING,
        first_delay_s: float | None = 0.0,
        logs_once: bool = False,
    ) -> None:
        self._name, self._work, self._failure = name, work, failure
        self._interval_s, self._first_delay_s = interval_s, first_delay_s
        self._logger, self._level, self._logs_once = logger, level, logs_once
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and not closed."""
        return self._task is not None

    def start(self) -> None:
        """Call the function from now on, on the running event loop."""
        self._task = asyncio.create_task(self.run(), name=self._name)

    async def close(self) -> None:
        """Cancel the call under way and make no others; no-op if it was never started."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def run(self) -> None:
        """Call the function until this is cancelled."""
        await asyncio.sleep(self._next_delay_s() if self._first_delay_s is None else self._first_delay_s)
        is_failing = False
        while True:
            try:
                await self._work()
                is_failing = False
            except Exception as error:
                if not (is_failing and self._logs_once):
                    self._log(error)
                is_failing = True
            await asyncio.sleep(self._next_delay_s())

    def _log(self, error: Exception) -> None:
        if isinstance(error, LoraserveError):
            self._logger.log(self._level, "%s: %s", self._failure, error)
        else:
            # a bug of ours must not end the task for good
            self._logger.error("%s: %s", self._failure, error, exc_info=error)

    def _next_delay_s(self) -> float:
        return self._interval_s() if callable(self._interval_s) else self._interval_s


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double with each consecutive failure.

    Attributes:
        first_s: seconds after the first failure.
        max_s: cap on the delay.
    """

    first_s: float
    max_s: float

    def delay_s(self, num_failures: int) -> float:
        """Return the seconds to wait after so many consecutive failures, at least one."""
        return min(self.max_s, self.first_s * 2.0 ** min(num_failures - 1, 64))


class RetrySchedule(Generic[K]):
    """Time of the next attempt, by key; a key that never failed is due at once.

    Args:
        backoff: delays after consecutive failures.
        monotonic: clock in seconds.
    """

    def __init__(self, backoff: Backoff, monotonic: Callable[[], float]) -> None:
        self._backoff = backoff
        self._monotonic = monotonic
        self._failures: dict[K, tuple[int, float]] = {}
        """Number of consecutive failures, and the time of the next attempt."""

    def is_due(self, key: K) -> bool:
        """Return whether the key may be tried now."""
        return key not in self._failures or self._monotonic() >= self._failures[key][1]

    def fail(self, key: K) -> None:
        """Note that an attempt failed."""
        num_failures = self._failures.get(key, (0, 0.0))[0] + 1
        self._failures[key] = num_failures, self._monotonic() + self._backoff.delay_s(num_failures)

    def succeed(self, key: K) -> None:
        """Note that an attempt succeeded."""
        self._failures.pop(key, None)

    def retain(self, keys: Container[K]) -> None:
        """Forget the failures of all other keys."""
        self._failures = {key: failure for key, failure in self._failures.items() if key in keys}
