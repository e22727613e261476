"""Threads that compute masks during or between forward passes, and the steps' wait for them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from loraserve.background import LOADER_NICENESS, lower_thread_priority
from loraserve.memory.timings import Timings

logger = logging.getLogger(__name__)

MASK_PATIENCE_S = 0.01
"""Seconds that a step waits for the masks of its requests after its forward pass.

Bounds what grammars add to the time between other requests' tokens. A row without a mask is
computed again.
"""
MAX_AT_ONCE = 64
"""Answers of a step that its own thread follows: of more, threads follow several at a time."""
_ALONE_S = 0.001
"""Seconds of a step's wait that one thread has for all of its masks, before others help it."""

_PROCESSORS_PER_THREAD = 8
_NUM_THREADS = (2, 8)
"""The least and the most threads for masks."""

Job = Callable[[], None]


class Lane(Enum):
    """Threads that a job runs on, by what it takes: no job waits for one that takes longer.

    FAST is for masks, of some ten microseconds; SLOW for those of some milliseconds; COMPILE for
    whole grammars.
    """

    FAST = auto()
    SLOW = auto()
    COMPILE = auto()


class JobTurns:
    """Queue of jobs from which tenants' jobs are taken in turn, each tenant's in their order.

    So a tenant with any number of slow grammars delays another's job by one of its own.
    """

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, job: Job, tenant: str) -> None:
        """Add a job behind the tenant's others."""
        with self._changed:
            self._jobs.setdefault(tenant, deque()).append(job)
            self._changed.notify()

    def get(self) -> Job | None:
        """Wait for the next job; None once the queue is closed and empty."""
        with self._changed:
            while not self._jobs:
                if self._is_closed:
                    return None
                self._changed.wait()
            tenant, jobs = self._jobs.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._jobs[tenant] = jobs
            return job

    def close(self) -> None:
        """Let `get` return None when there are no jobs left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class Mask(Protocol):
    """A mask that a thread computes.

    Attributes:
        mask_s: processor time that it took.
    """

    mask_s: float
    is_ready: bool

    def note_late(self) -> None:
        """Note that a step continues without it."""


class Gathered(Protocol):
    """A mask that may wait for the end of a forward pass.

    Attributes:
        is_gathered: whether it does.
    """

    is_gathered: bool

    def follow_at_once(self) -> bool:
        """Do without the mask on the steps' thread, if that takes microseconds; return whether."""
        ...

    def follow_together(self, masks: list[Any]) -> None:
        """Compute it and others of the same class and tenant."""


