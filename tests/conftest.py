"""Databases for the tests: SQLite always, PostgreSQL too when LORASERVE_TEST_POSTGRES_URL names a server (tests/postgres.sh)."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import make_url

from loraserve.db import migrate

POSTGRES_URL = os.environ.get("LORASERVE_TEST_POSTGRES_URL")
BACKENDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


def run_on_postgres(statement: str) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(POSTGRES_URL)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(run())


def postgres_url(name: str) -> str:
    return make_url(POSTGRES_URL or "").set(database=name).render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file that the real migrations made, to copy."""
    path = tmp_path_factory.mktemp("template") / "registry.db"
    asyncio.run(migrate.upgrade(f"sqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def migrated_postgres() -> Iterator[str]:
    """The name of a PostgreSQL database that the real migrations made, to use as a template."""
    if POSTGRES_URL is None:
        pytest.skip("LORASERVE_TEST_POSTGRES_URL isn't set")
    name = f"template_{uuid.uuid4().hex}"
    run_on_postgres(f"CREATE DATABASE {name}")
    asyncio.run(migrate.upgrade(postgres_url(name)))
    yield name
    run_on_postgres(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=BACKENDS)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without a table."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'registry.db'}"
        return
    if POSTGRES_URL is None:
        pytest.skip("LORASERVE_TEST_POSTGRES_URL isn't set")
    name = f"empty_{uuid.uuid4().hex}"
    run_on_postgres(f"CREATE DATABASE {name}")
    yield postgres_url(name)
    run_on_postgres(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database at the newest revision, without rows."""
    if request.param == "sqlite":
        template: Path = request.getfixturevalue("migrated_sqlite")
        shutil.copyfile(template, tmp_path / "registry.db")
        yield f"sqlite:///{tmp_path / 'registry.db'}"
        return
    template_name: str = request.getfixturevalue("migrated_postgres")
    name = f"test_{uuid.uuid4().hex}"
    run_on_postgres(f"CREATE DATABASE {name} TEMPLATE {template_name}")
    yield postgres_url(name)
    run_on_postgres(f"DROP DATABASE {name} WITH (FORCE)")
