"""The engine: requests go in, tokens come out, a step at a time. One thread calls it; it knows no sockets and no HTTP."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from loraserve.background import Throttle
from loraserve.config import EngineConfig
from loraserve.engine.activation import find_activation
from loraserve.engine.execution.batch import Batch, build_batch
from loraserve.engine.execution.runner import StepHandle, StepRunner
from loraserve.engine.probe import Probe
from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.scheduling.scheduler import Scheduler
from loraserve.engine_client.messages import AddRequest
from loraserve.errors import EngineError
from loraserve.memory.arena import Owner
from loraserve.memory.kv.block_pool import BlockPool
from loraserve.memory.kv.prefix_cache import prefix_root
from loraserve.memory.residency.pager import Pager
from loraserve.memory.timings import Timings
from loraserve.progress import Progress
from loraserve.types import (
    AdapterRef,
    BaseSpec,
    Digest,
    EngineStats,
    RequestId,
    SamplingParams,
    TenantId,
    Tier,
    TokenOutput,
)

if TYPE_CHECKING:
    from loraserve.engine.verification.verifier import Verifications

logger = logging.getLogger(__name__)

MIN_PREFILL_ROWS = 16
"""A step of mostly prompts has so many rows at least, beside two per request."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was launched."""

    batch: Batch
    handle: StepHandle


