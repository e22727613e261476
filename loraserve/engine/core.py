"""The engine: requests go in, tokens come out, a step at a time. One thread calls it; it knows no sockets and no HTTP."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from loraserve.config import EngineConfig
from loraserve.engine.batch import build_batch
from loraserve.engine.messages import AddRequest
from loraserve.engine.request import Request
from loraserve.engine.runner import StepRunner
from loraserve.engine.scheduler import ScheduledRequest, Scheduler
from loraserve.errors import EngineError
from loraserve.memory.kv_cache import KVCache, prefix_root
from loraserve.memory.pager import Pager
from loraserve.types import BaseSpec, EngineStats, RequestId, TokenOutput

logger = logging.getLogger(__name__)


class Engine:
    """Add requests, abort them, and call `step` while there are any.

    A step is one sentence: poll the pager, schedule, launch, take the results, update.
    """

    def __init__(
        self,
        config: EngineConfig,
        base: BaseSpec,
        runner: StepRunner,
        pager: Pager,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base = base
        self.pager = pager
        self._runner = runner
        self._clock = clock
        self._kv_dtype = config.dtype
        self._kv = KVCache(runner.num_blocks, config.block_size, enable_prefix_cache=config.enable_prefix_cache)
        self._scheduler = Scheduler(
            self._kv,
            pager,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.max_num_batched_tokens,
            eos_token_ids=base.eos_token_ids,
            clock=clock,
        )
        self._sequence_numbers = itertools.count()
        self._num_steps = 0
        self._step_s = 0.0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._invariant_violations = 0

    @property
    def has_requests(self) -> bool:
        return self._scheduler.has_requests

    @property
    def is_waiting_for_adapters_only(self) -> bool:
        """Whether no step can do anything until an adapter arrives, or a place for one."""
        scheduler = self._scheduler
        return scheduler.num_running == 0 and scheduler.num_waiting == scheduler.num_waiting_for_adapter

    def add(self, message: AddRequest) -> None:
        """Queue a request, or the rest of one whose first tokens were sent before a crash."""
        self._scheduler.add(
            Request(
                request_id=message.request_id,
                tenant=message.tenant,
                adapter=message.adapter,
                params=message.params,
                token_ids=[*message.prompt_token_ids, *message.output_token_ids],
                num_prompt_tokens=len(message.prompt_token_ids),
                priority=message.priority,
                prefix_root=prefix_root(
                    message.tenant,
                    message.adapter.digest if message.adapter is not None else None,
                    self.base.digest,
                    self._kv_dtype,
                ),
                arrival_s=self._clock(),
                sequence_number=next(self._sequence_numbers),
            )
        )
        self._prompt_tokens += len(message.prompt_token_ids)

    def abort(self, request_id: RequestId) -> bool:
        """End a request and free what it holds; False if it is over already."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[TokenOutput]:
        """Advance every request that can be advanced; return what their clients get."""
        started = self._clock()
        self.pager.poll()
        scheduled = self._scheduler.schedule()
        outputs = self._scheduler.take_failed()
        if scheduled:
            outputs += self._run(scheduled)
            self._num_steps += 1
            self._step_s += self._clock() - started
        self._generation_tokens += sum(len(output.token_ids) for output in outputs)
        if not self._scheduler.has_requests:
            self._check_idle()
        return outputs

    def _run(self, scheduled: Sequence[ScheduledRequest]) -> list[TokenOutput]:
        """Compute the scheduled rows. When that raises, halve the step until the request that raises stands alone, and fail only that one.

        Running a half again is safe: rows don't see each other, and KV is written again to the same slots.
        """
        try:
            batch = build_batch(scheduled, self._kv.block_size, self.pager.packed)
            results = self._runner.launch(batch).results()
        except Exception as error:
            if len(scheduled) == 1:
                logger.exception("request %s failed in a step", scheduled[0].request.request_id)
                reason = EngineError(f"The step of this request failed: {type(error).__name__}.")
                return [self._scheduler.fail(scheduled[0].request, reason)]
            logger.warning("a step of %d requests raised %s: halving it", len(scheduled), type(error).__name__)
            middle = len(scheduled) // 2
            return self._run(scheduled[:middle]) + self._run(scheduled[middle:])
        return self._scheduler.update(batch.entries, results)

    def _check_idle(self) -> None:
        """With no request alive, nothing may be held."""
        held = [(self._kv.num_held, "KV blocks"), (self.pager.num_pins, "adapter pins")]
        for count, what in held:
            if count:
                self._invariant_violations += 1
                logger.error("no request is alive, but %d %s are held", count, what)

    def check(self) -> list[str]:
        """Return every broken invariant of the memory, in words."""
        return [*self._kv.check(), *self.pager.check()]

    def stats(self) -> EngineStats:
        """Return the counters and gauges of this moment; adapters' part comes from the pager."""
        kv, scheduler = self._kv, self._scheduler
        return EngineStats(
            num_steps=self._num_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_for_adapter=scheduler.num_waiting_for_adapter,
            num_preemptions=scheduler.num_preemptions,
            num_kv_blocks=kv.num_blocks,
            num_kv_blocks_used=kv.num_held,
            num_kv_blocks_cached=kv.num_idle,
            prefix_tokens_hit=kv.prefix_tokens_hit,
            prefix_tokens_queried=kv.prefix_tokens_queried,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            step_s=self._step_s,
            invariant_violations=self._invariant_violations + self.pager.num_violations,
            **cast("dict[str, Any]", self.pager.stats()),
        )
