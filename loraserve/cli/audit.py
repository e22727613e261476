"""``loraserve audit``: the log of changes."""

from __future__ import annotations

from itertools import islice, takewhile
from typing import Annotated

import typer

from loraserve.cli.arguments import instant
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Column

COLUMNS = (
    Column("AT", "at"),
    Column("TENANT", "tenant"),
    Column("ACTOR", "actor"),
    Column("ACTION", "action"),
    Column("TARGET", "target"),
    Column("DETAIL", lambda entry: ", ".join(f"{key}={value}" for key, value in entry.detail.items())),
)


def audit(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most entries to show.")] = 50,
    since: Annotated[
        str | None,
        typer.Option(metavar="INSTANT", help="Show entries since this date or instant (UTC unless it names a zone)."),
    ] = None,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Show changes to the tenant's resources, newest first.

    With an admin key that acts for none, show all tenants'.
    """
    start = instant(since)
    with connected(format, url, tenant) as (output, client):
        entries = takewhile(lambda entry: start is None or entry.at >= start, client.audit())
        output.rows(islice(entries, limit), COLUMNS, name="id", empty="No audit entries.")
