"""Runner of the batches of one server: at most one of each tenant is computed, under a lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

from adapters_store.base import BlobStore
from loraserve.background import Backoff, RetrySchedule, Throttle
from loraserve.batches.batches import Batches
from loraserve.batches.progress import BatchProgress
from loraserve.batches.records import IN_PROGRESS, LIVE_STATES, BatchRecord, LineHandler
from loraserve.batches.run import BatchRun, RunContext
from loraserve.db.leases import LeaseHolder
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import LoraserveError
from loraserve.limits import LIMITS
from loraserve.tenancy.billing.meter import UsageMeter

logger = logging.getLogger(__name__)

LINE_OUTCOMES = ("completed", "failed", "retried")
_BACKOFF = Backoff(1.0, 60.0)
_STOP_S = 5.0
"""Seconds to record what is done and hand the leases back."""
_COUNT_S = 15.0


class BatchRunner:
    """Runs batches from `start` until `close`.

    Args:
        meter: counts what is billed, for metrics; None: nothing is metered.
        max_requests: lines that are computed at once.
    """

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        batches: Batches,
        *,
        throttle: Throttle,
        meter: UsageMeter | None,
        max_requests: int,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_lines: Counter[str] = Counter()
        """Lines since the start, by outcome; one that was refused for now is retried."""
        self.num_ended: Counter[str] = Counter()
        """Batches that ended on this server since the start, by state."""
        self.num_by_state = dict.fromkeys(LIVE_STATES, 0)
        """Batches of all servers that haven't ended, as last counted."""
        self._database = database
        self._store = store
        self._batches = batches
        self._clock = clock
        self._monotonic = monotonic
        self._lease = LeaseHolder(database, timedelta(seconds=LIMITS.batch_lease_s), clock=clock)
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._computing: dict[str, BatchRecord] = {}
        self._schedule: RetrySchedule[str] = RetrySchedule(_BACKOFF, monotonic)
        self._failed: set[str] = set()
        self._has_news = asyncio.Event()
        self._counted_at_s = -_COUNT_S
        self._task: asyncio.Task[None] | None = None
        self._throttle = throttle
        self._meter = meter
        self._max_requests = max_requests
        batches.on_change = self._has_news.set

    @property
    def num_running(self) -> int:
        """Batches that this server works on."""
        return len(self._runs)

    @property
    def num_live_lines(self) -> int:
        """Lines that are computed or wait for their turn."""
        return sum(run.num_live for run, _ in self._runs.values())

    def start(self, handler: LineHandler) -> None:
        """Work on batches from now on, on the running event loop.

        Args:
            handler: computes the lines.
        """
        context = RunContext(
            store=self._store,
            handler=handler,
            throttle=self._throttle,
            meter=self._meter,
            slots=asyncio.Semaphore(self._max_requests),
            num_lines=self.num_lines,
            num_ended=self.num_ended,
            num_runs=lambda: len(self._computing),
            max_requests=self._max_requests,
            clock=self._clock,
        )
        self._task = asyncio.create_task(self._run(context), name="batches")

    async def close(self, grace_s: float = 0.0) -> None:
        """Begin no more lines, let those under way end within so long, and hand the batches on.

        No-op if it was never started, or is closed.
        """
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        running = list(self._runs.values())
        for run, _ in running:
            run.stop(grace_s)
        tasks = [task for _, task in running]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s + _STOP_S)
        for left in tasks:
            left.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, context: RunContext) -> None:
        while True:
            self._has_news.clear()
            try:
                await self._begin_runs(context)
            except LoraserveError as error:
                logger.info("batches can't be looked up now: %s", error)
            except Exception as error:
                logger.error("looking for batches failed", exc_info=error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIMITS.batch_poll_s):
                    await self._has_news.wait()

    async def _begin_runs(self, context: RunContext) -> None:
        """Begin with batches that no server runs, as far as there is room."""
        if not context.handler.is_ready():
            return
        if self._monotonic() - self._counted_at_s >= _COUNT_S:
            self._counted_at_s = self._monotonic()
            self.num_by_state = await self._batches.num_by_state()
        free = LIMITS.max_running_batches - len(self._runs)
        if free <= 0:
            return
        not_due = {batch for batch in self._failed if not self._schedule.is_due(batch)}
        found = await self._batches.to_run(
            limit=free,
            besides=self._runs.keys() | not_due,
            busy_tenants={batch.tenant for batch in self._computing.values()},
        )
        for batch in found:
            if await self._lease.acquire(batch.id):
                self._begin(batch, context)

    def _begin(self, batch: BatchRecord, context: RunContext) -> None:
        progress = BatchProgress(self._database, self._store, batch, clock=self._clock)
        run = BatchRun(progress, context, renew=lambda: self._lease.acquire(batch.id))
        if batch.state == IN_PROGRESS:
            self._computing[batch.id] = batch
        self._runs[batch.id] = run, asyncio.create_task(self._work(run), name=f"batch {batch.id}")

    async def _work(self, run: BatchRun) -> None:
        batch_id = run.batch.id
        try:
            await run.run()
        except LoraserveError as error:
            logger.warning("a batch can't go on now: %s", error, extra={"batch": batch_id})
            self._note_failure(batch_id)
        except Exception as error:
            # a bug of ours must not end the others
            logger.error("working on the batch %s failed", batch_id, exc_info=error)
            self._note_failure(batch_id)
        else:
            self._schedule.succeed(batch_id)
            self._failed.discard(batch_id)
        finally:
            # unless it is given back, it is over soon
            with contextlib.suppress(LoraserveError, TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._lease.release(batch_id)
            del self._runs[batch_id]
            self._computing.pop(batch_id, None)
            # the next one, or what comes after its input was found valid
            self._has_news.set()

    def _note_failure(self, batch_id: str) -> None:
        self._schedule.fail(batch_id)
        self._failed.add(batch_id)
