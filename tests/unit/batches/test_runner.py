"""Batches from their making to their files: whatever happens on the way, each line is computed to
an end, and is in one of the files once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from unittest.mock import patch

import pytest
from sqlalchemy import func, select, update

from loraserve import faults
from loraserve.batches import run as run_module
from loraserve.batches.records import BatchRecord, LineRequest
from loraserve.batches.run import BatchRun
from loraserve.db.models import AuditRow, BatchChunk, BatchRow, GcCandidate, Lease, UsageHour
from loraserve.errors import DatabaseUnavailable
from loraserve.limits import LIMITS, Limits
from loraserve.registry.blob_references import referenced
from loraserve.tenancy.identity.policy import TenantLimits
from loraserve.types import TenantId

from .conftest import Place, answer_of, input_of, refused


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Results are recorded at once, and a lease is over soon."""
    limits = dataclasses.replace(LIMITS, batch_chunk_s=0.05, batch_poll_s=0.1, batch_lease_s=1.0)
    for name in ("run", "runner"):
        monkeypatch.setattr(f"loraserve.batches.{name}.LIMITS", limits)
    monkeypatch.setattr(run_module, "_REFRESH_S", 0.05)
    return limits


async def billed(place: Place, tenant: TenantId) -> tuple[int, int]:
    """Requests and completion tokens in the database."""
    query = select(func.sum(UsageHour.num_requests), func.sum(UsageHour.completion_tokens))
    async with place.database.read() as session:
        found = (await session.execute(query.where(UsageHour.tenant_id == tenant))).one()
    return int(found[0] or 0), int(found[1] or 0)


async def check_whole(place: Place, batch: BatchRecord, num: int) -> None:
    """The batch is completed: each of its lines is there once, and billed once."""
    assert batch.state == "completed"
    assert (batch.num_lines, batch.num_completed, batch.num_failed) == (num, num, 0)
    lines = await place.lines(batch, batch.output_file_id)
    assert Counter(line["custom_id"] for line in lines) == Counter(f"c{number}" for number in range(1, num + 1))
    assert await billed(place, batch.tenant) == (num, 3 * num)


async def test_a_batch_has_an_answer_for_each_line(place: Place, acme: TenantId) -> None:
    place.runner.start(place.handler)
    batch = await place.end(await place.create(acme, input_of(20), metadata={"a": "b"}))
    await check_whole(place, batch, 20)
    line = (await place.lines(batch, batch.output_file_id))[0]
    assert line["id"].startswith("batch_req_")
    assert line["error"] is None
    body = {"said": line["custom_id"]}
    assert line["response"] == {"status_code": 200, "request_id": f"req_{line['custom_id']}", "body": body}
    assert batch.error_file_id is None
    assert batch.usage == {"prompt_tokens": 100, "cached_tokens": 0, "completion_tokens": 60}
    assert {"in_progress", "finalizing", "completed"} <= batch.times.keys()
    await place.runner.close(1.0)
    async with place.database.read() as session:
        assert (await session.scalars(select(BatchChunk))).all() == []
        assert (await session.scalars(select(Lease))).all() == []
        actions = (await session.scalars(select(AuditRow.action).where(AuditRow.tenant_id == acme))).all()
    assert [action for action in actions if action.startswith(("batch", "file"))] == [
        *("file.create", "batch.create", "batch.end")
    ]


async def test_failed_lines_are_in_error_file_with_answers(place: Place, acme: TenantId) -> None:
    place.handler.answers = {"c2": [dataclasses.replace(answer_of(acme, "c2", 400), usage={})]}
    place.runner.start(place.handler)
    batch = await place.end(await place.create(acme, input_of(3)))
    assert (batch.state, batch.num_completed, batch.num_failed) == ("completed", 2, 1)
    (line,) = await place.lines(batch, batch.error_file_id)
    assert (line["custom_id"], line["response"]["status_code"]) == ("c2", 400)
    assert await billed(place, acme) == (2, 6)


async def test_temporarily_refused_line_is_retried(place: Place, acme: TenantId) -> None:
    place.handler.answers = {"c1": [refused(), refused(0.1, pauses_batch=True)], "c3": [refused()]}
    place.runner.start(place.handler)
    await check_whole(place, await place.end(await place.create(acme, input_of(4))), 4)
    assert Counter(place.handler.asked) == {"c1": 3, "c2": 1, "c3": 2, "c4": 1}
    assert place.runner.num_lines["retried"] == 3


async def test_no_line_begins_while_clients_wait(place: Place, acme: TenantId) -> None:
    place.handler.is_open_now = False
    place.runner.start(place.handler)
    batch = await place.create(acme, input_of(4))
    await place.until(batch, lambda found: found.state == "in_progress")
    await asyncio.sleep(0.3)
    assert place.handler.asked == []
    place.handler.is_open_now = True
    await check_whole(place, await place.end(batch), 4)


