"""The data directory, the disk below it, and the registry's database."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from loraserve.doctor.checks import Check, fail, ok, warn
from loraserve.errors import LoraserveError, StoreMismatch
from loraserve.limits import GIB, LIMITS, MIB
from loraserve.planning.machine import nearest_folder

DATABASE_TIMEOUT_S = 20.0
MIN_FREE_BYTES = 256 * MIB
MIN_FILES, FILES_BESIDE_REQUESTS = 256, 256


def check_data_dir(data_dir: Path) -> Iterator[Check]:
    """Check that files can be written and synced there; the test file is removed."""
    folder = nearest_folder(data_dir)
    path = folder / f".doctor-{secrets.token_hex(8)}"
    moved = path.with_suffix(".moved")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"loraserve")
            os.fsync(fd)
        finally:
            os.close(fd)
        path.rename(moved)
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)
    except OSError as error:
        expected = "a folder that this user can write and sync (fsync)"
        yield fail(
            "data_dir",
            f"{folder}: {error.strerror}",
            expected,
            "Give another --data-dir, or change the folder's owner.",
        )
        return
    finally:
        for left in (path, moved):
            left.unlink(missing_ok=True)
    yield ok("data_dir", f"{data_dir} can be written and synced" + ("" if folder == data_dir else f" (in {folder})"))


def check_disk(data_dir: Path) -> Iterator[Check]:
    """Check the room for uploads."""
    free = shutil.disk_usage(nearest_folder(data_dir)).free
    found, wanted = f"{free / GIB:.1f} GiB free", LIMITS.max_upload_bytes
    if free < MIN_FREE_BYTES:
        yield fail("disk", found, f"at least {MIN_FREE_BYTES / MIB:.0f} MiB", "Free some space, or move --data-dir.")
    elif free < wanted:
        yield warn("disk", found, f"{wanted / GIB:.1f} GiB, the largest upload", "Free some space, or move --data-dir.")
    else:
        yield ok("disk", found)


def check_database(url: str) -> Iterator[Check]:
    """Check that the database answers and has this program's tables. Creates nothing."""
    path = _path_of(url)
    if path is not None and not path.exists():
        yield ok("database", f"{path} doesn't exist yet: the first start creates it")
        return
    from loraserve.db import migrate

    async def look() -> tuple[str | None, list[str]]:
        async with asyncio.timeout(DATABASE_TIMEOUT_S):
            revision = await migrate.current(url)
            if revision is None:
                return None, []
            await migrate.check(url)
            return revision, await migrate.differences(url)

    try:
        revision, differences = asyncio.run(look())
    except TimeoutError:
        yield fail(
            "database",
            f"no answer within {DATABASE_TIMEOUT_S:.0f} s",
            "an answer",
            "Check that the database runs and can be reached from here.",
        )
        return
    if revision is None:
        yield ok("database", "empty: the first start creates its tables")
    elif differences:
        found = "; ".join(differences[:3]) + (f" and {len(differences) - 3} more" if len(differences) > 3 else "")
        yield fail(
            "database", found, "the tables that this program creates", "They were changed by hand: restore a backup."
        )
    else:
        yield ok("database", f"at revision {revision}, the one that this program needs")


def check_store(store_url: str, database_url: str) -> Iterator[Check]:
    """Check that the store is the registry's, by its marker. Makes nothing and claims nothing."""
    from adapters_store import open_store
    from loraserve.db.session import Database
    from loraserve.registry.storage_gc.store_claim import StoreClaim

    for url in (store_url, database_url):
        path = _path_of(url)
        if path is not None and not path.exists():
            yield ok("store", f"{path} doesn't exist yet: the first start creates it")
            return

    async def look() -> StoreMismatch | None:
        store, database = open_store(store_url), Database(database_url)
        try:
            async with asyncio.timeout(DATABASE_TIMEOUT_S):
                return await StoreClaim(database, store, where=f"the store {store_url}").why_not()
        finally:
            store.close()
            await database.dispose()

    problem = asyncio.run(look())
    if problem is None:
        yield ok("store", "it belongs to this registry, or is unclaimed")
    else:
        yield fail("store", problem.message, "this registry's own store", problem.hint or "")


def _path_of(url: str) -> Path | None:
    """Parse the path of a file:// store or a SQLite database; None for others."""
    parts = urlsplit(url)
    scheme = parts.scheme.partition("+")[0]
    if scheme == "file":
        return Path(unquote(parts.path))
    if scheme == "sqlite":
        return Path(unquote(parts.path)[1:] if parts.path.startswith("//") or not parts.path else parts.path)
    return None


def check_bases(url: str, served: str | None) -> Iterator[Check]:
    """Check that the registry's versions are of the base that is served: others are refused there.

    Yields nothing for a registry without tables.

    Args:
        served: the digest of the base that a server on this registry has; None: there is no such
            server to query.
    """
    path = _path_of(url)
    if path is not None and not path.exists():
        return
    from sqlalchemy import func, select

    from loraserve.db import migrate
    from loraserve.db.models import Adapter, AdapterVersion, Tenant
    from loraserve.db.session import Database

    query = (
        select(AdapterVersion.base_digest, func.count())
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(AdapterVersion.deleted_at.is_(None), Adapter.deleted_at.is_(None), Tenant.deleted_at.is_(None))
        .group_by(AdapterVersion.base_digest)
        .order_by(AdapterVersion.base_digest)
    )

    async def look() -> dict[str, int] | None:
        async with asyncio.timeout(DATABASE_TIMEOUT_S):
            if await migrate.current(url) is None:
                return None
            await migrate.check(url)
            database = Database(url)
            try:
                async with database.read() as session:
                    return dict((await session.execute(query)).all())
            finally:
                await database.dispose()

    try:
        counts = asyncio.run(look())
    except (TimeoutError, LoraserveError):
        # `check_database` reports what is wrong with it
        return
    if counts is None:
        return
    words = ", ".join(f"{count:,} of base sha256:{digest[:12]}" for digest, count in counts.items())
    found = f"versions: {words}" if words else "no versions yet"
    others = {digest for digest in counts if digest != served}
    if served is None and len(counts) > 1:
        yield warn("bases", found, "one base, or a server for each", "Each version is served on its own base only.")
    elif served is not None and others:
        num = sum(counts[digest] for digest in others)
        advice = "Serve their base, or verify them on this one: loraserve adapter verify NAME@VERSION --rebase"
        yield warn("bases", f"{found}: {num:,} aren't served", f"the server's base, sha256:{served[:12]}", advice)
    else:
        yield ok("bases", found)


def check_files() -> Iterator[Check]:
    """Check how many files this user may have open: each connection is one.

    The server raises its soft limit to the hard one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMITS.max_live_requests + FILES_BESIDE_REQUESTS
    found = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} open files"
    advice = f"Raise it with ulimit -Hn {wanted}, or LimitNOFILE= in the server's unit."
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        yield ok("files", found)
    elif hard < MIN_FILES:
        yield fail("files", found, f"at least {MIN_FILES}", advice)
    else:
        yield warn("files", found, f"{wanted:,}: {LIMITS.max_live_requests:,} requests may be live at once", advice)
