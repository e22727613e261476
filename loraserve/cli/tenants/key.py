"""``loraserve key``: a tenant's API keys. Takes a key with ``keys:write``, or an admin key."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from loraserve.cli.arguments import duration
from loraserve.cli.help import App
from loraserve.cli.options import FormatOption, UrlOption, connected
from loraserve.cli.output import Column
from loraserve.cli.tenants.rotation import SHOWN_ONCE, OverlapOption, describe_rotation, read_overlap

app = App(help="Manage a tenant's API keys (takes a key with keys:write, or an admin key).", no_args_is_help=True)

OfOption = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="TENANT",
        help="Tenant whose keys they are, for an admin key (default: the key's own).",
        show_default=False,
    ),
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the key, from `key list`.")]

COLUMNS = (
    Column("ID", "id"),
    Column("NAME", "name"),
    Column("SCOPES", "scopes"),
    Column("STARTS WITH", "prefix"),
    Column("CREATED", "created_at"),
    Column("EXPIRES", "expires_at"),
    Column("REVOKED", "revoked_at"),
)
NEW_COLUMNS = (
    Column("id", "id"),
    Column("name", "name"),
    Column("scopes", "scopes"),
    Column("expires", "expires_at"),
    Column("key", "key"),
)


@app.command()
def create(
    tenant: OfOption = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Label to tell keys apart.")] = "cli",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "inference, adapters:read, adapters:write or keys:write; may be repeated (default: the first three, "
                "of those that your own key has). Or metrics:read alone: /metrics, which tells of all "
                "tenants, and nothing else."
            )
        ),
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(metavar="TIME", help="Lifetime, e.g. 12h or 30d (default: no end, or your own key's).")
    ] = None,
    url: UrlOption = None,
    format: FormatOption = None,
) -> None:
    """Create a key and print its secret, this once; with --format quiet, only the secret."""
    lasts = duration(expires_in)
    expires_at = None if lasts is None else datetime.now(UTC) + lasts
    with connected(format, url, named=_named(tenant)) as (output, client):
        made = client.keys.create(tenant, name=name, scopes=scope or None, expires_at=expires_at)
        output.one(made, NEW_COLUMNS, name="key")
        output.note(f"{SHOWN_ONCE} Use it: export LORASERVE_API_KEY=…")


@app.command("list")
def list_(tenant: OfOption = None, url: UrlOption = None, format: FormatOption = None) -> None:
    """List the tenant's keys without their secrets, revoked ones too."""
    with connected(format, url, named=_named(tenant)) as (output, client):
        of = "" if tenant is None else f" --tenant {tenant}"
        empty = f"No keys yet. Make one: loraserve key create{of}"
        output.rows(client.keys.list(tenant), COLUMNS, name="id", empty=empty)


@app.command()
def rotate(
    key_id: IdArgument,
    tenant: OfOption = None,
    overlap: OverlapOption = None,
    url: UrlOption = None,
    format: FormatOption = None,
) -> None:
    """Put a new key of the same name, scopes and end in the place of one, and print its secret."""
    overlap_s = read_overlap(overlap)
    with connected(format, url, named=_named(tenant)) as (output, client):
        output.one(client.keys.rotate(tenant, key_id, overlap_s=overlap_s), NEW_COLUMNS, name="key")
        output.note(describe_rotation(overlap))


@app.command()
def revoke(
    key_id: IdArgument,
    tenant: OfOption = None,
    url: UrlOption = None,
    format: FormatOption = None,
) -> None:
    """Revoke a key."""
    with connected(format, url, named=_named(tenant)) as (output, client):
        client.keys.revoke(tenant, key_id)
        output.done({"revoked": key_id}, f"Revoked {key_id}.")


def _named(tenant: str | None) -> dict[str, str]:
    return {} if tenant is None else {"NAME": tenant, "TENANT": tenant}
