"""Names that a shell offers for an argument: adapters and models of the server, if it answers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from loraserve.sdk import Client

MAX_WAIT_S = 1.0
"""Longest time that a Tab waits for a server; what has come by then is offered."""
MAX_NAMES = 1000

# A shell evaluates what is offered: a server's answer is no command.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:-]{0,255}")
_LAST_TERM = re.compile(r"[^+*]*\Z")


def adapter_names(context: typer.Context, incomplete: str) -> list[str]:
    """List the tenant's adapters whose names begin so; none where no server answers in time."""
    return _ask(context, incomplete, lambda client: (adapter.name for adapter in client.adapters.list()))


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """List the models that begin so, or the sums whose last adapter does: ``a+0.5*b``."""
    term = _LAST_TERM.search(incomplete)
    before = incomplete[: term.start()] if term is not None else ""
    found = _ask(context, incomplete[len(before) :], lambda client: (model.id for model in client.models.list()))
    return [before + name for name in found]


def _ask(context: typer.Context, start: str, names: Callable[[Client], Iterable[str]]) -> list[str]:
    """Select the names that begin with `start`, of those that come before the wait is over."""
    from loraserve.sdk import Client

    found: list[str] = []

    def read() -> None:
        try:
            url, tenant = context.params.get("url"), context.params.get("tenant")
            with Client(url, tenant=tenant, timeout=MAX_WAIT_S, max_retries=0) as client:
                for name in names(client):
                    if name.startswith(start) and _PLAIN.fullmatch(name) and len(found) < MAX_NAMES:
                        found.append(name)
        except Exception:  # noqa: S110
            pass  # words here would stand in the middle of a line that is typed

    # not joined for longer: the process ends, and the thread with it
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(MAX_WAIT_S)
    return sorted(found)
