"""Sessions on the registry's database, SQLite or PostgreSQL, with the same guarantees on both.

When `Database.write()` leaves without an exception, its changes survive a power cut: SQLite runs in
WAL mode with ``synchronous = FULL``, PostgreSQL with its own default. SQLite's writers take the
write lock at the start (``BEGIN IMMEDIATE``), so that a transaction never fails half-way because
another one wrote. Writes to a SQLite file that isn't at its path any more aren't acknowledged
(`loraserve.db.database_file`).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from loraserve.db.database_file import DatabaseFile
from loraserve.db.space_reserve import SpaceReserve
from loraserve.errors import ConfigError, DatabaseDamaged, DatabaseUnavailable, LoraserveError, Overloaded, StorageFull

logger = logging.getLogger(__name__)

WRITE = "loraserve_write"
"""Execution option of connections whose transactions write."""

POSTGRES_CONNECTIONS = 10
"""Connections that a process has open at most."""

_BUSY_S = 2.0
"""Silence in seconds before the database counts as unreachable."""

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


def parse_database_url(url: str) -> URL:
    """Parse the URL, and set the asynchronous driver that we use.

    Accepts ``sqlite:///PATH`` and ``postgresql://USER:PASSWORD@HOST:PORT/NAME`` (also
    ``postgres://``; ``sslmode`` is understood).

    Raises:
        ConfigError: another database, a SQLite database in memory (nothing would survive the
            process), or no URL at all.
    """
    expected = "Expected sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/NAME in LORASERVE_DATABASE_URL."
    try:
        # make_url has no driver-less "postgres" and isn't to import one.
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise ConfigError("The database URL can't be parsed.", hint=expected) from error
    backend = parsed.drivername.partition("+")[0]
    if backend == "sqlite":
        if not parsed.database or ":memory:" in parsed.database or parsed.query:
            raise ConfigError("The SQLite database URL needs the path of a file and takes no options.", hint=expected)
        return parsed.set(drivername="sqlite+aiosqlite")
    if backend in ("postgresql", "postgres"):
        query = dict(parsed.query)
        if "sslmode" in query:
            # asyncpg's connect() calls libpq's sslmode `ssl` and takes the same words.
            query["ssl"] = query.pop("sslmode")
        return parsed.set(drivername="postgresql+asyncpg", query=query)
    raise ConfigError(f'The database URL names "{backend}", which isn\'t supported.', hint=expected)


def make_engine(
    url: str, *, busy_timeout_s: float = 5.0, enforce_foreign_keys: bool = True, file: DatabaseFile | None = None
) -> AsyncEngine:
    """Create an engine with our settings on each connection.

    For a SQLite database, create the folder (0700) and the file (0600) too.

    Args:
        file: file of the SQLite database, if it is open already.

    Raises:
        ConfigError: the URL is invalid, or its folder can't be created.
    """
    parsed = parse_database_url(url)
    if parsed.drivername.startswith("postgresql"):
        if find_spec("asyncpg") is None:
            raise ConfigError("PostgreSQL needs asyncpg.", hint='Run: pip install "loraserve[postgres]"')
        return create_async_engine(
            parsed,
            pool_pre_ping=True,
            pool_size=POSTGRES_CONNECTIONS,
            max_overflow=0,
            pool_timeout=busy_timeout_s,
            connect_args={"timeout": busy_timeout_s, "command_timeout": 30},
        )
    file = file or DatabaseFile(Path(parsed.database or ""))
    engine = create_async_engine(
        file.url(parsed),
        pool_size=8,
        max_overflow=0,
        pool_timeout=busy_timeout_s,
        connect_args={"timeout": busy_timeout_s, "factory": _RollingBack},
    )

    @event.listens_for(engine.sync_engine, "connect")
    def set_pragmas(connection: Any, _record: Any) -> None:
        # The driver must not open transactions by itself: `begin` below chooses the kind.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(busy_timeout_s * 1000)}")
        _use_wal(cursor, busy_timeout_s)
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute(f"PRAGMA foreign_keys = {'ON' if enforce_foreign_keys else 'OFF'}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        is_write = connection.get_execution_options().get(WRITE, False)
        # A deferred transaction that turns into a writer fails at once when another wrote since; an
        # immediate one waits.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

    file.watch(engine.sync_engine)
    return engine


class _RollingBack(sqlite3.Connection):
    """Connection whose transaction ends when it is closed.

    A task that is cancelled in the middle of a statement leaves a cursor, and with it the closed
    connection's transaction, which would lock the database until the cursor is collected
    (https://sqlite.org/c3ref/close.html: a connection with statements becomes a zombie).
    """

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self.rollback()
        super().close()


def _use_wal(cursor: Any, patience_s: float) -> None:
    """Switch the database to WAL mode, retrying while it is busy.

    SQLite's busy timeout doesn't cover this change.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            is_busy = getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not is_busy or time.monotonic() > deadline_s:
                raise
            time.sleep(0.005)
        else:
            return


@contextmanager
def database_errors(is_silent: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Turn the drivers' errors into ours.

    "Not now" becomes `DatabaseUnavailable`, "no room" `StorageFull`, and "not like this" (no such
    database, no such user) `ConfigError`. Other errors, such as a violated constraint, pass as they
    are.

    Args:
        is_silent: returns whether the database is silent; otherwise a connection timeout means that
            it is only busy.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, PoolTimeout) and not is_silent():
            raise Overloaded(
                "The server's queue for database connections is full.", hint="Try again in a moment."
            ) from error
        translated = _translate(error)
        if translated is None:
            raise
        raise translated from error


def damaged(found: str) -> DatabaseDamaged:
    """Build the error for a database whose bytes aren't what was written."""
    return DatabaseDamaged(
        f"The registry's database is damaged, truncated, or no database at all: {found}.",
        hint="Restore a backup, or check LORASERVE_DATABASE_URL.",
    )


_SQLITE_AWAY = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
}
_SQLITE_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# Classes of SQLSTATE: connection lost, transaction rolled back (deadlock), out of resources, lock
# not to be had, operator's shutdown.
_POSTGRES_AWAY = {"08", "40", "53", "55", "57"}
_POSTGRES_CONFIG = {"28", "3D"}
_POSTGRES_DAMAGED = {"XX001", "XX002"}


