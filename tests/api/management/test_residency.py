"""What residency tells of each version, and of all memory to those who may know."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec

from loraserve.api.services import Services
from loraserve.registry.model_name import ParsedModel
from loraserve.types import EngineStats

STATS = EngineStats(
    device_bytes=100,
    kv_bytes_used=40,
    kv_bytes_idle=30,
    adapter_bytes_used=15,
    adapter_bytes_idle=10,
    free_bytes=5,
    device_adapters=3,
    host_adapters=2,
    host_adapter_bytes=64,
    host_adapter_budget_bytes=128,
)


async def test_admin_sees_memory_use_and_tenant_does_not(
    acme: httpx2.AsyncClient, admin: httpx2.AsyncClient, engine: Any
) -> None:
    engine.stats = STATS
    assert (await acme.get("/residency")).json()["memory"] is None
    for headers in ({}, {"X-Tenant": "acme"}):
        assert (await admin.get("/residency", headers=headers)).json()["memory"] == {
            "budget_bytes": 100,
            "kv_used_bytes": 40,
            "kv_idle_bytes": 30,
            "adapters_used_bytes": 15,
            "adapters_idle_bytes": 10,
            "free_bytes": 5,
            "num_device_adapters": 3,
            "host_budget_bytes": 128,
            "host_adapter_bytes": 64,
            "num_host_adapters": 2,
        }


async def test_version_in_memory_reports_storage_and_use(
    push: Any, acme: httpx2.AsyncClient, admin: httpx2.AsyncClient, engine: Any
) -> None:
    await push(acme)
    on_disk = (await acme.get("/residency")).json()["data"][0]
    assert (on_disk["dtype"], on_disk["precision_loss"], on_disk["uses_per_s"]) == (None, None, None)
    assert on_disk["size_bytes"] > 0
    await acme.post("/adapters/sql/versions/1/warm")
    (digest,) = engine.resident
    engine.resident[digest] = msgspec.structs.replace(
        engine.resident[digest], dtype="int8", precision_loss=0.01, uses_per_s=2.5
    )
    told = (await acme.get("/residency")).json()["data"][0]
    # how often others use the same bytes is theirs
    assert (told["dtype"], told["precision_loss"], told["uses_per_s"]) == ("int8", 0.01, None)


async def test_use_of_version_is_hidden_from_identical_copies(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, admin: httpx2.AsyncClient, services: Services
) -> None:
    for tenant, name in ((acme, "a"), (acme, "copy"), (globex, "b")):
        await push(tenant, name)
    registry = services.registry
    await acme.post("/adapters/a/versions/1/warm")
    (one,) = [
        row for row in (await registry.list_owned(None, limit=9, cursor=None, digests=None)).items if row.name == "a"
    ]
    adapter = await registry.resolve(one.tenant, ParsedModel(name="a", version=1))
    use = services.metrics.adapter_load.begin(adapter, ())
    use.answer()

    async def told(client: httpx2.AsyncClient, name: str) -> dict[str, Any]:
        rows = (await client.get("/residency")).json()["data"]
        return next(row for row in rows if row["name"] == name)

    busy = await told(admin, "a")
    assert (busy["num_pins"], busy["last_used_s"] is None, busy["uses_per_s"] > 0) == (1, False, True)
    for name in ("copy", "b"):
        idle = await told(admin, name)
        assert (idle["tier"], idle["num_pins"], idle["last_used_s"], idle["uses_per_s"]) == ("device", 0, None, 0.0)
    # the bytes are acme's own under either name, and globex has used none
    assert [(await told(acme, name))["tier"] for name in ("a", "copy")] == ["device", "device"]
    assert [(await told(acme, name))["last_used_s"] is None for name in ("a", "copy")] == [False, True]
    assert ((await told(globex, "b"))["tier"], (await told(globex, "b"))["last_used_s"]) == ("disk", None)
    use.end()
    assert (await told(admin, "a"))["num_pins"] == 0


async def test_pin_shows_only_on_pinned_version(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, admin: httpx2.AsyncClient
) -> None:
    await push(acme, "a")
    await push(globex, "b")
    await globex.post("/adapters/b/versions/1/warm")
    await admin.post("/adapters/a/versions/1/pin", headers={"X-Tenant": "acme"})
    pinned = {row["name"]: row["is_pinned"] for row in (await admin.get("/residency")).json()["data"]}
    assert pinned == {"a": True, "b": False}
    assert (await globex.get("/residency")).json()["data"][0]["is_pinned"] is False
