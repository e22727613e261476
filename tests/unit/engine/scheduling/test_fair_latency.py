"""A quiet tenant beside one that sends twenty times as much, on a clock that steps take their time
of: what the benchmark measures on a machine, here for certain.
"""

from __future__ import annotations

import math
import random

from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.types import Residency

from ..conftest import Harness, make_request

# of the benchmark's base S in int8 on two cores
STEP_S, PROMPT_TOKEN_S, SEQUENCE_S = 0.012, 0.000_48, 0.000_65
PROMPT_TOKENS, OUTPUT_TOKENS = (64, 512), (16, 128)
DURATION_S, LEAD_S = 60.0, 4.0


def arrivals(tenant: str, rate: float, start_s: float, seed: int) -> list[Request]:
    rng = random.Random(seed)
    requests, now_s = [], start_s
    while now_s < LEAD_S + DURATION_S:
        now_s += rng.expovariate(rate)
        request = make_request(
            rng.randrange(*PROMPT_TOKENS),
            tenant=tenant,
            adapter=f"{tenant}{rng.randrange(4)}",
            max_tokens=rng.randrange(*OUTPUT_TOKENS),
            arrival_s=now_s,
        )
        requests.append(request)
    return requests


def seconds(scheduled: list[ScheduledRequest]) -> float:
    num_prompt = sum(entry.num_tokens for entry in scheduled if entry.num_tokens > 1)
    num_decoding = sum(entry.num_tokens == 1 for entry in scheduled)
    return STEP_S + PROMPT_TOKEN_S * num_prompt + SEQUENCE_S * num_decoding


def first_tokens_s(quiet: list[Request], noisy: list[Request]) -> list[float]:
    """The quiet tenant's times to first token, in order of size."""
    harness = Harness(num_blocks=3600, block_size=16, max_num_seqs=64, token_budget=512)
    for request in (*quiet, *noisy):
        if request.adapter is not None:
            harness.adapters.set(request.adapter.name, Residency.RESIDENT)
    coming = sorted((*quiet, *noisy), key=lambda request: -request.arrival_s)
    of_quiet = {request.request_id: request for request in quiet}
    times_s = []
    while of_quiet:
        if not harness.scheduler.has_requests:
            harness.now = max(harness.now, coming[-1].arrival_s)
        while coming and coming[-1].arrival_s <= harness.now:
            harness.add(coming.pop())
        scheduled = harness.scheduler.schedule()
        harness.now += seconds(scheduled)
        for output in harness.update(scheduled):
            if request := of_quiet.pop(output.request_id, None):
                times_s.append(harness.now - request.arrival_s)
    return sorted(times_s)


def test_noisy_tenant_at_most_doubles_quiet_tenant_ttft() -> None:
    p95 = []
    for noisy in ([], arrivals("noisy", 20.0, 0.0, 1)):
        times_s = first_tokens_s(arrivals("quiet", 1.0, LEAD_S, 2), noisy)
        assert len(times_s) > 40
        p95.append(times_s[math.ceil(0.95 * len(times_s)) - 1])
    assert p95[1] <= 2.0 * p95[0]
