"""``loraserve audit``: who did what."""

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
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="The most entries to show.")] = 50,
    since: Annotated[
        str | None,
        typer.Option(metavar="INSTANT", help="None older than this date or instant (UTC where it names no zone)."),
    ] = None,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Who did what to the tenant's things, newest first; for an admin key that acts for no tenant, to anyone's."""
    start = instant(since)
    with connected(format, url, tenant) as (output, client):
        entries = takewhile(lambda entry: start is None or entry.at >= start, client.audit())
        output.rows(islice(entries, limit), COLUMNS, name="id", empty="Nothing was done.")
