"""Journal of a server's usage that isn't in the database yet.

It is a file that survives the death of its process. Each server process has one file in a folder
that may be shared, locked while the process lives. An entry is one line, written by one ``write``:
the CRC-32 of the rest, a sequence number, and sums. A line cut short by a kill is no entry; nothing
was acknowledged on it. A power cut may lose what wasn't synced: a second or so while the database
answers.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from ulid import ULID

from loraserve import faults
from loraserve.errors import ConfigError

SUFFIX = ".journal"
REFUSED_SUFFIX = ".refused"
_NEW_SUFFIX = ".new"
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class UsageKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Key by which usage is summed; identifies a row of the table of hours."""

    tenant: str
    hour: int
    """Hours since 1970, in UTC."""
    owner: str
    adapter: str
    version: int
    price: str


class Amounts(msgspec.Struct, frozen=True, array_like=True):
    """Amounts of usage."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    undelivered_tokens: int = 0
    # behind those of journals that earlier servers left
    num_cached_requests: int = 0
    cached_completion_tokens: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.num_requests + other.num_requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.undelivered_tokens + other.undelivered_tokens,
            self.num_cached_requests + other.num_cached_requests,
            self.cached_completion_tokens + other.cached_completion_tokens,
        )


Totals = dict[UsageKey, Amounts]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Usage recorded since the previous entry."""

    sequence: int
    amounts: tuple[tuple[UsageKey, Amounts], ...]


def add_to(totals: Totals, amounts: Iterable[tuple[UsageKey, Amounts]]) -> None:
    for key, amount in amounts:
        known = totals.get(key)
        totals[key] = amount if known is None else known + amount


@dataclass(frozen=True, slots=True)
class OrphanedJournal:
    """Journal whose process is gone, locked until `close` so that no other process counts it."""

    id: str
    path: Path
    fd: int

    def entries(self) -> list[Entry]:
        """Read the complete entries in order."""
        return list(_read_entries(self.fd))

    def remove(self) -> None:
        """Delete the file durably."""
        with suppress(FileNotFoundError):
            self.path.with_suffix(_NEW_SUFFIX).unlink()
        _unlink(self.path)

    def preserve(self) -> Path:
        """Link the file to a second name that is never counted.

        `remove` leaves it there, for inspection by people.
        """
        refused = self.path.with_suffix(REFUSED_SUFFIX)
        with suppress(FileExistsError):
            refused.hardlink_to(self.path)
        return refused

    def close(self) -> None:
        os.close(self.fd)


class Journal:
    """Journal of this process. Entries are numbered from 1; a number is never reused.

    All methods make a few system calls on a file of kilobytes, and only `sync` waits for the disk.
    """

    def __init__(self, folder: Path) -> None:
        """Create an empty journal.

        Raises:
            ConfigError: the folder can't be made or written to.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            while True:
                self.id = str(ULID())
                self._path = folder / f"{self.id}{SUFFIX}"
                self._fd = _open_locked(self._path)
                # Another process may have counted and removed it before it was locked.
                if os.fstat(self._fd).st_nlink:
                    break
                os.close(self._fd)
        except OSError as error:
            raise ConfigError(
                f"The usage journal can't be written in {folder} ({error.strerror}).",
                hint="Give a writable --data-dir.",
            ) from error
        self.sequence = 0
        """Number of the last entry."""
        self.num_bytes = 0

    def append(self, amounts: Mapping[UsageKey, Amounts]) -> None:
        """Append an entry that survives this process, however it ends.

        Raises:
            OSError: the entry wasn't written completely; the file is unchanged, but its number is
                used up.
        """
        self.sequence += 1
        line = _encode(Entry(self.sequence, tuple(amounts.items())))
        try:
            faults.hit("usage.before_write")
            _write_all(self._fd, line)
            faults.hit("usage.after_write")
        except OSError:
            # Half a line would hide the entries behind it.
            with suppress(OSError):
                os.ftruncate(self._fd, self.num_bytes)
            raise
        self.num_bytes += len(line)

    def clear(self) -> None:
        """Empty the journal after all of it was counted."""
        if not self.num_bytes:
            return
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            self.num_bytes = 0

    def compact(self, units: Iterable[tuple[int, Mapping[UsageKey, Amounts]]]) -> None:
        """Replace the journal's entries by these, the sums of all that isn't counted.

        Args:
            units: entries with ascending numbers, none above `sequence`.

        Raises:
            OSError: the journal is unchanged.
        """
        data = b"".join(_encode(Entry(number, tuple(amounts.items()))) for number, amounts in units)
        path = self._path.with_suffix(_NEW_SUFFIX)
        with suppress(FileNotFoundError):
            path.unlink()
        fd = _open_locked(path)
        try:
            _write_all(fd, data)
            path.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self.num_bytes = fd, len(data)

    def sync(self) -> None:
        """Wait until the written entries survive a power cut.

        Raises:
            OSError: they may not.
        """
        os.fsync(self._fd)

    def remove(self) -> None:
        """Delete the file durably."""
        _unlink(self._path)

    def close(self) -> None:
        """Close the file and leave it for the next start to count."""
        os.close(self._fd)


def orphaned_journals(folder: Path) -> Iterator[OrphanedJournal]:
    """Yield the journals in the folder whose processes are gone, locked; the caller closes them."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            continue
        if not os.fstat(fd).st_nlink:
            # Another process has counted it meanwhile.
            os.close(fd)
            continue
        yield OrphanedJournal(path.stem, path, fd)


def _open_locked(path: Path) -> int:
    fd = os.open(path, _APPEND, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # A reader locked it first and finds it empty.
        fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _unlink(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _encode(entry: Entry) -> bytes:
    # msgspec escapes line ends.
    body = msgspec.json.encode(entry)
    return b"%08x %b\n" % (zlib.crc32(body), body)


def _read_entries(fd: int) -> Iterator[Entry]:
    """Yield the entries up to the first incomplete one."""
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        for line in file:
            crc, _, body = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(body):
                return
            try:
                yield msgspec.json.decode(body, type=Entry)
            except msgspec.DecodeError:
                return
