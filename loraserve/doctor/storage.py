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
from loraserve.limits import GIB, LIMITS, MIB
from loraserve.planning.machine import nearest_folder

DATABASE_TIMEOUT_S = 20.0
MIN_FREE_BYTES = 256 * MIB
MIN_FILES, FILES_BESIDE_REQUESTS = 256, 256


def check_data_dir(data_dir: Path) -> Iterator[Check]:
    """That what is written there is written, and is on the disk when fsync says so. What was tried is gone afterwards."""
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
        expected = "to be written and synced (fsync) by this user"
        yield fail("data_dir", f"{folder}: {error.strerror}", expected, "Give another --data-dir, or mend its owner.")
        return
    finally:
        for left in (path, moved):
            left.unlink(missing_ok=True)
    yield ok("data_dir", f"{data_dir} can be written and synced" + ("" if folder == data_dir else f" (in {folder})"))


def check_disk(data_dir: Path) -> Iterator[Check]:
    """Room for uploads."""
    free = shutil.disk_usage(nearest_folder(data_dir)).free
    found, wanted = f"{free / GIB:.1f} GiB free", LIMITS.max_upload_bytes
    if free < MIN_FREE_BYTES:
        yield fail("disk", found, f"at least {MIN_FREE_BYTES / MIB:.0f} MiB", "Make room, or move --data-dir.")
    elif free < wanted:
        yield warn("disk", found, f"{wanted / GIB:.1f} GiB, the largest upload", "Make room, or move --data-dir.")
    else:
        yield ok("disk", found)


def check_database(url: str) -> Iterator[Check]:
    """That it answers and has the tables that this program works with. Makes nothing."""
    parts = urlsplit(url)
    if parts.scheme.partition("+")[0] == "sqlite":
        path = Path(unquote(parts.path)[1:] if parts.path.startswith("//") or not parts.path else parts.path)
        if not path.exists():
            yield ok("database", f"{path} isn't there yet: the first start makes it")
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
            "Is it up, and reachable from here?",
        )
        return
    if revision is None:
        yield ok("database", "empty: the first start makes its tables")
    elif differences:
        found = "; ".join(differences[:3]) + (f" and {len(differences) - 3} more" if len(differences) > 3 else "")
        yield fail(
            "database", found, "the tables that this program makes", "Somebody changed them by hand: restore a backup."
        )
    else:
        yield ok("database", f"at revision {revision}, as this program")


def check_files() -> Iterator[Check]:
    """How many files this user may have open: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMITS.max_live_requests + FILES_BESIDE_REQUESTS
    found = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} open files"
    advice = f"ulimit -n {wanted} (the hard limit is {hard:,}), or LimitNOFILE= of its unit."
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield ok("files", found)
    elif soft < MIN_FILES:
        yield fail("files", found, f"at least {MIN_FILES}", advice)
    else:
        yield warn("files", found, f"{wanted:,}: {LIMITS.max_live_requests:,} requests may be live at once", advice)
