"""Merge the engine's answers for one HTTP request into one stream of chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import msgspec

from loraserve.api.http.request_record import ChoiceRecord, InferenceRecord
from loraserve.api.inference.target import TargetSelector
from loraserve.api.result_cache import HIT, CacheUse
from loraserve.api.services import Services
from loraserve.api.shadow import ShadowCopy
from loraserve.errors import (
    AdapterNumerics,
    AdapterRejected,
    AdapterUnavailable,
    AdapterUnservable,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    LoraserveError,
)
from loraserve.registry.composition import label
from loraserve.types import TIMEOUT, AdapterRef, FinishReason, RequestId

if TYPE_CHECKING:
    from loraserve.api.inference.answering.direct_reader import DirectReader
    from loraserve.api.metrics.activity import RequestTimer
    from loraserve.engine_client.client import Chunk, GenerateRequest

_QUEUE_SIZE = 16
"""Chunks between several choices and a slow reader. Beyond it the engine's client merges chunks."""

_LEAST_TIMEOUT_S = 0.001

_BYTES_PER_CANDIDATE = 64
"""Size of a log probability in an answer, with its token."""

T = TypeVar("T")


class Generation:
    """The chunks of several engine requests as they come, each with its choice's index.

    `start` first, then iterate; `close` always (in a ``finally``): it aborts what still runs, and
    returns once the engine was notified.

    Args:
        target: notified when the adapter can't answer; where it has a fallback, that answers in the
            adapter's place.
        is_scoring: only the prompts' log probabilities are needed: the one token that the engine
            makes is left out.
        cache: answers that were kept, which are given in place of the engine's, or a place to keep
            those; None: the request doesn't set it.
        max_live: requests that are in the engine at once; None: all.
    """

    def __init__(
        self,
        services: Services,
        requests: Sequence[GenerateRequest],
        *,
        target: TargetSelector | None = None,
        is_scoring: bool = False,
        max_live: int | None = None,
        cache: CacheUse | None = None,
    ) -> None:
        self._services = services
        self._requests = requests
        self._target = target
        self._is_scoring = is_scoring
        self._cache = cache
        self._turns = asyncio.Semaphore(max_live or max(1, len(requests)))
        self._queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(_QUEUE_SIZE)
        self._tasks: list[asyncio.Task[None]] = []
        self._only: AsyncGenerator[Chunk, None] | None = None
        """Chunks of a lone request, which the reader itself takes, without a task between."""
        self._first: tuple[int, Chunk] | None = None
        self._reader: DirectReader | None = None
        self._num_open = len(requests)
        self._began = 0.0
        self._has_reported_numerics = False
        self._is_refused = False
        self.record = InferenceRecord(services.engine.base.id, is_pooled=any(one.pooling for one in requests))
        """Record of the request, for the access log and its spans."""
        self.num_tokens = 0
        """Made for the answer so far."""
        self.has_engine_work = False
        """Whether the engine worked for the request: it made a token, or ran until an abort or
        timeout.
        """

    async def start(self) -> Chunk:
        """Start generating; return the first chunk of any choice, which iterating gives again.

        An error before it can still be answered with a status.

        Raises:
            LoraserveError: why there is no chunk.
        """
        self._began = time.monotonic()
        try:
            first = await self._begin()
        except AdapterUnavailable as error:
            if self._target is None or not self._target.fall_back(error):
                raise
            await self._restart(self._target.adapter)
            try:
                first = await self._begin()
            except AdapterUnavailable as second:
                # its owner can do something about what was requested
                raise error from second
        if self._target is not None and self._target.has_fallen_back:
            self._services.metrics.fallbacks.labels(self._target.reason).inc()
        return first

    def read_with(self, reader: DirectReader) -> None:
        """Give the chunks of a lone choice to `reader` where it takes them, before `start`."""
        self._reader = reader if len(self._requests) == 1 else None

    async def _restart(self, adapter: AdapterRef | None) -> None:
        """Replace the requests by those for another adapter.

        They get new names: chunks of the old ones may still come.
        """
        if self._reader is not None:
            self._reader.end()
        await self._stop()
        passed_s = time.monotonic() - self._began
        self._requests = [
            msgspec.structs.replace(
                request,
                request_id=RequestId(f"{request.request_id}-fallback"),
                adapter=adapter,
                # the engine counts from the arrival of this one
                timeout_s=None if request.timeout_s is None else max(_LEAST_TIMEOUT_S, request.timeout_s - passed_s),
            )
            for request in self._requests
        ]
        self._num_open = len(self._requests)
        self._is_refused = self._has_reported_numerics = False

    async def _begin(self) -> Chunk:
        if len(self._requests) == 1:
            self._only = self._answer(0)
        else:
            self._tasks = [asyncio.create_task(self._pump(index)) for index in range(len(self._requests))]
        self._first = await self._next()
        if self._first is None:
            raise EngineUnavailable("The engine ended this request without an answer.", hint="Try again.")
        return self._first[1]

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        item = self._first
        while item is not None:
            yield item
            item = await self._next()

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers on whether the answer was kept before; none if the cache wasn't requested."""
        return {} if self._cache is None else self._cache.headers

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work`, which renders the whole answer, to its result.

        Many log probabilities take long, and so are a thread's.
        """
        num_bytes = sum(_BYTES_PER_CANDIDATE * _num_candidates(request) for request in self._requests)
        return await self._services.text_threads.run(self._requests[0].tenant, num_bytes, work)

    def note_answered(self) -> None:
        """Note in the record what answers: the bound version, its fallback or the base."""
        if self._target is None:
            return
        adapter, record = self._target.adapter, self.record
        record.fell_back_for = self._target.reason
        if adapter is not None:
            shown = self._target.label(adapter)
            is_one = not adapter.parts
            record.adapter = shown.rpartition("@")[0] if is_one else shown
            record.version = adapter.version if is_one and not adapter.is_ephemeral else None

    async def close(self) -> None:
        # the answer that a reader renders for holds this: in a circle a request's ephemeral
        # adapter would stay in memory until a collection
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.end()
        await self._stop()

    async def _stop(self) -> None:
        """End the requests in the engine."""
        if self._only is not None:
            # nothing in it waits: the engine is notified in this turn of the event loop
            await self._only.aclose()
        for task in self._tasks:
            task.cancel()
        # A second cancellation must not leave a request running in the engine.
        await asyncio.shield(asyncio.gather(*self._tasks, return_exceptions=True))
        # what failed has the frames of this
        self._tasks, self._queue = [], asyncio.Queue(_QUEUE_SIZE)

    async def _next(self) -> tuple[int, Chunk] | None:
        if self._only is not None:
            try:
                return 0, await anext(self._only)
            except StopAsyncIteration:
                return None
            except Exception as error:
                failure = self._failure(0, error)
                try:
                    if failure is error:
                        raise
                    raise failure from error
                finally:
                    # it has this frame
                    del failure
        while self._num_open:
            index, item = await self._queue.get()
            if isinstance(item, Exception):
                try:
                    raise item
                finally:
                    # it has this frame
                    del item
            if item is not None:
                return index, item
            self._num_open -= 1
        return None

    async def _pump(self, index: int) -> None:
        """Move one engine request's chunks to the queue, then None or the error that ended them."""
        try:
            async with self._turns, aclosing(self._answer(index)) as chunks:
                async for chunk in chunks:
                    await self._queue.put((index, chunk))
        except Exception as error:
            await self._queue.put((index, self._failure(index, error)))
        else:
            await self._queue.put((index, None))

    def _failure(self, index: int, error: Exception) -> Exception:
        """Note that a request has failed, and return the error to show the client."""
        if isinstance(error, AdapterNumerics | DeadlineExceeded):
            self.has_engine_work = True
        else:
            # the other requests end with this one, not because the client left
            self._is_refused = True
        if isinstance(error, AdapterNumerics):
            self._report_numerics(self._requests[index])
        return self._explained(error, self._requests[index])

    def _report_numerics(self, request: GenerateRequest) -> None:
        """Report one numeric failure for the whole request: its choices pose the same question."""
        if request.adapter is not None and not self._has_reported_numerics:
            self._has_reported_numerics = True
            self._services.registry.numeric_failures.report(request.tenant, request.adapter)

    def _start_copy(self, request: GenerateRequest) -> ShadowCopy | None:
        """Start the request's copy on the shadow version, if it has one."""
        has_none = self._target is None or self._is_scoring or request.pooling is not None
        shadow = None if has_none or self._target is None else self._target.shadow
        return None if shadow is None else self._services.shadows.start_copy(request, shadow)

    def _answer(self, index: int) -> AsyncGenerator[Chunk, None]:
        if self._cache is not None and self._cache.outcome == HIT:
            return self._replayed(self._cache, index)
        return self._measured(index)

    async def _replayed(self, cache: CacheUse, index: int) -> AsyncGenerator[Chunk, None]:
        """Yield a kept answer: no adapter is used, no copy starts on a shadow."""
        reason = "abort"
        record = self._begin_choice(index)
        record.is_replayed = True
        try:
            async with aclosing(cache.replay(index, self._requests[index])) as chunks:
                async for chunk in chunks:
                    record.note(chunk)
                    answer = _without_token(chunk) if self._is_scoring else chunk
                    self.num_tokens += len(answer.token_ids)
                    if answer.finish_reason is not None:
                        reason = answer.finish_reason.value
                    yield answer
        finally:
            record.end(reason)
            self._services.metrics.finished.labels(reason).inc()

    def _begin_choice(self, index: int) -> ChoiceRecord:
        record = ChoiceRecord(index, time.monotonic())
        self.record.choices.append(record)
        return record

    async def _measured(self, index: int) -> AsyncGenerator[Chunk, None]:
        metrics, request = self._services.metrics, self._requests[index]
        record = self._begin_choice(index)
        started, first_at, num_tokens, reason = record.sent_s, 0.0, 0, "abort"
        copy: ShadowCopy | None = None
        target = self._target
        names, owners = ([], []) if target is None else (target.names(), target.owner_names())
        recording = None if self._cache is None else self._cache.record(request)
        use = metrics.adapter_load.begin(request.adapter, names, owners)
        timer: RequestTimer | None = None
        is_failure = False

        def note(chunk: Chunk) -> Chunk:
            """Count a chunk; return what the client gets of it."""
            nonlocal num_tokens
            if recording is not None:
                recording.add(chunk)
            answer = _without_token(chunk) if self._is_scoring else chunk
            num_new = len(answer.token_ids)
            num_tokens += num_new
            self.num_tokens += num_new
            metrics.generation_tokens.inc(num_new)
            if timer is not None:
                timer.num_tokens += num_new
            if copy is not None:
                copy.add(answer.token_ids)
            return answer

        def note_direct(chunk: Chunk) -> Chunk:
            """Count a chunk that isn't the first, nor what a scored prompt has."""
            record.num_tokens += len(chunk.token_ids)
            return note(chunk)

        sent = request
        if self._reader is not None:
            self._reader.note = note_direct
            sent = msgspec.structs.replace(request, reader=self._reader)
        try:
            if target is not None and request.pooling is None:
                timer = metrics.activity.begin(request, tenant_name=target.tenant, asked=target.asked)
            async with aclosing(self._services.engine.generate(sent)) as chunks:
                async for chunk in chunks:
                    self.has_engine_work = True
                    record.note(chunk)
                    if not first_at:
                        first_at = record.first_s or time.monotonic()
                        use.answer()
                        metrics.prompt_tokens.inc(len(request.prompt_token_ids))
                        (metrics.ttft_s if request.pooling is None else metrics.pooling_s).observe(first_at - started)
                        copy = self._start_copy(request)
                    if chunk.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                        raise EngineUnavailable("The engine aborted this request.", hint="Try again.")
                    answer = note(chunk)
                    if timer is not None and not timer.has_begun:
                        timer.begin(answer)
                    if answer.finish_reason is not None:
                        reason = answer.finish_reason.value
                        # an answer that was cut short is no measure for another version
                        if copy is not None and answer.stop_reason != TIMEOUT:
                            copy.complete(time.monotonic() - started)
                    yield answer
                    if answer.finish_reason is not None:
                        break
            if num_tokens > 1:
                metrics.tpot_s.observe((time.monotonic() - first_at) / (num_tokens - 1))
        except LoraserveError as error:
            reason, is_failure = error.code, True
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.has_engine_work |= not self._is_refused
            raise
        finally:
            record.end(reason)
            if copy is not None:
                copy.abandon()
            use.end()
            if timer is not None and target is not None:
                timer.end(reason, answered_by=target.answering, is_failure=is_failure)
            if request.pooling is None:
                metrics.finished.labels(reason).inc()
            else:
                kind = "classify" if request.pooling.classify else request.pooling.kind.value
                metrics.pooled_inputs.labels(kind, reason).inc()

    def _explained(self, error: Exception, request: GenerateRequest) -> Exception:
        """Choose the error to show the client.

        A sum that can't be composed of sound parts is the request's fault.
        """
        if request.adapter is None or not request.adapter.parts or getattr(error, "param", None) is not None:
            return error
        if not isinstance(error, InvalidRequest | AdapterRejected | AdapterUnservable):
            return error
        # The engine has digests, not names.
        name_of = label if self._target is None else self._target.label
        short = {part.adapter.digest[:12]: name_of(part.adapter) for part in request.adapter.parts}
        named = [f"{digest}… is {name}." for digest, name in short.items() if digest in error.message]
        return InvalidRequest(" ".join([error.message, *named]), param="model", hint=error.hint)


def _without_token(chunk: Chunk) -> Chunk:
    return msgspec.structs.replace(
        chunk, text="", token_ids=(), logprobs=None, finish_reason=FinishReason.LENGTH, stop_reason=None
    )


def finish_reason(chunk: Chunk) -> str | None:
    """OpenAI's word: ``stop`` or ``length``; None while the choice continues."""
    return None if chunk.finish_reason is None else FinishReason(chunk.finish_reason).value


def _num_candidates(request: GenerateRequest) -> int:
    """Count the log probabilities that the request's choice has at most."""
    params = request.params
    num_top = len(params.logprob_token_ids) or params.logprobs or 0
    num_prompt = 0 if params.prompt_logprobs is None else len(request.prompt_token_ids) * (1 + params.prompt_logprobs)
    return num_prompt + (0 if params.logprobs is None else params.max_tokens * (1 + num_top))
