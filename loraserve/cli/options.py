"""Options that many commands share, and the frame that each command runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve import errors
from loraserve.cli.output import Format, Output

if TYPE_CHECKING:
    from loraserve.sdk import Client

FORMAT_VARIABLE = "LORASERVE_FORMAT"
NOTHING_NAMED: Mapping[str, str] = {}

FormatOption = Annotated[
    Format | None,
    typer.Option(
        "--format",
        help="human, json, or quiet (names alone) (default: human)",
        show_default=False,
        envvar=FORMAT_VARIABLE,
        show_envvar=False,
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="The server (default: LORASERVE_URL, or http://127.0.0.1:8000)", show_default=False),
]
ActForOption = Annotated[
    str | None,
    typer.Option(
        "--tenant", help="The tenant that an admin key acts for (default: LORASERVE_TENANT)", show_default=False
    ),
]
TenantOption = Annotated[str, typer.Option("--tenant", help="The tenant's name.")]


def choose_format(format: Format | None) -> None:
    """Make a ``--format`` that stands before the command the default of the command's own."""
    if format is not None:
        # Commands are parsed after this ran, and this variable is where they look.
        os.environ[FORMAT_VARIABLE] = format.value


@contextmanager
def reporting(format: Format | None, named: Mapping[str, str] = NOTHING_NAMED) -> Iterator[Output]:
    """An `Output` for the block. An error of ours becomes words on stderr and the exit code that fits.

    Args:
        named: what this command's NAME, DIR and the like are: the command to run next is shown with them.

    Raises:
        typer.Exit: 2 for a wrong configuration, 1 for every other error of ours.
    """
    output = Output(format or Format.HUMAN, named)
    try:
        yield output
    except errors.LoraserveError as error:
        output.fail(error)
        raise typer.Exit(2 if isinstance(error, errors.ConfigError) else 1) from error


@contextmanager
def connected(
    format: Format | None, url: str | None, tenant: str | None = None, named: Mapping[str, str] = NOTHING_NAMED
) -> Iterator[tuple[Output, Client]]:
    """As `reporting`, with a client of the server."""
    with reporting(format, named) as output:
        from loraserve.sdk import Client

        with Client(url, tenant=tenant) as client:
            yield output, client
