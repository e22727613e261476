"""Whose key it is, as the server sees it."""

from __future__ import annotations

from typing import Any

import httpx2


async def whoami(client: httpx2.AsyncClient, **headers: str) -> Any:
    answer = await client.get("/whoami", headers={name.replace("_", "-"): value for name, value in headers.items()})
    return answer.status_code, answer.json()


async def test_tenant_key_gets_tenant_and_limits(admin: httpx2.AsyncClient, acme: httpx2.AsyncClient) -> None:
    await admin.patch("/tenants/acme", json={"limits": {"requests_per_minute": 90}, "weight": 2})
    status, me = await whoami(acme)
    assert status == 200
    assert (me["tenant"], me["is_admin"], me["sees_all"]) == ("acme", False, False)
    assert (me["limits"]["requests_per_minute"], me["weight"]) == (90, 2.0)
    assert me["scopes"] == ["adapters:read", "adapters:write", "inference"]


async def test_admin_gets_tenant_acted_for(admin: httpx2.AsyncClient, acme: httpx2.AsyncClient) -> None:
    _, me = await whoami(admin)
    assert (me["tenant"], me["is_admin"], me["sees_all"], me["has_console"]) == ("default", True, True, True)
    _, me = await whoami(admin, x_tenant="acme")
    assert (me["tenant"], me["is_admin"], me["sees_all"]) == ("acme", True, False)


async def test_key_reveals_no_foreign_tenant(acme: httpx2.AsyncClient, globex: httpx2.AsyncClient) -> None:
    theirs, absent = await whoami(globex, x_tenant="acme"), await whoami(globex, x_tenant="nobody")
    assert theirs[0] == absent[0] == 404
    assert theirs[1] | {"request_id": ""} == absent[1] | {"request_id": ""}
