"""One batch, and two servers that each believe that it is theirs."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from loraserve.batches.progress import BatchProgress, Results, TakenOver
from loraserve.db.models import BatchChunk, UsageHour
from loraserve.db.session import utc_now
from loraserve.types import TenantId

from .conftest import Place, answer_of, input_of


def results_of(tenant: TenantId, number: int) -> Results:
    results = Results()
    results.add(number, b"+{}\n" * number, answer_of(tenant, f"c{number}").usage, is_completed=True)
    return results


async def test_later_of_two_servers_records_no_results(place: Place, acme: TenantId) -> None:
    batch = await place.create(acme, input_of(2))
    first, second = [BatchProgress(place.database, place.registry.store, batch, clock=utc_now) for _ in range(2)]
    await first.begin(2)
    await second.refresh()
    await first.commit(results_of(acme, 1))
    for number in (1, 2):
        with pytest.raises(TakenOver):
            await second.commit(results_of(acme, number + 1))
    with pytest.raises(TakenOver):
        await second.refresh()
    with pytest.raises(TakenOver):
        await second.end("completed", {}, 0)
    # the faster one goes on
    await first.commit(results_of(acme, 2))
    async with place.database.read() as session:
        chunks = (await session.scalars(select(BatchChunk.lines).order_by(BatchChunk.sequence))).all()
        num_billed = await session.scalar(select(func.sum(UsageHour.num_requests)))
    assert (chunks, num_billed) == ([[1], [2]], 2)
    assert (await place.batches.get(acme, batch.id)).num_completed == 2


async def test_the_same_results_again_count_once(place: Place, acme: TenantId) -> None:
    batch = await place.create(acme, input_of(1))
    progress = BatchProgress(place.database, place.registry.store, batch, clock=utc_now)
    await progress.begin(1)
    before, results = progress.batch, results_of(acme, 1)
    await progress.commit(results)
    # as if the commit's answer had been lost
    progress.batch = before
    await progress.commit(results)
    assert progress.batch.num_completed == progress.batch.num_chunks == 1
    async with place.database.read() as session:
        assert await session.scalar(select(func.sum(UsageHour.num_requests))) == 1
