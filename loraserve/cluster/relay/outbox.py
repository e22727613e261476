"""A replica's outputs for one ingress, which leave together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from loraserve.engine_client import messages as m
from loraserve.types import TokenOutput

IDLE_S = 1.0
"""Seconds without a request after which a link ends."""


class Outbox:
    """Keeps a replica's outputs for one ingress until the link that it opened last takes them.

    A message costs Serve's way whatever is in it: what a step made for all requests goes in one.

    Attributes:
        num_open: requests of the ingress that the replica computes.
    """

    def __init__(self, *, idle_s: float = IDLE_S) -> None:
        self.num_open = 0
        self._idle_s = idle_s
        self._outputs: list[TokenOutput] = []
        self._damaged: list[m.AdapterDamaged] = []
        self._changed = asyncio.Event()
        self._link: object | None = None

    @property
    def is_unused(self) -> bool:
        """Whether neither a request nor a link needs it."""
        return not self.num_open and self._link is None

    def enter(self) -> None:
        """Count a request."""
        self.num_open += 1

    def leave(self) -> None:
        """Count a request no more, whose last output was put."""
        self.num_open -= 1
        self._changed.set()

    def put(self, output: TokenOutput, damaged: Iterable[m.AdapterDamaged] = ()) -> None:
        """Add an output, and what its request found damaged before it."""
        self._damaged += damaged
        self._outputs.append(output)
        self._changed.set()

    async def batches(self) -> AsyncGenerator[list[bytes], None]:
        """Yield what there is as encoded messages, as often as there is something.

        The first batch is empty: it confirms that the link is open. The last one comes when nothing
        has been open for a while, or the ingress has opened another link.
        """
        link = self._link = object()
        # one that was open may wait
        self._changed.set()
        try:
            yield []
            while await self._wait(link):
                yield self._take()
        finally:
            if self._link is link:
                self._link = None

    async def _wait(self, link: object) -> bool:
        """Wait until there is something for this link; False: it ends."""
        while self._link is link:
            if self._outputs:
                return True
            self._changed.clear()
            try:
                async with asyncio.timeout(None if self.num_open else self._idle_s):
                    await self._changed.wait()
            except TimeoutError:
                if not self.num_open and not self._outputs:
                    return False
        return False

    def _take(self) -> list[bytes]:
        outputs, self._outputs = self._outputs, []
        damaged, self._damaged = self._damaged, []
        return [m.encode_output(one) for one in (*damaged, m.StepOutputs(outputs=tuple(outputs)))]
