"""A replica's outputs for one ingress leave together, by the link that was opened last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from loraserve.cluster.relay.outbox import Outbox
from loraserve.engine_client import messages as m
from loraserve.types import Digest, RequestId, TokenOutput

IDLE_S = 0.05
WITHIN_S = 10.0


def output(request_id: str, token_id: int = 1) -> TokenOutput:
    return TokenOutput(request_id=RequestId(request_id), token_ids=(token_id,))


async def read(batches: AsyncGenerator[list[bytes], None]) -> list[m.EngineOutput]:
    async with asyncio.timeout(WITHIN_S):
        return [m.decode_output(encoded) for encoded in await anext(batches)]


async def is_over(batches: AsyncGenerator[list[bytes], None]) -> bool:
    async with asyncio.timeout(WITHIN_S):
        return await anext(batches, None) is None


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(idle_s=IDLE_S)


async def test_outputs_since_last_batch_leave_together(outbox: Outbox) -> None:
    batches = outbox.batches()
    assert await read(batches) == []
    for request_id in ("a", "b"):
        outbox.enter()
        outbox.put(output(request_id))
    assert await read(batches) == [m.StepOutputs(outputs=(output("a"), output("b")))]
    outbox.put(output("b", 2))
    assert await read(batches) == [m.StepOutputs(outputs=(output("b", 2),))]


async def test_damage_is_reported_before_affected_output(outbox: Outbox) -> None:
    damaged = m.AdapterDamaged(digest=Digest("d" * 64), blob=Digest("b" * 64))
    outbox.enter()
    outbox.put(output("a"), [damaged])
    batches = outbox.batches()
    await read(batches)
    assert await read(batches) == [damaged, m.StepOutputs(outputs=(output("a"),))]


async def test_idle_link_ends_after_timeout(outbox: Outbox) -> None:
    batches = outbox.batches()
    await read(batches)
    outbox.enter()
    ending = asyncio.ensure_future(is_over(batches))
    await asyncio.sleep(3 * IDLE_S)
    assert not ending.done()
    # one that was aborted leaves without a last output
    outbox.leave()
    assert not outbox.is_unused
    assert await ending
    assert outbox.is_unused


async def test_outputs_untaken_by_link_wait_for_next_link(outbox: Outbox) -> None:
    outbox.enter()
    outbox.put(output("a"))
    outbox.leave()
    batches = outbox.batches()
    await read(batches)
    assert await read(batches) == [m.StepOutputs(outputs=(output("a"),))]
    assert await is_over(batches)


async def test_a_newer_link_takes_over(outbox: Outbox) -> None:
    outbox.enter()
    older, newer = outbox.batches(), outbox.batches()
    await read(older)
    ending = asyncio.ensure_future(is_over(older))
    await asyncio.sleep(0)
    await read(newer)
    assert await ending
    assert not outbox.is_unused
    outbox.put(output("a"))
    assert await read(newer) == [m.StepOutputs(outputs=(output("a"),))]


async def test_cut_link_leaves_remaining_links(outbox: Outbox) -> None:
    outbox.enter()
    older = outbox.batches()
    await read(older)
    await older.aclose()
    outbox.put(output("a"))
    newer = outbox.batches()
    await read(newer)
    assert await read(newer) == [m.StepOutputs(outputs=(output("a"),))]
