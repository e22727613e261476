"""Waiting for what continues without a request."""

from __future__ import annotations

from typing import Any

import pytest

from loraserve import AsyncClient, Client, errors
from loraserve.sdk import Progress

RUNNING = {
    "id": "01OP",
    "kind": "pull",
    "target": "sql",
    "state": "running",
    "progress": {"bytes_done": 0, "bytes_total": 10},
    "result": None,
    "error": None,
    "created_at": "2026-01-02T03:04:05Z",
    "updated_at": "2026-01-02T03:04:05Z",
}
DONE = RUNNING | {"state": "done", "progress": {"bytes_done": 10, "bytes_total": 10}, "result": {"version": 1}}


def test_wait_reports_progress_and_returns_result(server: Any, client: Client, waits: list[float]) -> None:
    server.answer(RUNNING)
    server.answer(RUNNING | {"progress": {"bytes_done": 4, "bytes_total": 10}})
    server.answer(DONE)
    seen: list[Progress] = []
    operation = client.operations.wait("01OP", on_progress=seen.append)
    assert operation.result == {"version": 1}
    assert [(one.sent_bytes, one.total_bytes) for one in seen] == [(0, 10), (4, 10), (10, 10)]
    assert waits[0] < waits[1]


async def test_async_wait_ends_alike(server: Any, async_client: AsyncClient, waits: list[float]) -> None:
    server.answer(RUNNING)
    server.answer(DONE)
    assert (await async_client.operations.wait("01OP")).result == {"version": 1}
    assert len(waits) == 1


def test_wait_raises_error_of_failed_operation(server: Any, client: Client) -> None:
    server.answer(
        RUNNING | {"state": "failed", "error": {"code": "adapter_base_mismatch", "message": "4096 isn't 2048"}}
    )
    with pytest.raises(errors.AdapterBaseMismatch, match=r"01OP failed: 4096 isn't 2048"):
        client.operations.wait("01OP")


def test_wait_for_cancelled_operation_raises(server: Any, client: Client) -> None:
    server.answer(RUNNING | {"state": "cancelled"})
    with pytest.raises(errors.Conflict, match="cancelled"):
        client.operations.wait("01OP")


def test_timed_out_wait_leaves_operation_running(server: Any, client: Client) -> None:
    server.answer(RUNNING)
    with pytest.raises(errors.ClientTimeout, match="continues"):
        client.operations.wait("01OP", timeout=0)
    assert [asked.method for asked in server.asked] == ["GET"]


def test_cancel_requests_end_of_operation(server: Any, client: Client) -> None:
    server.answer(RUNNING, 202)
    assert client.operations.cancel("01OP").is_running
    assert (server.asked[0].method, server.asked[0].path) == ("DELETE", "/api/v1/operations/01OP")


def test_pull_from_names_source_and_may_be_repeated(server: Any, client: Client) -> None:
    server.answer(RUNNING, 202)
    operation = client.adapters.pull_from("sql", "hf://acme/sql@main")
    asked = server.asked[0]
    assert (asked.method, asked.path) == ("POST", "/api/v1/adapters/sql/pulls")
    assert asked.json == {"source": "hf://acme/sql@main"}
    assert asked.headers["idempotency-key"]
    assert operation.is_running
    server.answer(RUNNING, 202)
    client.adapters.pull_from("sql", "s3://models/sql", promote=False)
    assert server.asked[1].json == {"source": "s3://models/sql", "promote": False}
