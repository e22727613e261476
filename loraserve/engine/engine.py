"""The engine: requests go in, tokens come out, one step at a time. One thread calls it.

It uses neither sockets nor HTTP.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from loraserve.config import EngineConfig
from loraserve.engine.activation import find_activation
from loraserve.engine.execution.runner import StepRunner
from loraserve.engine.grammar.constraints import Constraints
from loraserve.engine.pooler import Pooler
from loraserve.engine.probe import Probe
from loraserve.engine.request import Request, VersionName
from loraserve.engine.scheduling.results import failed_output
from loraserve.engine.scheduling.scheduler import Scheduler
from loraserve.engine.speculation.history import is_of
from loraserve.engine.speculation.speculation import Speculation
from loraserve.engine.step_hooks import StepListener, StepTimer
from loraserve.engine.step_pipeline import StepPipeline
from loraserve.engine_client.messages import AddRequest
from loraserve.errors import InvariantViolation
from loraserve.memory.arena import Owner
from loraserve.memory.kv.block_pool import BlockPool
from loraserve.memory.kv.prefix_cache import prefix_root
from loraserve.memory.residency.pager import Pager
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

logger = logging.getLogger(__name__)


class Engine:
    """Add requests, abort them, and call `step` while there are any.

    A step is one sentence: poll the pager, schedule, launch, collect, update. With `overlap` it
    collects the results of the step before: the device computes one step while the host prepares
    the next.

    Attributes:
        listener: hooks around the steps for work that isn't serving; set by the worker.
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
        constraints: Constraints | None = None,
        speculation: Speculation | None = None,
        progress: Progress | None = None,
        more_stats: Callable[[], dict[str, Any]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an engine that has no requests yet.

        Args:
            constraints: follows the grammars of requests; None: no request may have one.
            kv: cache that the runner's steps write; None: one of the runner's blocks, all
                of which are its own.
            speculation: proposes tokens for steps to verify; None: none are proposed.
            progress: notified of each step; None: nothing reads it.
            more_stats: returns fields of EngineStats that the runner's processes count.
        """
        self.base, self._more_stats = base, more_stats
        self.pager = pager
        self.listener = StepListener()
        self._progress = progress or Progress()
        self._clock = clock
        self._kv_dtype = config.dtype
        if kv is None:
            kv = BlockPool(runner.num_blocks, config.block_size, enable_prefix_cache=config.enable_prefix_cache)
        self._kv = kv
        self._constraints, self._speculation = constraints, speculation
        # requests whose grammar is being compiled, in the order of their arrival
        self._preparing: dict[RequestId, Request] = {}
        self._scheduler = Scheduler(
            kv,
            pager,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.max_num_batched_tokens,
            max_inter_token_s=config.max_inter_token_s,
            eos_token_ids=base.eos_token_ids,
            clock=clock,
            on_end=self._end_constraint,
            speculation=speculation,
            has_recurrent_state=base.has_recurrent_state,
        )
        self._pipeline = StepPipeline(
            runner, self._scheduler, block_size=kv.block_size, handle_of=pager.handle, overlap=overlap
        )
        self._timer = StepTimer(pager.stopwatch, kv.prefix_cache.prefill_cost, clock)
        self._sequence_numbers = itertools.count()
        # requests by where their adapter was when they came
        self._lookups = dict.fromkeys((Tier.DEVICE, Tier.HOST, Tier.DISK), 0)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._invariant_violations = 0

    @property
    def is_serving(self) -> bool:
        """Whether any request but probes takes part in steps."""
        return self._scheduler.is_serving

    @property
    def adapters_served(self) -> set[Digest | None]:
        """Adapters of the requests that take part in steps, without probes.

        None stands for the base alone.
        """
        return self._scheduler.adapters_served

    @property
    def has_requests(self) -> bool:
        """Whether `step` has anything to do: requests, or a step in flight, even of ended ones."""
        return self._scheduler.has_requests or bool(self._preparing) or bool(self._pipeline)

    @property
    def is_waiting(self) -> bool:
        """Whether no step can do anything until an adapter arrives, or space for one, or a mask."""
        scheduler = self._scheduler
        if self._pipeline or scheduler.has_computable:
            return False
        return self.pager.is_admission_paused or scheduler.num_waiting == scheduler.num_waiting_for_adapter

    def step(self) -> list[TokenOutput]:
        """Advance every request that can be advanced; return what their clients get.

        With `overlap` the step launched here stays in flight, and the outputs are those of the one
        before.
        """
        self._timer.begin(is_idle=not self._scheduler.num_running)
        self._scheduler.note_changed(self.pager.poll())
        outputs = self._admit_prepared()
        scheduled = self._scheduler.schedule()
        self.listener.before_launch(scheduled)
        self._progress.begin(f"computing step {self._timer.num_steps + 1} of {len(scheduled)} requests")
        outputs += self._scheduler.take_failed()
        if scheduled or self._pipeline:
            in_flight = self._pipeline.entries
            outputs += self._pipeline.launch(scheduled)
            outputs += self._pipeline.collect(scheduled)
            elapsed_s = self._timer.end(scheduled)
            awaited = in_flight or scheduled
            if bool(in_flight) + bool(scheduled) - len(self._pipeline) == 1:
                self._scheduler.prompt_share.note(awaited, elapsed_s)
            if self._speculation is not None and scheduled:
                self._speculation.note_step(scheduled, elapsed_s)
        return self._finish_step(outputs)

    def _finish_step(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Count what was made; return the outputs of requests that have clients."""
        self._note_idle()
        outputs = self.listener.take_outputs(outputs)
        self._generation_tokens += sum(len(output.token_ids) for output in outputs)
        if not self.has_requests:
            self._check_idle()
        return outputs

    def _note_idle(self) -> None:
        if not self.is_serving:
            self.listener.on_idle()

    def add(self, message: AddRequest) -> None:
        """Queue a request, or the rest of one that a crash interrupted."""
        adapter, tier = message.adapter, ""
        versions = _versions_of(adapter)
        if adapter is not None:
            found = self.pager.tier(adapter.digest)
            self._lookups[found] += 1
            tier = found.value
            # the requesting tenant is charged for the load, not the one that owns the adapter
            adapter = msgspec.structs.replace(adapter, tenant=message.tenant)
        request = Request(
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
            adapter_tier=tier,
            versions=versions,
            pooler=None if message.pooling is None else Pooler(message.pooling),
        )
        self._prompt_tokens += len(message.prompt_token_ids)
        if message.params.grammar:
            self._prepare(request, message.output_token_ids)
        else:
            self._scheduler.add(request)

    def _prepare(self, request: Request, output_token_ids: Sequence[int]) -> None:
        """Compile the request's grammar on a thread; the scheduler gets the request after that."""
        if self._constraints is None:
            raise InvariantViolation(f"request {request.request_id} has a grammar, and this engine follows none")
        request.constraint = self._constraints.begin(request.params, output_token_ids, request.tenant)
        self._preparing[request.request_id] = request

    def _admit_prepared(self) -> list[TokenOutput]:
        """Give the scheduler the requests whose grammars are compiled.

        Return the last outputs of those that failed.
        """
        failed = []
        for request in [r for r in self._preparing.values() if r.constraint is not None and r.constraint.is_ready]:
            del self._preparing[request.request_id]
            if request.constraint is not None and request.constraint.error is not None:
                self._end_constraint(request)
                failed.append(failed_output(request, request.constraint.error))
            else:
                self._scheduler.add(request)
        return failed

    def _end_constraint(self, request: Request) -> None:
        if self._constraints is not None and request.constraint is not None:
            self._constraints.end(request.constraint)

    def add_probe(self, probe: Probe, adapter: AdapterRef | None) -> None:
        """Queue a probe as a request like any other, without counting its prompt.

        Its outputs go to the listener.
        """
        self._scheduler.add(self._probe_request(probe, adapter))

    def add_probe_of_resident(self, probe: Probe, digest: Digest) -> None:
        """Queue a probe of an adapter that is resident now and known by its digest alone."""
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
        # a certificate is no tenant's use of the engine: it has no weight and no limits
        tenant = TenantId("")
        return Request(
            request_id=probe.request_id,
            tenant=tenant,
            adapter=adapter,
            params=SamplingParams(max_tokens=probe.max_tokens, temperature=0.0, ignore_eos=not probe.max_answer_tokens),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            priority=0,
            prefix_root=prefix_root(tenant, self.base.digest, self._kv_dtype),
            arrival_s=self._clock(),
            sequence_number=next(self._sequence_numbers),
            probe=probe,
        )

    def abort(self, request_id: RequestId) -> bool:
        """End a request and free what it holds; return False if it is over already."""
        preparing = self._preparing.pop(request_id, None)
        if preparing is not None:
            self._end_constraint(preparing)
        is_aborted = preparing is not None or self._scheduler.abort(request_id)
        self._note_idle()
        return is_aborted

    def discard(self, digest: Digest) -> None:
        """Drop a version that no request names any more, with its texts."""
        self.pager.discard(digest)
        if self._speculation is not None:
            self._speculation.forget(digest)

    def forget_texts(self, owner: TenantId, name: str | None, version: int | None) -> None:
        """Forget what a deleted version made, or all of a deleted adapter or tenant.

        Running requests continue, and leave nothing either.

        Args:
            name: None: of all of the owner's adapters, and of its own requests.
            version: None: of all versions.
        """
        if self._speculation is None:
            return
        for request in (*self._scheduler.requests, *self._preparing.values()):
            if is_of(request.tenant, request.versions, owner, name, version):
                request.leaves_text = False
        self._speculation.forget_deleted(owner, name, version)

    def _check_idle(self) -> None:
        """Count and log what is still held although no request is alive and no step in flight."""
        held = [(self._kv.num_held, "KV blocks"), (self.pager.num_pins, "adapter pins")]
        for count, what in held:
            if count:
                self._invariant_violations += 1
                logger.error("no request is alive, but %d %s are held", count, what)

    def check(self) -> list[str]:
        """List the broken invariants of the requests and the memory, as text."""
        return [*self._scheduler.check(self._pipeline.entries), *self._kv.check(), *self.pager.check()]

    def stats(self) -> EngineStats:
        """Collect the current counters and gauges; those of adapters come from the pager."""
        kv, scheduler = self._kv, self._scheduler
        return EngineStats(
            num_steps=self._timer.num_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._preparing),
            num_waiting_for_adapter=scheduler.num_waiting_for_adapter,
            num_preemptions=scheduler.num_preemptions,
            num_fair_preemptions=scheduler.num_fair_preemptions,
            num_timeouts=scheduler.num_timeouts,
            num_tenants=scheduler.num_tenants,
            num_kv_blocks=kv.num_blocks,
            num_kv_blocks_used=kv.num_held,
            num_kv_blocks_cached=kv.num_idle,
            num_kv_blocks_available=kv.num_available,
            kv_block_size=kv.block_size,
            prefix_tokens_hit=kv.prefix_cache.num_tokens_hit,
            prefix_tokens_queried=kv.prefix_cache.num_tokens_queried,
            base_prefix_tokens_hit=scheduler.base_prefix_tokens_hit,
            num_state_snapshots=0 if kv.snapshots is None else kv.snapshots.num_kept,
            state_snapshot_evictions=0 if kv.snapshots is None else kv.snapshots.num_evictions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            kv_evictions=kv.num_evictions_for.total(),
            kv_evictions_for_adapters=kv.num_evictions_for[Owner.ADAPTERS],
            adapter_lookups_device=self._lookups[Tier.DEVICE],
            adapter_lookups_host=self._lookups[Tier.HOST],
            adapter_lookups_disk=self._lookups[Tier.DISK],
            adapter_wait_s=scheduler.adapter_wait_s.histogram,
            step_adapter_s=self._timer.adapter_s,
            step_s=self._timer.total_s,
            invariant_violations=self._invariant_violations + self.pager.num_violations,
            **self._more_stats(),
            **({} if self._constraints is None else self._constraints.stats()),
            **({} if self._speculation is None else self._speculation.stats()),
            **cast("dict[str, Any]", self.pager.stats()),
        )

    def close(self) -> None:
        """End the threads of grammars and loads."""
        if self._constraints is not None:
            self._constraints.close()
        self.pager.close()


def _versions_of(adapter: AdapterRef | None) -> tuple[VersionName, ...]:
    """List the versions that an adapter consists of."""
    if adapter is None:
        return ()
    refs = tuple(part.adapter for part in adapter.parts) or (adapter,)
    return tuple((ref.tenant, ref.name, ref.version) for ref in refs)