async def test_few_lines_run_at_once(place: Place, acme: TenantId, globex: TenantId) -> None:
    place.handler.gate.clear()
    place.runner.start(place.handler)
    batches = [await place.create(tenant, input_of(30)) for tenant in (acme, globex)]
    for batch in batches:
        await place.until(batch, lambda found: found.state == "in_progress")
    await asyncio.sleep(0.3)
    assert place.handler.most_live == 4
    place.handler.gate.set()
    for batch in batches:
        await check_whole(place, await place.end(batch), 30)
    assert place.handler.most_live == 4


INVALID = {
    "no request": (b"\n  \n", "empty_file"),
    "no JSON": (input_of(2) + b"{\n", "invalid_value"),
    "the same custom_id twice": (input_of(1) + input_of(1), "duplicate_custom_id"),
    "no such model": (input_of(1, model="other"), "model_not_found"),
    "too long a line": (input_of(1) + b'{"custom_id": "' + b"x" * (3 << 20) + b'"}\n', "invalid_value"),
}


async def test_invalid_input_fails_and_names_line(place: Place, acme: TenantId, subtests: pytest.Subtests) -> None:
    place.runner.start(place.handler)
    for name, (data, code) in INVALID.items():
        with subtests.test(name):
            batch = await place.end(await place.create(acme, data))
            assert batch.state == "failed"
            assert batch.errors is not None
            assert batch.errors[0]["code"] == code
            lines = data.rstrip(b"\n").count(b"\n") + 1
            assert batch.errors[0]["line"] == (None if code == "empty_file" else lines)
            assert batch.output_file_id is None
    assert place.handler.asked == []


async def test_too_many_requests_are_refused_before_computing(
    place: Place, acme: TenantId, monkeypatch: pytest.MonkeyPatch, quick: Limits
) -> None:
    monkeypatch.setattr(run_module, "LIMITS", dataclasses.replace(quick, max_batch_lines=5, max_batch_errors=3))
    place.runner.start(place.handler)
    many = await place.end(await place.create(acme, input_of(6)))
    assert many.errors is not None
    assert many.errors[0]["code"] == "too_many_requests"
    wrong = await place.end(await place.create(acme, b"{\n" * 5))
    assert wrong.errors is not None
    assert [error["line"] for error in wrong.errors] == [1, 2, 3]


async def test_second_server_continues_where_killed_server_stopped(place: Place, acme: TenantId) -> None:
    place.handler.answers = {f"c{number}": [refused(30)] for number in range(11, 21)}
    place.runner.start(place.handler)
    batch = await place.create(acme, input_of(20))
    await place.until(batch, lambda found: found.num_completed == 10)
    # as by a kill: nothing is handed back
    with patch("loraserve.db.leases.LeaseHolder.release"):
        for _, task in place.runner._runs.values():
            task.cancel()
        await place.runner.close()
    heir = place.another()
    heir.handler.answers = {}
    heir.runner.start(heir.handler)
    await check_whole(place, await heir.end(batch), 20)
    await heir.runner.close()
    assert sorted(heir.handler.asked) == sorted(f"c{number}" for number in range(11, 21))


async def test_server_without_lease_records_no_more_results(place: Place, acme: TenantId) -> None:
    """Both compute; what the slower one has is dropped, and not billed."""
    place.handler.gate.clear()
    place.runner.start(place.handler)
    batch = await place.create(acme, input_of(3))
    await place.until(batch, lambda found: found.state == "in_progress")
    while place.handler.num_live < 3:
        await asyncio.sleep(0.01)
    async with place.database.write() as session:
        await session.execute(update(Lease).values(holder="x" * 26))
        await session.execute(update(Lease).values(expires_at=(await session.scalar(select(Lease.expires_at)))))
    heir = place.another()
    with patch.object(run_module.BatchRun, "_tick", _no_tick):
        heir.runner.start(heir.handler)
        await check_whole(place, await heir.end(batch), 3)
        place.handler.gate.set()
        await asyncio.sleep(0.5)
    await heir.runner.close()
    assert await billed(place, acme) == (3, 9)
    assert place.runner.num_running == 0


async def _no_tick(_: BatchRun) -> None: ...


async def test_commit_with_lost_reply_counts_once(place: Place, acme: TenantId) -> None:
    num_lost = 0

    def lose() -> None:
        nonlocal num_lost
        num_lost += 1
        if num_lost == 1:
            raise DatabaseUnavailable("The connection broke.")

    with faults.arm("batch.after_chunk_commit", lose):
        place.runner.start(place.handler)
        await check_whole(place, await place.end(await place.create(acme, input_of(10))), 10)
    assert num_lost > 1 or len(place.handler.asked) == 10
    assert len(place.handler.asked) == 10


