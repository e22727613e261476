"""What residency tells of each version, and of all memory to those who may know."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec

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


async def test_an_admin_is_told_what_memory_holds_and_a_tenant_is_not(
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


async def test_a_version_in_memory_says_how_it_is_held_and_used(
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
    assert (await admin.get("/residency")).json()["data"][0]["uses_per_s"] == 2.5
