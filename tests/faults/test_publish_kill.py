"""kill -9 in the middle of publishing: what was acknowledged is there, what is visible is whole."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from adapters_store import LocalStore
from loraserve.db.session import Database
from loraserve.registry.records import VersionRecord
from loraserve.registry.registry import Registry
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.types import BaseSpec, TenantId

POINTS = [
    "blob.write",
    "blob.fsync",
    "blob.after_fsync",
    "blob.before_rename",
    "blob.after_rename",
    "blob.folder_fsync",
    "blob.after_folder_fsync",
    "registry.before_commit",
    "registry.after_commit",
    "registry.after_alias_commit",
]
NUM_RANDOM_KILLS = 8


async def test_acknowledged_versions_are_visible_and_visible_versions_whole(
    database_url: str, tmp_path: Path, small_base: BaseSpec, make_upload: Callable[..., tuple[bytes, bytes]]
) -> None:
    uploads = tmp_path / "uploads"
    uploads.mkdir()
    for seed in range((len(POINTS) + NUM_RANDOM_KILLS) * 10):
        config, weights = make_upload(seed)
        (uploads / f"{seed:04}.safetensors").write_bytes(weights)
    (uploads / "config.json").write_bytes(config)
    (uploads / "base.json").write_bytes(msgspec.json.encode(small_base))
    rng = random.Random(20261121)
    rounds = [f"{point}@{rng.randrange(1, 7)}" for point in POINTS]
    rounds += [f"after {rng.uniform(0, 0.5):.3f}" for _ in range(NUM_RANDOM_KILLS)]
    command = [sys.executable, str(Path(__file__).with_name("publisher.py")), database_url]
    ran = await asyncio.to_thread(
        subprocess.run,
        [*command, f"file://{tmp_path / 'blobs'}", str(uploads)],
        input="\n".join(rounds),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    acknowledged = [line.split() for line in ran.stdout.splitlines()]
    # The fault points alone let ten publishes through.
    assert sum(line[0] == "published" for line in acknowledged) >= 10

    database = Database(database_url)
    store = LocalStore(tmp_path / "blobs")
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    tenant = (await authenticator.authenticate("a" * 32)).tenant
    registry = Registry(database, store, lambda: small_base)
    visible = await all_versions(registry, tenant)
    found = {(record.name, str(record.version)): record for record in visible}

    for kind, name, *rest in acknowledged:
        if kind == "published":
            assert found[name, rest[0]].digest == rest[1]
    for record in visible:
        # `read` re-hashes.
        assert store.read(record.config_blob)
        assert store.read(record.weights_blob)
    last_moves = {name: int(rest[1]) for kind, name, *rest in acknowledged if kind == "moved"}
    for name, version in last_moves.items():
        # One more move may have been committed and not acknowledged.
        assert (await registry.aliases.get(tenant, name, "previous")).version in (version, version + 1)
    num_published = sum(line[0] == "published" for line in acknowledged)
    assert num_published <= len(visible) <= num_published + len(rounds)
    assert list((tmp_path / "blobs" / "staging").iterdir()) == []
    await database.dispose()


async def all_versions(registry: Registry, tenant: TenantId) -> list[VersionRecord]:
    versions: list[VersionRecord] = []
    cursor = None
    while True:
        page = await registry.list(tenant, limit=200, cursor=cursor)
        for adapter in page.items:
            versions += (await registry.list_versions(tenant, adapter.name, limit=200)).items
        cursor = page.next_cursor
        if cursor is None:
            return versions
