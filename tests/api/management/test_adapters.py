"""Adapters, versions, aliases and residency over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from core_clock import scheduled_s

from loraserve.api.management import adapters
from loraserve.api.services import Services
from loraserve.tenancy.limits.admission import Admissions

CALLS = [
    ("GET", "/adapters/{name}", None),
    ("DELETE", "/adapters/{name}", None),
    ("GET", "/adapters/{name}/versions", None),
    ("GET", "/adapters/{name}/versions/1", None),
    ("DELETE", "/adapters/{name}/versions/1", None),
    ("GET", "/adapters/{name}/aliases/live", None),
    ("PUT", "/adapters/{name}/aliases/live", {"version": 1}),
    ("DELETE", "/adapters/{name}/aliases/live", None),
    ("POST", "/adapters/{name}/versions/1/warm", None),
    ("POST", "/adapters/{name}/versions/1/verify", None),
]


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_foreign_adapter_gets_same_404_bytes_as_absent(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, method: str, path: str, body: Any
) -> None:
    await push(acme, "sql")

    async def refused(name: str) -> tuple[int, bytes]:
        response = await globex.request(method, path.format(name=name), json=body, headers={"x-request-id": "the-same"})
        return response.status_code, response.content.replace(name.encode(), b"NAME")

    foreign = await refused("sql")
    assert foreign[0] == 404
    assert foreign == await refused("lqs")
    assert (await acme.get("/adapters/sql/versions/1")).status_code == 200


@pytest.mark.parametrize("path", ["/adapters", "/residency"])
async def test_lists_hold_the_callers_own_things(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, path: str
) -> None:
    await push(acme, "sql")
    await push(globex, "other")
    assert [one["name"] for one in (await globex.get(path)).json()["data"]] == ["other"]


async def test_pages_lead_to_every_adapter(push: Any, acme: httpx2.AsyncClient) -> None:
    for name in ("a", "b", "c"):
        await push(acme, name)
    first = (await acme.get("/adapters", params={"limit": 2})).json()
    second = (await acme.get("/adapters", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert [one["name"] for one in first["data"] + second["data"]] == ["a", "b", "c"]
    assert second["next_cursor"] is None


@pytest.mark.parametrize("params", [{"limit": "0"}, {"limit": "201"}, {"limit": "x"}, {"cursor": "?"}])
async def test_impossible_page_gets_400_naming_parameter(acme: httpx2.AsyncClient, params: dict[str, str]) -> None:
    response = await acme.get("/adapters", params=params)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (400, next(iter(params)))


async def test_adapter_reports_aliases_and_versions(push: Any, acme: httpx2.AsyncClient) -> None:
    await push(acme, seed=1)
    await push(acme, seed=2, params={"promote": "false"})
    found = (await acme.get("/adapters/sql")).json()
    assert (found["aliases"], found["num_versions"], found["latest_version"]) == ({"live": 1}, 2, 2)
    assert [one["version"] for one in (await acme.get("/adapters/sql/versions")).json()["data"]] == [2, 1]


async def test_a_known_etag_is_answered_with_304(push: Any, acme: httpx2.AsyncClient) -> None:
    await push(acme, seed=1)
    paths = ["/adapters", "/adapters/sql", "/adapters/sql/versions/1", "/adapters/sql/aliases/live", "/base", "/limits"]
    for path in paths:
        etag = (await acme.get(path)).headers["etag"]
        again = await acme.get(path, headers={"If-None-Match": f'"other", {etag}'})
        assert (again.status_code, again.content) == (304, b"")
    before = (await acme.get("/adapters/sql/versions/1")).headers["etag"]
    await push(acme, seed=2)
    assert (await acme.get("/adapters/sql/versions/1", headers={"If-None-Match": before})).status_code == 200


async def test_conditional_get_accepts_weak_etags_and_star(push: Any, acme: httpx2.AsyncClient) -> None:
    await push(acme, seed=1)
    etag = (await acme.get("/adapters/sql")).headers["etag"]
    for known in (f"W/{etag}", f' "other" ,W/{etag}', "*"):
        assert (await acme.get("/adapters/sql", headers={"If-None-Match": known})).status_code == 304
    for unknown in ('"other"', etag.strip('"'), '"', ",,"):
        assert (await acme.get("/adapters/sql", headers={"If-None-Match": unknown})).status_code == 200


async def test_long_conditional_header_does_not_block_server(acme: httpx2.AsyncClient) -> None:
    started = scheduled_s()
    response = await acme.get("/adapters", headers={"If-None-Match": "x" + " " * 15_000 + "x"})
    # a pattern that tries every space anew took three seconds of the event loop
    assert (response.status_code, scheduled_s() - started < 1) == (200, True)


async def test_alias_moves_only_from_state_client_read(push: Any, acme: httpx2.AsyncClient) -> None:
    await push(acme, seed=1)
    await push(acme, seed=2)
    seen = (await acme.get("/adapters/sql/aliases/live")).headers["etag"]
    moved = await acme.put("/adapters/sql/aliases/live", json={"version": 1}, headers={"If-Match": seen})
    assert (moved.status_code, moved.json()["version"]) == (200, 1)
    late = await acme.put("/adapters/sql/aliases/live", json={"version": 2}, headers={"If-Match": seen})
    assert (late.status_code, late.json()["code"]) == (412, "precondition_failed")
    again = await acme.put(
        "/adapters/sql/aliases/live", json={"version": 2}, headers={"If-Match": moved.headers["etag"]}
    )
    assert again.status_code == 200


async def test_conditions_on_two_header_lines_all_count(push: Any, acme: httpx2.AsyncClient) -> None:
    await push(acme)
    etag = (await acme.get("/adapters/sql/aliases/live")).headers["etag"]
    path, body = "/adapters/sql/aliases/live", {"version": 1}
    both = [("If-Match", '"r0"'), ("If-Match", etag)]
    assert (await acme.put(path, json=body, headers=both)).status_code == 200
    known = [("If-None-Match", '"other"'), ("If-None-Match", (await acme.get(path)).headers["etag"])]
    assert (await acme.get(path, headers=known)).status_code == 304


async def test_new_alias_gets_201_and_presence_conditions_hold(push: Any, acme: httpx2.AsyncClient) -> None:
    await push(acme)
    path, body = "/adapters/sql/aliases/canary", {"version": 1}
    assert (await acme.put(path, json=body, headers={"If-Match": "*"})).status_code == 412
    assert (await acme.put(path, json=body, headers={"If-None-Match": "*"})).status_code == 201
    assert (await acme.put(path, json=body, headers={"If-None-Match": "*"})).status_code == 412
    assert (await acme.put(path, json=body, headers={"If-Match": 'W/"r1"'})).status_code == 412
    assert (await acme.put(path, json=body, headers={"If-Match": "r1"})).status_code == 400
    assert (await acme.delete(path)).status_code == 204
    assert (await acme.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("alias", "body", "status"),
    [
        ("12", b'{"version": 1}', 400),
        ("latest", b'{"version": 1}', 400),
        ("UP", b'{"version": 1}', 400),
        ("live", b'{"version": 99}', 404),
        ("live", b'{"version": 99999999999999999999999}', 404),
        ("live", b'{"version": "1"}', 400),
        ("live", b'{"version": true}', 400),
        ("live", b'{"version": 1.0}', 400),
        ("live", b'{"version": NaN}', 400),
        ("live", b'{"version": 1, "version": 2}', 400),
        ("live", b'{"version": 1, "verison": 2}', 400),
        ("live", b'{"\\ud800": 1}', 400),
        ("live", b"{}", 400),
        ("live", b"[1]", 400),
        ("live", b"", 400),
        ("live", b"\xff", 400),
    ],
)
async def test_bad_alias_change_gets_4xx_without_effect(
    push: Any, acme: httpx2.AsyncClient, alias: str, body: bytes, status: int
) -> None:
    await push(acme)
    response = await acme.put(f"/adapters/sql/aliases/{alias}", content=body)
    assert response.status_code == status
    assert (await acme.get("/adapters/sql")).json()["aliases"] == {"live": 1}


async def test_deleting_aliased_version_gets_409_naming_alias(push: Any, acme: httpx2.AsyncClient) -> None:
    await push(acme, seed=1)
    await push(acme, seed=2)
    refused = await acme.delete("/adapters/sql/versions/2")
    assert refused.status_code == 409
    assert "live" in refused.json()["detail"]
    assert (await acme.delete("/adapters/sql/versions/1")).status_code == 204
    assert (await acme.get("/adapters/sql/versions/1")).status_code == 404


async def test_deleted_adapter_is_gone_and_name_is_free(push: Any, acme: httpx2.AsyncClient) -> None:
    await push(acme)
    assert (await acme.delete("/adapters/sql")).status_code == 204
    assert (await acme.get("/adapters/sql")).status_code == 404
    assert (await push(acme)).json()["version"] == 2


async def test_engine_forgets_deleted_versions_adapters_and_tenants(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, admin: httpx2.AsyncClient, engine: Any
) -> None:
    for seed in range(2):
        await push(acme, seed=seed)
    assert (await globex.delete("/adapters/sql")).status_code == 404
    assert (await acme.delete("/adapters/sql/versions/2")).status_code == 409
    assert engine.forgotten == []
    assert (await acme.delete("/adapters/sql/versions/1")).status_code == 204
    assert (await acme.delete("/adapters/sql")).status_code == 204
    assert (await admin.delete("/tenants/acme")).status_code == 204
    owner = engine.forgotten[0][0]
    assert engine.forgotten == [(owner, "sql", 1), (owner, "sql", None), (owner, None, None)]


@pytest.mark.parametrize(
    "path", ["/adapters/%00", "/adapters/a/versions/0", "/adapters/sql/versions/99999999999", "/adapters/%ED%A0%80"]
)
async def test_impossible_name_or_version_gets_404(push: Any, acme: httpx2.AsyncClient, path: str) -> None:
    await push(acme)
    response = await acme.get(path)
    assert response.status_code == 404
    assert response.json()["code"] in ("adapter_not_found", "version_not_found")


async def test_residency_follows_warm_pin_and_unpin(
    push: Any, acme: httpx2.AsyncClient, admin: httpx2.AsyncClient
) -> None:
    await push(acme)

    async def state() -> tuple[str, bool]:
        one = (await acme.get("/residency")).json()["data"][0]
        return one["tier"], one["is_pinned"]

    assert await state() == ("disk", False)
    assert (await acme.get("/residency", params={"resident": "true"})).json()["data"] == []
    assert (await acme.post("/adapters/sql/versions/1/warm")).status_code == 200
    assert await state() == ("device", False)
    assert len((await acme.get("/residency", params={"resident": "true"})).json()["data"]) == 1
    assert (await acme.post("/adapters/sql/versions/1/pin")).status_code == 403
    for action, is_pinned in (("pin", True), ("unpin", False)):
        response = await admin.post(f"/adapters/sql/versions/1/{action}", headers={"X-Tenant": "acme"})
        assert response.json()["is_done"]
        assert await state() == ("device", is_pinned)


async def test_slow_warming_gets_202(
    push: Any, acme: httpx2.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "WARM_WAIT_S", 0.01)
    await push(acme)
    engine.gate = asyncio.Event()
    response = await acme.post("/adapters/sql/versions/1/warm")
    assert (response.status_code, response.json()["is_done"]) == (202, False)


async def test_residency_of_shared_bytes_hides_other_tenants_use(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, admin: httpx2.AsyncClient
) -> None:
    await push(acme, "a")
    await push(globex, "b")
    await acme.post("/adapters/a/versions/1/warm")
    theirs = (await globex.get("/residency")).json()["data"][0]
    assert (theirs["tier"], theirs["device_bytes"], theirs["last_used_s"]) == ("disk", 0, None)
    everyone = (await admin.get("/residency")).json()["data"]
    assert [(one["tenant"], one["name"], one["tier"]) for one in everyone] == [
        ("acme", "a", "device"),
        ("globex", "b", "device"),
    ]
    named = await admin.get("/residency", headers={"X-Tenant": "globex"})
    assert [one["tenant"] for one in named.json()["data"]] == ["globex"]


async def test_a_retried_pin_does_not_undo_an_unpin(push: Any, admin: httpx2.AsyncClient) -> None:
    await push(admin)
    pin, key = "/adapters/sql/versions/1/pin", {"Idempotency-Key": "p"}
    first = await admin.post(pin, headers=key)
    await admin.post("/adapters/sql/versions/1/unpin")
    again = await admin.post(pin, headers=key)
    assert again.content == first.content
    assert (await admin.get("/residency")).json()["data"][0]["is_pinned"] is False


async def test_base_and_limits_are_told(acme: httpx2.AsyncClient) -> None:
    base = (await acme.get("/base")).json()
    assert (base["id"], base["modules"]["v_proj"]) == ("org/base:1", [4, 8])
    named = tuple(base[field] for field in ("arithmetic", "kernels", "instructions", "device"))
    assert named == ("fp32", "onednn", "avx2", "cpu")
    assert (await acme.get("/limits")).json()["max_upload_bytes"] == 2 << 30


async def test_audit_is_limited_to_tenant_except_for_admin(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, admin: httpx2.AsyncClient
) -> None:
    await push(acme)
    await push(globex, "other")
    mine = (await acme.get("/audit")).json()["data"]
    assert [one["action"] for one in mine] == ["alias.move", "version.publish", "key.create", "tenant.create"]
    assert mine[1]["target"] == "sql@1"
    assert mine[1]["detail"]["digest"]
    assert {one["tenant"] for one in mine} == {"acme"}
    assert {one["tenant"] for one in (await admin.get("/audit")).json()["data"]} == {"acme", "globex", "default"}


async def test_lists_have_notes_on_request(acme: httpx2.AsyncClient, push: Any) -> None:
    await push(acme, "sql")
    for path in ("/adapters/sql", "/adapters/sql/versions/1"):
        assert (await acme.patch(path, json={"notes": "long " * 100})).status_code == 200
        assert (await acme.get(path)).json()["notes"] == "long " * 100
        listed = path.removesuffix("/sql").removesuffix("/1")
        assert [row["notes"] for row in (await acme.get(listed)).json()["data"]] == [None]
        assert [row["notes"] for row in (await acme.get(f"{listed}?include=notes")).json()["data"]] == ["long " * 100]
        refused = await acme.get(f"{listed}?include=weights")
        assert refused.status_code == 400
        assert "include" in refused.text


async def test_management_rate_is_refused_with_retry_after(
    acme: httpx2.AsyncClient, services: Services, admin: httpx2.AsyncClient
) -> None:
    services.settings = services.settings.model_copy(update={"management_requests_per_minute": 4})
    # since the fixture's own requests
    services.admissions = Admissions(monotonic=lambda: 100.0)
    answers = [await acme.get("/adapters") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[-1].json()["code"] == "rate_limit_exceeded"
    assert int(answers[-1].headers["retry-after"]) > 0
    assert {(await admin.get("/tenants")).status_code for _ in range(9)} == {200}
