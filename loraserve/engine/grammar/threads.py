"""Threads that compute masks beside the forward pass, and the steps' wait for them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from queue import SimpleQueue
from typing import Protocol

from loraserve.background import LOADER_NICENESS, lower_thread_priority
from loraserve.memory.timings import Timings

logger = logging.getLogger(__name__)

MASK_PATIENCE_S = 0.01
"""Seconds that a step waits for the masks of its requests after its forward pass.

Bounds what grammars add to the time between other requests' tokens. A row without a mask is
computed again.
"""

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
        """Return the next job, once there is one; None once the queue is closed and empty."""
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
        """Note that a step goes on without it."""


class MaskThreads:
    """Run jobs on the threads of their lane. The steps' thread alone waits and counts.

    Attributes:
        num_late: masks that a step didn't wait for.
        mask_s: processor time of each mask that a step used.
        wait_s: seconds that each step with masks waited for them.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_late = 0
        self.mask_s, self.wait_s = Timings(), Timings()
        least, most = _NUM_THREADS
        num_fast = num_threads or max(least, min(most, (os.cpu_count() or 1) // _PROCESSORS_PER_THREAD))
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
        if lane is Lane.FAST:
            self._fast.put(job)
        else:
            self._turns[lane].put(job, tenant)

    def wait(self, masks: Sequence[Mask], patience_s: float = MASK_PATIENCE_S) -> None:
        """Return once every mask is there, or after `patience_s`; note those that are late."""
        started_s = time.monotonic()
        if not _are_ready(masks):
            self._wait(masks, started_s + patience_s)
        self.wait_s.add(time.monotonic() - started_s)
        for mask in masks:
            if mask.is_ready:
                self.mask_s.add(mask.mask_s)
            else:
                self.num_late += 1
                mask.note_late()

    def close(self) -> None:
        """End the threads once all jobs are done."""
        for turns in self._turns.values():
            turns.close()
        for _ in self._threads:
            self._fast.put(None)
        for thread in self._threads:
            thread.join()

    def _wait(self, masks: Sequence[Mask], deadline_s: float) -> None:
        with self._done:
            # a job makes its mask ready, then looks at this: one of the two threads sees the
            # other's
            self._is_awaited = True
            while not _are_ready(masks) and (remaining_s := deadline_s - time.monotonic()) > 0:
                self._done.wait(remaining_s)
            self._is_awaited = False

    def _run(self, lane: Lane) -> None:
        if lane is not Lane.FAST:
            lower_thread_priority(LOADER_NICENESS)
        get = self._fast.get if lane is Lane.FAST else self._turns[lane].get
        while (job := get()) is not None:
            try:
                job()
            except Exception:
                # our own bug: its request waits until its time is over
                logger.exception("a grammar's job failed")
            # otherwise kept alive, with its matcher, until the next job
            del job
            if self._is_awaited:
                with self._done:
                    self._done.notify_all()


def _are_ready(masks: Sequence[Mask]) -> bool:
    return all(mask.is_ready for mask in masks)
