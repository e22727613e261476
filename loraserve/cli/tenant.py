"""``loraserve tenant``: who shares the server. Takes an admin key."""

from __future__ import annotations

from typing import Annotated

import typer

from loraserve.cli.options import FormatOption, UrlOption, connected
from loraserve.cli.output import Column

app = typer.Typer(help="Who shares the server (takes an admin key).", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]
COLUMNS = (
    Column("NAME", "name"),
    Column("ID", "id"),
    Column("LIMITS", lambda tenant: _set(tenant.limits)),
    Column("CREATED", "created_at"),
)


def _set(limits: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in limits.items() if value is not None}


@app.command()
def create(
    name: NameArgument,
    max_adapters: Annotated[int | None, typer.Option(min=0, help="The most adapters it may have.")] = None,
    max_stored_bytes: Annotated[
        int | None, typer.Option(min=0, help="The most bytes its versions may have together.")
    ] = None,
    url: UrlOption = None,
    format: FormatOption = None,
) -> None:
    """A new tenant, without keys or adapters."""
    wanted = {"max_adapters": max_adapters, "max_stored_bytes": max_stored_bytes}
    limits = {name: value for name, value in wanted.items() if value is not None}
    with connected(format, url) as (output, client):
        output.one(client.tenants.create(name, limits=limits or None), COLUMNS, name="name")
        output.note(f"Give it a key: loraserve key create --tenant {name}")


@app.command("list")
def list_(url: UrlOption = None, format: FormatOption = None) -> None:
    """Every tenant."""
    with connected(format, url) as (output, client):
        empty = "No tenants yet. Make one: loraserve tenant create TENANT"
        output.rows(client.tenants.list(), COLUMNS, name="name", empty=empty)


@app.command()
def show(name: NameArgument, url: UrlOption = None, format: FormatOption = None) -> None:
    """One tenant."""
    with connected(format, url) as (output, client):
        output.one(client.tenants.get(name), COLUMNS, name="name")


@app.command()
def delete(name: NameArgument, url: UrlOption = None, format: FormatOption = None) -> None:
    """Delete a tenant: its keys and models work no more, at once."""
    with connected(format, url) as (output, client):
        client.tenants.delete(name)
        output.note(f"Deleted the tenant {name}.")
