"""Operators' keys by HTTP: wrong requests are refused by name, secrets are shown once."""

from __future__ import annotations

from typing import Any

import httpx2
from whole_app import ADMIN_KEY, app, bearer, client, model_dir, services, started  # noqa: F401

PATH = "/api/v1/admin-keys"
ADMIN = bearer(ADMIN_KEY)


async def test_wrong_bodies_are_refused_by_the_field(client: httpx2.AsyncClient, subtests: Any) -> None:  # noqa: F811
    made = (await client.post(PATH, json={"name": "x", "role": "operator:read"}, headers=ADMIN)).json()
    rotate = f"{PATH}/{made['id']}/rotate"
    for path, body, param in (
        (PATH, {}, "role"),
        (PATH, {"role": None}, "role"),
        (PATH, {"role": 1}, "role"),
        (PATH, {"role": ["admin"]}, "role"),
        (PATH, {"role": "root"}, "role"),
        (PATH, {"role": "a" * 100_000}, "role"),
        (PATH, {"role": "admin", "name": ""}, "name"),
        (PATH, {"role": "admin", "name": "a" * 129}, "name"),
        (PATH, {"role": "admin", "name": "a\x00"}, "name"),
        (PATH, {"role": "admin", "name": 5}, "name"),
        (PATH, {"role": "admin", "expires_at": "yesterday"}, "expires_at"),
        (PATH, {"role": "admin", "expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
        (PATH, {"role": "admin", "scopes": ["admin"]}, None),
        (rotate, {"overlap_s": -1}, "overlap_s"),
        (rotate, {"overlap_s": 1e300}, "overlap_s"),
        (rotate, {"overlap_s": "1"}, "overlap_s"),
        (rotate, {"overlap_s": True}, "overlap_s"),
        (rotate, {"overlap": 1}, None),
    ):
        with subtests.test(f"{path} {str(body)[:60]}"):
            answer = await client.post(path, json=body, headers=ADMIN)
            assert answer.status_code == 400, answer.text
            assert answer.json()["errors"][0]["field"] == param
            assert len(answer.content) < 1000
    assert (await client.post(f"{PATH}/absent/rotate", json={}, headers=ADMIN)).status_code == 404
    assert (await client.delete(f"{PATH}/absent", headers=ADMIN)).status_code == 404


async def test_secret_appears_only_in_first_answer(client: httpx2.AsyncClient) -> None:  # noqa: F811
    once = ADMIN | {"idempotency-key": "one"}
    body = {"name": "x", "role": "operator:read"}
    first = await client.post(PATH, json=body, headers=once)
    assert (first.status_code, first.headers["cache-control"]) == (201, "no-store")
    assert first.headers["location"] == f"{PATH}/{first.json()['id']}"
    again = await client.post(PATH, json=body, headers=once)
    assert again.status_code == 409
    secret = first.json()["key"]
    listed = await client.get(PATH, headers=bearer(secret))
    assert [row["role"] for row in listed.json()["data"]] == ["operator:read"]
    for answer in (again, listed):
        assert secret not in answer.text
    rotated = await client.post(f"{PATH}/{first.json()['id']}/rotate", json={}, headers=ADMIN)
    assert (await client.get(PATH, headers=bearer(secret))).status_code == 401
    assert (await client.get(PATH, headers=bearer(rotated.json()["key"]))).status_code == 200
    assert (await client.delete(f"{PATH}/{rotated.json()['id']}", headers=ADMIN)).status_code == 204
    assert (await client.get(PATH, headers=bearer(rotated.json()["key"]))).status_code == 401
