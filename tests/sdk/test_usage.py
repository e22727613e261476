"""What was used, as the server says it."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from starlette.responses import Response

from loraserve import AsyncClient, Client

AMOUNTS = {
    "num_requests": 2,
    "prompt_tokens": 30,
    "cached_tokens": 16,
    "completion_tokens": 7,
    "undelivered_tokens": 1,
    "num_cached_requests": 1,
    "cached_completion_tokens": 3,
    "cost": "0.0000175",
    "currency": "EUR",
}


def test_sums_are_asked_for_by_group_and_hour(server: Any, client: Client) -> None:
    row = {"adapter": "sql", "version": 2, "day": "2026-03-01", **AMOUNTS}
    server.answer({"data": [row], "next_cursor": "x"})
    server.answer({"data": [{"adapter": None, "version": None, "day": "2026-03-01", **AMOUNTS}], "next_cursor": None})
    start = datetime(2026, 3, 1, tzinfo=UTC)
    first, second = client.usage.sums(adapter="sql", start=start, group_by=("adapter", "version", "day"))
    query = dict(server.asked[0].query)
    assert query.pop("limit")
    assert query == {"adapter": "sql", "from": "2026-03-01T00:00:00Z", "group_by": "adapter,version,day"}
    assert server.asked[1].query["cursor"] == "x"
    assert (first.cost, first.day, first.label) == (Decimal("0.0000175"), date(2026, 3, 1), "sql/2/2026-03-01")
    assert (first.num_cached_requests, first.cached_completion_tokens) == (1, 3)
    assert second.label == "-/-/2026-03-01"


async def test_async_sum_of_all_has_no_group(server: Any, async_client: AsyncClient) -> None:
    server.answer({"data": [AMOUNTS], "next_cursor": None})
    rows = [row async for row in async_client.usage.sums(tenant="acme")]
    assert [(row.label, row.completion_tokens) for row in rows] == [("all", 7)]
    assert "group_by" not in server.asked[0].query


def test_csv_is_the_servers_own(server: Any, client: Client) -> None:
    server.answers.append(Response("day,num_requests\r\n2026-03-01,2\r\n", media_type="text/csv"))
    assert client.usage.csv(group_by=("day",)) == "day,num_requests\r\n2026-03-01,2\r\n"
    assert server.asked[0].query == {"group_by": "day", "format": "csv"}


def test_usage_has_cost_where_prices_exist(server: Any, client: Client) -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3, "cost": "0.0000025", "currency": "EUR"}
    choices = [{"index": 0, "text": "x", "finish_reason": "stop", "logprobs": None}]
    server.answer({"id": "1", "created": 1, "model": "sql", "choices": choices, "usage": usage})
    found = client.completions.create(model="sql", prompt="x").usage
    assert found is not None
    assert (found.cost, found.currency) == (Decimal("0.0000025"), "EUR")


def test_answer_names_adapter_fallback_replaced(server: Any, client: Client) -> None:
    server.answer_with_completion(x_loraserve_adapter="sql@1; fallback-from=sql@2; reason=adapter_quarantined")
    answer = client.completions.create(model="sql", prompt="x").answer
    assert answer is not None
    assert (answer.adapter, answer.fell_back_from, answer.fell_back_for) == ("sql@1", "sql@2", "adapter_quarantined")
    server.answer_with_completion(x_loraserve_adapter="sql@2")
    answer = client.completions.create(model="sql", prompt="x").answer
    assert answer is not None
    assert (answer.adapter, answer.fell_back_from, answer.fell_back_for) == ("sql@2", None, None)


def test_answer_reports_remaining_rates(server: Any, client: Client) -> None:
    server.answer_with_completion(x_ratelimit_limit_requests="60", x_ratelimit_remaining_requests="59")
    answer = client.completions.create(model="sql", prompt="x").answer
    assert answer is not None
    assert answer.rate_limits == {"limit-requests": "60", "remaining-requests": "59"}