def _translate(error: Exception) -> LoraserveError | None:
    unavailable = DatabaseUnavailable("The registry's database can't be reached now.", hint="Try again in a moment.")
    # asyncpg lets what goes wrong while connecting through unwrapped. TimeoutError is an OSError
    # too.
    if isinstance(error, OSError | PoolTimeout | InterfaceError):
        return unavailable
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        # The low byte is the kind, the rest has details.
        kind = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if kind == sqlite3.SQLITE_FULL:
            return StorageFull("The database's disk is full.", hint="Free some space; nothing was written.")
        if kind in _SQLITE_DAMAGED:
            return damaged(str(cause))
        return unavailable if kind in _SQLITE_AWAY else None
    state = str(getattr(cause, "sqlstate", None) or "")
    if state in _POSTGRES_DAMAGED:
        return damaged(str(cause))
    if state[:2] in _POSTGRES_CONFIG:
        return ConfigError(f"The database refuses the connection: {cause}.", hint="Check LORASERVE_DATABASE_URL.")
    if state[:2] in _POSTGRES_AWAY or (isinstance(error, DBAPIError) and error.connection_invalidated):
        return unavailable
    return None


class Database:
    """Pool of connections, used through `read()`, `read_columns()` and `write()`.

    A block under any of them does database work only: no files, no network, no other waiting.
    """

    def __init__(self, url: str, *, busy_timeout_s: float = 5.0) -> None:
        parsed = parse_database_url(url)
        is_sqlite = parsed.drivername.startswith("sqlite")
        self._file = DatabaseFile(Path(parsed.database or "")) if is_sqlite else None
        self._reserve = None if self._file is None else SpaceReserve(self._file.reserve_path)
        self._has_failed = False
        self._engine = make_engine(url, busy_timeout_s=busy_timeout_s, file=self._file)
        self._is_sqlite = self._engine.dialect.name == "sqlite"
        read_options: dict[str, Any] = (
            {} if self._is_sqlite else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        )
        self._read_engine = self._engine.execution_options(**read_options)
        self._readers = async_sessionmaker(self._read_engine, expire_on_commit=False)
        self._writers = async_sessionmaker(self._engine.execution_options(**{WRITE: True}), expire_on_commit=False)
        # SQLite has one writer; queueing here is fair, its busy handler isn't.
        self._write_lock = asyncio.Lock()
        self._answered_at = time.monotonic()

        @event.listens_for(self._engine.sync_engine, "after_cursor_execute")
        def note_answer(*_: Any) -> None:
            self._answered_at = time.monotonic()

    def reserve_space(self) -> None:
        """Reserve space for deletions on the disk of a SQLite database."""
        if self._reserve is not None:
            self._reserve.hold()

    @property
    def is_cancellable(self) -> bool:
        """Whether cancelling a query frees its connection, as on PostgreSQL.

        On SQLite, its thread continues.
        """
        return not self._is_sqlite

    def silence_s(self) -> float:
        """Compute the seconds since the database answered a statement of this process."""
        return time.monotonic() - self._answered_at

    def is_silent(self) -> bool:
        """Check whether the database has been silent for long.

        Then waits for connections are its fault.
        """
        return self.silence_s() >= _BUSY_S

    @property
    def is_available(self) -> bool:
        """Whether the last write reached the database and its file is in place.

        A server's heartbeat writes every 2 s.
        """
        try:
            self._check_file()
        except DatabaseUnavailable:
            return False
        return not self._has_failed

    def _check_file(self) -> None:
        if self._file is not None:
            self._file.check()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate errors as `database_errors` does.

        The details that are meant for the operator are logged. These errors are shown to tenants,
        and drivers' messages contain user names and paths.
        """
        try:
            with database_errors(self.is_silent):
                yield
        except (DatabaseDamaged, ConfigError) as error:
            if error.__cause__ is None:
                # the block itself raised it
                raise
            logger.error("%s", error)
            if isinstance(error, DatabaseDamaged):
                raise DatabaseDamaged(
                    "The registry's database is damaged.", hint="The server's operator must restore a backup."
                ) from error
            raise DatabaseUnavailable("The registry's database can't be reached now.") from error

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Open a session that sees one consistent state and writes nothing.

        Raises:
            DatabaseUnavailable: there is no connection, or it broke.
        """
        with self._errors():
            async with self._readers() as session, session.begin():
                yield session

    @asynccontextmanager
    async def read_columns(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection as `read` does, for statements that select columns.

        A session's overhead would be half the query's time.

        Raises:
            DatabaseUnavailable: there is no connection, or it broke.
        """
        with self._errors():
            # ends with a rollback: there is nothing to commit
            async with self._read_engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def write(self, *, frees_space: bool = False) -> AsyncIterator[AsyncSession]:
        """Open a session whose changes are durable after the block, or undone if it raises.

        Args:
            frees_space: whether they delete something, and so may use what is reserved for that on
                a full disk.

        Raises:
            DatabaseUnavailable: no connection, it broke, another writer held the lock too long, or
                its file was moved away.
            StorageFull: no room on the database's disk.
        """
        try:
            with self._errors():
                async with AsyncExitStack() as stack:
                    if self._is_sqlite:
                        await stack.enter_async_context(self._write_lock)
                    self._check_file()
                    if self._reserve is not None:
                        if frees_space:
                            self._reserve.release()
                        stack.callback(self._reserve.restore)
                    session = await stack.enter_async_context(self._writers())
                    await stack.enter_async_context(session.begin())
                    # The lock is taken now, not at the first statement.
                    await session.connection()
                    yield session
                # don't acknowledge a commit to a file that is gone meanwhile
                self._check_file()
        except DatabaseUnavailable:
            self._has_failed = True
            raise
        self._has_failed = False

    async def dispose(self) -> None:
        """Close every connection."""
        await self._engine.dispose()
