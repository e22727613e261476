"""Rotation of keys, of tenants and of operators, on the command line."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from loraserve.cli.arguments import duration

OverlapOption = Annotated[
    str | None,
    typer.Option("--overlap", metavar="TIME", help="Time for which the old key works on, e.g. 1h (default: none)."),
]
SHOWN_ONCE = "The key is shown only now."


def read_overlap(overlap: str | None) -> float:
    """Convert the option's text to seconds.

    Raises:
        BadParameter: it isn't a time.
    """
    return (duration(overlap) or timedelta()).total_seconds()


def describe_rotation(overlap: str | None) -> str:
    """Write what is said below a key that has taken the place of another."""
    old = "The old one is revoked." if overlap is None else f"The old one ends in {overlap}."
    return f"{SHOWN_ONCE} {old}"
