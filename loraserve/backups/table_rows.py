"""Rows of the registry's tables as JSON lines, the same for SQLite and PostgreSQL.

A file's first line names the columns, each further one is a row. Rows are read through the models,
and written through the tables as they are found: a backup of an older revision is put into tables
of that revision, which migrations then bring to this program's.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

import msgspec
from sqlalchemy import JSON, Connection, DateTime, LargeBinary, MetaData, Table, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from adapters_store.base import BlobStore
from loraserve.backups.lines import read_lines
from loraserve.backups.manifest import TableRows
from loraserve.db.models import Base, GcCandidate, Lease, RegistryIdentity, ServerRow, StoreStamp
from loraserve.errors import BackupDamaged

LEFT_OUT = frozenset(model.__tablename__ for model in (ServerRow, Lease, GcCandidate, RegistryIdentity, StoreStamp))
"""Tables about running servers and about the store: a restored registry has others."""
_AT_ONCE = 500


async def write_tables(session: AsyncSession, store: BlobStore) -> list[TableRows]:
    """Write all rows that the session sees to the backup, a blob for each table.

    Raises:
        DatabaseUnavailable, StorageFull, StorageError
    """
    return [
        await _write_table(session, table, store) for table in Base.metadata.sorted_tables if table.name not in LEFT_OUT
    ]


async def _write_table(session: AsyncSession, table: Table, store: BlobStore) -> TableRows:
    num_rows = 0
    key = list(table.primary_key.columns)
    with store.stage() as staged:
        staged.write(msgspec.json.encode([str(column.name) for column in table.columns]) + b"\n")
        query = select(*table.columns).order_by(*key).execution_options(yield_per=_AT_ONCE)
        rows = await session.stream(query)
        async for some in rows.partitions():
            staged.write(b"".join(msgspec.json.encode([_as_json(value) for value in row]) + b"\n" for row in some))
            num_rows += len(some)
        return TableRows(str(table.name), num_rows, staged.commit())


def _as_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def insert_tables(connection: Connection, store: BlobStore, tables: Iterable[TableRows]) -> None:
    """Insert all rows of the backup into empty tables, in the connection's transaction.

    Raises:
        BackupDamaged: a file doesn't fit its table.
        BlobNotFound, BlobCorrupt, StorageError
    """
    found = MetaData()
    found.reflect(connection)
    by_name = {rows.name: rows for rows in tables}
    if unknown := sorted(by_name.keys() - found.tables.keys()):
        raise BackupDamaged(f"The backup has rows of tables that its revision doesn't have: {', '.join(unknown)}.")
    for table in found.sorted_tables:
        if table.name in by_name:
            _insert_table(connection, table, store, by_name[table.name])
            _continue_numbers(connection, table)


def _insert_table(connection: Connection, table: Table, store: BlobStore, rows: TableRows) -> None:
    lines = read_lines(store, rows.blob)
    names = _decode(next(lines, b""), table)
    if not set(names) <= set(table.columns.keys()):
        raise BackupDamaged(f"The backup's rows of {table.name} have columns that its revision doesn't have.")
    readers = [_reader(table, str(name)) for name in names]
    num_rows = 0
    while some := list(islice(_rows(lines, table, names, readers), _AT_ONCE)):
        connection.execute(table.insert(), some)
        num_rows += len(some)
    if num_rows != rows.num_rows:
        raise BackupDamaged(f"The backup has {num_rows:,} rows of {table.name}; {rows.num_rows:,} were written.")


def _rows(
    lines: Iterator[bytes], table: Table, names: list[Any], readers: list[Callable[[Any], Any]]
) -> Iterator[dict[str, Any]]:
    for line in lines:
        values = _decode(line, table)
        try:
            yield {name: read(value) for name, read, value in zip(names, readers, values, strict=True)}
        except (ValueError, TypeError, binascii.Error) as error:
            raise BackupDamaged(f"A row of {table.name} in the backup can't be read.") from error


def _decode(line: bytes, table: Table) -> list[Any]:
    try:
        return msgspec.json.decode(line, type=list[Any])
    except ValueError as error:
        raise BackupDamaged(f"A line of {table.name} in the backup can't be parsed.") from error


def _reader(table: Table, name: str) -> Callable[[Any], Any]:
    kind = table.columns[name].type
    if isinstance(kind, JSON):
        # SQL's NULL, as our own columns have it, and not JSON's
        kind.none_as_null = True
    if isinstance(kind, DateTime):
        return lambda value: None if value is None else datetime.fromisoformat(value)
    if isinstance(kind, LargeBinary):
        return lambda value: None if value is None else base64.b64decode(value, validate=True)
    return lambda value: value


def _continue_numbers(connection: Connection, table: Table) -> None:
    """Let PostgreSQL's own numbers continue after the inserted ones; SQLite does by itself."""
    if connection.dialect.name != "postgresql":
        return
    for column in table.primary_key.columns:
        if not column.autoincrement or not (column.server_default is not None or column.identity is not None):
            continue
        last = connection.scalar(select(func.max(column)))
        if last is not None:
            connection.execute(
                text("SELECT setval(pg_get_serial_sequence(:table, :column), :last)"),
                {"table": table.name, "column": column.name, "last": last},
            )
