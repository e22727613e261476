"""Ephemeral adapters: in memory alone, for as long as a name or a request holds them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from trainer import Trainer
from whole_app import ADMIN_KEY, bearer, small_weights

from adapters_store import read_memory
from loraserve.api.services import Services
from loraserve.db.models import Base
from loraserve.engine_client.messages import GenerateRequest
from loraserve.errors import AdapterNotFound, AdapterNumerics, AdapterTooLarge, BlobNotFound
from loraserve.registry.health.numeric_failures import MAX_NUMERIC_FAILURES
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports
from loraserve.types import AdapterRef, MemoryFile


async def rows(services: Services) -> dict[str, int]:
    """Number of rows of each table but those of the usage, which is what is billed."""
    async with services.registry._database.read() as session:
        return {
            table.name: await session.scalar(select(func.count()).select_from(table)) or 0
            for table in Base.metadata.sorted_tables
            if not table.name.startswith("usage")
        }


def held(services: Services) -> tuple[int, int, int]:
    """Names, versions and bytes."""
    ephemeral = services.registry.ephemeral
    ephemeral.sweep()
    return len(ephemeral), ephemeral.versions.total, ephemeral.bytes.total


class Gate:
    """Holds the engine's requests until it is opened."""

    def __init__(self, services: Services) -> None:
        self.seen: list[AdapterRef | None] = []
        self.opened = asyncio.Event()
        self._generate = services.engine.generate
        services.engine.generate = self.generate  # type: ignore[method-assign]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Any, None]:
        self.seen.append(request.adapter)
        await self.opened.wait()
        async for chunk in self._generate(request):
            yield chunk

    async def until_seen(self, num: int) -> None:
        while len(self.seen) < num:
            await asyncio.sleep(0.001)


async def test_ephemeral_adapter_is_never_stored_or_left_behind(
    acme: Trainer, services: Services, tmp_path: Path
) -> None:
    before = await rows(services)
    for number in range(1, 4):
        assert (await acme.load_tensors(fill=number / 8, load_inplace=True)).status_code == 200
        assert await acme.version() == f"policy@{number}"
        assert held(services)[:2] == (1, 1)
    served = (await acme.models())["policy"]
    assert (served["owned_by"], served["parent"]) == ("acme", services.engine.base.id)
    model = await acme.client.get("/v1/models/policy", headers=acme.headers)
    assert model.json() == served
    assert held(services)[2] > len(small_weights())
    listed = await acme.client.get("/api/v1/adapters", headers=acme.headers)
    assert listed.json()["data"] == []
    await acme.unload()
    assert held(services) == (0, 0, 0)
    assert await rows(services) == before
    assert not list(services.store.iter_digests())
    assert not list((tmp_path / "blobs" / "staging").iterdir())
    assert len(services.engine.discarded) == 3  # type: ignore[attr-defined]
    assert (await acme.complete()).status_code == 404


async def test_running_request_keeps_version_and_memory(acme: Trainer, services: Services) -> None:
    gate = Gate(services)
    running = []
    for number in range(1, 4):
        await acme.load_tensors(fill=number / 8, load_inplace=True)
        running.append(asyncio.create_task(acme.complete()))
        await gate.until_seen(number)
    await acme.unload()
    assert held(services)[:2] == (0, 3)
    for number, ref in enumerate(gate.seen, 1):
        assert ref is not None
        assert ref.memory is not None
        config, weights = read_memory(ref.memory, ref.config_blob, ref.weights_blob)
        assert bytes(weights) == small_weights(number / 8)
        assert b"LORA" in bytes(config)
    path = ref.memory.path
    del ref, config, weights
    gate.seen.clear()
    gate.opened.set()
    answers = [(await task).headers["x-loraserve-adapter"] for task in running]
    assert answers == ["policy@1", "policy@2", "policy@3"]
    gc.collect()
    assert held(services) == (0, 0, 0)
    with pytest.raises(BlobNotFound):
        read_memory(MemoryFile(path=path, weights_bytes=1, config_bytes=1), *("0" * 64,) * 2)  # type: ignore[arg-type]


async def test_the_same_bytes_make_no_other_version(acme: Trainer, services: Services) -> None:
    for _ in range(2):
        assert (await acme.load_tensors(load_inplace=True)).status_code == 200
        assert await acme.version() == "policy@1"
        assert held(services)[:2] == (1, 1)
    refused = await acme.load_tensors()
    assert "has already been loaded" in refused.json()["error_message"]


