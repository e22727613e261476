"""``loraserve adapter``: push, see, name and delete adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected, split_version
from loraserve.cli.output import Column, Format, Output, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from loraserve.sdk import Client
    from loraserve.sdk.resources import Version

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
    Column("PARITY", "verdict"),
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
    Column("kind", lambda version: version.detail_of("format")),
    Column("rank", "rank"),
    Column("size", lambda version: f"{size(version.size_bytes)} ({version.size_bytes} bytes)"),
    Column("modules", "target_modules"),
    Column("digest", "digest"),
    Column("created", "created_at"),
    Column("parity", lambda version: _parity(version)),
)
CERTIFICATE_DETAILS = (
    Column("largest difference", lambda one: f"{_number(one.max_difference)} of {_number(one.tolerance)} allowed"),
    Column("mean difference", lambda one: _number(one.mean_difference)),
    Column("the base's own", lambda one: _number(one.base_difference)),
    Column("largest effect", lambda one: f"{_number(one.max_effect)} on a logit of the base"),
    Column("same token", lambda one: f"{_share(one.top1_agreement)} of {one.num_probe_tokens} positions"),
    Column("precision loss", lambda one: _share(one.precision_loss)),
    Column("verified in", lambda one: f"{_number(one.seconds)} s"),
)
ACTION_COLUMNS = (
    Column("model", lambda action: f"{action.name}@{action.version}"),
    Column("action", "action"),
    Column("done", "is_done"),
)


def _details(version: Version) -> list[Column]:
    """What people are shown of a version: its certificate's numbers too, where it has one."""
    certificate = version.certificate
    if certificate is None:
        return list(VERSION_DETAILS)
    return [
        *VERSION_DETAILS,
        *(Column(f"  {column.title}", _fixed(column.of(certificate))) for column in CERTIFICATE_DETAILS),
    ]


def _fixed(text: str) -> Callable[[object], str]:
    return lambda _: text


def _parity(version: Version) -> str | None:
    """The verdict, and why it isn't a better one."""
    if version.verdict in (None, "passed"):
        return version.verdict
    certificate = version.certificate
    why = version.detail_of("parity") if certificate is None else certificate.reason
    return f"{version.verdict}: {why}" if why else version.verdict


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "not finite" if value is None else f"{100 * value:.4g} %"


def _show_version(output: Output, version: Version) -> None:
    output.one(version, _details(version), name="model")


def _check_served(output: Output, version: Version) -> None:
    """Raises:
    typer.Exit: the version is in quarantine; scripts must not go on as if it were served.
    """
    if version.is_quarantined:
        output.note(f"{version.model} is in quarantine: it isn't served, and no alias was moved to it.")
        raise typer.Exit(1)


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
        _show_version(output, version)
        if dry_run:
            output.note("Dry run: it would be accepted; nothing was kept.")
        else:
            _check_served(output, version)
            if version.verdict == "skipped":
                output.note(f"It isn't verified yet. Try: loraserve adapter verify {version.model}")
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
    """One adapter and its live version, or one version of it, with its certificate."""
    name, version = split_version(target)
    with connected(format, url, tenant) as (output, client):
        if version is not None:
            _show_version(output, client.adapters.version(name, version))
            return
        adapter = client.adapters.get(name)
        output.one(adapter, ADAPTER_COLUMNS, name="name")
        live = adapter.aliases.get("live")
        # Programs asked for one thing, and get it.
        if live is not None and output.format is Format.HUMAN:
            _show_version(output, client.adapters.version(name, live))


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
def verify(
    target: TargetArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Compare the answers with a plain evaluation of the adapter, anew. What fails isn't served until it passes."""
    with connected(format, url, tenant) as (output, client):
        version = client.adapters.verify(*_target(client, target))
        _show_version(output, version)
        _check_served(output, version)


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
