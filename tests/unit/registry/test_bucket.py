"""The registry over a bucket: two servers on one, uploads in chunks, and what is collected."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bucket import BucketService, bucket_service

from adapters_store import BlobStore, open_store
from loraserve.db.session import Database, utc_now
from loraserve.registry.registry import Registry
from loraserve.registry.storage_gc.collector import Collector
from loraserve.types import BaseSpec, TenantId


@pytest.fixture
def service() -> Iterator[BucketService]:
    pytest.importorskip("obstore", reason="needs obstore")
    with bucket_service() as running:
        yield running


@pytest.fixture
def stores(
    service: BucketService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[list[BlobStore]]:
    """Two servers' stores on one bucket."""
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    # moto's buckets outlive its server
    url = service.make("s" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]) + "/blobs"
    stores = [open_store(url, spool=tmp_path / f"spool{number}") for number in range(2)]
    yield stores
    for store in stores:
        store.close()


async def piece(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_upload_across_two_servers_is_published_without_chunks(
    stores: list[BlobStore], database: Database, small_base: BaseSpec, acme: TenantId, make_upload: Any
) -> None:
    config, data = make_upload()
    one, two = (Registry(database, store, lambda: small_base) for store in stores)
    await asyncio.gather(one.claim.open(), two.claim.open())
    upload, _ = await one.uploads.resumable.create(acme, hashlib.sha256(data).hexdigest(), len(data), actor="x")
    await one.uploads.resumable.receive(acme, upload.id, 0, 100, len(data), piece(data[:100]))
    done = await two.uploads.resumable.receive(acme, upload.id, 100, len(data), len(data), piece(data[100:]))
    assert done.is_complete
    stored = await one.uploads.resumable.stored(acme, upload.sha256)
    version = (await one.publisher.publish(acme, "sql", config, stored, actor="x")).version
    assert bytes(stores[1].read(version.weights_blob)) == data
    passed = [0.0]
    collector = Collector(
        database,
        stores[1],
        two.claim,
        retention_s=0,
        grace_s=10,
        clock=lambda: utc_now() + timedelta(seconds=passed[-1]),
        monotonic=lambda: passed[-1],
    )
    assert await collector.collect()
    passed.append(11.0)
    assert await collector.collect()
    assert collector.num_blobs == 2
    assert set(stores[0].iter_digests()) == {version.config_blob, version.weights_blob}
