"""Publishing: checked, durable, numbered, once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve import faults
from loraserve.db.idempotency import Once, Replay, StoredResponse
from loraserve.db.session import Database
from loraserve.errors import (
    AdapterBaseMismatch,
    AdapterNotFinite,
    AdapterNotFound,
    IdempotencyKeyReused,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    RateLimited,
    StorageFull,
    TenantNotFound,
)
from loraserve.limits import LIMITS
from loraserve.registry.model_name import parse_model
from loraserve.registry.records import AliasTarget, Published
from loraserve.registry.registry import Registry
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.tenancy.identity.tenants import TenantLimits
from loraserve.types import TenantId

SQL = parse_model("sql", "base")


def once_for(key: str = "k", fingerprint: str = "f") -> Once[Published]:
    return Once("owner", key, fingerprint, lambda result: StoredResponse(201, {}, str(result.version.version).encode()))


@pytest.fixture
async def small_tenant(database: Database) -> Callable[..., Awaitable[TenantId]]:
    """A function that makes a tenant with limits."""
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()

    async def make(**limits: int) -> TenantId:
        return (await authenticator.tenants.create("small", actor="test", limits=TenantLimits(**limits))).id

    return make


async def test_version_describes_upload_and_live_names_version(
    publish: Any, registry: Registry, store: LocalStore, acme: TenantId, make_upload: Any
) -> None:
    config, weights = make_upload(rank=3)
    published = await publish(rank=3)
    version = published.version
    assert published.is_new
    assert (version.name, version.version, version.state, version.rank) == ("sql", 1, "ready", 3)
    assert version.target_modules == ("q_proj", "v_proj")
    assert version.aliases == ("live",)
    assert version.size_bytes == len(config) + len(weights)
    assert [check["name"] for check in version.checks] == ["format", "base", "finite"]
    assert bytes(store.read(version.config_blob)) == config
    assert bytes(store.read(version.weights_blob)) == weights
    assert await registry.resolve(acme, SQL) == version.ref
    assert await registry.get_version(acme, "sql", 1) == version


async def test_versions_are_numbered_consecutively_and_live_moves(
    publish: Any, registry: Registry, acme: TenantId
) -> None:
    numbers = [(await publish(seed=seed)).version.version for seed in range(3)]
    assert numbers == [1, 2, 3]
    assert (await registry.resolve(acme, SQL)).version == 3
    assert (await registry.resolve(acme, parse_model("sql@1", "base"))).version == 1


async def test_without_promotion_live_stays(publish: Any, registry: Registry, acme: TenantId) -> None:
    await publish(seed=1)
    published = await publish(seed=2, is_promoting=False)
    assert published.version.aliases == ()
    assert (await registry.resolve(acme, SQL)).version == 1


async def test_republished_bytes_return_existing_version(publish: Any, registry: Registry, acme: TenantId) -> None:
    first = await publish(seed=1)
    await publish(seed=2)
    again = await publish(seed=1)
    assert not again.is_new
    assert again.version.version == first.version.version
    assert (await registry.resolve(acme, SQL)).version == 1
    assert (await registry.get(acme, "sql")).num_versions == 2


async def test_same_bytes_elsewhere_become_separate_version(
    publish: Any, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    first = await publish("sql")
    for published in (await publish("other"), await publish("sql", tenant=globex)):
        assert published.is_new
        assert published.version.version == 1
        assert published.version.digest == first.version.digest


async def test_concurrent_identical_uploads_make_single_version(
    publish: Any, registry: Registry, acme: TenantId
) -> None:
    results = await asyncio.gather(*(publish(seed=7) for _ in range(4)))
    assert sorted(result.is_new for result in results) == [False, False, False, True]
    assert (await registry.get(acme, "sql")).num_versions == 1


async def test_concurrent_different_uploads_get_distinct_numbers(publish: Any) -> None:
    results = await asyncio.gather(*(publish(seed=seed) for seed in range(6)))
    assert sorted(result.version.version for result in results) == [1, 2, 3, 4, 5, 6]


async def test_dry_run_checks_without_storing(
    publish: Any, registry: Registry, store: LocalStore, acme: TenantId
) -> None:
    published = await publish(is_dry_run=True)
    assert (published.is_new, published.version.version, published.version.state) == (True, None, "checked")
    assert list(store.iter_digests()) == []
    with pytest.raises(AdapterNotFound):
        await registry.get(acme, "sql")
    with pytest.raises(AdapterNotFinite):
        await publish(is_dry_run=True, fill=math.nan)


async def test_dry_run_of_known_bytes_names_version(publish: Any) -> None:
    await publish()
    published = await publish(is_dry_run=True)
    assert (published.is_new, published.version.version) == (False, 1)


@pytest.mark.parametrize(
    ("how", "error"), [({"fill": math.inf}, AdapterNotFinite), ({"hidden_size": 16}, AdapterBaseMismatch)]
)
async def test_unservable_upload_leaves_no_bytes_or_adapter(
    publish: Any, registry: Registry, store: LocalStore, acme: TenantId, how: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await publish(**how)
    assert list(store.iter_digests()) == []
    assert (await registry.list(acme)).items == ()


@pytest.mark.parametrize("name", ["a//b", "a" * 129, "", "sql@1", "../../etc", "org/base:1:x", "ORG/BASE:1"])
async def test_a_name_outside_the_pattern_is_refused(publish: Any, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await publish(name)
    assert caught.value.param == "name"


async def test_uploads_beyond_bound_must_wait(registry: Registry, database: Database) -> None:
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    # tenants enough that none reaches its own bound
    names = [f"tenant-{number}" for number in range(LIMITS.max_concurrent_uploads + 1)]
    *tenants, another = [(await authenticator.tenants.create(name, actor="test")).id for name in names]
    staged = [await registry.uploads.stage(tenant) for tenant in tenants]
    with pytest.raises(Overloaded):
        await registry.uploads.stage(another)
    for tenant, blob in zip(tenants, staged, strict=True):
        await registry.uploads.release(tenant, blob)
    await registry.uploads.release(tenants[0], await registry.uploads.stage(tenants[0]))


async def test_tenants_uploads_leave_capacity_for_other_tenant(
    registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    staged = [await registry.uploads.stage(acme) for _ in range(LIMITS.max_concurrent_uploads_per_tenant)]
    with pytest.raises(RateLimited):
        await registry.uploads.stage(acme)
    await registry.uploads.release(globex, await registry.uploads.stage(globex))
    await registry.uploads.release(acme, staged.pop())
    staged.append(await registry.uploads.stage(acme))
    for blob in staged:
        await registry.uploads.release(acme, blob)


async def test_full_disk_refuses_upload_and_next_succeeds(
    publish: Any, registry: Registry, store: LocalStore, acme: TenantId
) -> None:
    with faults.arm("blob.fsync", "ENOSPC"), pytest.raises(StorageFull):
        await publish()
    assert (await registry.list(acme)).items == ()
    assert (await publish()).version.version == 1


async def test_a_failure_before_the_commit_leaves_no_row(publish: Any, registry: Registry, acme: TenantId) -> None:
    with faults.arm("registry.before_commit", "EIO"), pytest.raises(Exception, match="can't be reached"):
        await publish()
    assert (await registry.list(acme)).items == ()
    assert (await publish()).version.version == 1


async def test_quotas_count_existing_adapters_and_bytes(
    publish: Any, registry: Registry, small_tenant: Callable[..., Awaitable[TenantId]]
) -> None:
    size = (await publish("probe", is_dry_run=True)).version.size_bytes
    small = await small_tenant(max_adapters=2, max_stored_bytes=size * 3 + 64)
    await publish("a", tenant=small)
    await publish("b", tenant=small)
    with pytest.raises(QuotaExceeded, match="2 adapters"):
        await publish("c", tenant=small)
    await publish("a", seed=1, tenant=small)
    with pytest.raises(QuotaExceeded, match="bytes"):
        await publish("a", seed=2, tenant=small)
    await registry.delete(small, "b", actor="test")
    await publish("c", tenant=small)


async def test_upload_over_quota_stores_no_bytes(
    publish: Any,
    database: Database,
    store: LocalStore,
    certified: Registry,
    certifying: Any,
    small_tenant: Callable[..., Awaitable[TenantId]],
) -> None:
    size = (await publish("probe", is_dry_run=True)).version.size_bytes
    small = await small_tenant(max_adapters=1, max_stored_bytes=size + 64)
    await publish("a", tenant=small, via=certified)
    before, num_asked = set(store.iter_digests()), len(certifying.asked)
    for name in ("a", "b"):
        with pytest.raises(QuotaExceeded):
            await publish(name, seed=1, tenant=small, via=certified)
    assert set(store.iter_digests()) == before
    assert len(certifying.asked) == num_asked


async def test_unpublished_upload_counts_against_storage_quota(
    publish: Any, registry: Registry, small_tenant: Callable[..., Awaitable[TenantId]]
) -> None:
    size = (await publish("probe", is_dry_run=True)).version.size_bytes
    small = await small_tenant(max_stored_bytes=size + 64)
    upload, _ = await registry.uploads.resumable.create(small, "0" * 64, 100, actor="test")
    with pytest.raises(QuotaExceeded, match="uploads 100"):
        await publish(tenant=small)
    await registry.uploads.resumable.delete(small, upload.id, actor="test")
    await publish(tenant=small)


async def test_repeated_delete_and_publish_cannot_fill_store(
    publish: Any, registry: Registry, small_tenant: Callable[..., Awaitable[TenantId]]
) -> None:
    size = (await publish("probe", is_dry_run=True)).version.size_bytes
    small = await small_tenant(max_stored_bytes=size + 64)
    for seed in (0, 0, 1):
        # the same bytes twice are there once
        await publish(seed=seed, tenant=small)
        await registry.delete(small, "sql", actor="test")
    with pytest.raises(QuotaExceeded, match="kept for a restore"):
        await publish(seed=2, tenant=small)
    # but what is kept comes back
    await registry.restorer.restore(small, "sql", actor="test")


async def test_deleted_tenant_cannot_publish(publish: Any, database: Database, globex: TenantId) -> None:
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    await authenticator.tenants.delete("globex", actor="test")
    with pytest.raises(TenantNotFound):
        await publish(tenant=globex)


async def test_the_same_idempotency_key_gives_the_first_answer(
    publish: Any, registry: Registry, acme: TenantId
) -> None:
    await publish(seed=1, once=once_for())
    with pytest.raises(Replay) as caught:
        await publish(seed=1, once=once_for())
    assert caught.value.response == StoredResponse(201, {}, b"1")
    with pytest.raises(IdempotencyKeyReused):
        await publish(seed=2, once=once_for(fingerprint="other"))


async def test_concurrent_same_idempotency_key_publishes_once(publish: Any, registry: Registry, acme: TenantId) -> None:
    results = await asyncio.gather(*(publish(seed=1, once=once_for()) for _ in range(4)), return_exceptions=True)
    assert sum(isinstance(result, Published) for result in results) == 1
    assert sum(isinstance(result, Replay) and result.response.body == b"1" for result in results) == 3


async def test_idempotency_key_is_reusable_after_failure(publish: Any) -> None:
    with faults.arm("registry.before_commit", "EIO"), pytest.raises(Exception, match="can't be reached"):
        await publish(once=once_for())
    assert (await publish(once=once_for())).version.version == 1


async def test_concurrent_publishes_and_alias_moves_do_not_deadlock(
    publish: Any, registry: Registry, acme: TenantId
) -> None:
    await publish(seed=0)

    async def move(alias: str) -> None:
        for _ in range(15):
            await registry.aliases.set(acme, "sql", alias, AliasTarget(1), actor="test")

    async def push(first: int) -> None:
        for seed in range(first, first + 8):
            await publish(seed=seed)

    # whoever waits for whom ends by an error of the database
    await asyncio.gather(push(1), push(101), move("live"), move("canary"), move("other"))
    assert (await registry.get(acme, "sql")).num_versions == 17
