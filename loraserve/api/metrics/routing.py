"""Names of adapters in use and in memory, as routers request them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from loraserve.api.metrics.adapter_load import AdapterLoad
from loraserve.errors import EngineUnavailable, LoraserveError
from loraserve.types import AdapterResidency, Digest, Tier

if TYPE_CHECKING:
    from loraserve.engine_client.interface import ServingEngine

MAX_AGE_S = 0.25
"""Age up to which an answer of the engine's is used again: routers scrape many times a second."""
_TIMEOUT_S = 1.0
_LEVELS = {Tier.DEVICE: "gpu", Tier.HOST: "cpu"}


class AdapterRouting:
    """Adapters that are waited for, run, or were requested last.

    The engine has digests alone, and the server has names.

    Args:
        max_num_seqs: the maximum number of sequences in a step.
    """

    def __init__(
        self,
        engine: ServingEngine,
        load: AdapterLoad,
        max_num_seqs: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._load = load
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._rows: dict[Digest, AdapterResidency] = {}
        self._asked_s: float | None = None

    @property
    def max_lora(self) -> int:
        """Number of adapters of the present mean size that fit the device.

        Without one there that could be measured, each sequence of a step may have its own.
        """
        return self._engine.stats.max_device_adapters or self._max_num_seqs

    def num_loaded(self) -> dict[str, float]:
        """Count the adapters that steps can use, by the base's id.

        By that id a router recognizes the requests that need no adapter. Nothing, before it is
        loaded.
        """
        stats = self._engine.stats
        try:
            return {self._engine.base.id: stats.device_adapters - stats.num_arriving_adapters}
        except EngineUnavailable:
            return {}

    def requests_info(self) -> dict[tuple[str, str, str], float]:
        """Build the time, by `max_lora` and the names of adapters that run and are waited for."""
        running, waiting = ",".join(self._load.running_names()), ",".join(self._load.waiting_names())
        return {(str(self.max_lora), running, waiting): time.time()}

    async def refresh(self) -> None:
        """Query the engine again, if its last answer is older than `MAX_AGE_S`.

        Nothing is known while it is away.
        """
        now_s = self._clock()
        if self._asked_s is not None and now_s - self._asked_s < MAX_AGE_S:
            return
        self._asked_s = now_s
        digests = set(self._load.named_digests().values())
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                rows = await self._engine.residency(digests) if digests else ()
        except (LoraserveError, TimeoutError):
            rows = ()
        self._rows = {row.digest: row for row in rows}

    def loaded(self) -> dict[tuple[str, str, str, str], float]:
        """Build 1 by name, level, whether it is pinned, and owner, of each that is loaded."""
        found = {}
        for (owner, name), digest in self._load.named_digests().items():
            row = self._rows.get(digest)
            if row is not None and row.tier in _LEVELS:
                found[name, _LEVELS[row.tier], str(row.is_pinned).lower(), owner] = 1.0
        return found
