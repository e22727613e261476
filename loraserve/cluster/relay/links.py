"""An ingress' links: one to each replica that computes requests of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException

from loraserve.cluster.relay.calls import LOST, ReplicaCalls
from loraserve.types import TokenOutput

logger = logging.getLogger(__name__)


class Links:
    """Opens links and reads them; a replica ends one that has had nothing to send for a while.

    Args:
        on_output: called with each output.
        on_end: called with a replica and why its link has ended; None: it had nothing more to send.
    """

    def __init__(
        self,
        calls: ReplicaCalls,
        on_output: Callable[[TokenOutput], None],
        on_end: Callable[[str, str | None], None],
    ) -> None:
        self._calls, self._on_output, self._on_end = calls, on_output, on_end
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._open: set[str] = set()

    def has(self, replica_id: str) -> bool:
        """Check whether there is a link to a replica, maybe one that opens."""
        return replica_id in self._reading

    def ensure(self, replica_id: str) -> None:
        """Open a link to a replica; no-op if there is one."""
        if replica_id not in self._reading:
            self._reading[replica_id] = asyncio.create_task(self._read(replica_id), name="cluster-link")

    def forget(self, replica_id: str) -> None:
        """Give up a link that isn't open yet, since its replica takes no calls any more."""
        if replica_id in self._reading and replica_id not in self._open:
            self._reading[replica_id].cancel()

    async def close(self) -> None:
        """End all links."""
        reading = list(self._reading.values())
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    async def _read(self, replica_id: str) -> None:
        reason: str | None = "it leaves"
        try:
            async with aclosing(self._calls.batches(replica_id)) as batches:
                async for outputs in batches:
                    self._open.add(replica_id)
                    for output in outputs:
                        self._on_output(output)
            reason = None
        except (*LOST, RayServeException) as error:
            reason = f"it is gone ({type(error).__name__})"
        except RayTaskError as error:
            reason = f"it failed: {error.cause!r}"
        except Exception as error:
            logger.exception("a replica's link failed")
            reason = f"its link failed ({type(error).__name__})"
        finally:
            self._open.discard(replica_id)
            del self._reading[replica_id]
            self._on_end(replica_id, reason)
