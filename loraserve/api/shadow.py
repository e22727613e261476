"""Run copies of requests on shadow versions during the answers, compare them, and discard them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from loraserve.api.metrics.version_traffic import EndedRequest, Role
from loraserve.errors import AdapterNumerics, EngineUnavailable, LoraserveError, Overloaded
from loraserve.limits import LIMITS, Limits
from loraserve.registry.binding import Shadow
from loraserve.registry.catalog.shadow_hours import Tally
from loraserve.types import FinishReason, RequestId, TenantId

if TYPE_CHECKING:
    from loraserve.api.metrics.counters import ServerMetrics
    from loraserve.engine_client.client import GenerateRequest
    from loraserve.engine_client.interface import ServingEngine
    from loraserve.registry.registry import Registry

logger = logging.getLogger(__name__)

PRIORITY = 1 << 20
"""After every request of its tenant: clients can set 1000 at most."""
MAX_KV_USE = 0.75
"""Highest share of KV blocks in use at which copies run.

Above it a copy would soon preempt a request.
"""
_LOOK_S = 0.5
"""Between two looks whether the server is busy: as often as the engine reports."""
COMPARED, FAILED, DROPPED, ABANDONED = "compared", "failed", "dropped", "abandoned"
OUTCOMES = (COMPARED, FAILED, DROPPED, ABANDONED)
"""Outcomes of a copy.

`DROPPED`: the server was busy, before or during it; `ABANDONED`: there is no answer to compare
with.
"""


class ShadowCopy:
    """Copy of one request, and the tokens of both answers so far."""

    def __init__(self, shadow: Shadow, request: GenerateRequest, version: int) -> None:
        self.shadow = shadow
        self.request = request
        self.version = version
        """Version that answers."""
        self.live_token_ids: list[int] = []
        self.token_ids: list[int] = []
        self.seconds: float | None = None
        """Seconds from the copy's start to its last token."""
        self.first_s: float | None = None
        """Seconds from the copy's start to its first token."""
        self.num_cached_tokens = 0
        self.task: asyncio.Task[None] | None = None
        self.is_running = True
        """Whether it still takes resources of the engine; afterwards it may wait for the other
        answer.
        """
        self.outcome = ABANDONED
        """Outcome if the copy is cancelled."""
        self._live_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def add(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the client's answer."""
        self.live_token_ids.extend(token_ids)

    def complete(self, seconds: float) -> None:
        """Note that the client's answer was complete after `seconds`.

        Compare once the copy is complete too.
        """
        if not self._live_s.done():
            self._live_s.set_result(seconds)

    def abandon(self) -> None:
        """Note that the client's answer has ended; cancel the copy if the answer isn't complete."""
        if not self._live_s.done() and self.task is not None:
            self.task.cancel()

    async def live_s(self) -> float:
        """Wait until the client's answer is complete; return how many seconds it took."""
        return await self._live_s

    def compare(self, live_s: float) -> Tally:
        """Compare both answers."""
        live, mine = self.live_token_ids, self.token_ids
        num_agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(live, mine, strict=False)))
        return Tally(
            num_requests=1,
            num_equal=int(live == mine),
            num_tokens=len(live),
            num_agreed_tokens=num_agreed,
            live_ms=round(live_s * 1000),
            shadow_ms=round((self.seconds or 0.0) * 1000),
        )