async def test_results_wait_while_the_database_is_away(place: Place, acme: TenantId) -> None:
    num_failures = 0

    def fail() -> None:
        nonlocal num_failures
        num_failures += 1
        if num_failures <= 2:
            raise DatabaseUnavailable("The database can't be reached.")

    with patch.object(run_module, "_COMMIT_RETRY_S", 0.05), faults.arm("batch.after_chunk", fail):
        place.runner.start(place.handler)
        await check_whole(place, await place.end(await place.create(acme, input_of(10))), 10)
    assert num_failures >= 3


async def test_results_wait_while_the_disk_is_full(place: Place, acme: TenantId) -> None:
    place.handler.gate.clear()
    place.runner.start(place.handler)
    batch = await place.create(acme, input_of(10))
    await place.until(batch, lambda found: found.state == "in_progress")

    def full() -> None:
        raise OSError(errno.ENOSPC, "no space")

    with patch.object(run_module, "_COMMIT_RETRY_S", 0.05):
        with faults.arm("blob.write", full):
            place.handler.gate.set()
            await asyncio.sleep(0.4)
            assert (await place.batches.get(acme, batch.id)).num_completed == 0
        await check_whole(place, await place.end(batch), 10)
    assert Counter(place.handler.asked).most_common(1)[0][1] <= 2


async def test_cancelled_batch_keeps_results_and_names_rest(place: Place, acme: TenantId) -> None:
    place.handler.answers = {f"c{number}": [refused(30)] for number in range(4, 7)}
    place.runner.start(place.handler)
    batch = await place.create(acme, input_of(6))
    await place.until(batch, lambda found: found.num_completed == 3)
    assert (await place.batches.cancel(acme, batch.id, actor="key")).state == "cancelling"
    ended = await place.end(batch)
    assert (ended.state, ended.num_completed, ended.num_failed) == ("cancelled", 3, 3)
    assert len(await place.lines(ended, ended.output_file_id)) == 3
    rest = await place.lines(ended, ended.error_file_id)
    assert {(line["custom_id"], line["error"]["code"], line["response"]) for line in rest} == {
        (f"c{number}", "batch_cancelled", None) for number in range(4, 7)
    }
    assert await billed(place, acme) == (3, 9)


async def test_waiting_batch_is_cancelled_at_once(place: Place, acme: TenantId) -> None:
    place.handler.gate.clear()
    place.runner.start(place.handler)
    first, second = [await place.create(acme, input_of(2)) for _ in range(2)]
    await place.until(second, lambda found: found.state == "in_progress")
    await place.batches.cancel(acme, second.id, actor="key")
    assert (await place.end(second)).state == "cancelled"
    assert (await place.batches.get(acme, first.id)).state == "in_progress"


async def test_single_batch_of_tenant_runs_at_once(place: Place, acme: TenantId, globex: TenantId) -> None:
    place.handler.gate.clear()
    place.runner.start(place.handler)
    batches = [await place.create(tenant, input_of(1)) for tenant in (acme, acme, globex)]
    for batch in batches:
        await place.until(batch, lambda found: found.state == "in_progress")
    async with asyncio.timeout(30):
        while place.handler.num_live < 2:
            await asyncio.sleep(0.01)
    # time for a third, if it were begun
    await asyncio.sleep(0.3)
    assert place.handler.num_live == 2
    place.handler.gate.set()
    for batch in batches:
        assert (await place.end(batch)).state == "completed"


async def test_batch_ends_with_window(place: Place, acme: TenantId) -> None:
    place.handler.answers = {"c2": [refused(30)]}
    place.runner.start(place.handler)
    batch = await place.create(acme, input_of(2))
    await place.until(batch, lambda found: found.num_completed == 1)
    async with place.database.write() as session:
        await session.execute(update(BatchRow).values(expires_at=batch.created_at - timedelta(seconds=1)))
    ended = await place.end(batch)
    assert (ended.state, ended.num_completed, ended.num_failed) == ("expired", 1, 1)
    assert [line["custom_id"] for line in await place.lines(ended, ended.output_file_id)] == ["c1"]
    (line,) = await place.lines(ended, ended.error_file_id)
    assert (line["custom_id"], line["error"]["code"]) == ("c2", "batch_expired")


async def test_stopping_server_hands_over_batches(place: Place, acme: TenantId) -> None:
    place.handler.gate.clear()
    place.runner.start(place.handler)
    batch = await place.create(acme, input_of(20))
    while place.handler.num_live < 4:
        await asyncio.sleep(0.01)
    closing = asyncio.create_task(place.runner.close(5.0))
    await asyncio.sleep(0.2)
    place.handler.gate.set()
    await closing
    # what was under way has ended, and nothing has begun
    assert len(place.handler.asked) == (await place.batches.get(acme, batch.id)).num_completed == 4
    async with place.database.read() as session:
        assert (await session.scalars(select(Lease))).all() == []
    heir = place.another()
    heir.runner.start(heir.handler)
    await check_whole(place, await heir.end(batch), 20)
    await heir.runner.close()
    assert not set(heir.handler.asked) & set(place.handler.asked)


