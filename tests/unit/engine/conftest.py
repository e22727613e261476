"""Builders for the engine's tests: a request, a scheduler over real KV bookkeeping, adapters that arrive when the test says so."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from loraserve.engine.request import Request
from loraserve.engine.scheduler import ScheduledRequest, Scheduler, StepResult
from loraserve.errors import AdapterCorrupt, LoraserveError
from loraserve.memory.kv_cache import KVCache, prefix_root
from loraserve.memory.pager import Residency
from loraserve.types import AdapterRef, Digest, RequestId, SamplingParams, TenantId, TokenOutput

EOS = 7
_numbers = itertools.count()


def make_ref(name: str, tenant: str = "t") -> AdapterRef:
    digest = Digest(name.encode().hex().ljust(64, "0"))
    return AdapterRef(
        tenant=TenantId(tenant), name=name, version=1, digest=digest, config_blob=digest, weights_blob=digest
    )


def make_request(
    num_prompt_tokens: int = 4,
    *,
    adapter: str | None = None,
    tokens: list[int] | None = None,
    priority: int = 0,
    **params: object,
) -> Request:
    number = next(_numbers)
    ref = None if adapter is None else make_ref(adapter)
    # every prompt its own, so that no test shares prefixes by accident
    token_ids = tokens if tokens is not None else [100 + number * 1000 + i for i in range(num_prompt_tokens)]
    return Request(
        request_id=RequestId(f"r{number}"),
        tenant=TenantId("t"),
        adapter=ref,
        params=SamplingParams(**{"max_tokens": 3, "temperature": 0.0, **params}),  # type: ignore[arg-type]
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        priority=priority,
        prefix_root=prefix_root(TenantId("t"), ref.digest if ref else None, Digest("b"), "float32"),
        arrival_s=0.0,
        sequence_number=number,
    )


class CountedPin:
    def __init__(self, adapters: Adapters, digest: Digest) -> None:
        self._adapters, self._digest = adapters, digest
        adapters.pins[digest] = adapters.pins.get(digest, 0) + 1

    def release(self) -> None:
        self._adapters.pins[self._digest] -= 1


@dataclass
class Adapters:
    """An AdapterSource whose states the test sets."""

    states: dict[Digest, Residency] = field(default_factory=dict)
    pins: dict[Digest, int] = field(default_factory=dict)

    def request(self, ref: AdapterRef) -> Residency:
        return self.states.get(ref.digest, Residency.LOADING)

    def error(self, digest: Digest) -> LoraserveError | None:
        return AdapterCorrupt("bad bytes")

    def pin(self, digest: Digest) -> CountedPin:
        return CountedPin(self, digest)

    def set(self, name: str, state: Residency) -> None:
        self.states[make_ref(name).digest] = state


class Harness:
    """A scheduler, and steps in which every sampled token is 1 (or what `tokens` says)."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, token_budget: int = 32) -> None:
        self.kv = KVCache(num_blocks, block_size)
        self.adapters = Adapters()
        self.now = 0.0
        self.scheduler = Scheduler(
            self.kv,
            self.adapters,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            eos_token_ids=[EOS],
            clock=lambda: self.now,
        )

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def schedule(self) -> list[ScheduledRequest]:
        scheduled = self.scheduler.schedule()
        assert self.kv.check() == []
        return scheduled

    def step(self, token_id: int = 1, **result: object) -> tuple[list[ScheduledRequest], list[TokenOutput]]:
        scheduled = self.schedule()
        results = [
            StepResult(token_id if entry.is_sampled and entry.request.params.max_tokens else None, **result)  # type: ignore[arg-type]
            for entry in scheduled
        ]
        outputs = self.scheduler.take_failed() + self.scheduler.update(scheduled, results)
        assert self.kv.check() == []
        return scheduled, outputs

    def run(self, max_steps: int = 1000) -> list[TokenOutput]:
        outputs = []
        for _ in range(max_steps):
            if not self.scheduler.has_requests:
                return outputs
            outputs += self.step()[1]
        raise AssertionError("requests never ended")


@pytest.fixture
def harness() -> Harness:
    return Harness()
