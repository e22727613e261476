"""Pins of waiting requests' adapters, and the ends of requests whose adapter doesn't come."""

from __future__ import annotations

from collections.abc import Callable

from loraserve.engine.activation import find_activation
from loraserve.engine.request import Request
from loraserve.engine.scheduling.queue import WaitingQueue
from loraserve.engine.scheduling.quota import ResourceQuota
from loraserve.engine.scheduling.results import adapter_overdue_error
from loraserve.engine.scheduling.step import Step
from loraserve.engine.scheduling.waits import AdapterSource, AdapterWaits
from loraserve.errors import LoraserveError
from loraserve.memory.timings import Timings
from loraserve.types import AdapterRef, Residency, Tier


class AdapterPinning:
    """Pin a request's adapter before it starts, or let the request wait for its load.

    Args:
        fail: ends a request with an error, outside of a step.

    Attributes:
        wait_s: seconds that each request waited for its adapter, whether it came or not.
    """

    def __init__(
        self,
        adapters: AdapterSource,
        queue: WaitingQueue,
        waits: AdapterWaits,
        quota: ResourceQuota,
        fail: Callable[[Request, LoraserveError], None],
    ) -> None:
        self.wait_s = Timings()
        self._adapters, self._queue, self._waits, self._quota, self._fail = adapters, queue, waits, quota, fail
        self._fair_queue = queue.fair_queue

    @property
    def is_admission_paused(self) -> bool:
        """Return whether an adapter waits for memory that running requests hold."""
        return self._adapters.is_admission_paused

    def hold_to_share(self, request: Request) -> bool:
        """Stop a waiting request whose adapter would take more than its tenant's share.

        Return whether it was stopped: then its adapter is neither pinned nor requested, which would
        evict other tenants' adapters for nothing, and it doesn't wait for the load either.
        """
        if request.adapter is None or request.pin is not None:
            return False
        share = self._adapters.memory_share(request.adapter.digest)
        if not self._quota.exceeds_adapter_share(request, share):
            return False
        self._waits.end(request)
        return True

    def pin_or_request(self, request: Request, step: Step) -> bool:
        """Pin the request's adapter and return True, or queue its load and return False.

        If it couldn't be loaded, the request fails.
        """
        if request.pin is not None:
            return True
        if self._adapters.is_admission_paused and request.adapter_wait_started_s is None:
            # An adapter waits for memory that running requests hold. Those with a pin go on; so do
            # those whose adapter has just arrived, which would lose it again to the one that waits
            # now, and so on in turn.
            return False
        if request.adapter is None:
            return True
        flow = self._fair_queue.flow(request)
        # the pager is asked once a step for all requests of a flow
        state = Residency.LOADING if flow in step.absent else self._adapters.request(request.adapter)
        match state:
            case Residency.RESIDENT:
                # Pinned before any KV block is taken, and kept across preemption: a request that
                # holds KV can run.
                digest = request.adapter.digest
                request.pin = self._adapters.pin(digest, is_use=not request.is_internal)
                metadata = self._adapters.metadata(digest)
                # in the prompt alone: neither an answer nor output from before a crash moves it
                request.activation = find_activation(digest, metadata.invocation_token_ids, request.prompt_token_ids)
                request.num_extra_rows = metadata.num_extra_rows
                if request.pooler is not None:
                    request.pooler.head = metadata.head
                self._waits.end(request)
                if request.adapter_tier == Tier.DISK:
                    # a load that others began may have run before it came
                    request.adapter_read_s = min(request.adapter_wait_s, metadata.read_s)
                self._fair_queue.note_pinned(request, self._adapters.memory_share(digest))
                if not request.is_internal:
                    self.wait_s.add(request.adapter_wait_s)
                return True
            case Residency.FAILED:
                self._fail_load(request, request.adapter)
                return False
            case _:
                step.absent.add(flow)
                if request.adapter_wait_started_s is None:
                    self._waits.begin(request, request.adapter.digest)
                return False

    def fail_overdue(self, now: float) -> None:
        """Fail the requests that have waited for their adapter too long; its load goes on."""
        for request in self._waits.overdue(now):
            if request.adapter is None:
                continue
            state = self._adapters.request(request.adapter)
            if state in (Residency.LOADING, Residency.WAITING_FOR_SPACE):
                error = adapter_overdue_error(request, state, self._waits.deadline_s)
                self._fail(request, error)
            elif state is Residency.RESIDENT:
                # the request waits for a slot, which has its own bound
                self._waits.end(request)
                self._queue.blocked.unpark(self._fair_queue.flow(request))
            else:
                self._fail_load(request, request.adapter)

    def _fail_load(self, request: Request, adapter: AdapterRef) -> None:
        error = self._adapters.error(adapter.digest)
        self._fail(request, error or LoraserveError("the adapter could not be loaded"))
