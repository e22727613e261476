"""Processes for tenants' hostile work, in turns: none waits for what another's question broke."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from loraserve.tenancy.limits.turns import TenantTurns
from loraserve.text.workers.process import WorkerProcess, WorkerStartFailed

logger = logging.getLogger(__name__)

NUM_PROCESSES = 2
"""Processes, started when they are needed. A tenant never has both."""
START_S = 30.0
"""Seconds that a process may take to start."""


class TenantProcesses:
    """Give processes to tenants in turns, question by question.

    A tenant whose questions are slow, or end their process, has one of the two at most, until that
    one runs again: its turn lasts so long. So a question of another tenant waits for nothing of
    that tenant's. While several tenants are slow at once, it waits for the two questions that run
    and one of each tenant that waits before it.

    Args:
        make: makes a process, which starts with its first question.
    """

    def __init__(self, make: Callable[[], WorkerProcess]) -> None:
        self._make = make
        self._turns = TenantTurns(NUM_PROCESSES)
        self._idle: list[WorkerProcess] = []
        self._all: list[WorkerProcess] = []
        self._restarts: set[asyncio.Task[None]] = set()

    @property
    def num_waiting(self) -> int:
        """Questions that wait for a process."""
        return self._turns.num_waiting

    @property
    def num_starts(self) -> int:
        """Processes since the start."""
        return sum(process.num_starts for process in self._all)

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[WorkerProcess]:
        """Take a process in the tenant's turn, for one question."""
        await self._turns.take(tenant)
        try:
            process = self._choose()
        except BaseException:
            self._turns.give_back(tenant)
            raise
        try:
            yield process
        finally:
            if process.is_running or not process.num_starts:
                self._give_back(tenant, process)
            else:
                task = asyncio.create_task(self._restart(tenant, process), name="restart-worker")
                self._restarts.add(task)
                task.add_done_callback(self._restarts.discard)

    async def close(self) -> None:
        """Kill the processes."""
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        for process in self._all:
            await process.close()

    def _choose(self) -> WorkerProcess:
        process = next((one for one in self._idle if one.is_running), None)
        if process is None and self._idle:
            process = self._idle[-1]
        if process is not None:
            self._idle.remove(process)
            return process
        self._all.append(self._make())
        return self._all[-1]

    async def _restart(self, tenant: str, process: WorkerProcess) -> None:
        try:
            await process.start(START_S)
        except WorkerStartFailed:
            # the next question tries again, and reports it
            logger.warning("a process that ended couldn't be started again")
        finally:
            self._give_back(tenant, process)

    def _give_back(self, tenant: str, process: WorkerProcess) -> None:
        self._idle.append(process)
        self._turns.give_back(tenant)
