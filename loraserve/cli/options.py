"""Options that many commands share, and the context that each command runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve import errors
from loraserve.cli.output import Format, Output

if TYPE_CHECKING:
    from loraserve.sdk import Client

FORMAT_VARIABLE = "LORASERVE_FORMAT"
_MAX_COMPARED = 2000
"""Names that a mistyped one is compared with."""
NOTHING_NAMED: Mapping[str, str] = {}

FormatOption = Annotated[
    Format | None,
    typer.Option(
        "--format",
        help="Output format; quiet prints only names (default: human).  [env var: LORASERVE_FORMAT]",
        show_default=False,
        envvar=FORMAT_VARIABLE,
        show_envvar=False,
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Server (default: http://127.0.0.1:8000).  [env var: LORASERVE_URL]",
        show_default=False,
    ),
]
ActForOption = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="TENANT",
        help="Tenant that an admin key acts for.  [env var: LORASERVE_TENANT]",
        show_default=False,
    ),
]


def choose_format(format: Format | None) -> None:
    """Make a ``--format`` before the command the default of the command's own."""
    if format is not None:
        # commands are parsed after this ran, and read this variable
        os.environ[FORMAT_VARIABLE] = format.value


@contextmanager
def reporting(format: Format | None, named: Mapping[str, str] = NOTHING_NAMED) -> Iterator[Output]:
    """Yield an `Output` for the block; print an error of ours on stderr and exit with its code.

    Args:
        named: values of this command's NAME, DIR and the like, to fill into the command to run
            next.

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
    """Do as `reporting`, and yield a client of the server too."""
    with reporting(format, named) as output:
        from loraserve.sdk import Client

        with Client(url, tenant=tenant, on_wait=output.wait) as client:
            try:
                yield output, client
            except (errors.AdapterNotFound, errors.ModelNotFound) as error:
                _add_guess(error, client, named)
                raise


def _add_guess(error: errors.NotFound, client: Client, named: Mapping[str, str]) -> None:
    """Add the name that may be meant to the error's hint, of those that the key itself may use."""
    asked = named.get("MODEL") or named.get("NAME")
    if not asked:
        return
    name, at, rest = asked.partition("@")
    try:
        if "MODEL" in named:
            known = [model.id for model in client.models.list()]
        else:
            known = [adapter.name for adapter in islice(client.adapters.list(), _MAX_COMPARED)]
    except errors.LoraserveError:
        # the error that is known says more
        return
    guess = errors.closest(name, known[:_MAX_COMPARED])
    if guess is not None and guess != name:
        error.hint = " ".join(filter(None, (f"Did you mean {guess}{at}{rest}?", error.hint)))