class Engine:
    """Add requests, abort them, and call `step` while there are any.

    A step is one sentence: poll the pager, schedule, launch, take the results, update. With `overlap` the results are those of the
    step before: the device computes one step while the host prepares the next.

    Attributes:
        verifications: whose probes are requests here; None where nobody verifies.
        throttle: pauses background work; each step notes there what it computes.
    """

    def __init__(
        self,
        config: EngineConfig,
        base: BaseSpec,
        runner: StepRunner,
        pager: Pager,
        *,
        overlap: bool = False,
        kv: BlockPool | None = None,
        throttle: Throttle | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            kv: whose blocks the runner's steps write; None: as many as the runner has, which nothing else rents.
            throttle: pauses background work on the processors that steps compute on; None: they compute elsewhere.
            progress: told of each step; None: nothing reads it.
        """
        self.base = base
        self.pager = pager
        self.verifications: Verifications | None = None
        self.throttle = throttle or Throttle.beside_steps(math.inf)
        self._progress = progress or Progress()
        self._runner = runner
        self._overlap = overlap
        self._clock = clock
        self._kv_dtype = config.dtype
        if kv is None:
            kv = BlockPool(runner.num_blocks, config.block_size, enable_prefix_cache=config.enable_prefix_cache)
        self._kv = kv
        self._scheduler = Scheduler(
            self._kv,
            pager,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.max_num_batched_tokens,
            eos_token_ids=base.eos_token_ids,
            clock=clock,
        )
        # launched and not updated yet, oldest first: none between steps, or one with `overlap`; for a moment in a step one more
        self._in_flight: deque[_Step] = deque()
        self._sequence_numbers = itertools.count()
        self._num_steps = 0
        self._step_s = 0.0
        self._step_adapter_s = Timings()
        # requests by where their adapter was when they came
        self._lookups = dict.fromkeys((Tier.DEVICE, Tier.HOST, Tier.DISK), 0)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._invariant_violations = 0

    @property
    def is_serving(self) -> bool:
        """Whether somebody's request takes part in steps: one that isn't a probe."""
        return self._scheduler.is_serving

    @property
    def adapters_served(self) -> set[Digest | None]:
        """Of the requests that take part in steps, probes aside; None: some have none."""
        return self._scheduler.adapters_served

    @property
    def has_requests(self) -> bool:
        """Whether `step` has anything to do: requests, or a step in flight, though all of its requests may have ended."""
        return self._scheduler.has_requests or bool(self._in_flight)

    @property
    def is_waiting_for_adapters_only(self) -> bool:
        """Whether no step can do anything until an adapter arrives, or a place for one."""
        scheduler = self._scheduler
        if self._in_flight:
            return False
        if scheduler.num_running:
            return False
        return self.pager.is_admission_paused or scheduler.num_waiting == scheduler.num_waiting_for_adapter

    def add(self, message: AddRequest) -> None:
        """Queue a request, or the rest of one whose first tokens were sent before a crash."""
        adapter = message.adapter
        if adapter is not None:
            self._lookups[self.pager.tier(adapter.digest)] += 1
            # whose turns its load takes is who asks for it, not who lent it
            adapter = msgspec.structs.replace(adapter, tenant=message.tenant)
        self._scheduler.add(
            Request(
                request_id=message.request_id,
                tenant=message.tenant,
                adapter=adapter,
                params=message.params,
                token_ids=[*message.prompt_token_ids, *message.output_token_ids],
                num_prompt_tokens=len(message.prompt_token_ids),
                priority=message.priority,
                prefix_root=prefix_root(message.tenant, self.base.digest, self._kv_dtype),
                arrival_s=self._clock(),
                sequence_number=next(self._sequence_numbers),
                weight=message.weight,
                kv_share=message.kv_share,
                timeout_s=message.timeout_s,
            )
        )
        self._prompt_tokens += len(message.prompt_token_ids)

    def add_probe(self, probe: Probe, adapter: AdapterRef | None) -> None:
        """Queue a probe as a request like any other. It isn't counted among the prompts; its outputs are for whoever made it."""
        self._scheduler.add(self._probe_request(probe, adapter))

    def add_probe_of_resident(self, probe: Probe, digest: Digest) -> None:
        """The same by an adapter that is resident now, of which no more is known than that."""
        ref = AdapterRef(
            tenant=TenantId(""), name="", version=0, digest=digest, config_blob=digest, weights_blob=digest
        )
        request = self._probe_request(probe, ref)
        request.pin = self.pager.pin(digest, is_use=False)
        invocation_token_ids = self.pager.metadata(digest).invocation_token_ids
        request.activation = find_activation(digest, invocation_token_ids, request.prompt_token_ids)
        self._scheduler.add(request)

    def _probe_request(self, probe: Probe, adapter: AdapterRef | None) -> Request:
        prompt = list(probe.token_ids[: probe.num_prompt_tokens])
        # nobody's: a certificate is no tenant's use of the engine, and has no weight or limits of one
        tenant = TenantId("")
        return Request(
            request_id=probe.request_id,
            tenant=tenant,
            adapter=adapter,
            params=SamplingParams(max_tokens=probe.max_tokens, temperature=0.0, ignore_eos=True),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            priority=0,
            prefix_root=prefix_root(tenant, self.base.digest, self._kv_dtype),
            arrival_s=self._clock(),
            sequence_number=next(self._sequence_numbers),
            probe=probe,
        )

    def abort(self, request_id: RequestId) -> bool:
        """End a request and free what it holds; False if it is over already."""
        is_aborted = self._scheduler.abort(request_id)
        self._note_idle()
        return is_aborted

    def step(self) -> list[TokenOutput]:
        """Advance every request that can be advanced; return what their clients get.

        With `overlap` the step that is launched here stays in flight, and what is returned is the results of the one before.
        """
        started = self._clock()
        if not self._scheduler.num_running:
            # done while nobody ran: it held up no step
            self.pager.stopwatch.take_s()
        self._scheduler.note_changed(self.pager.poll())
        scheduled = self._scheduler.schedule()
        self._note_step(scheduled)
        self._progress.begin(f"computing step {self._num_steps + 1} of {len(scheduled)} requests")
        outputs = self._scheduler.take_failed()
        if scheduled or self._in_flight:
            outputs += self._launch(scheduled)
            num_left = self._num_left_in_flight(scheduled)
            while len(self._in_flight) > num_left:
                outputs += self._update(self._in_flight.popleft())
            self._num_steps += bool(scheduled)
            if scheduled:
                self._step_adapter_s.add(self.pager.stopwatch.take_s())
            elapsed = self._clock() - started
            self._step_s += elapsed
            self._note_prefill(scheduled, elapsed)
        self._note_idle()
        if self.verifications is not None:
            outputs = self.verifications.take(outputs)
        self._generation_tokens += sum(len(output.token_ids) for output in outputs)
        if not self.has_requests:
            self._check_idle()
        return outputs

    def _note_step(self, scheduled: Sequence[ScheduledRequest]) -> None:
        lengths = [entry.num_tokens for entry in scheduled if entry.request.probe is None]
        is_long = self.pager.num_loading > 0 or any(length > 1 for length in lengths)
        self.throttle.note(is_serving=bool(lengths), is_long=is_long)

    def _note_idle(self) -> None:
        """There may be no step that says so."""
        if not self.is_serving:
            self.throttle.note(is_serving=False)

    def _note_prefill(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        """A step of mostly prompts says what it costs to compute tokens anew; with `overlap` it's as long as the one that ran meanwhile."""
        num_tokens = sum(entry.num_tokens for entry in scheduled)
        if num_tokens >= MIN_PREFILL_ROWS + 2 * len(scheduled):
            self._kv.prefix_cache.prefill_cost.note(num_tokens, seconds)

    def _launch(self, scheduled: Sequence[ScheduledRequest]) -> list[TokenOutput]:
        """The scheduled rows are in flight. When launching them raised they aren't, and everything was computed apart."""
        if not scheduled:
            return []
        try:
            self._in_flight.append(self._start(scheduled))
        except Exception as error:
            outputs = []
            while self._in_flight:
                outputs += self._update(self._in_flight.popleft())
            return outputs + self._recover(scheduled, error)
        return []

    def _start(self, scheduled: Sequence[ScheduledRequest]) -> _Step:
        previous = self._in_flight[-1].batch if self._in_flight else None
        batch = build_batch(scheduled, self._kv.block_size, self.pager.handle, previous)
        return _Step(batch, self._runner.launch(batch))

    def _num_left_in_flight(self, scheduled: Sequence[ScheduledRequest]) -> int:
        """How many steps may still run when the next one is scheduled: none if that needs to know what this one samples."""
        if not self._overlap or not scheduled:
            return 0
        needs_results = any(e.is_sampled and self._runner.needs_results_first(e.request) for e in scheduled)
        return 0 if needs_results else 1

    def _update(self, step: _Step) -> list[TokenOutput]:
        try:
            results = step.handle.results()
        except Exception as error:
            self._give_up_in_flight()
            return self._recover(step.batch.entries, error)
        return self._scheduler.update(step.batch.entries, results)

    def _give_up_in_flight(self) -> None:
        """Steps that were launched after one that raised may have been fed by it: they are computed anew, if they are scheduled again."""
        while self._in_flight:
            step = self._in_flight.pop()
            with suppress(Exception):
                # the device must be done with it
                step.handle.results()
            self._scheduler.forget(step.batch.entries)

    def _recover(self, scheduled: Sequence[ScheduledRequest], error: Exception) -> list[TokenOutput]:
        """Compute anew what is left of a step that raised, with nothing in flight beside it."""
        logger.warning("a step of %d requests raised %s: computing it anew", len(scheduled), type(error).__name__)
        self._scheduler.forget([entry for entry in scheduled if not entry.is_current])
        return self._run_apart([entry for entry in scheduled if entry.is_current])

    def _run_apart(self, scheduled: Sequence[ScheduledRequest]) -> list[TokenOutput]:
        """Compute rows here and now. When that raises, halve them until the request that raises stands alone, and fail only that one.

        Running a half again is safe: rows don't see each other, and KV is written again to the same slots.
        """
        if not scheduled:
            return []
        try:
            step = self._start(scheduled)
            results = step.handle.results()
        except Exception as error:
            if len(scheduled) == 1:
                logger.exception("request %s failed in a step", scheduled[0].request.request_id)
                reason = EngineError(f"The step of this request failed: {type(error).__name__}.")
                return [self._scheduler.fail(scheduled[0].request, reason)]
            logger.warning("a step of %d requests raised %s: halving it", len(scheduled), type(error).__name__)
            middle = len(scheduled) // 2
            return self._run_apart(scheduled[:middle]) + self._run_apart(scheduled[middle:])
        return self._scheduler.update(step.batch.entries, results)

    def _check_idle(self) -> None:
        """With no request alive and no step in flight, nothing may be held."""
        held = [(self._kv.num_held, "KV blocks"), (self.pager.num_pins, "adapter pins")]
        for count, what in held:
            if count:
                self._invariant_violations += 1
                logger.error("no request is alive, but %d %s are held", count, what)

    def check(self) -> list[str]:
        """Return every broken invariant of the requests and the memory, in words."""
        in_flight = [entry for step in self._in_flight for entry in step.batch.entries]
        return [*self._scheduler.check(in_flight), *self._kv.check(), *self.pager.check()]

    def stats(self) -> EngineStats:
        """Return the counters and gauges of this moment; adapters' part comes from the pager."""
        kv, scheduler = self._kv, self._scheduler
        return EngineStats(
            num_steps=self._num_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_for_adapter=scheduler.num_waiting_for_adapter,
            num_preemptions=scheduler.num_preemptions,
            num_fair_preemptions=scheduler.num_fair_preemptions,
            num_timeouts=scheduler.num_timeouts,
            num_tenants=scheduler.num_tenants,
            num_kv_blocks=kv.num_blocks,
            num_kv_blocks_used=kv.num_held,
            num_kv_blocks_cached=kv.num_idle,
            prefix_tokens_hit=kv.prefix_cache.num_tokens_hit,
            prefix_tokens_queried=kv.prefix_cache.num_tokens_queried,
            base_prefix_tokens_hit=scheduler.base_prefix_tokens_hit,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            kv_evictions=kv.num_evictions_for.total(),
            kv_evictions_for_adapters=kv.num_evictions_for[Owner.ADAPTERS],
            adapter_lookups_device=self._lookups[Tier.DEVICE],
            adapter_lookups_host=self._lookups[Tier.HOST],
            adapter_lookups_disk=self._lookups[Tier.DISK],
            adapter_wait_s=scheduler.adapter_wait_s.histogram,
            step_adapter_s=self._step_adapter_s.histogram,
            step_s=self._step_s,
            invariant_violations=self._invariant_violations + self.pager.num_violations,
            **cast("dict[str, Any]", self.pager.stats()),
        )
