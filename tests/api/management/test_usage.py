"""GET /usage: sums by tenant, adapter, version, hour and day; each tenant sees its own."""

from __future__ import annotations

import csv
import io
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest

from loraserve.api.services import Services
from loraserve.tenancy.billing.meter import UsageEvent

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()
HOUR_S = 3600
PRICE = "EUR 0.5 0.05 1.5"

Use = Callable[..., Awaitable[None]]


@pytest.fixture
def use(services: Services) -> Use:
    """A function that records what a tenant used: 10 prompt tokens, 4 of them cached,
    and so many of an answer.
    """

    async def run(tenant: str = "acme", completion_tokens: int = 5, *, hours: int = 0, **fields: Any) -> None:
        record = await services.authenticator.tenants.get(tenant)
        whole: dict[str, Any] = {
            "owner": "",
            "adapter": "sql",
            "version": 1,
            "num_requests": 1,
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "at": NOON + hours * HOUR_S,
        }
        assert services.usage is not None
        services.usage.record(UsageEvent(record.id, completion_tokens=completion_tokens, **{**whole, **fields}))

    return run


async def ask(client: httpx2.AsyncClient, **params: Any) -> list[dict[str, Any]]:
    response = await client.get("/usage", params=params)
    assert response.status_code == 200, response.text
    data: list[dict[str, Any]] = response.json()["data"]
    return data


def brief(data: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(item[name] for name in (*names, "completion_tokens")) for item in data]


async def test_usage_without_groups_is_single_sum(acme: httpx2.AsyncClient, use: Use) -> None:
    await use(undelivered_tokens=7, num_cached_requests=1, cached_completion_tokens=5)
    await use(completion_tokens=6, adapter="", version=0, hours=30)
    assert await ask(acme) == [
        {
            "num_requests": 2,
            "prompt_tokens": 20,
            "cached_tokens": 8,
            "completion_tokens": 11,
            "undelivered_tokens": 7,
            "num_cached_requests": 1,
            "cached_completion_tokens": 5,
            "cost": None,
            "currency": None,
        }
    ]


async def test_no_usage_gives_no_sums(acme: httpx2.AsyncClient) -> None:
    assert await ask(acme) == []
    assert await ask(acme, group_by="hour") == []


async def test_usage_is_grouped_by_requested_fields(acme: httpx2.AsyncClient, use: Use) -> None:
    await use(completion_tokens=1)
    await use(completion_tokens=2, version=2, hours=1)
    await use(completion_tokens=4, adapter="", version=0, hours=12)
    await use(completion_tokens=8, adapter="a@1+0.5*b@2", version=0, hours=12)
    assert brief(await ask(acme, group_by="day"), "day") == [("2026-11-21", 3), ("2026-11-22", 12)]
    assert brief(await ask(acme, group_by="hour"), "hour") == [
        ("2026-11-21T12:00:00Z", 1),
        ("2026-11-21T13:00:00Z", 2),
        ("2026-11-22T00:00:00Z", 12),
    ]
    assert brief(await ask(acme, group_by="adapter,version"), "adapter", "version") == [
        (None, None, 4),
        ("a@1+0.5*b@2", None, 8),
        ("sql", 1, 1),
        ("sql", 2, 2),
    ]
    assert brief(await ask(acme, group_by="day,adapter"), "day", "adapter")[-1] == ("2026-11-22", "a@1+0.5*b@2", 8)


async def test_from_and_to_choose_whole_hours(acme: httpx2.AsyncClient, use: Use) -> None:
    for hours in range(4):
        await use(completion_tokens=1 << hours, hours=hours)
    for start, end, wanted in (
        ("2026-11-21T13:00:00Z", None, 14),
        ("2026-11-21T13:59:59Z", None, 14),
        (None, "2026-11-21T13:00:00Z", 1),
        (None, "2026-11-21T13:00:01Z", 3),
        ("2026-11-21T14:30:00+01:00", "2026-11-21T14:00:00Z", 2),
        ("2026-11-21", "2026-11-22", 15),
    ):
        params = {name: value for name, value in (("from", start), ("to", end)) if value is not None}
        assert brief(await ask(acme, **params)) == [(wanted,)], params


async def test_tenant_sees_own_usage_and_admin_sees_all(
    acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, admin: httpx2.AsyncClient, use: Use
) -> None:
    await use("acme", 1)
    await use("globex", 2)
    assert brief(await ask(acme, group_by="tenant"), "tenant") == [("acme", 1)]
    assert brief(await ask(acme, tenant="acme")) == [(1,)]
    assert brief(await ask(globex)) == [(2,)]
    assert brief(await ask(admin)) == [(3,)]
    assert brief(await ask(admin, group_by="tenant"), "tenant") == [("acme", 1), ("globex", 2)]
    assert brief(await ask(admin, tenant="globex")) == [(2,)]
    response = await admin.get("/usage", headers={"X-Tenant": "acme"})
    assert brief(response.json()["data"]) == [(1,)]


async def test_foreign_tenant_reads_like_absent_tenant(
    acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, use: Use
) -> None:
    await use("globex", 2)
    answers = [await acme.get("/usage", params={"tenant": name}) for name in ("globex", "nobody", "default")]
    bodies = {answer.content.replace(answer.headers["x-request-id"].encode(), b"") for answer in answers}
    assert {answer.status_code for answer in answers} == {404}
    assert len(bodies) == 1


