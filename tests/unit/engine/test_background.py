"""Requests that nobody waits for take nobody's place."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from loraserve.engine_client.client import EngineClient
from loraserve.engine_client.messages import GenerateRequest, StepOutputs
from loraserve.errors import Overloaded, RateLimited
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import FinishReason, RequestId, SamplingParams, TenantId, TokenOutput

from .conftest import World


def make(number: int, *, is_background: bool = False, max_queued: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(f"r{number}"),
        tenant=TenantId("t"),
        adapter=None,
        prompt_token_ids=(1,),
        params=SamplingParams(max_tokens=1),
        is_background=is_background,
        max_queued=max_queued,
    )


@pytest.fixture
def client(world: World) -> EngineClient:
    """One place, and a queue of one; its engine isn't started, so whoever is taken waits."""
    config = msgspec.structs.replace(world.config(), max_num_seqs=1)
    return EngineClient(config, Tokenizer(world.model_dir), max_queued_requests=1)


async def start(client: EngineClient, request: GenerateRequest) -> asyncio.Task[Any]:
    async def first() -> Any:
        async with aclosing(client.generate(request)) as chunks:
            return await anext(chunks)

    task = asyncio.create_task(first())
    await asyncio.sleep(0)
    return task


async def test_background_requests_fill_no_queue(client: EngineClient) -> None:
    background = [await start(client, make(number, is_background=True)) for number in range(5)]
    others = [await start(client, make(number, max_queued=2)) for number in (10, 11)]
    assert client.num_live_requests == 7, "one may have the place, the other the queue"
    with pytest.raises(RateLimited):
        await (await start(client, make(12, max_queued=2)))
    with pytest.raises(Overloaded):
        await (await start(client, make(13)))
    # their tokens and their ends don't count either
    for number in (0, 10):
        output = TokenOutput(request_id=RequestId(f"r{number}"), token_ids=(5,), finish_reason=FinishReason.LENGTH)
        client._on_message(StepOutputs(outputs=(output,)))
    await asyncio.gather(background[0], others[0])
    for task in background[1:]:
        task.cancel()
    await asyncio.gather(*background[1:], return_exceptions=True)
    assert (client.num_live_requests, client._requests.bounds.num_alive) == (1, 1)
    others[1].cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert client._requests.bounds.num_alive == 0
