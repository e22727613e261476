"""A request's own time is over for its client too where no engine says so."""

from __future__ import annotations

import time

import pytest

from loraserve.engine_client import live_request
from loraserve.engine_client.live_request import LiveRequest
from loraserve.engine_client.messages import GenerateRequest
from loraserve.errors import DeadlineExceeded
from loraserve.types import FinishReason, RequestId, SamplingParams, TenantId, TokenOutput


def make(timeout_s: float) -> LiveRequest:
    request = GenerateRequest(
        request_id=RequestId("r"),
        tenant=TenantId("t"),
        adapter=None,
        prompt_token_ids=(1,),
        params=SamplingParams(max_tokens=9),
        timeout_s=timeout_s,
    )
    return LiveRequest(request, deadline_s=time.monotonic() + timeout_s)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_request, "TIMEOUT_GRACE_S", 0.0)


async def test_who_has_no_token_when_its_time_is_over_is_told() -> None:
    with pytest.raises(DeadlineExceeded):
        await make(0.01).next(600.0)


async def test_who_has_tokens_when_its_time_is_over_ends_with_them() -> None:
    live = make(0.01)
    live.receive(TokenOutput(request_id=RequestId("r"), token_ids=(5,)))
    assert (await live.next()).token_ids == (5,)
    output = await live.next()
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ((), FinishReason.LENGTH, "timeout")


async def test_another_bound_on_the_wait_is_not_taken_for_its_own_time() -> None:
    with pytest.raises(TimeoutError):
        await make(600.0).next(0.01)
