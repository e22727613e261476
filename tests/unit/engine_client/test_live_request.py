"""A request's own time is over for its client too where no engine says so.

Outputs have one order, whichever way they go.
"""

from __future__ import annotations

import asyncio
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


async def test_request_without_tokens_raises_at_deadline() -> None:
    with pytest.raises(DeadlineExceeded):
        await make(0.01).next(600.0)


async def test_request_with_tokens_ends_at_deadline() -> None:
    live = make(0.01)
    live.receive(TokenOutput(request_id=RequestId("r"), token_ids=(5,)))
    assert (await live.next()).token_ids == (5,)
    output = await live.next()
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ((), FinishReason.LENGTH, "timeout")


async def test_other_wait_bound_is_not_request_deadline() -> None:
    with pytest.raises(TimeoutError):
        await make(600.0).next(0.01)


def output(token_id: int, finish_reason: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(request_id=RequestId("r"), token_ids=(token_id,), finish_reason=finish_reason)


async def test_taker_gets_outputs_only_while_reader_waits() -> None:
    live, taken = make(600.0), []
    live.taker = lambda output: taken.append(output.token_ids) or True
    live.receive(output(1))
    assert (await live.next()).token_ids == (1,)
    # the reader has the first one, and may not have written it
    live.receive(output(2))
    assert taken == []
    assert (await live.next()).token_ids == (2,)
    waiting = asyncio.create_task(live.next())
    await asyncio.sleep(0)
    live.receive(output(3))
    live.receive(output(4))
    assert taken == [(3,), (4,)]
    # the last one ends the iterator
    live.receive(output(5, FinishReason.LENGTH))
    assert (await waiting).token_ids == (5,)
    assert live.output_token_ids == [1, 2, 3, 4, 5]


async def test_reader_gets_refused_output_and_later_outputs() -> None:
    live, taken = make(600.0), []
    live.taker = lambda output: taken.append(output.token_ids) or len(taken) < 2
    waiting = asyncio.create_task(live.next())
    await asyncio.sleep(0)
    for token_id in (1, 2, 3):
        live.receive(output(token_id))
    assert taken == [(1,), (2,)]
    assert (await waiting).token_ids == (2, 3)


async def test_a_takers_error_is_the_readers() -> None:
    live = make(600.0)

    def take(_: TokenOutput) -> bool:
        raise RuntimeError("it can't be rendered")

    live.taker = take
    waiting = asyncio.create_task(live.next())
    await asyncio.sleep(0)
    live.receive(output(1))
    with pytest.raises(RuntimeError, match="rendered"):
        await waiting
