"""``loraserve grant``: which other tenants may use an adapter."""

from __future__ import annotations

from typing import Annotated

import typer

from loraserve.cli.adapters.adapter import NameArgument
from loraserve.cli.help import App
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Column

app = App(help="Let other tenants use an adapter, as OWNER/NAME.", no_args_is_help=True)

ToArgument = Annotated[str, typer.Argument(metavar="TENANT", help="Tenant that may use it.")]
COLUMNS = (Column("ADAPTER", "adapter"), Column("TENANT", "tenant"), Column("CREATED", "created_at"))


@app.command()
def add(
    name: NameArgument,
    to: ToArgument,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Grant a tenant the use of an adapter. It can neither read its files nor change it."""
    with connected(format, url, tenant, {"NAME": name, "TENANT": to}) as (output, client):
        output.one(client.grants.add(name, to), COLUMNS, name="tenant")
        output.note(
            f"A tenant of that name can use it as OWNER/{name}, with the owner's name. "
            f"Revoke it: loraserve grant remove {name} {to}"
        )


@app.command("list")
def list_(name: NameArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None) -> None:
    """List the other tenants that may use an adapter."""
    with connected(format, url, tenant, {"NAME": name}) as (output, client):
        empty = f"No grants: only its owner can use it. Add one: loraserve grant add {name} TENANT"
        output.rows(client.grants.list(name), COLUMNS, name="tenant", empty=empty)


@app.command()
def remove(
    name: NameArgument,
    to: ToArgument,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """End a tenant's use of an adapter, within seconds. Running requests finish."""
    with connected(format, url, tenant, {"NAME": name, "TENANT": to}) as (output, client):
        client.grants.remove(name, to)
        output.done({"removed": to, "adapter": name}, f"{to} can no longer use {name}.")
