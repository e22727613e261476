"""File of a SQLite database: check that the open file is still the one at its path.

SQLite keeps its files open, so writes to a file that was renamed, deleted or replaced under a
running server are lost. `DatabaseFile` compares the path with the opened file, and keeps
connections from creating an empty file instead of a lost one.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Engine, event

from loraserve.errors import ConfigError, DatabaseUnavailable


class DatabaseFile:
    """File of a SQLite database and its log (``-wal``), as they were when opened."""

    def __init__(self, path: Path) -> None:
        """Create the file, readable by its owner only, if it doesn't exist.

        Raises:
            ConfigError: the file can't be created or opened.
        """
        self.path = path.absolute()
        self._opened = _make_private_file(self.path)
        # SQLite puts the log next to the file itself, where the path is a link to it
        self._log_path = Path(f"{os.path.realpath(self.path)}-wal")
        self.reserve_path = Path(f"{os.path.realpath(self.path)}-reserve")
        """File of the space that is kept for deletions."""
        self._log: tuple[int, int] | None = None
        self._num_connections = 0

    def check(self) -> None:
        """Check that the files that connections have open are those at their paths.

        Raises:
            DatabaseUnavailable: a file was moved, replaced or deleted.
        """
        is_there = _identity(self.path) == self._opened
        if is_there and (self._log is None or _identity(self._log_path) == self._log):
            return
        raise DatabaseUnavailable(
            "The registry's database was moved, replaced or deleted while the server ran; nothing was written.",
            hint="The server's operator must put the file back, or restart the server.",
        )

    def url(self, parsed: URL) -> URL:
        """Build the URL of connections that open this file and never create one."""
        return parsed.set(database=f"file:{quote(str(self.path))}", query={"mode": "rw", "uri": "true"})

    def watch(self, engine: Engine) -> None:
        """Check the files before each connection, and remember the shared log.

        Call this after adding the pragmas' listener.
        """

        @event.listens_for(engine, "do_connect")
        def check(*_: object) -> None:
            self.check()

        @event.listens_for(engine, "connect")
        def opened(*_: object) -> None:
            # the log is the same from the first connection to the last
            self._num_connections += 1
            if self._log is None:
                self._log = _identity(self._log_path)

        @event.listens_for(engine, "close")
        def closed(*_: object) -> None:
            self._num_connections -= 1
            if not self._num_connections:
                self._log = None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _make_private_file(path: Path) -> tuple[int, int]:
    """Create `path`, readable by its owner only, if absent; return device and inode.

    SQLite's -wal and -shm get its mode.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"The database file {path} can't be opened ({error.strerror}).",
            hint="Give a writable --data-dir or another LORASERVE_DATABASE_URL.",
        ) from error
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    return found.st_dev, found.st_ino
