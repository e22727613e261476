"""``loraserve adapter verify, warm, pin, unpin``.

They show what a version answers, and whether its weights wait in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loraserve.cli.adapters.adapter import TargetArgument
from loraserve.cli.adapters.version_view import check_served, show_version
from loraserve.cli.arguments import split_version
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Column, Output

if TYPE_CHECKING:
    from loraserve.contract.adapter import Action
    from loraserve.sdk import Client

ACTION_COLUMNS = (
    Column("model", lambda action: f"{action.name}@{action.version}"),
    Column("action", "action"),
    Column("done", "is_done"),
)


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    for command in (verify, warm, pin, unpin):
        app.command()(command)


def _target(client: Client, target: str) -> tuple[str, int]:
    """Parse ``NAME[@VERSION]`` into name and version; without one, the live version."""
    name, version = split_version(target)
    return name, client.adapters.alias(name, "live").version if version is None else version


def _named(target: str) -> dict[str, str]:
    return {"NAME": split_version(target)[0]}


def _tell_loading(output: Output, action: Action) -> None:
    if not action.is_done:
        output.note(f"{action.name}@{action.version} is still being loaded. See: loraserve ps")


def verify(
    target: TargetArgument,
    rebase: Annotated[
        bool,
        typer.Option(
            "--rebase",
            help="Move a version of another base to the server's, if it passes there. "
            "Servers of the other base then refuse it.",
        ),
    ] = False,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Certify a version again, against the reference.

    One that fails isn't served until it passes.
    """
    with connected(format, url, tenant, _named(target)) as (output, client):
        with output.working(f"verifying {target}: its answers are compared with the reference's"):
            version = client.adapters.verify(*_target(client, target), rebase=rebase)
        show_version(output, version)
        check_served(output, version)


def warm(
    target: TargetArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Load the weights into memory before the first request needs them."""
    with connected(format, url, tenant, _named(target)) as (output, client):
        with output.working(f"loading the weights of {target}"):
            action = client.adapters.warm(*_target(client, target))
        output.one(action, ACTION_COLUMNS, name="name")
        _tell_loading(output, action)


def pin(
    target: TargetArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Keep the weights in memory until they are unpinned (takes an admin key)."""
    with connected(format, url, tenant, _named(target)) as (output, client):
        with output.working(f"loading and pinning {target}"):
            action = client.adapters.pin(*_target(client, target))
        output.one(action, ACTION_COLUMNS, name="name")
        _tell_loading(output, action)


def unpin(
    target: TargetArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Allow the weights to be evicted when memory is needed (takes an admin key)."""
    with connected(format, url, tenant, _named(target)) as (output, client):
        output.one(client.adapters.unpin(*_target(client, target)), ACTION_COLUMNS, name="name")
