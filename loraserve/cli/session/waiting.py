"""Show why an answer is late: a refusal that is tried again, or weights that are loaded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from loraserve import errors
from loraserve.cli.output import Output, size

if TYPE_CHECKING:
    from loraserve.contract.residency import AdapterResidency
    from loraserve.contract.result import Answer

FIRST_LOOK_S, LOOK_EVERY_S, LOOK_TIMEOUT_S = 1.5, 3.0, 2.0
MAX_LOOKED_AT = 1000
"""Rows of the residency that a look reads at most."""
LONG_LOAD_MS = 1000.0
"""Time for an adapter's weights from which it is shown after the answer too."""


def term_names(model: str) -> list[str]:
    """List the adapters that a model names, without weights: ``a+0.5*b@3`` has a and b@3."""
    return [term.rpartition("*")[2].strip() for term in model.split("+")]


class WaitTeller:
    """Watch a request until its first token, and show on a terminal what it waits for.

    Each look is a request of its own, on another thread, with a short timeout. A look that fails
    shows nothing: the request itself will.
    """

    def __init__(self, output: Output, url: str | None, tenant: str | None) -> None:
        self._output = output
        self._url = url
        self._tenant = tenant

    @contextmanager
    def watching(self, model: str) -> Iterator[None]:
        """Show what the block waits for, while it does."""
        if not sys.stderr.isatty():
            yield
            return
        over, printing = threading.Event(), threading.Lock()
        threading.Thread(target=self._watch, args=(model, over, printing), daemon=True).start()
        try:
            yield
        finally:
            with printing:
                over.set()

    def tell_load(self, answer: Answer | None) -> None:
        """Show how long the request waited for weights, if that was long."""
        took_ms = 0.0 if answer is None else _duration_ms(answer.server_timing, "adapter")
        if took_ms >= LONG_LOAD_MS and sys.stderr.isatty():
            self._output.note(f"({took_ms / 1000:.1f} s of the wait were for the adapter's weights.)")

    def _watch(self, model: str, over: threading.Event, printing: threading.Lock) -> None:
        told = None
        pause_s = FIRST_LOOK_S
        while not over.wait(pause_s):
            pause_s = LOOK_EVERY_S
            reason = self._reason(model)
            with printing:
                if reason is not None and reason != told and not over.is_set():
                    self._output.note(f"Waiting: {reason} (Ctrl-C cancels.)")
                    told = reason

    def _reason(self, model: str) -> str | None:
        from loraserve.sdk import Client

        try:
            with Client(self._url, tenant=self._tenant, timeout=LOOK_TIMEOUT_S, max_retries=0) as client:
                rows = [row for row, _ in zip(client.residency(resident=True), range(MAX_LOOKED_AT), strict=False)]
        except errors.LoraserveError:
            return None
        return wait_reason(model, rows)


def wait_reason(model: str, rows: Sequence[AdapterResidency]) -> str:
    """Describe what a request for `model` waits for, by the versions in memory or on their way."""
    names = {term.partition("@")[0] for term in term_names(model)}
    loading = [row for row in rows if row.name in names and row.tier == "loading"]
    if loading:
        parts = ", ".join(f"{row.model} ({size(row.size_bytes)})" for row in loading)
        return f"the server is loading the weights of {parts}."
    return "the server hasn't begun to answer; it may be busy with other requests. See: loraserve ps"


def _duration_ms(server_timing: str | None, name: str) -> float:
    """Read the milliseconds of a part of ``Server-Timing``; 0 if it isn't there."""
    for part in (server_timing or "").split(","):
        what, *facts = (word.strip() for word in part.split(";"))
        if what == name:
            for fact in facts:
                key, _, value = fact.partition("=")
                try:
                    return float(value) if key == "dur" else 0.0
                except ValueError:
                    return 0.0
    return 0.0
