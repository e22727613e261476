"""Notes, tags and fallbacks over HTTP, and what was deleted coming back."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

Push = Any


@pytest.fixture
async def sql(acme: httpx2.AsyncClient, push: Push) -> httpx2.AsyncClient:
    """acme, which has two versions of sql."""
    for seed in range(2):
        assert (await push(acme, seed=seed)).status_code == 201
    return acme


async def test_adapter_returns_edited_notes_tags_and_fallback(sql: httpx2.AsyncClient) -> None:
    body = {"notes": "for tickets", "tags": {"team": "data"}, "fallback": 1}
    edited = await sql.patch("/adapters/sql", json=body)
    assert edited.status_code == 200
    assert {name: edited.json()[name] for name in body} == body | {"fallback": "1"}
    assert (await sql.get("/adapters/sql")).json() == edited.json()
    assert (await sql.get("/adapters?include=notes")).json()["data"] == [edited.json()]
    kept = (await sql.patch("/adapters/sql", json={"tags": None})).json()
    assert (kept["notes"], kept["tags"], kept["fallback"]) == ("for tickets", {}, "1")
    emptied = (await sql.patch("/adapters/sql", json={"notes": None, "fallback": None})).json()
    assert (emptied["notes"], emptied["fallback"]) == ("", None)


async def test_version_returns_edited_notes_and_tags(sql: httpx2.AsyncClient) -> None:
    edited = await sql.patch("/adapters/sql/versions/1", json={"notes": "old", "tags": {"a": "b"}})
    assert (edited.status_code, edited.json()["notes"], edited.json()["tags"]) == (200, "old", {"a": "b"})
    assert (await sql.get("/adapters/sql/versions/1")).json() == edited.json()
    assert (await sql.get("/adapters/sql/versions/2")).json()["notes"] == ""


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/adapters/sql", {"notes": 1}, "notes"),
        ("/adapters/sql", {"tags": {"a": 1}}, "tags.a"),
        ("/adapters/sql", {"fallback": True}, "fallback"),
        ("/adapters/sql", {"fallback": "latest"}, "fallback"),
        ("/adapters/sql/versions/1", {"notes": "\u0000"}, "notes"),
        ("/adapters/sql/versions/1", {"fallback": "base"}, None),
    ],
)
async def test_invalid_edit_is_refused_by_field(
    sql: httpx2.AsyncClient, path: str, body: dict[str, Any], field: str | None
) -> None:
    refused = await sql.patch(path, json=body)
    assert refused.status_code == 400
    assert (refused.json()["errors"][0]["field"] or "").startswith(field or "")


async def test_a_deleted_adapter_is_restored_once_per_key(sql: httpx2.AsyncClient) -> None:
    before = (await sql.get("/adapters/sql")).json()
    await sql.delete("/adapters/sql")
    restored = await sql.post("/adapters/sql/restore", headers={"Idempotency-Key": "k"})
    assert restored.status_code == 200
    assert restored.json() | {"updated_at": ""} == before | {"updated_at": ""}
    again = await sql.post("/adapters/sql/restore", headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()) == (200, restored.json())
    assert (await sql.post("/adapters/sql/restore")).status_code == 409


async def test_a_deleted_version_is_restored(sql: httpx2.AsyncClient) -> None:
    before = (await sql.get("/adapters/sql/versions/1")).json()
    await sql.delete("/adapters/sql/versions/1")
    assert (await sql.get("/adapters/sql/versions/1")).status_code == 404
    assert (await sql.post("/adapters/sql/versions/1/restore")).json() == before
    assert (await sql.post("/adapters/sql/versions/1/restore")).status_code == 409
    assert (await sql.post("/adapters/sql/versions/7/restore")).status_code == 404


async def test_foreign_adapters_and_versions_read_as_absent(
    sql: httpx2.AsyncClient, globex: httpx2.AsyncClient
) -> None:
    await sql.delete("/adapters/sql/versions/1")

    async def answers(name: str) -> list[tuple[int, str]]:
        calls = [
            await globex.patch(f"/adapters/{name}", json={"notes": "mine"}),
            await globex.patch(f"/adapters/{name}/versions/2", json={"notes": "mine"}),
            await globex.post(f"/adapters/{name}/versions/1/restore"),
            await globex.post(f"/adapters/{name}/restore"),
        ]
        texts = [(one.status_code, one.json() | {"instance": "", "request_id": ""}) for one in calls]
        return [(status, str(text).replace(name, "NAME")) for status, text in texts]

    alive = await answers("sql")
    absent = await answers("lqs")
    await sql.delete("/adapters/sql")
    assert alive == absent == await answers("sql")
    assert {status for status, _ in absent} == {404}
