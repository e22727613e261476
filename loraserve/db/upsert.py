"""Insert rows or change those that exist.

One statement does it that SQLite and PostgreSQL both understand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, inspect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import Base

_ROWS_PER_STATEMENT = 500
"""Rows in one statement; SQLite accepts 32,766 values in all."""


async def upsert(
    session: AsyncSession,
    model: type[Base],
    rows: Sequence[Mapping[str, Any]],
    *,
    add: Sequence[str] = (),
    replace: Sequence[str] = (),
    where: ColumnElement[bool] | None = None,
) -> int:
    """Insert the rows, and return how many were inserted or changed.

    A row that violates a unique constraint is skipped. With `add` or `replace`, a row whose primary
    key exists changes the existing one instead.

    Args:
        rows: column values, the same columns in each row. Order them by primary key if there are
            several: transactions that lock the same rows in different orders can deadlock.
        add: columns whose values are added to those of the existing row.
        replace: columns whose values replace those of the existing row.
        where: condition on the existing row; it stays as it is where the condition is false.

    Raises:
        IntegrityError: a row refers to one that doesn't exist.
    """
    insert: Any = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    key = inspect(model).primary_key
    num_written = 0
    for start in range(0, len(rows), _ROWS_PER_STATEMENT):
        statement = insert(model).values([dict(row) for row in rows[start : start + _ROWS_PER_STATEMENT]])
        if add or replace:
            table = model.__table__.c
            changes = {name: table[name] + statement.excluded[name] for name in add}
            changes |= {name: statement.excluded[name] for name in replace}
            statement = statement.on_conflict_do_update(index_elements=key, set_=changes, where=where)
        else:
            statement = statement.on_conflict_do_nothing()
        num_written += len((await session.execute(statement.returning(key[0]))).all())
    return num_written
