"""SQLite's tables as the migrations make them, recorded: a new registry is created from the record.

Its first start then neither imports Alembic nor runs migrations, which copy a table to change it.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import cache
from importlib.resources import files
from pathlib import Path

_MIGRATIONS = Path(str(files("loraserve_migrations")))
RECORD = _MIGRATIONS / "sqlite.sql"
_REVISION = re.compile(r'^(down_)?revision(?:: [^=]+)? = (?:"(\w+)"|None)$', re.MULTILINE)


@cache
def revisions() -> dict[str, str | None]:
    """Return this installation's revisions, each with the one before it."""
    found: dict[str, str | None] = {}
    for file in (_MIGRATIONS / "versions").iterdir():
        if file.name.endswith(".py"):
            named = dict(_REVISION.findall(file.read_text("utf-8")))
            found[named[""]] = named["down_"] or None
    return found


@cache
def statements(revision: str) -> tuple[str, ...]:
    """Return the statements that create the tables of `revision`; none if another was recorded."""
    found = tuple(part for part in RECORD.read_text("utf-8").split(";\n") if part)
    return found if _stamp(revision) in found else ()


def dump(database: Path) -> str:
    """Return the statements that create the tables and indexes of a SQLite file, and its revision.

    They are in one order: Alembic copies a table's constraints and indexes in any.
    """
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute(
            "SELECT type, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC, name"
        ).fetchall()
        ((revision,),) = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    created = [_sorted(sql) if kind == "table" else sql for kind, sql in found]
    return "".join(f"{statement};\n" for statement in (*created, _stamp(revision)))


def _sorted(sql: str) -> str:
    """Return ``CREATE TABLE`` with its constraints after its columns, sorted."""
    first, *parts, last = (line.strip() for line in sql.splitlines())
    parts = [part.removesuffix(",") for part in parts]
    parts.sort(key=lambda part: part if part.startswith("CONSTRAINT ") else "")
    return "\n".join((first, ",\n".join(f"    {part}" for part in parts), last))


def _stamp(revision: str) -> str:
    return f"INSERT INTO alembic_version (version_num) VALUES ('{revision}')"  # noqa: S608 (the migrations' own)
