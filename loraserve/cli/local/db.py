"""``loraserve db``: the registry's tables, and the owner of its store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loraserve.cli.help import App
from loraserve.cli.local import coroutine
from loraserve.cli.options import FormatOption, reporting
from loraserve.cli.output import Format, Output

if TYPE_CHECKING:
    from loraserve.registry.storage_gc.marker import Adoption
    from loraserve.settings import Settings

app = App(help="Manage the registry's tables and its store.", no_args_is_help=True)

DataDirOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="Data directory of `serve` (default: as for serve).")
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--database-url", metavar="URL", help="sqlite:///… or postgresql://… (default: in the data directory)."
    ),
]


def _database_url(data_dir: str | None, database_url: str | None) -> str:
    from loraserve.settings import Settings

    # Settings are the server's and it must have a model; nothing here looks at it.
    return Settings.load(model="none", data_dir=data_dir, database_url=database_url).resolved_database_url


def _say(output: Output, revision: str | None, head: str) -> None:
    if output.format is Format.JSON:
        output.json({"revision": revision, "head": head, "is_current": revision == head})
    else:
        output.line(revision or "none")


@app.command()
def upgrade(data_dir: DataDirOption = None, database_url: UrlOption = None, format: FormatOption = None) -> None:
    """Migrate the tables to the revision of this program."""
    with reporting(format) as output:
        from loraserve.db import migrate

        url = _database_url(data_dir, database_url)
        before = coroutine.run(migrate.current(url))
        after = coroutine.run(migrate.upgrade(url))
        _say(output, after, migrate.head())
        output.note(
            "The tables were at this revision already." if before == after else f"Upgraded from {before or 'nothing'}."
        )


@app.command()
def downgrade(
    revision: Annotated[str, typer.Argument(metavar="REVISION", help="Revision of the older program's tables.")],
    discard: Annotated[
        bool, typer.Option("--discard", help="Drop the rows that the older tables have no place for.")
    ] = False,
    data_dir: DataDirOption = None,
    database_url: UrlOption = None,
    format: FormatOption = None,
) -> None:
    """Bring the tables back to an older revision. Stop the servers, and make a backup first.

    The older program prints its revision with: loraserve db current --format json (`head`).
    """
    with reporting(format) as output:
        from loraserve.db import migrate

        url = _database_url(data_dir, database_url)
        found = coroutine.run(migrate.downgrade(url, revision, is_loss_accepted=discard))
        _say(output, found, migrate.head())
        output.note("The tables are the older program's now; this one needs them upgraded again.")


@app.command()
def current(data_dir: DataDirOption = None, database_url: UrlOption = None, format: FormatOption = None) -> None:
    """Print the tables' revision; "none" for an empty database."""
    with reporting(format) as output:
        from loraserve.db import migrate

        revision, head = coroutine.run(migrate.current(_database_url(data_dir, database_url))), migrate.head()
        _say(output, revision, head)
        if revision != head:
            output.note(f"This program needs revision {head}. Run: loraserve db upgrade")


@app.command()
def check(data_dir: DataDirOption = None, database_url: UrlOption = None, format: FormatOption = None) -> None:
    """Check the tables: exit with 0 if they are at this program's revision and equal its models."""
    with reporting(format) as output:
        from loraserve.db import migrate
        from loraserve.errors import SchemaOutdated

        url = _database_url(data_dir, database_url)
        coroutine.run(migrate.check(url))
        differences = coroutine.run(migrate.differences(url))
        if differences:
            raise SchemaOutdated(
                f"The tables differ from what this program expects: {'; '.join(differences)}.",
                hint="They were changed by hand: restore a backup.",
            )
        _say(output, migrate.head(), migrate.head())
        output.note("The tables are current.")


@app.command("adopt-store")
def adopt_store(
    yes: Annotated[bool, typer.Option("--yes", help="Make the change; without this flag, only show it.")] = False,
    data_dir: DataDirOption = None,
    database_url: UrlOption = None,
    store_url: Annotated[
        str | None, typer.Option(metavar="URL", help="file:///… or s3://… (default: as for serve).")
    ] = None,
    format: FormatOption = None,
) -> None:
    """Bind the store to this registry, if `serve` refuses it.

    Blobs unknown to the registry are deleted later.
    """
    with reporting(format) as output:
        from loraserve.errors import ConfigError
        from loraserve.settings import Settings

        settings = Settings.load(model="none", data_dir=data_dir, database_url=database_url, store_url=store_url)
        found = coroutine.run(_adopt(settings, is_dry_run=not yes))
        _show_adoption(output, found, settings.resolved_store_url, is_done=yes and found.is_needed)
        if found.is_needed and not yes:
            raise ConfigError("Nothing was changed.", hint="Run: loraserve db adopt-store --yes")


async def _adopt(settings: Settings, *, is_dry_run: bool) -> Adoption:
    from adapters_store import open_store
    from loraserve.db import migrate
    from loraserve.db.session import Database
    from loraserve.registry.storage_gc.store_claim import StoreClaim

    await migrate.check(settings.resolved_database_url)
    database = Database(settings.resolved_database_url)
    store = open_store(settings.resolved_store_url)
    try:
        claim = StoreClaim(database, store, where=f"the store {settings.resolved_store_url}")
        return await claim.adopt(actor="cli", is_dry_run=is_dry_run)
    finally:
        store.close()
        await database.dispose()


def _show_adoption(output: Output, found: Adoption, url: str, *, is_done: bool) -> None:
    from loraserve.limits import LIMITS

    contents, marker = found.contents, found.marker
    record = {
        "store": url,
        "registry": found.registry,
        "marker_of": marker.registry if marker else None,
        "marked_at": marker.written_at if marker else None,
        "blobs": contents.num_blobs,
        "published_here": contents.num_published,
        "known_otherwise": contents.num_listed,
        "unknown": contents.num_unknown,
        "is_adopted": is_done or not found.is_needed,
    }
    if output.format is Format.JSON:
        output.json(record)
    else:
        output.pairs(record)
    if not found.is_needed:
        output.note("The store already belongs to this registry; nothing was changed.")
        return
    will = "will be" if is_done else "would be"
    output.note(
        f"The {contents.num_unknown:,} blobs that this registry doesn't reference {will} deleted as garbage, from"
        f" {LIMITS.gc_grace_s / 3600:g} h after a server's start. Servers of another registry on this store "
        f"{will} refused."
    )
