"""The registry's tables as the migrations make them, and the chain of migrations."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect

from loraserve.db import migrate


def test_tables(migrated_sqlite: Path, golden: Callable[..., None]) -> None:
    engine = create_engine(f"sqlite:///{migrated_sqlite}")
    lines = []
    with engine.connect() as connection:
        tables = inspect(connection)
        for table in sorted(tables.get_table_names()):
            lines.append(table)
            keys = tables.get_pk_constraint(table)
            for column in tables.get_columns(table):
                null = "null" if column["nullable"] else "not null"
                lines.append(f"    column {column['name']} {column['type']} {null} default {column['default']}")
            lines.append(f"    primary key {keys['name']} ({', '.join(keys['constrained_columns'])})")
            facts = [
                f"    foreign key {key['name']} ({', '.join(key['constrained_columns'])}) -> {key['referred_table']}"
                f" ({', '.join(key['referred_columns'])}) {sorted(key['options'].items())}"
                for key in tables.get_foreign_keys(table)
            ]
            for constraint in tables.get_unique_constraints(table):
                facts.append(f"    unique {constraint['name']} ({', '.join(constraint['column_names'])})")
            for check in tables.get_check_constraints(table):
                facts.append(f"    check {check['name']} {' '.join(check['sqltext'].split())}")
            lines += sorted(facts)
    engine.dispose()
    with closing(sqlite3.connect(migrated_sqlite)) as database:
        # as SQL: they may have conditions and expressions
        found = database.execute("SELECT sql FROM sqlite_master WHERE type != 'table' AND sql IS NOT NULL").fetchall()
    lines += ["", *sorted(" ".join(sql.split()) for (sql,) in found)]
    golden("tables.txt", lines)


def test_migrations(golden: Callable[..., None]) -> None:
    scripts = ScriptDirectory.from_config(migrate.alembic_config()).walk_revisions()
    golden("migrations.txt", sorted(f"{script.revision} after {script.down_revision}" for script in scripts))
