"""``loraserve usage``: tokens used, and their cost."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve.cli.arguments import instant
from loraserve.cli.options import FormatOption, UrlOption, connected
from loraserve.cli.output import Column

if TYPE_CHECKING:
    from datetime import datetime

GROUPS = ("tenant", "adapter", "version", "hour", "day")
AMOUNT_COLUMNS = (
    Column("REQUESTS", lambda row: f"{row.num_requests:,}"),
    Column("PROMPT", lambda row: f"{row.prompt_tokens:,}"),
    Column("CACHED", lambda row: f"{row.cached_tokens:,}"),
    Column("COMPLETION", lambda row: f"{row.completion_tokens:,}"),
    Column("UNDELIVERED", lambda row: f"{row.undelivered_tokens:,}"),
    Column("CACHED ANSWERS", lambda row: f"{row.num_cached_requests:,}"),
    Column("THEIR TOKENS", lambda row: f"{row.cached_completion_tokens:,}"),
    Column("COST", lambda row: None if row.cost is None else f"{row.cost} {row.currency}"),
)
_GROUP_COLUMNS = {
    "tenant": Column("TENANT", lambda row: row.tenant or row.tenant_id),
    "adapter": Column("ADAPTER", lambda row: row.adapter or "(base)"),
    "version": Column("VERSION", "version"),
    "hour": Column("HOUR (UTC)", lambda row: _hour(row.hour)),
    "day": Column("DAY (UTC)", "day"),
}


def _hour(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def _groups(text: str) -> tuple[str, ...]:
    """Parse the names to group by.

    Raises:
        typer.BadParameter: one is none of ours.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise typer.BadParameter(
            f"--group-by is {text!r}; it should be one or more of {', '.join(GROUPS)}, separated by commas."
        )
    return names


def usage(
    group_by: Annotated[str, typer.Option(metavar="GROUP,…", help=f"Sum by each of these: {', '.join(GROUPS)}.")] = "",
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="INSTANT", help="Start, a date or an instant (UTC unless it names a zone)."),
    ] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="INSTANT", help="End, written as --from.")] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Count only this adapter; the base's id: only the base.")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values, whatever the format.")] = False,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Tenant (default: the key's own; with an admin key, all).")
    ] = None,
    url: UrlOption = None,
    format: FormatOption = None,
) -> None:
    """Sum requests and tokens, and their cost where there are prices."""
    groups, since, until = _groups(group_by), instant(start), instant(end)
    with connected(format, url, named={"TENANT": tenant} if tenant else {}) as (output, client):
        if csv:
            text = client.usage.csv(tenant=tenant, adapter=adapter, start=since, end=until, group_by=groups)
            output.text(text.replace("\r\n", "\n"))
            return
        rows = client.usage.sums(tenant=tenant, adapter=adapter, start=since, end=until, group_by=groups)
        columns = (*(_GROUP_COLUMNS[group] for group in groups), *AMOUNT_COLUMNS)
        output.rows(rows, columns, name="label", empty="No usage.")
