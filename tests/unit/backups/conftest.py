from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from adapters_store import BlobStore, LocalStore
from loraserve.backups.backup import Backup, Made
from loraserve.backups.folder import BackupFolder
from loraserve.db.session import Database
from loraserve.registry.registry import Registry
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.types import AdapterRef, BaseSpec, Certificate, TenantId

DAY = timedelta(days=1)


@dataclass
class Site:
    """A registry with its database and its store."""

    url: str
    database: Database
    store: BlobStore
    registry: Registry
    authenticator: Authenticator

    async def tenant(self, name: str) -> TenantId:
        return (await self.authenticator.tenants.create(name, actor="test")).id

    async def back_up(self, folder: BackupFolder, **how: Any) -> Made:
        return await Backup(self.database, self.store, folder, **{"retention": DAY, **how}).make(actor="test")


@pytest.fixture
async def make_site(
    small_base: BaseSpec, make_certificate: Callable[..., Certificate]
) -> AsyncIterator[Callable[..., Awaitable[Site]]]:
    sites: list[Site] = []

    async def certify(_: AdapterRef) -> Certificate:
        return make_certificate()

    async def make(url: str, store: BlobStore, base: BaseSpec = small_base) -> Site:
        database = Database(url)
        authenticator = Authenticator(database, admin_key="a" * 32)
        site = Site(url, database, store, Registry(database, store, lambda: base, certify=certify), authenticator)
        sites.append(site)
        await site.registry.claim.open()
        await authenticator.open()
        return site

    yield make
    for site in sites:
        await site.database.dispose()


@pytest.fixture
async def site(make_site: Any, database_url: str, tmp_path: Path) -> Site:
    made: Site = await make_site(database_url, LocalStore(tmp_path / "blobs"))
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[BackupFolder]:
    folder = BackupFolder(tmp_path / "backups", is_made=True)
    yield folder
    folder.close()


@pytest.fixture
def publish(make_upload: Callable[..., tuple[bytes, bytes]]) -> Callable[..., Any]:
    """A function that publishes the adapter of a seed, as the HTTP side does."""

    async def run(site: Site, tenant: TenantId, name: str, seed: int = 0) -> Any:
        config, weights = make_upload(seed)
        staged = await site.registry.uploads.stage(tenant)
        try:
            staged.write(weights)
            return await site.registry.publisher.publish(tenant, name, config, staged, actor="test")
        finally:
            await site.registry.uploads.release(tenant, staged)

    return run