async def test_lines_outlasting_grace_are_recomputed_and_billed_once(place: Place, acme: TenantId) -> None:
    place.handler.gate.clear()
    place.runner.start(place.handler)
    batch = await place.create(acme, input_of(4))
    while place.handler.num_live < 4:
        await asyncio.sleep(0.01)
    await place.runner.close(0.1)
    heir = place.another()
    heir.runner.start(heir.handler)
    await check_whole(place, await heir.end(batch), 4)
    await heir.runner.close()


async def test_the_batches_of_a_deleted_tenant_fail(place: Place, acme: TenantId) -> None:
    # its second line isn't answered before, however long the deletion takes
    place.handler.answers = {"c2": [refused()] * 10_000}
    place.runner.start(place.handler)
    batch = await place.create(acme, input_of(2))
    await place.until(batch, lambda found: found.num_completed == 1)
    await place.authenticator.tenants.delete("acme", actor="test")
    ended = await place.end(batch)
    assert ended.state == "failed"
    assert ended.errors is not None
    assert ended.errors[0]["code"] == "tenant_deleted"
    async with place.database.read() as session:
        assert (await session.scalars(select(BatchChunk))).all() == []


async def test_batch_continues_after_input_is_deleted(place: Place, acme: TenantId) -> None:
    place.handler.gate.clear()
    place.runner.start(place.handler)
    batch = await place.create(acme, input_of(3))
    await place.files.delete(acme, batch.input_file_id, actor="key")
    async with place.database.read() as session:
        used = await referenced(session, [batch.input_blob], batch.created_at, timedelta(days=7))
    assert used == {batch.input_blob}
    place.handler.gate.set()
    ended = await place.end(batch)
    await check_whole(place, ended, 3)
    async with place.database.read() as session:
        digests = [batch.input_blob, (await place.files.get(acme, str(ended.output_file_id))).blob]
        used = await referenced(session, digests, batch.created_at, timedelta(days=7))
        listed = (await session.scalars(select(GcCandidate.digest))).all()
    assert used == {digests[1]}
    assert batch.input_blob in listed


async def test_batch_with_damaged_input_fails(place: Place, acme: TenantId) -> None:
    batch = await place.create(acme, input_of(2))
    place.registry.store.delete(batch.input_blob)
    place.runner.start(place.handler)
    ended = await place.end(batch)
    assert ended.state == "failed"
    assert ended.errors is not None
    assert ended.errors[0]["code"] == "storage_damaged"


async def test_results_beyond_the_tenants_quota_end_the_batch(
    place: Place, make_tenant: Callable[..., Awaitable[TenantId]]
) -> None:
    data = input_of(30)
    tenant = await make_tenant("small", limits=TenantLimits(max_stored_bytes=len(data) + 1000))
    place.runner.start(place.handler)
    ended = await place.end(await place.create(tenant, data))
    assert ended.state == "failed"
    assert ended.errors is not None
    assert ended.errors[0]["code"] == "insufficient_quota"
    rest = await place.lines(ended, ended.error_file_id)
    assert len(rest) + len(await place.lines(ended, ended.output_file_id)) == 30
    assert await billed(place, tenant) == (ended.num_completed, 3 * ended.num_completed)


async def test_batch_results_are_bounded(place: Place, acme: TenantId, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = dataclasses.replace(LIMITS, max_batch_output_bytes=1000)
    monkeypatch.setattr("loraserve.batches.progress.LIMITS", bounded)
    place.runner.start(place.handler)
    ended = await place.end(await place.create(acme, input_of(30)))
    assert ended.state == "failed"
    assert ended.errors is not None
    assert "results exceed the limit of 1000 bytes" in ended.errors[0]["message"]
    assert await billed(place, acme) == (ended.num_completed, 3 * ended.num_completed)


async def test_bug_in_batch_ends_no_further_batch(place: Place, acme: TenantId, globex: TenantId) -> None:
    real = place.handler.run

    async def run(batch: BatchRecord, request: LineRequest) -> object:
        if batch.tenant == acme:
            raise ValueError("a bug")
        return await real(batch, request)

    with patch.object(place.handler, "run", run):
        place.runner.start(place.handler)
        bad = await place.create(acme, input_of(1))
        await check_whole(place, await place.end(await place.create(globex, input_of(2))), 2)
        assert (await place.batches.get(acme, bad.id)).state == "in_progress"
