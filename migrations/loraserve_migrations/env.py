"""Alembic's entry: run the migrations on the connection that `loraserve.db.migrate` opened.

For `alembic revision --autogenerate` in a checkout, LORASERVE_DATABASE_URL names the database to
compare with.
"""

from __future__ import annotations

import asyncio
import os
from typing import Literal

from alembic import context
from sqlalchemy import Connection

from loraserve.db.models import Base, UtcDateTime
from loraserve.db.session import WRITE, make_engine


def render_type(kind: str, item: object, _context: object) -> str | Literal[False]:
    """Render our types as plain ones: a migration mustn't depend on today's classes."""
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(item, UtcDateTime) else False


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        # SQLite can't alter most of a table: Alembic copies it instead.
        render_as_batch=True,
        # SQLite's DDL is transactional once the driver leaves transactions to us
        # (`loraserve.db.session`).
        transactional_ddl=True,
        render_item=render_type,
        compare_type=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


async def run_by_url(url: str) -> None:
    engine = make_engine(url, enforce_foreign_keys=False)
    try:
        async with engine.execution_options(**{WRITE: True}).begin() as connection:
            await connection.run_sync(run)
    finally:
        await engine.dispose()


given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    asyncio.run(run_by_url(os.environ["LORASERVE_DATABASE_URL"]))
