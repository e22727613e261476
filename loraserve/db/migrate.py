"""Bring the registry's tables from one revision to the next, whole or not at all.

All pending migrations run in one transaction: a process killed in the middle leaves the old revision. Two processes that
migrate at once take turns (SQLite's write lock, PostgreSQL's advisory lock), and the second finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import JSON, Column, Connection, inspect, text

from loraserve.db.models import Base
from loraserve.db.session import WRITE, damaged, database_errors, make_engine, parse_database_url
from loraserve.errors import ConfigError, DatabaseDamaged, SchemaOutdated

ADVISORY_LOCK = 0x6C6F7261
"""Any number, the same in every process: "lora"."""

T = TypeVar("T")


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration for the scripts of this installation: wheel, sdist or checkout."""
    config = Config()
    config.set_main_option("script_location", str(files("loraserve_migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def head() -> str:
    """The revision that this program works with."""
    revision = ScriptDirectory.from_config(alembic_config()).get_current_head()
    if revision is None:
        raise ConfigError("This installation has no migrations.", hint="Install loraserve again.")
    return revision


async def current(url: str) -> str | None:
    """The database's revision; None for an empty database.

    Raises:
        ConfigError: the URL is no good, or the database holds somebody else's tables.
        DatabaseUnavailable: it can't be reached.
    """
    return await _in_transaction(url, _read_revision, is_write=False)


async def upgrade(url: str) -> str:
    """Bring the database to `head()` and return it. Does nothing when it is there already.

    Raises:
        SchemaOutdated: the database is newer than this program.
        ConfigError, DatabaseUnavailable: as for `current`.
    """
    return await _in_transaction(url, _upgrade)


async def upgrade_if_empty(url: str) -> bool:
    """Make the tables of an empty database; True if it was empty. A database with tables is left as it is (see `check`)."""

    def run(connection: Connection) -> bool:
        if _read_revision(connection) is not None:
            return False
        _upgrade(connection)
        return True

    return await _in_transaction(url, run)


async def check(url: str) -> None:
    """Return if the database is at `head()`, with every table, and, on SQLite, its pages are whole (all of it is read).

    Raises:
        DatabaseDamaged: it isn't whole.
        SchemaOutdated: it is older (the message names the command) or newer.
        ConfigError, DatabaseUnavailable: as for `current`.
    """
    await _in_transaction(url, _check, is_write=False)


async def differences(url: str) -> list[str]:
    """What the database at `url` lacks or has too much of, compared with the models; empty when they agree."""

    def compare(connection: Connection) -> list[str]:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": _is_other_default}
        )
        return [str(difference) for difference in compare_metadata(context, Base.metadata)]

    return await _in_transaction(url, compare, is_write=False)


def _is_other_default(
    _context: MigrationContext,
    _inspected: Column[Any],
    column: Column[Any],
    found: str | None,
    _default: Any,
    expected: str | None,
) -> bool | None:
    """Whether a column's default isn't the model's. None: let Alembic find out, which asks the database; PostgreSQL can't compare JSON."""
    if not isinstance(column.type, JSON):
        return None
    return (found or "").partition("::")[0].strip("'") != (expected or "").strip("'")


async def _in_transaction(url: str, action: Callable[[Connection], T], *, is_write: bool = True) -> T:
    # Foreign keys are off while tables are rebuilt (SQLite would cascade); `_upgrade` checks them before the commit.
    engine = make_engine(url, enforce_foreign_keys=False)
    try:
        with database_errors():
            async with engine.execution_options(**{WRITE: is_write}).begin() as connection:
                if is_write and engine.dialect.name == "postgresql":
                    await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
                return await connection.run_sync(action)
    except DatabaseDamaged as error:
        # said to operators alone, so with the place
        where = parse_database_url(url).set(drivername=engine.dialect.name).render_as_string()
        raise DatabaseDamaged(error.message.replace("database is", f"database {where} is"), hint=error.hint) from error
    finally:
        await engine.dispose()


def _read_revision(connection: Connection) -> str | None:
    heads = MigrationContext.configure(connection).get_current_heads()
    if len(heads) > 1:
        raise SchemaOutdated(
            f"The registry's tables say that they are at several revisions ({', '.join(heads)}).",
            hint="Somebody changed alembic_version by hand: restore a backup.",
        )
    revision = heads[0] if heads else None
    if revision is None:
        foreign = set(inspect(connection).get_table_names()) - {"alembic_version"}
        if foreign:
            raise ConfigError(
                f"The database has tables that aren't loraserve's ({', '.join(sorted(foreign)[:3])}, …).",
                hint="Give loraserve a database of its own in LORASERVE_DATABASE_URL.",
            )
    return revision


def _upgrade(connection: Connection) -> str:
    target = head()
    _refuse_newer(_read_revision(connection), target)
    command.upgrade(alembic_config(connection), "head")
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        if broken:
            raise ConfigError(
                f"The migration would leave {len(broken)} rows without their parent; nothing was changed."
            )
    return target


def _check(connection: Connection) -> None:
    found, target = _read_revision(connection), head()
    _refuse_newer(found, target)
    if found != target:
        raise SchemaOutdated(
            f"The registry's tables are at revision {found or 'none'}; this program works with {target}.",
            hint="Run: loraserve db upgrade",
        )
    missing = sorted(set(Base.metadata.tables) - set(inspect(connection).get_table_names()))
    if missing:
        raise SchemaOutdated(
            f"The registry's database is at revision {found} and has no table {', '.join(missing[:3])}.",
            hint="Somebody changed it by hand: restore a backup.",
        )
    if connection.dialect.name == "sqlite":
        problem = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
        if problem != "ok":
            raise damaged(" ".join(str(problem).split()))


def _refuse_newer(found: str | None, target: str) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    if found is not None and found not in known:
        raise SchemaOutdated(
            f"The registry's tables are at revision {found}, which this program (at {target}) doesn't know.",
            hint="They were made by a newer loraserve: install that version or newer.",
        )
