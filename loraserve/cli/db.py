"""``loraserve db``: the registry's tables."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from loraserve.cli.options import FormatOption, reporting
from loraserve.cli.output import Format, Output

app = typer.Typer(help="The registry's tables.", no_args_is_help=True)

DataDirOption = Annotated[str | None, typer.Option(help="Where `serve` keeps its data (default: as for serve)")]
UrlOption = Annotated[
    str | None, typer.Option("--database-url", help="sqlite:///… or postgresql://… (default: in the data directory)")
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
    """Bring the tables to the revision that this program works with."""
    with reporting(format) as output:
        from loraserve.db import migrate

        url = _database_url(data_dir, database_url)
        before = asyncio.run(migrate.current(url))
        after = asyncio.run(migrate.upgrade(url))
        _say(output, after, migrate.head())
        output.note(
            "The tables were at this revision already." if before == after else f"Upgraded from {before or 'nothing'}."
        )


@app.command()
def current(data_dir: DataDirOption = None, database_url: UrlOption = None, format: FormatOption = None) -> None:
    """The tables' revision; "none" for an empty database."""
    with reporting(format) as output:
        from loraserve.db import migrate

        revision, head = asyncio.run(migrate.current(_database_url(data_dir, database_url))), migrate.head()
        _say(output, revision, head)
        if revision != head:
            output.note(f"This program works with {head}. Run: loraserve db upgrade")


@app.command()
def check(data_dir: DataDirOption = None, database_url: UrlOption = None, format: FormatOption = None) -> None:
    """Exit 0 if the tables are those that this program works with and differ from the models in nothing."""
    with reporting(format) as output:
        from loraserve.db import migrate
        from loraserve.errors import SchemaOutdated

        url = _database_url(data_dir, database_url)
        asyncio.run(migrate.check(url))
        differences = asyncio.run(migrate.differences(url))
        if differences:
            raise SchemaOutdated(
                f"The tables differ from what this program expects: {'; '.join(differences)}.",
                hint="Somebody changed them by hand: restore a backup.",
            )
        _say(output, migrate.head(), migrate.head())
        output.note("The tables are current.")
