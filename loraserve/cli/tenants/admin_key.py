"""``loraserve admin-key``: operators' keys, which belong to no tenant. Takes an admin key."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from loraserve.cli.arguments import duration
from loraserve.cli.help import App
from loraserve.cli.options import FormatOption, UrlOption, connected
from loraserve.cli.output import Column
from loraserve.cli.tenants.rotation import SHOWN_ONCE, OverlapOption, describe_rotation, read_overlap

app = App(help="Manage operators' keys and their roles (takes an admin key).", no_args_is_help=True)

COLUMNS = (
    Column("ID", "id"),
    Column("NAME", "name"),
    Column("ROLE", "role"),
    Column("STARTS WITH", "prefix"),
    Column("CREATED", "created_at"),
    Column("EXPIRES", "expires_at"),
    Column("REVOKED", "revoked_at"),
)
NEW_COLUMNS = (
    Column("id", "id"),
    Column("name", "name"),
    Column("role", "role"),
    Column("expires", "expires_at"),
    Column("key", "key"),
)
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the key, from `admin-key list`.")]


@app.command()
def create(
    role: Annotated[
        str,
        typer.Option(
            metavar="ROLE",
            help="admin; operator:read (sees all tenants, changes nothing, and gets neither answers nor adapters' "
            "files); or metrics:read (/metrics alone).",
        ),
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Label to tell keys apart.")] = "cli",
    expires_in: Annotated[
        str | None, typer.Option(metavar="TIME", help="Lifetime, e.g. 12h or 30d (default: no end).")
    ] = None,
    url: UrlOption = None,
    format: FormatOption = None,
) -> None:
    """Create a key and print its secret, this once; with --format quiet, only the secret."""
    lasts = duration(expires_in)
    expires_at = None if lasts is None else datetime.now(UTC) + lasts
    with connected(format, url) as (output, client):
        output.one(client.admin_keys.create(name=name, role=role, expires_at=expires_at), NEW_COLUMNS, name="key")
        output.note(SHOWN_ONCE)


@app.command("list")
def list_(url: UrlOption = None, format: FormatOption = None) -> None:
    """List operators' keys without their secrets, revoked ones too.

    The server's LORASERVE_ADMIN_KEY isn't among them.
    """
    with connected(format, url) as (output, client):
        empty = "No keys. Make one: loraserve admin-key create --role operator:read"
        output.rows(client.admin_keys.list(), COLUMNS, name="id", empty=empty)


@app.command()
def rotate(
    key_id: IdArgument,
    overlap: OverlapOption = None,
    url: UrlOption = None,
    format: FormatOption = None,
) -> None:
    """Put a new key of the same name, role and end in the place of one, and print its secret."""
    overlap_s = read_overlap(overlap)
    with connected(format, url) as (output, client):
        output.one(client.admin_keys.rotate(key_id, overlap_s=overlap_s), NEW_COLUMNS, name="key")
        output.note(describe_rotation(overlap))


@app.command()
def revoke(key_id: IdArgument, url: UrlOption = None, format: FormatOption = None) -> None:
    """Revoke a key; not the last admin key that works."""
    with connected(format, url) as (output, client):
        client.admin_keys.revoke(key_id)
        output.done({"revoked": key_id}, f"Revoked {key_id}.")
