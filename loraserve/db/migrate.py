"""Migrations of the registry's tables, all or nothing.

Pending migrations run in one transaction: a killed process leaves the old revision. Concurrent
processes are serialized by SQLite's write lock or PostgreSQL's advisory lock, and the second finds
nothing to do.
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
"""Key of the advisory lock; any number that all processes share."""

T = TypeVar("T")


def alembic_config(connection: Connection | None = None) -> Config:
    """Build Alembic's configuration for the scripts of this installation.

    It may be a wheel, an sdist or a checkout.
    """
    config = Config()
    config.set_main_option("script_location", str(files("loraserve_migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def head() -> str:
    """Find the revision that this program works with."""
    revision = ScriptDirectory.from_config(alembic_config()).get_current_head()
    if revision is None:
        raise ConfigError("This installation has no migrations.", hint="Install loraserve again.")
    return revision


async def current(url: str) -> str | None:
    """Read the database's revision; None for an empty database.

    Raises:
        ConfigError: the URL is invalid, or the database has other programs' tables.
        DatabaseUnavailable: the database can't be reached.
    """
    return await _in_transaction(url, _read_revision, is_write=False)


async def upgrade(url: str) -> str:
    """Bring the database to `head()` and return it. Does nothing when it is there already.

    Raises:
        SchemaOutdated: the database is newer than this program.
        ConfigError, DatabaseUnavailable: as for `current`.
    """
    return await _in_transaction(url, _upgrade)


async def downgrade(url: str, revision: str, *, is_loss_accepted: bool = False) -> str:
    """Bring the database back to an older revision, for an older program, and return it.

    It is one transaction. Rows that the older tables have no place for are refused.

    Args:
        is_loss_accepted: drop such rows instead.

    Raises:
        SchemaOutdated: the revision is unknown or newer than the database's, or there is no way
            back.
        Conflict: rows would be lost; the message says of which table.
        ConfigError, DatabaseUnavailable: as for `current`.
    """

    def run(connection: Connection) -> str:
        found = _read_revision(connection)
        _refuse_newer(found, head())
        scripts = ScriptDirectory.from_config(alembic_config())
        older = [script.revision for script in scripts.walk_revisions(head=found or "base")]
        if found is None or revision not in older:
            raise SchemaOutdated(
                f"The registry's tables are at revision {found or 'none'}; they can't go back to {revision!r}.",
                hint=f"Name one of: {', '.join(sorted(older[1:]))}.",
            )
        for script in scripts.walk_revisions(base=revision, head=found):
            if script.revision != revision and not hasattr(script.module, "downgrade"):
                raise SchemaOutdated(
                    f"There is no way back from revision {script.revision}.",
                    hint="Restore the backup that was made before the upgrade, with the older program's.",
                )
        config = alembic_config(connection)
        config.attributes["is_loss_accepted"] = is_loss_accepted
        command.downgrade(config, revision)
        return revision

    return await _in_transaction(url, run)


async def upgrade_if_empty(url: str) -> bool:
    """Create the tables of an empty database; return whether it was empty.

    Other databases are unchanged (see `check`).
    """

    def run(connection: Connection) -> bool:
        if _read_revision(connection) is not None:
            return False
        _upgrade(connection)
        return True

    return await _in_transaction(url, run)


async def fill(url: str, revision: str, insert: Callable[[Connection], None]) -> None:
    """Make the tables of `revision` in an empty database, fill them, and bring all to `head()`.

    It is one transaction: whatever fails, the database stays empty.

    Args:
        insert: called once the tables are made.

    Raises:
        ConfigError: the database isn't empty, or rows refer to rows that aren't there.
        SchemaOutdated: this program lacks the revision.
        DatabaseUnavailable
    """
    check_known(revision)

    def run(connection: Connection) -> None:
        if _read_revision(connection) is not None:
            raise ConfigError("The database isn't empty any more.", hint="Name an empty one.")
        command.upgrade(alembic_config(connection), revision)
        insert(connection)
        _upgrade(connection)

    await _in_transaction(url, run)


def check_known(revision: str) -> None:
    """Check that this program has the revision.

    Raises:
        SchemaOutdated: it doesn't: a newer one made it.
    """
    _refuse_newer(revision, head())


async def check(url: str) -> None:
    """Check that the database is at `head()` with all tables.

    On SQLite, also read all pages and check them.

    Raises:
        DatabaseDamaged: a page is corrupt.
        SchemaOutdated: the database is older (the message names the command) or newer.
        ConfigError, DatabaseUnavailable: as for `current`.
    """
    await _in_transaction(url, _check, is_write=False)


async def differences(url: str) -> list[str]:
    """List the differences between the database at `url` and the models; empty if they agree."""

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
    """Check whether a JSON column's default differs from the model's.

    PostgreSQL can't compare them. None for others.
    """
    if not isinstance(column.type, JSON):
        return None
    return (found or "").partition("::")[0].strip("'") != (expected or "").strip("'")


async def _in_transaction(url: str, action: Callable[[Connection], T], *, is_write: bool = True) -> T:
    # Foreign keys are off while tables are rebuilt (SQLite would cascade); `_upgrade` checks them
    # before the commit.
    engine = make_engine(url, enforce_foreign_keys=False)
    try:
        with database_errors():
            async with engine.execution_options(**{WRITE: is_write}).begin() as connection:
                if is_write and engine.dialect.name == "postgresql":
                    await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
                return await connection.run_sync(action)
    except DatabaseDamaged as error:
        # shown to operators only, so name the database
        where = parse_database_url(url).set(drivername=engine.dialect.name).render_as_string()
        raise DatabaseDamaged(error.message.replace("database is", f"database {where} is"), hint=error.hint) from error
    finally:
        await engine.dispose()


def _read_revision(connection: Connection) -> str | None:
    heads = MigrationContext.configure(connection).get_current_heads()
    if len(heads) > 1:
        raise SchemaOutdated(
            f"The registry's table alembic_version has several revisions ({', '.join(heads)}); expected one.",
            hint="It was changed by hand: restore a backup.",
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
                f"The migration would leave {len(broken)} rows that refer to deleted rows; nothing was changed."
            )
    return target


def _check(connection: Connection) -> None:
    found, target = _read_revision(connection), head()
    _refuse_newer(found, target)
    if found != target:
        raise SchemaOutdated(
            f"The registry's tables are at revision {found or 'none'}; this program needs {target}.",
            hint="Run: loraserve db upgrade",
        )
    missing = sorted(set(Base.metadata.tables) - set(inspect(connection).get_table_names()))
    if missing:
        raise SchemaOutdated(
            f"The registry's database is at revision {found} and has no table {', '.join(missing[:3])}.",
            hint="It was changed by hand: restore a backup.",
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
