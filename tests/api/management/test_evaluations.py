"""Evaluations over HTTP: kept, listed, shown with the version, and what moves an alias."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

Push = Any
SHA256 = "a" * 64
PATH = f"/adapters/sql/versions/1/evaluations/{SHA256}"
BODY: dict[str, Any] = {
    "data_name": "held-out.jsonl",
    "num_lines": 40,
    "metrics": {"exact_match": 0.5, "log_likelihood": -1.25},
    "base_metrics": {"exact_match": 0},
    "settings": {"max_tokens": "64"},
}


@pytest.fixture
async def sql(acme: httpx2.AsyncClient, push: Push) -> httpx2.AsyncClient:
    """acme, which has two versions of sql."""
    for seed in range(2):
        assert (await push(acme, seed=seed)).status_code == 201
    return acme


async def test_evaluation_is_kept_listed_and_shown(sql: httpx2.AsyncClient, small_base: Any) -> None:
    assert (await sql.get("/adapters/sql/versions/1")).json()["evaluation"] is None
    put = await sql.put(PATH, json=BODY)
    assert put.status_code == 201
    body = put.json()
    assert {name: body[name] for name in BODY} == BODY
    assert (body["version"], body["data_sha256"], body["base_digest"]) == (1, SHA256, small_base.digest)
    assert body["created_by"]
    assert (await sql.get("/adapters/sql/versions/1/evaluations")).json() == {"data": [body], "next_cursor": None}
    shown = await sql.get("/adapters/sql/versions/1")
    assert shown.json()["evaluation"] == body
    listed = (await sql.get("/adapters/sql/versions")).json()["data"]
    assert [one["evaluation"] for one in listed] == [None, body]
    again = await sql.put(PATH, json=BODY | {"metrics": {"exact_match": 0.75}})
    assert (again.status_code, again.json()["metrics"]) == (200, {"exact_match": 0.75})
    changed = await sql.get("/adapters/sql/versions/1", headers={"if-none-match": shown.headers["etag"]})
    assert changed.json()["evaluation"] == again.json()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"metrics": {}}, "metrics"),
        ({"metrics": {"exact_match": "0.5"}}, "metrics.exact_match"),
        ({"metrics": {"exact_match": True}}, "metrics.exact_match"),
        ({"metrics": {"Exact": 0.5}}, "metrics"),
        ({"num_lines": 0}, "num_lines"),
        ({"data_name": ""}, "data_name"),
        ({"settings": {"max_tokens": 64}}, "settings.max_tokens"),
    ],
)
async def test_malformed_evaluation_is_refused_by_field(
    sql: httpx2.AsyncClient, change: dict[str, Any], param: str
) -> None:
    refused = await sql.put(PATH, json=BODY | change)
    assert refused.status_code == 400
    assert refused.json()["errors"][0]["field"] == param


async def test_evaluation_needs_known_fields_and_digest(sql: httpx2.AsyncClient) -> None:
    assert (await sql.put(PATH, json=BODY | {"accuracy": 1})).status_code == 400
    refused = await sql.put(PATH.replace("a" * 64, "A" * 64), json=BODY)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (400, "sha256")


async def test_read_key_lists_and_keeps_no_evaluations(
    admin: httpx2.AsyncClient, sql: httpx2.AsyncClient, connect: Any
) -> None:
    made = await admin.post("/tenants/acme/keys", json={"name": "reader", "scopes": ["adapters:read"]})
    reader = connect(made.json()["key"])
    assert (await reader.get("/adapters/sql/versions/1/evaluations")).status_code == 200
    assert (await reader.put(PATH, json=BODY)).status_code == 403


async def test_foreign_evaluations_read_as_absent(sql: httpx2.AsyncClient, globex: httpx2.AsyncClient) -> None:
    await sql.put(PATH, json=BODY)
    for answer in (await globex.put(PATH, json=BODY), await globex.get("/adapters/sql/versions/1/evaluations")):
        assert (answer.status_code, answer.json()["code"]) == (404, "adapter_not_found")
    listed = (await sql.get("/adapters/sql/versions/1/evaluations")).json()["data"]
    assert [one["metrics"] for one in listed] == [BODY["metrics"]]


async def test_alias_moves_if_version_is_better(sql: httpx2.AsyncClient) -> None:
    move = {"version": 1, "if_better": "exact_match"}
    refused = await sql.put("/adapters/sql/aliases/live", json=move)
    assert (refused.status_code, refused.json()["code"]) == (412, "not_evaluated")
    assert "loraserve adapter eval sql@1,2" in refused.json()["detail"]
    await sql.put(PATH, json=BODY)
    worse = PATH.replace("/1/", "/2/")
    await sql.put(worse, json=BODY)
    refused = await sql.put("/adapters/sql/aliases/live", json=move)
    assert (refused.status_code, refused.json()["code"]) == (412, "not_better")
    await sql.put(worse, json=BODY | {"metrics": {"exact_match": 0.25}})
    moved = await sql.put("/adapters/sql/aliases/live", json=move)
    assert (moved.status_code, moved.json()["version"]) == (200, 1)
    # a condition, and no part of the alias
    assert "if_better" not in moved.json()