class ShadowRunner:
    """Run few copies at the lowest priority, outside of bills and of tenants' limits.

    A copy gives way as soon as requests wait in the engine or its KV blocks are nearly used up.

    Args:
        draw: uniform in [0, 1): whether a request has a copy.
    """

    def __init__(
        self,
        engine: ServingEngine,
        registry: Registry,
        metrics: ServerMetrics,
        *,
        limits: Limits = LIMITS,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._metrics = metrics
        self._limits = limits
        self._draw = draw
        self._copies: set[ShadowCopy] = set()
        self._num_by_tenant: Counter[TenantId] = Counter()
        self._num_waiting = 0
        """Copies that may be among the waiting requests of the engine's last report."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False
        metrics.live_shadow_requests.set_function(lambda: self.num_live)
        for outcome in OUTCOMES:
            # shown as 0 before the first
            metrics.shadow_requests.labels(outcome)

    @property
    def num_live(self) -> int:
        return len(self._copies)

    def start_copy(self, request: GenerateRequest, shadow: Shadow) -> ShadowCopy | None:
        """Start the copy of `request` at its first token.

        It is started if the request falls into the share and there is room. A tenant that uses a
        granted adapter has none: it would be at its cost, and for the owner's figures.
        """
        if shadow.adapter.tenant != request.tenant:
            return None
        if request.adapter is None or self._draw() >= shadow.share:
            return None
        if not self._has_room(request.tenant):
            self._metrics.shadow_requests.labels(DROPPED).inc()
            return None
        params = msgspec.structs.replace(request.params, logprobs=None, prompt_logprobs=None)
        mine = msgspec.structs.replace(
            request,
            request_id=RequestId(f"{request.request_id}-shadow"),
            adapter=shadow.adapter,
            params=params,
            priority=PRIORITY,
            timeout_s=None,
            is_background=True,
        )
        copy = ShadowCopy(shadow, mine, request.adapter.version)
        self._copies.add(copy)
        self._num_by_tenant[mine.tenant] += 1
        copy.task = asyncio.create_task(self._run(copy), name="shadow")
        copy.task.add_done_callback(lambda task: self._end(copy, task))
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(_LOOK_S, self._sweep)
        return copy

    async def close(self) -> None:
        """Stop all copies, and start no more."""
        self._is_closed = True
        tasks = [copy.task for copy in self._copies if copy.task is not None]
        self._drop(self._copies)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, copy: ShadowCopy) -> None:
        try:
            async with asyncio.timeout(self._limits.shadow_timeout_s):
                await self._generate(copy)
        except (Overloaded, EngineUnavailable):
            copy.outcome = DROPPED
            return
        except (LoraserveError, TimeoutError) as error:
            if isinstance(error, AdapterNumerics):
                self._registry.numeric_failures.report(copy.request.tenant, copy.shadow.adapter)
            outcome, tally = FAILED, Tally(num_requests=1, num_failed=1)
            # a shadow fails a request only where there was an answer
            await copy.live_s()
        else:
            outcome, tally = COMPARED, copy.compare(await copy.live_s())
            self._metrics.shadow_tokens.inc(tally.num_tokens)
            self._metrics.shadow_agreed_tokens.inc(tally.num_agreed_tokens)
        copy.outcome = outcome
        self._count(copy, is_failure=outcome == FAILED)
        self._registry.shadow_hours.record(copy.shadow, copy.version, tally)

    async def _generate(self, copy: ShadowCopy) -> None:
        started = time.monotonic()
        self._num_waiting += 1
        is_waiting = True
        # no client requested the shadow, so that no router sees its name
        use = self._metrics.adapter_load.begin(copy.request.adapter, ())
        try:
            async with aclosing(self._engine.generate(copy.request)) as chunks:
                async for chunk in chunks:
                    if is_waiting:
                        is_waiting = False
                        use.answer()
                        copy.first_s, copy.num_cached_tokens = time.monotonic() - started, chunk.num_cached_tokens
                        # until the engine has reported again how many wait
                        asyncio.get_running_loop().call_later(2 * _LOOK_S, self._is_under_way)
                    if chunk.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                        raise EngineUnavailable("The engine aborted this copy.")
                    copy.token_ids.extend(chunk.token_ids)
                    if chunk.finish_reason is not None:
                        break
        finally:
            use.end()
            copy.is_running = False
            if is_waiting:
                self._is_under_way()
        copy.seconds = time.monotonic() - started

    def _count(self, copy: ShadowCopy, *, is_failure: bool) -> None:
        """Add the copy to the sums of the shadow's version."""
        request, num_tokens, per_token_s = copy.request, len(copy.token_ids), None
        if copy.first_s is not None and copy.seconds is not None and num_tokens > 1:
            per_token_s = (copy.seconds - copy.first_s) / (num_tokens - 1)
        ended = EndedRequest(
            is_failure=is_failure,
            prompt_tokens=0 if copy.first_s is None else len(request.prompt_token_ids),
            cached_tokens=copy.num_cached_tokens,
            completion_tokens=num_tokens,
            first_token_s=copy.first_s,
            per_token_s=per_token_s,
        )
        self._metrics.activity.traffic.add(request.tenant, request.adapter, Role.SHADOW, ended)

    def _is_under_way(self) -> None:
        self._num_waiting -= 1

    def _end(self, copy: ShadowCopy, task: asyncio.Task[None]) -> None:
        """Clean up after a copy, however it ended."""
        self._copies.discard(copy)
        tenant = copy.request.tenant
        self._num_by_tenant[tenant] -= 1
        if not self._num_by_tenant[tenant]:
            # one entry per tenant with copies, not per tenant ever seen
            del self._num_by_tenant[tenant]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request's copy on a shadow version failed", exc_info=error)
            copy.outcome = FAILED
        self._metrics.shadow_requests.labels(copy.outcome).inc()

    def _has_room(self, tenant: TenantId) -> bool:
        return (
            not self._is_closed
            and len(self._copies) < self._limits.max_shadow_requests
            and self._num_by_tenant[tenant] < self._limits.max_shadow_requests_per_tenant
            and not self._is_busy()
        )

    def _is_busy(self) -> bool:
        stats = self._engine.stats
        is_full = stats.num_kv_blocks_used > MAX_KV_USE * stats.num_kv_blocks
        return not self._engine.is_ready or stats.num_waiting > self._num_waiting or is_full

    def _sweep(self) -> None:
        self._sweeper = None
        if self._is_busy():
            # those that only wait for the other answer hold nothing, and stay
            self._drop(copy for copy in self._copies if copy.is_running)
        elif self._copies:
            self._sweeper = asyncio.get_running_loop().call_later(_LOOK_S, self._sweep)

    def _drop(self, copies: Iterable[ShadowCopy]) -> None:
        for copy in list(copies):
            if copy.task is not None:
                copy.outcome = DROPPED
                copy.task.cancel()
