"""``loraserve adapter``: push, see, name and delete adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected, split_version
from loraserve.cli.output import Column, size

if TYPE_CHECKING:
    from loraserve.sdk import Client

app = typer.Typer(help="Push, see, name and delete adapters.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]

TargetArgument = Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="The adapter, or one version of it.")]

ADAPTER_COLUMNS = (
    Column("NAME", "name"),
    Column("ALIASES", "aliases"),
    Column("VERSIONS", "num_versions"),
    Column("LATEST", "latest_version"),
    Column("UPDATED", "updated_at"),
)
VERSION_COLUMNS = (
    Column("VERSION", "version"),
    Column("ALIASES", "aliases"),
    Column("STATE", "state"),
    Column("RANK", "rank"),
    Column("SIZE", lambda version: size(version.size_bytes)),
    Column("MODULES", "target_modules"),
    Column("DIGEST", lambda version: version.digest[:12]),
    Column("CREATED", "created_at"),
)
VERSION_DETAILS = (
    Column("model", "model"),
    Column("aliases", "aliases"),
    Column("state", "state"),
    Column("rank", "rank"),
    Column("size", lambda version: f"{size(version.size_bytes)} ({version.size_bytes} bytes)"),
    Column("modules", "target_modules"),
    Column("digest", "digest"),
    Column("created", "created_at"),
)
ACTION_COLUMNS = (
    Column("model", lambda action: f"{action.name}@{action.version}"),
    Column("action", "action"),
    Column("done", "is_done"),
)


@app.command()
def push(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="As PEFT's save_pretrained() makes it.", show_default=False)
    ],
    name: Annotated[str, typer.Option(help="What requests will write as `model`.")],
    alias: Annotated[str | None, typer.Option(help="Point this alias at the new version too.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, keep nothing.")] = False,
    promote: Annotated[
        bool, typer.Option("--promote/--no-promote", help="Let NAME itself mean the new version.")
    ] = True,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Send a PEFT directory; it is served when this returns."""
    with connected(format, url, tenant) as (output, client):
        with output.progress(f"pushing {name}") as on_progress:
            version = client.adapters.push(
                directory, name=name, alias=alias, promote=promote, dry_run=dry_run, on_progress=on_progress
            )
        output.one(version, VERSION_DETAILS, name="model")
        if dry_run:
            output.note("Dry run: it would be accepted; nothing was kept.")
        else:
            model = name if promote else version.model
            output.note(f'Try it: loraserve run {model} "PROMPT"')


@app.command("list")
def list_(url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None) -> None:
    """Every adapter of the tenant."""
    with connected(format, url, tenant) as (output, client):
        empty = "No adapters yet. Push one: loraserve adapter push DIR --name NAME"
        output.rows(client.adapters.list(), ADAPTER_COLUMNS, name="name", empty=empty)


@app.command()
def show(
    target: TargetArgument,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """One adapter, or one version of it."""
    name, version = split_version(target)
    with connected(format, url, tenant) as (output, client):
        if version is None:
            output.one(client.adapters.get(name), ADAPTER_COLUMNS, name="name")
        else:
            output.one(client.adapters.version(name, version), VERSION_DETAILS, name="model")


@app.command()
def versions(
    name: NameArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Every version of an adapter."""
    with connected(format, url, tenant) as (output, client):
        output.rows(client.adapters.versions(name), VERSION_COLUMNS, name="model", empty=f"{name} has no versions.")


@app.command()
def alias(
    name: NameArgument,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="`live` is what NAME alone means.")],
    version: Annotated[int, typer.Argument(metavar="VERSION", min=1)],
    if_match: Annotated[str | None, typer.Option(help="Move it only if its ETag is still this one.")] = None,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Point an alias at a version: promote, or roll back."""
    with connected(format, url, tenant) as (output, client):
        moved = client.adapters.set_alias(name, alias, version, if_match=if_match)
        columns = (Column("alias", "alias"), Column("version", "version"), Column("etag", "etag"))
        output.one(moved, columns, name="alias")


@app.command()
def delete(
    target: TargetArgument,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Delete an adapter, or one version of it. Requests that run finish on what they started with."""
    name, version = split_version(target)
    with connected(format, url, tenant) as (output, client):
        client.adapters.delete(name, version)
        output.note(f"Deleted {target}.")


def _target(client: Client, target: str) -> tuple[str, int]:
    """The name and the version that ``NAME[@VERSION]`` means: the live one where none is named."""
    name, version = split_version(target)
    return name, client.adapters.alias(name, "live").version if version is None else version


@app.command()
def warm(
    target: TargetArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Bring the weights into memory before the first request asks for them."""
    with connected(format, url, tenant) as (output, client):
        output.one(client.adapters.warm(*_target(client, target)), ACTION_COLUMNS, name="name")


@app.command()
def pin(
    target: TargetArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Keep the weights in memory until they're unpinned (takes an admin key)."""
    with connected(format, url, tenant) as (output, client):
        output.one(client.adapters.pin(*_target(client, target)), ACTION_COLUMNS, name="name")


@app.command()
def unpin(
    target: TargetArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Let the weights go when their room is needed (takes an admin key)."""
    with connected(format, url, tenant) as (output, client):
        output.one(client.adapters.unpin(*_target(client, target)), ACTION_COLUMNS, name="name")