async def test_usage_of_deleted_tenant_is_found_by_id(
    acme: httpx2.AsyncClient, admin: httpx2.AsyncClient, use: Use
) -> None:
    await use("acme", 1)
    (ident,) = {item["tenant_id"] for item in await ask(admin, group_by="tenant")}
    assert (await admin.delete("/tenants/acme")).status_code == 204
    assert (await admin.post("/tenants", json={"name": "acme"})).status_code == 201
    assert await ask(admin, tenant="acme") == []
    assert brief(await ask(admin, tenant=ident, group_by="tenant"), "tenant") == [("acme", 1)]


async def test_granted_adapter_is_listed_under_owner_name(
    acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, services: Services, use: Use
) -> None:
    owner = (await services.authenticator.tenants.get("globex")).id
    await use(completion_tokens=1)
    await use(completion_tokens=2, owner=owner)
    assert brief(await ask(acme, group_by="adapter"), "adapter") == [("sql", 1), ("globex/sql", 2)]
    assert brief(await ask(acme, adapter="sql")) == [(1,)]
    assert brief(await ask(acme, adapter="globex/sql")) == [(2,)]


async def test_usage_of_base_is_requested_by_base_id(acme: httpx2.AsyncClient, use: Use, engine: Any) -> None:
    await use(completion_tokens=1)
    await use(completion_tokens=2, adapter="", version=0)
    assert brief(await ask(acme, adapter=engine.base.id)) == [(2,)]
    assert await ask(acme, adapter="unknown") == []


async def test_costs_are_exact_at_prices_of_time_used(acme: httpx2.AsyncClient, use: Use) -> None:
    await use(price=PRICE)
    await use(price="EUR 1 0.1 3")
    # (6·0.5 + 4·0.05 + 5·1.5 + 6·1 + 4·0.1 + 5·3) ÷ 10⁶
    (whole,) = await ask(acme)
    assert (whole["cost"], whole["currency"], whole["num_requests"]) == ("0.0000321", "EUR", 2)


async def test_currencies_are_never_added_up(acme: httpx2.AsyncClient, use: Use) -> None:
    await use(price=PRICE)
    await use(price="USD 1 1 1")
    await use()
    found = {(item["currency"], item["cost"]) for item in await ask(acme, group_by="adapter")}
    assert found == {("EUR", "0.0000107"), ("USD", "0.000015"), (None, None)}


async def test_next_page_continues_after_last_sum(acme: httpx2.AsyncClient, use: Use) -> None:
    wanted = []
    for number in range(7):
        for version in (1, 2):
            await use(adapter=f"a-{number}", version=version, price=PRICE if version == 1 else "")
            wanted.append((f"a-{number}", version))
    found: list[tuple[str, int]] = []
    cursor, num_pages = None, 0
    while cursor is not None or not num_pages:
        params: dict[str, Any] = {"group_by": "adapter,version,day", "limit": 3}
        response = await acme.get("/usage", params=params | ({"cursor": cursor} if cursor else {}))
        page = response.json()
        assert len(page["data"]) <= 3
        found += [(item["adapter"], item["version"]) for item in page["data"]]
        cursor, num_pages = page["next_cursor"], num_pages + 1
    assert found == wanted
    assert num_pages == 5


async def test_csv_contains_each_sum_with_all_columns(acme: httpx2.AsyncClient, use: Use) -> None:
    for number in range(60):
        await use(adapter=f"a-{number:02}", price=PRICE)
    for response in (
        await acme.get("/usage", params={"group_by": "tenant,adapter", "format": "csv"}),
        await acme.get("/usage", params={"group_by": "tenant,adapter"}, headers={"Accept": "text/csv, */*;q=0.1"}),
    ):
        assert response.headers["content-type"].startswith("text/csv")
        rows = list(csv.DictReader(io.StringIO(response.text)))
        assert len(rows) == 60
        assert list(rows[0]) == [
            *("tenant", "tenant_id", "adapter", "num_requests", "prompt_tokens", "cached_tokens"),
            *("completion_tokens", "undelivered_tokens", "num_cached_requests", "cached_completion_tokens"),
            *("cost", "currency"),
        ]
        assert (rows[7]["tenant"], rows[7]["adapter"], rows[7]["cost"]) == ("acme", "a-07", "0.0000107")


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"group_by": "model"}, "group_by"),
        ({"group_by": "hour,hour"}, "group_by"),
        ({"group_by": "version"}, "group_by"),
        ({"from": "yesterday"}, "from"),
        ({"from": "2026-11-21T00:00:00"}, "from"),
        ({"to": "0001-01-01T00:00:00+23:59"}, "to"),
        ({"from": "2026-11-21", "to": "2026-11-21"}, "from"),
        ({"format": "xml"}, "format"),
        ({"adapter": "a\0b"}, "adapter"),
        ({"limit": 0}, "limit"),
        ({"group_by": "adapter", "cursor": "e30"}, "cursor"),
        ({"group_by": "adapter", "cursor": "x" * 5000}, "cursor"),
        ({"group_by": "version,adapter", "cursor": "Wzk5OTk5OTk5OTk5OTk5OTk5LCIiLCIiXQ"}, "cursor"),
        ({"cursor": "W10"}, "cursor"),
    ],
)
async def test_nonsensical_parameter_gets_400_naming_field(
    acme: httpx2.AsyncClient, params: dict[str, Any], field: str
) -> None:
    response = await acme.get("/usage", params=params)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (400, field)


@pytest.mark.parametrize("name", ["a\0b", "é", "x" * 300, ""])
async def test_impossible_tenant_name_gets_404(admin: httpx2.AsyncClient, name: str) -> None:
    assert (await admin.get("/usage", params={"tenant": name})).status_code == 404