async def test_requests_use_previous_version_until_next_reaches_device(
    acme: Trainer, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving, landed = asyncio.Event(), asyncio.Event()

    async def warm(ref: AdapterRef) -> None:
        arriving.set()
        await landed.wait()

    await acme.load_tensors()
    monkeypatch.setattr(services.registry.ephemeral, "_warm", warm)
    loading = asyncio.create_task(acme.load_tensors(fill=0.25, load_inplace=True))
    await arriving.wait()
    assert await acme.version() == "policy@1"
    landed.set()
    assert (await loading).status_code == 200
    assert await acme.version() == "policy@2"


async def test_unloadable_version_does_not_take_name(
    acme: Trainer, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def warm(ref: AdapterRef) -> None:
        raise AdapterTooLarge("This adapter version needs more.")

    await acme.load_tensors()
    monkeypatch.setattr(services.registry.ephemeral, "_warm", warm)
    refused = await acme.load_tensors(fill=0.25, load_inplace=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "adapter_too_large")
    assert await acme.version() == "policy@1"
    gc.collect()
    assert held(services)[:2] == (1, 1)


async def test_names_mean_the_present_version_alone(acme: Trainer) -> None:
    await acme.load_tensors()
    await acme.load_tensors(fill=0.25, load_inplace=True)
    found = {name: (await acme.complete(name)).status_code for name in ("policy@2", "policy@live", "policy@1")}
    assert found == {"policy@2": 200, "policy@live": 200, "policy@1": 404}
    assert (await acme.complete("policy@canary")).status_code == 404
    summed = await acme.complete("policy+0.5*policy@2")
    assert summed.status_code == 200


async def test_adapter_is_unloaded_when_ttl_expires(
    acme: Trainer, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    ephemeral = services.registry.ephemeral
    now_s = 100.0
    monkeypatch.setattr(ephemeral, "_monotonic", lambda: now_s)
    await acme.load_tensors("short", ttl_s=10)
    await acme.load_tensors("long", fill=0.25)
    now_s = 109.0
    await acme.load_tensors("short", ttl_s=10, load_inplace=True)
    now_s = 118.0
    assert held(services)[0] == 2
    now_s = 119.0
    assert held(services)[:2] == (1, 1)
    assert set(await acme.models()) >= {"long"}
    assert (await acme.complete("short")).status_code == 404
    now_s = 100.0 + services.settings.ephemeral_ttl_s
    assert held(services) == (0, 0, 0)
    assert ephemeral.num_expired == 2


async def test_expired_adapters_are_swept_while_the_server_runs(acme: Trainer, services: Services) -> None:
    ephemeral = services.registry.ephemeral
    ephemeral.start()
    await acme.load_tensors()
    ephemeral._names[acme.tenant, "policy"].expires_s = 0.0
    async with asyncio.timeout(5):
        while len(ephemeral):
            await asyncio.sleep(0.01)
    await ephemeral.close()


async def test_other_tenant_cannot_find_or_unload_adapter(acme: Trainer, globex: Trainer, services: Services) -> None:
    await acme.load_tensors()
    assert (await globex.complete()).status_code == (await globex.complete("acme/policy")).status_code == 404
    assert (await globex.unload()).status_code == 404
    assert "policy" not in await globex.models()
    await globex.load_tensors(fill=0.25)
    assert await globex.version() == await acme.version() == "policy@1"
    await globex.unload()
    assert await acme.version() == "policy@1"
    deleted = await acme.client.delete("/api/v1/tenants/acme", headers=bearer(ADMIN_KEY))
    assert deleted.status_code == 204
    assert held(services) == (0, 0, 0)


async def test_bytes_are_discarded_after_last_tenant_unloads(
    acme: Trainer, globex: Trainer, services: Services
) -> None:
    await acme.load_tensors()
    await globex.load_tensors()
    await acme.unload()
    assert services.engine.discarded == []  # type: ignore[attr-defined]
    await globex.unload()
    assert len(services.engine.discarded) == 1  # type: ignore[attr-defined]


async def test_name_is_either_stored_or_ephemeral(acme: Trainer) -> None:
    assert (await acme.load("stored")).status_code == 200
    over = await acme.load_tensors("stored", load_inplace=True)
    assert (over.status_code, over.json()["error"]["code"]) == (409, "conflict")
    await acme.load_tensors("policy")
    under = await acme.load("policy", load_inplace=True, ephemeral=False)
    assert (under.status_code, "ephemeral" in under.text) == (409, True)
    assert await acme.version("policy") == await acme.version("policy@1")


@pytest.mark.parametrize("slow", ["publish", "load"])
async def test_concurrent_publish_and_load_cannot_share_name(
    acme: Trainer, services: Services, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    gate = asyncio.Event()
    certificates = services.registry.publisher._certificates
    check_upload = certificates.check_upload

    async def wait(*_: object) -> None:
        await gate.wait()

    async def check_late(ref: AdapterRef) -> Any:
        await gate.wait()
        return await check_upload(ref)

    # each has looked at the name before the other has it: a publish while its version is certified,
    # a load while its version is brought to the device
    if slow == "publish":
        monkeypatch.setattr(certificates, "check_upload", check_late)
        first = asyncio.create_task(acme.load("policy", ephemeral=False))
        await asyncio.sleep(0.1)
        assert (await acme.load_tensors("policy")).status_code == 200
    else:
        monkeypatch.setattr(services.registry.ephemeral, "_warm", wait)
        first = asyncio.create_task(acme.load_tensors("policy"))
        await asyncio.sleep(0.1)
        assert (await acme.load("policy", ephemeral=False)).status_code == 409
    gate.set()
    assert (await first).status_code == (409 if slow == "publish" else 200)
    assert services.registry.ephemeral.name_of(acme.tenant, "policy") is not None
    with pytest.raises(AdapterNotFound):
        await services.registry.get(acme.tenant, "policy")


async def test_deleted_adapter_cannot_be_restored_under_ephemeral_name(acme: Trainer) -> None:
    assert (await acme.load("policy", ephemeral=False)).status_code == 200
    assert (await acme.unload("policy")).status_code == 200
    assert (await acme.load_tensors("policy")).status_code == 200
    refused = await acme.post("/api/v1/adapters/policy/restore")
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert (await acme.unload("policy")).status_code == 200
    assert (await acme.post("/api/v1/adapters/policy/restore")).status_code == 200


async def test_ephemeral_adapters_count_towards_tenant_quota(acme: Trainer, admin: Trainer) -> None:
    limits = {"limits": {"max_adapters": 2, "max_stored_bytes": 3 * len(small_weights())}}
    changed = await admin.client.patch("/api/v1/tenants/acme", json=limits, headers=bearer(ADMIN_KEY))
    assert changed.status_code == 200
    assert (await acme.load_tensors("one")).status_code == 200
    assert (await acme.load_tensors("two", fill=0.25)).status_code == 200
    third = await acme.load_tensors("three", fill=0.125)
    assert (third.status_code, third.json()["error"]["code"]) == (429, "insufficient_quota")
    assert (await acme.load_tensors("two", fill=0.125, load_inplace=True)).status_code == 200
    limits["limits"]["max_stored_bytes"] = 2 * len(small_weights())
    await admin.client.patch("/api/v1/tenants/acme", json=limits, headers=bearer(ADMIN_KEY))
    assert (await acme.load_tensors("two", fill=0.0625, load_inplace=True)).status_code == 429


async def test_tenant_cannot_exceed_share_of_server_memory(acme: Trainer, globex: Trainer, services: Services) -> None:
    services.registry.ephemeral.bytes.capacity = 4 * 1024
    names = [f"policy-{i}" for i in range(8)]
    refused = [answer for name in names if (answer := await acme.load_tensors(name)).status_code != 200]
    assert refused
    assert {answer.status_code for answer in refused} == {429}
    assert "retry-after" in refused[0].headers
    # there is as much for the next tenant
    assert (await globex.load_tensors()).status_code == 200
    before = held(services)[2]
    assert (await acme.load_tensors("another")).status_code == 429
    assert held(services)[2] == before


async def test_ephemeral_usage_is_billed_under_single_name(acme: Trainer, services: Services) -> None:
    for name in ("one", "two"):
        await acme.load_tensors(name)
        assert (await acme.complete(name)).status_code == 200
        await acme.unload(name)
    assert services.usage is not None
    found = await UsageReports(services.usage).all(UsageQuery(group_by=("adapter", "version")))
    assert [(one.group, one.amounts.num_requests) for one in found] == [
        ({"adapter": "(ephemeral)", "version": None}, 2)
    ]


async def test_repeated_non_finite_answers_end_in_quarantine(
    acme: Trainer, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(request: GenerateRequest) -> AsyncGenerator[Any, None]:
        raise AdapterNumerics("The logits aren't finite.")
        yield

    await acme.load_tensors()
    with monkeypatch.context() as patch:
        patch.setattr(services.engine, "generate", fail)
        codes = [(await acme.complete()).json()["error"]["code"] for _ in range(MAX_NUMERIC_FAILURES + 1)]
    assert codes == ["adapter_numerics"] * MAX_NUMERIC_FAILURES + ["adapter_quarantined"]
    assert "policy" not in await acme.models()
    # another version is another's matter
    await acme.load_tensors(fill=0.25, load_inplace=True)
    assert await acme.version() == "policy@2"


async def test_metrics_say_how_many_there_are(acme: Trainer) -> None:
    await acme.load_tensors()
    text = (await acme.client.get("/metrics", headers=bearer(ADMIN_KEY))).text
    for line in (
        "loraserve_ephemeral_adapters 1.0",
        "loraserve_ephemeral_loads_total 1.0",
        "loraserve_ephemeral_expiries_total 0.0",
        'loraserve_shares_held{room="ephemeral_versions"} 1.0',
    ):
        assert line in text, line


async def test_concurrent_loads_under_same_name_leave_single_version(acme: Trainer, services: Services) -> None:
    answers = await asyncio.gather(*(acme.load_tensors(fill=i / 8) for i in range(1, 5)))
    assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400]
    stored = await asyncio.gather(*(acme.load_tensors("kept", fill=i / 8, ephemeral=False) for i in range(1, 5)))
    assert sorted(answer.status_code for answer in stored) == [200, 400, 400, 400]
    assert held(services)[:2] == (1, 1)
