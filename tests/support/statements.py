"""Compile each SQL statement once a process.

SQLAlchemy keeps compiled statements with their database, of which most tests make one, and
compiling takes longer than running them: a fifth of the processor time of the HTTP tests.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.util import LRUCache

_MAX_STATEMENTS = 2000
_statements: LRUCache[Any, Any] = LRUCache(_MAX_STATEMENTS)


def pytest_configure(config: pytest.Config) -> None:
    create = Engine.__init__

    def create_with_statements(engine: Engine, *arguments: Any, **options: Any) -> None:
        create(engine, *arguments, **options)
        if isinstance(engine.dialect, SQLiteDialect_aiosqlite):
            engine._compiled_cache = _statements

    Engine.__init__ = create_with_statements  # type: ignore[assignment, method-assign]
    # dialects are a part of the key: all of SQLite's are made with the same options
    SQLiteDialect_aiosqlite.__eq__ = lambda self, other: type(self) is type(other)  # type: ignore[method-assign]
    SQLiteDialect_aiosqlite.__hash__ = lambda self: hash(type(self))  # type: ignore[method-assign]
