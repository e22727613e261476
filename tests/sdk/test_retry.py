from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from loraserve import AsyncClient, Client, errors
from loraserve.sdk.retry import RetryPolicy, retry_after_s

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"retry-after-ms": "50", "retry-after": "1"}, 0.05),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after-ms": "soon", "retry-after": "3"}, 3.0),
        ({"retry-after": "Thu, 01 Jan 2026 00:00:07 GMT"}, 7.0),
        ({"retry-after": "Wed, 31 Dec 2025 00:00:00 GMT"}, 0.0),
        ({"retry-after": "later"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after-ms": "inf"}, None),
        ({}, None),
    ],
)
def test_the_servers_word_on_waiting_is_read(headers: dict[str, str], wait: float | None) -> None:
    assert retry_after_s(headers, NOW) == wait


def test_waits_double_to_a_bound_and_are_jittered() -> None:
    longest = RetryPolicy(10, random=lambda: 0.0)
    assert [longest.delay_after_failure(attempt) for attempt in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert RetryPolicy(10, random=lambda: 1.0).delay_after_failure(1) == 0.75


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_passing_troubles_are_retried(status: int) -> None:
    assert RetryPolicy(1).delay_after_answer(0, status, {}) is not None
    assert RetryPolicy(1).delay_after_answer(1, status, {}) is None


@pytest.mark.parametrize("status", [409, 500, 507])
def test_remaining_errors_are_retried_only_on_server_request(status: int) -> None:
    assert RetryPolicy(1).delay_after_answer(0, status, {}) is None
    assert RetryPolicy(1).delay_after_answer(0, status, {"retry-after-ms": "20"}) == 0.02
    assert RetryPolicy(1).delay_after_answer(0, status, {"x-should-retry": "true"}) is not None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 412, 422])
def test_refusals_stand(status: int) -> None:
    assert RetryPolicy(5).delay_after_answer(0, status, {"retry-after": "1"}) is None


def test_server_can_forbid_a_retry() -> None:
    assert RetryPolicy(5).delay_after_answer(0, 503, {"x-should-retry": "false", "retry-after": "1"}) is None


def test_wait_of_hours_is_the_callers_business() -> None:
    assert RetryPolicy(5).delay_after_answer(0, 429, {"retry-after": "3600"}) is None


def test_overloaded_server_is_retried_after_named_time(server: Any, client: Client, waits: list[float]) -> None:
    server.refuse(503, "overloaded", retry_after="1", retry_after_ms="50")
    server.refuse(429, "rate_limit_exceeded", retry_after="2")
    server.answer_with_completion()
    assert client.completions.create(model="sql", prompt="list").choices[0].text == "SELECT"
    assert waits == [0.05, 2.0]
    assert [asked.headers.get("x-retry-count") for asked in server.asked] == [None, "1", "2"]
    assert len({asked.body for asked in server.asked}) == 1


def test_caller_is_notified_of_each_wait_and_reason(server: Any) -> None:
    told: list[tuple[float, str]] = []
    server.refuse(503, "overloaded", retry_after_ms="1")
    server.refuse(429, "rate_limit_exceeded", retry_after_ms="2")
    server.answer_with_completion()
    with Client(server.url, api_key="sk-lora-test", on_wait=lambda s, error: told.append((s, error.code))) as client:
        client.completions.create(model="sql", prompt="list")
    assert told == [(0.001, "overloaded"), (0.002, "rate_limit_exceeded")]


async def test_async_client_retries_alike(server: Any, async_client: AsyncClient, waits: list[float]) -> None:
    server.refuse(503, "overloaded", retry_after="1", retry_after_ms="50")
    server.answer_with_completion()
    answer = await async_client.completions.create(model="sql", prompt="list")
    assert answer.choices[0].text == "SELECT"
    assert waits == [0.05]


def test_last_refusal_is_raised_with_server_message(server: Any, client: Client) -> None:
    for _ in range(3):
        server.refuse(429, "insufficient_quota", "Enough for today.", retry_after_ms="1", x_request_id="req-7")
    with pytest.raises(errors.RateLimited, match="Enough for today") as caught:
        client.models.list()
    assert caught.value.status_code == 429
    assert caught.value.request_id == "req-7"
    assert caught.value.code == "insufficient_quota"


def test_unreachable_server_is_retried_then_reported(unused_tcp_port: int, waits: list[float]) -> None:
    with Client(f"http://127.0.0.1:{unused_tcp_port}", api_key="sk-lora-test") as client:
        client._transport._sleep = waits.append
        with pytest.raises(errors.ConnectionFailed, match=f"127.0.0.1:{unused_tcp_port}.*loraserve serve"):
            client.keys.create("acme", name="ci")
    assert len(waits) == 2


def test_resent_creation_carries_same_idempotency_key(server: Any, client: Client) -> None:
    server.refuse(503, "overloaded", retry_after_ms="1")
    server.answer_with_tenant()
    client.tenants.create("acme")
    first, second = (asked.headers["idempotency-key"] for asked in server.asked)
    assert first == second
    server.answer_with_tenant()
    client.tenants.create("acme")
    assert server.asked[2].headers["idempotency-key"] != first


def test_slow_answer_is_not_asked_for_twice(server: Any, waits: list[float]) -> None:
    with Client(server.url, api_key="sk-lora-test", timeout=0.05) as client:
        client._transport._sleep = waits.append
        server.answer_late(0.3)
        with pytest.raises(errors.ClientTimeout):
            client.completions.create(model="sql", prompt="list")
    assert len(server.asked) == 1
    assert waits == []