class MaskThreads:
    """Run jobs on the threads of their lane. The steps' thread alone submits, waits and counts.

    Where a device computes the steps, masks are computed during them. Where the processor's own
    cores do, masks are gathered until a forward pass is over, and then computed together: the
    tokens' tree stays in the cores' caches from the first to the last, and none takes a core from
    the step's threads.

    Args:
        are_beside_steps: whether masks are computed during steps, and never gathered.

    Attributes:
        num_late: masks that a step didn't wait for.
        mask_s: processor time of each mask that a step used.
        wait_s: seconds that each step with masks waited for them.
    """

    def __init__(self, num_threads: int | None = None, *, are_beside_steps: bool = True) -> None:
        self.num_late = 0
        self._are_beside_steps = are_beside_steps
        self._gathered: dict[str, list[Gathered]] = {}
        self._released: deque[Job] = deque()
        self.mask_s, self.wait_s = Timings(), Timings()
        least, most = _NUM_THREADS
        num_fast = num_threads or max(least, min(most, (os.cpu_count() or 1) // _PROCESSORS_PER_THREAD))
        self._num_fast = num_fast
        self._fast: SimpleQueue[Job | None] = SimpleQueue()
        self._turns = {Lane.SLOW: JobTurns(), Lane.COMPILE: JobTurns()}
        self._done = threading.Condition()
        self._is_awaited = False
        lanes = [Lane.FAST] * num_fast + [Lane.SLOW, Lane.COMPILE, Lane.COMPILE]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"mask-{lane.name.lower()}-{number}", daemon=True)
            for number, lane in enumerate(lanes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, lane: Lane, tenant: str = "") -> None:
        """Run a job on one of its lane's threads. It takes care of its own errors.

        Args:
            tenant: whose turn it takes in the lanes of long jobs.
        """
        if lane is not Lane.FAST:
            self._turns[lane].put(job, tenant)
        else:
            self._fast.put(job)

    def gather(self, mask: Gathered, tenant: str) -> bool:
        """Compute a mask with others of its tenant once the next forward pass is over.

        Return whether it is gathered.
        """
        if self._are_beside_steps:
            return False
        self._gathered.setdefault(tenant, []).append(mask)
        mask.is_gathered = True
        return True

    def release(self) -> None:
        """Let a thread compute what is gathered, tenant after tenant."""
        if self._gathered:
            for masks in self._gathered.values():
                for mask in masks:
                    mask.is_gathered = False
            self._released.extend(partial(masks[0].follow_together, masks) for masks in self._gathered.values())
            self._gathered = {}
            self._fast.put(self._run_released)

    def wait(self, masks: Sequence[Mask], patience_s: float = MASK_PATIENCE_S) -> None:
        """Wait for every mask, but at most `patience_s`; note those that are late."""
        started_s = time.monotonic()
        self._follow_at_once()
        self.release()
        if not _are_ready(masks) and not self._wait(masks, started_s + min(_ALONE_S, patience_s)):
            # one tenant's take long: the others' need not
            for _ in range(min(len(self._released), self._num_fast - 1)):
                self._fast.put(self._run_released)
            self._wait(masks, started_s + patience_s)
        self.wait_s.add(time.monotonic() - started_s)
        for mask in masks:
            if mask.is_ready:
                self.mask_s.add(mask.mask_s)
            else:
                self.num_late += 1
                mask.note_late()

    def _follow_at_once(self) -> None:
        """Leave the masks gathered that are needed."""
        num_left = MAX_AT_ONCE
        for tenant, masks in list(self._gathered.items()):
            some, others = masks[:num_left], masks[num_left:]
            num_left -= len(some)
            self._gathered[tenant] = [mask for mask in some if not mask.follow_at_once()] + others
            if not self._gathered[tenant]:
                del self._gathered[tenant]

    def close(self) -> None:
        """End the threads once all jobs are done."""
        self.release()
        for turns in self._turns.values():
            turns.close()
        for _ in self._threads:
            self._fast.put(None)
        for thread in self._threads:
            thread.join()

    def _wait(self, masks: Sequence[Mask], deadline_s: float) -> bool:
        """Wait until then at most; return whether all masks are there."""
        with self._done:
            # a job makes its mask ready, then looks at this: one of the two threads sees the
            # other's
            self._is_awaited = True
            while not _are_ready(masks) and (remaining_s := deadline_s - time.monotonic()) > 0:
                self._done.wait(remaining_s)
            self._is_awaited = False
        return _are_ready(masks)

    def _run_released(self) -> None:
        while True:
            try:
                job = self._released.popleft()
            except IndexError:
                return
            self._do(job)

    def _run(self, lane: Lane) -> None:
        if lane is not Lane.FAST:
            lower_thread_priority(LOADER_NICENESS)
        get = self._fast.get if lane is Lane.FAST else self._turns[lane].get
        while (job := get()) is not None:
            self._do(job)
            # otherwise kept alive, with its matcher, until the next job
            del job
            if self._is_awaited:
                with self._done:
                    self._done.notify_all()

    @staticmethod
    def _do(job: Job) -> None:
        try:
            job()
        except Exception:
            # our own bug: its request waits until its time is over
            logger.exception("a grammar's job failed")


def _are_ready(masks: Sequence[Mask]) -> bool:
    return all(mask.is_ready for mask in masks)
