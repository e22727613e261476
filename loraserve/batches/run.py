"""Run of one batch on one server, from where it stands until it ends or is handed on."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from adapters_store.base import BlobStore
from loraserve.background import Throttle
from loraserve.batches.lines import OK_STATUS, read_lines, read_results, result_line, undone_line
from loraserve.batches.progress import BatchProgress, Results, TakenOver
from loraserve.batches.records import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    IN_PROGRESS,
    VALIDATING,
    BatchError,
    BatchLine,
    BatchRecord,
    LineAnswer,
    LineHandler,
    LineRequest,
)
from loraserve.db.session import Clock
from loraserve.errors import (
    BlobCorrupt,
    BlobNotFound,
    InvalidRequest,
    LoraserveError,
    ModelNotFound,
    QuotaExceeded,
    TenantNotFound,
)
from loraserve.limits import LIMITS
from loraserve.tenancy.billing.meter import UsageMeter

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_REFRESH_S = 1.0
_COMMIT_RETRY_S = 1.0
_MIN_WAIT_S = 0.05
_ON_LOOP_BYTES = 32 << 10
_UNDONE = {
    CANCELLED: BatchError("batch_cancelled", "This request wasn't computed: the batch was cancelled."),
    EXPIRED: BatchError("batch_expired", "This request wasn't computed before the completion window was over."),
    FAILED: BatchError("batch_failed", "This request wasn't computed: the batch failed."),
}


@dataclass(frozen=True, slots=True)
class RunContext:
    """Parts that the runs of one server share.

    Attributes:
        slots: lines that are computed at once.
        num_lines: lines since the start, by outcome.
        num_ended: batches since the start, by their last state.
        num_runs: returns how many batches share the slots.
    """

    store: BlobStore
    handler: LineHandler
    throttle: Throttle
    meter: UsageMeter | None
    slots: asyncio.Semaphore
    num_lines: Counter[str]
    num_ended: Counter[str]
    num_runs: Callable[[], int]
    max_requests: int
    clock: Clock


class Interrupted(Exception):
    """Raised when this server shuts down; another server resumes the batch."""


class BatchRun:
    """Work on one batch.

    Args:
        renew: keeps the lease; returns False once another server has it.
    """

    def __init__(self, progress: BatchProgress, context: RunContext, *, renew: Callable[[], Awaitable[bool]]) -> None:
        self._progress = progress
        self._context = context
        self._renew = renew
        self._stops_at_s: float | None = None
        self._renewed_at_s = self._refreshed_at_s = time.monotonic()
        self._live: dict[asyncio.Task[LineAnswer | None], tuple[BatchLine, LineRequest | None]] = {}
        self._parked: list[tuple[float, int, BatchLine]] = []
        """Heap of lines that were refused for now: when they are due, and their numbers."""
        self._paused_until_s = 0.0
        self._results = Results()
        self._unit: Results | None = None
        """Results that are being recorded, or of which it isn't known whether they are."""
        self._commit_at_s = 0.0
        self._failure: BatchError | None = None

    @property
    def batch(self) -> BatchRecord:
        return self._progress.batch

    @property
    def num_live(self) -> int:
        """Number of lines under way."""
        return len(self._live)

    def stop(self, grace_s: float) -> None:
        """Begin no more lines; those under way may end within so long."""
        self._stops_at_s = time.monotonic() + grace_s

    async def run(self) -> None:
        """Check the input, or compute what is left of it and make its files.

        Raises:
            LoraserveError: it can't continue now; it may later.
        """
        try:
            await self._advance()
        except (TakenOver, Interrupted):
            return
        except (BlobCorrupt, BlobNotFound) as error:
            logger.error("the stored bytes of batch %s are damaged: %s", self.batch.id, error)
            text = "The stored bytes of the batch's input or results are damaged or missing."
            await self._fail([BatchError("storage_damaged", text)])
        except TenantNotFound:
            await self._fail([BatchError("tenant_deleted", "The tenant was deleted.")])

    async def _advance(self) -> None:
        if await self._progress.is_tenant_deleted():
            raise TenantNotFound("The tenant was deleted.")
        if self.batch.state == VALIDATING and not self._is_expired():
            await self._validate()
            return
        if self.batch.state == IN_PROGRESS and not self._is_expired():
            await self._compute()
        await self._finish()

    async def _fail(self, errors: list[BatchError]) -> None:
        try:
            await self._progress.fail(errors)
        except TakenOver:
            return
        self._context.num_ended[FAILED] += 1

    # the input

    async def _validate(self) -> None:
        errors: list[BatchError] = []
        seen: set[bytes] = set()
        models: set[str] = set()
        num_lines = 0
        async for line, request in self._requests():
            await self._tick()
            if self.batch.state == CANCELLING:
                return
            num_lines += 1
            if num_lines > LIMITS.max_batch_lines:
                text = f"The file has more than {LIMITS.max_batch_lines} requests."
                errors.append(BatchError("too_many_requests", text, None, line.number))
                break
            error = self._problem(request, seen)
            if error is None and isinstance(request, LineRequest) and request.model not in models:
                try:
                    await self._context.handler.check_model(self.batch, request.model)
                    models.add(request.model)
                except (ModelNotFound, InvalidRequest) as refusal:
                    error = BatchError(refusal.code, str(refusal), "body.model")
            if error is not None:
                errors.append(BatchError(error.code, error.message, error.param, line.number))
                if len(errors) >= LIMITS.max_batch_errors:
                    break
        if not num_lines:
            errors.append(BatchError("empty_file", "The file has no requests."))
        if errors:
            await self._fail(errors)
        else:
            await self._progress.begin(num_lines)

    def _problem(self, request: LineRequest | InvalidRequest, seen: set[bytes]) -> BatchError | None:
        if isinstance(request, InvalidRequest):
            return BatchError(request.code, str(request), request.param)
        # short however long the ids are
        key = hashlib.blake2b(request.custom_id.encode(), digest_size=16).digest()
        if key in seen:
            return BatchError("duplicate_custom_id", "The custom_id is another line's too.", "custom_id")
        seen.add(key)
        return None

    async def _requests(self) -> AsyncIterator[tuple[BatchLine, LineRequest | InvalidRequest]]:
        """Yield each line of the input, and its content or why it can't be read."""
        pieces = read_lines(self._context.store, self.batch.input_blob)
        while lines := await self._context.throttle.run(partial(next, pieces, None)):
            read = await self._context.throttle.run(partial(self._read_all, lines))
            for line, request in zip(lines, read, strict=True):
                yield line, request

    def _read_all(self, lines: list[BatchLine]) -> list[LineRequest | InvalidRequest]:
        return [self._read(line) for line in lines]

    def _read(self, line: BatchLine) -> LineRequest | InvalidRequest:
        if line.data is None:
            return InvalidRequest(f"The line exceeds the limit of {LIMITS.max_batch_line_bytes} bytes.")
        try:
            return self._context.handler.read(self.batch.endpoint, line.data)
        except InvalidRequest as error:
            return error

    # the lines

    async def _compute(self) -> None:
        """Compute the lines that aren't done.

        Return when all are, or when no more are to be.

        Raises:
            Interrupted: the server stops.
        """
        lines = self._undone_lines(set(await self._progress.done_lines()))
        is_read = False
        self._commit_at_s = time.monotonic() + LIMITS.batch_chunk_s
        try:
            while True:
                await self._tick()
                now_s = time.monotonic()
                if self.batch.state != IN_PROGRESS or self._is_expired() or self._failure is not None:
                    break
                if self._stops_at_s is not None and (not self._live or now_s >= self._stops_at_s):
                    break
                while self._has_room(now_s):
                    line = self._due_line(now_s)
                    if line is None and not is_read and len(self._parked) < LIMITS.max_waiting_lines:
                        line = await anext(lines, None)
                        is_read = line is None
                    if line is None:
                        break
                    await self._start(line)
                if not (self._live or self._parked) and is_read:
                    break
                if self._live:
                    await asyncio.wait(self._live, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(_LOOK_S)
                self._collect()
                await self._commit_if_due()
            self._collect()
        finally:
            await self._abandon()
        await self._commit_all()
        if self._stops_at_s is not None and self.batch.state == IN_PROGRESS and not self._is_all_done():
            raise Interrupted

    async def _undone_lines(self, done: set[int]) -> AsyncIterator[BatchLine]:
        pieces = read_lines(self._context.store, self.batch.input_blob)
        while lines := await self._context.throttle.run(partial(next, pieces, None)):
            for line in lines:
                if line.number not in done:
                    yield line

    def _has_room(self, now_s: float) -> bool:
        """Check whether another line may begin, or wait in turn with other batches' lines."""
        context = self._context
        share = max(1, 2 * context.max_requests // max(1, context.num_runs()))
        is_stuck = self._unit is not None or self._results.num_bytes > LIMITS.max_batch_chunk_bytes
        return (
            len(self._live) < min(LIMITS.max_batch_requests_per_batch, share)
            and now_s >= self._paused_until_s
            and self._stops_at_s is None
            and not is_stuck
        )

    def _due_line(self, now_s: float) -> BatchLine | None:
        if self._parked and self._parked[0][0] <= now_s:
            return heapq.heappop(self._parked)[2]
        return None

    async def _start(self, line: BatchLine) -> None:
        is_short = line.data is None or len(line.data) <= _ON_LOOP_BYTES
        request = self._read(line) if is_short else await asyncio.to_thread(self._read, line)
        if isinstance(request, InvalidRequest):
            # the input was valid for the server that began with it
            error = BatchError(request.code, str(request))
            self._results.add(
                line.number, b"-" + undone_line(self.batch, line.number, None, error), {}, is_completed=False
            )
            return
        task = asyncio.create_task(self._run_line(request), name=f"line {line.number} of {self.batch.id}")
        self._live[task] = line, request

    async def _run_line(self, request: LineRequest) -> LineAnswer | None:
        async with self._context.slots:
            while self._stops_at_s is None and not self._context.handler.is_open():
                await asyncio.sleep(_LOOK_S)
            if self._stops_at_s is not None:
                return None
            return await self._context.handler.run(self.batch, request)

    def _collect(self) -> None:
        """Take the answers that have come.

        Raises:
            TenantNotFound: the tenant is deleted.
        """
        now_s = time.monotonic()
        for task in [task for task in self._live if task.done()]:
            line, request = self._live.pop(task)
            answer = task.result()
            if answer is None or request is None:
                continue
            if answer.retry_after_s is not None:
                self._context.num_lines["retried"] += 1
                due_s = now_s + min(max(answer.retry_after_s, _MIN_WAIT_S), LIMITS.max_batch_wait_s)
                heapq.heappush(self._parked, (due_s, line.number, line))
                if answer.pauses_batch:
                    self._paused_until_s = max(self._paused_until_s, due_s)
                continue
            part = result_line(self.batch, line.number, request.custom_id, answer)
            self._results.add(line.number, part, answer.usage, is_completed=answer.status == OK_STATUS)

    async def _commit_if_due(self) -> None:
        results = self._results
        is_full = (
            results.num_bytes >= LIMITS.max_batch_chunk_bytes or len(results.lines) >= LIMITS.max_batch_chunk_lines
        )
        now_s = time.monotonic()
        if now_s < self._commit_at_s and not (is_full and self._unit is None):
            return
        self._commit_at_s = now_s + LIMITS.batch_chunk_s
        try:
            await self._commit_all()
        except (TakenOver, QuotaExceeded):
            raise
        except LoraserveError as error:
            # the results are kept and no line begins until they are durable
            logger.warning("results of a batch can't be recorded now: %s", error)
            self._commit_at_s = time.monotonic() + _COMMIT_RETRY_S

    async def _commit_all(self) -> None:
        """Record all results so far.

        Raises:
            TakenOver, DatabaseUnavailable, StorageFull, StorageError
        """
        while self._unit is not None or self._results.lines:
            if self._unit is None:
                self._unit, self._results = self._results, Results()
            unit = self._unit
            try:
                await self._progress.commit(unit)
            except QuotaExceeded as error:
                self._unit = None
                self._failure = BatchError(error.code, str(error))
                return
            self._unit = None
            self._context.num_lines["completed"] += unit.num_completed
            self._context.num_lines["failed"] += unit.num_failed
            if self._context.meter is not None:
                self._context.meter.note_billed(unit.usage)

    async def _abandon(self) -> None:
        """Cancel the lines under way: they are computed again, or never."""
        tasks, self._live = list(self._live), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self) -> None:
        """Keep the lease, and look whether the batch was cancelled.

        Raises:
            TakenOver: another server has it.
            Interrupted: the server stops, and no line is under way.
        """
        now_s = time.monotonic()
        if self._stops_at_s is not None and not self._live and not self._results.lines and self._unit is None:
            raise Interrupted
        try:
            if now_s - self._renewed_at_s >= LIMITS.batch_lease_s / 3:
                self._renewed_at_s = now_s
                if not await self._renew():
                    raise TakenOver("Another server has the batch.")
            if now_s - self._refreshed_at_s >= _REFRESH_S and self._unit is None:
                self._refreshed_at_s = now_s
                await self._progress.refresh()
        except TakenOver:
            raise
        except LoraserveError as error:
            # while the database is away, what runs continues; nothing is recorded
            logger.debug("a batch's row can't be read now: %s", error)

    def _is_expired(self) -> bool:
        return self._context.clock() >= self.batch.expires_at

    def _is_all_done(self) -> bool:
        return self.batch.num_completed + self.batch.num_failed >= self.batch.num_lines

    # the files

    async def _finish(self) -> None:
        """Make the output and error files, and end the batch."""
        await self._progress.finalize()
        batch = self.batch
        if batch.state == CANCELLING:
            state = CANCELLED
        elif self._failure is not None:
            state = FAILED
        else:
            state = COMPLETED if batch.num_lines and self._is_all_done() else EXPIRED
        done = set(await self._progress.done_lines())
        store = self._context.store
        output, problems = await asyncio.to_thread(store.stage), await asyncio.to_thread(store.stage)
        try:
            for chunk in await self._progress.chunks():
                results = read_results(store, chunk)
                while texts := await self._context.throttle.run(partial(_take, results)):
                    for staged, is_done in ((output, True), (problems, False)):
                        mine = b"".join(text for kind, text in texts if kind == is_done)
                        await self._context.throttle.run(partial(staged.write, mine))
                await self._tick()
            num_undone = 0
            if state != COMPLETED and batch.num_lines:
                async for line, request in self._requests():
                    if line.number in done:
                        continue
                    num_undone += 1
                    custom_id = request.custom_id if isinstance(request, LineRequest) else None
                    text = undone_line(batch, line.number, custom_id, _UNDONE[state])
                    await self._context.throttle.run(partial(problems.write, text))
                    await self._tick()
            errors = [self._failure] if self._failure is not None else []
            await self._progress.end(state, {True: output, False: problems}, num_undone, errors)
        finally:
            await asyncio.to_thread(output.discard)
            await asyncio.to_thread(problems.discard)
        self._context.num_ended[state] += 1


def _take(results: object) -> list[tuple[bool, bytes]]:
    """Take some hundred of the next results."""
    found: list[tuple[bool, bytes]] = []
    num_bytes = 0
    for kind, text in results:  # type: ignore[attr-defined]
        found.append((kind, text))
        num_bytes += len(text)
        if len(found) >= 256 or num_bytes >= 1 << 20:
            break
    return found
