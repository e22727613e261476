"""Leases: what one server does for all of them, until it stops renewing.

They save work, they guard nothing: what is done under one must be safe when two do it.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, or_
from sqlalchemy.dialects import postgresql, sqlite

from loraserve.db.models import Lease
from loraserve.db.session import Database


async def hold_lease(database: Database, name: str, holder: str, now: datetime, length: timedelta) -> bool:
    """Whether `holder` does `name` until `now` + `length`: nobody else does, or their lease has ended.

    Raises:
        DatabaseUnavailable
    """
    async with database.write() as session:
        insert: Any = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
        values = {"name": name, "holder": holder, "expires_at": now + length}
        statement = insert(Lease).values(values)
        held = await session.scalar(
            statement.on_conflict_do_update(
                index_elements=["name"],
                set_={"holder": holder, "expires_at": now + length},
                where=or_(Lease.holder == holder, Lease.expires_at <= now),
            ).returning(Lease.holder)
        )
    return bool(held == holder)


async def give_up_lease(database: Database, name: str, holder: str) -> None:
    """Another server may do `name` at once, if it was `holder` that did.

    Raises:
        DatabaseUnavailable
    """
    async with database.write() as session:
        await session.execute(delete(Lease).where(Lease.name == name, Lease.holder == holder))
