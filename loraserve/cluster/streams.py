"""Requests on replicas: what one has made of a request goes on at another if it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException, RequestCancelledError

from loraserve.cluster.calls import LOST, ReplicaCalls
from loraserve.cluster.routing.members import Members
from loraserve.cluster.routing.routed_request import TOKENS_PER_PREFIX, RoutedRequest, prefix_hashes
from loraserve.engine_client.live_request import LiveRequest
from loraserve.errors import EngineError, EngineUnavailable, LoraserveError, Overloaded
from loraserve.types import RequestId

logger = logging.getLogger(__name__)

MAX_LOSSES = 4
"""Replicas that may be lost under a request in a row, without a token, until it fails."""
_MOVABLE = frozenset({EngineUnavailable.code, Overloaded.code})
"""Codes with which a replica says that another should compute the request."""
_RETRY_S = 0.25


class _Lost(Exception):
    """The replica computes the request no more: another one must.

    Attributes:
        is_moved: whether it was taken away from the replica, which would have gone on.
    """

    def __init__(self, reason: str, *, is_moved: bool = False) -> None:
        super().__init__(reason)
        self.is_moved = is_moved


class ReplicaStreams:
    """Has replicas compute requests, one after the other where one is lost.

    Args:
        on_began: called with a request whose first output has come, of any replica.

    Attributes:
        num_replays: requests that went on at another replica, by what became of theirs: lost,
            moved.
    """

    def __init__(self, calls: ReplicaCalls, table: Members, on_began: Callable[[LiveRequest], None]) -> None:
        self.num_replays: Counter[str] = Counter(lost=0, moved=0)
        self._calls, self._table, self._on_began = calls, table, on_began
        self._responses: dict[RequestId, Any] = {}

    def move(self, replica_id: str) -> None:
        """Let what a replica still computes go on at others."""
        for request_id, response in list(self._responses.items()):
            if self._table.place(request_id) == replica_id:
                response.cancel()

    async def compute(self, live: LiveRequest) -> None:
        """Have a replica compute the request, and another one its rest if that one is lost.

        Its outputs, or the error that ends it, go to the request.
        """
        num_losses = attempt = 0
        try:
            while not live.is_finished:
                num_tokens = len(live.output_token_ids)
                attempt += 1
                try:
                    await self._follow(live, attempt)
                except _Lost as loss:
                    self.num_replays["moved" if loss.is_moved else "lost"] += 1
                    num_losses = num_losses + 1 if len(live.output_token_ids) == num_tokens else 1
                    if num_losses >= MAX_LOSSES:
                        raise EngineUnavailable(
                            f"{num_losses} replicas in a row were lost under this request; the last: {loss}.",
                            hint="Try again.",
                        ) from loss
                    if num_losses > 1:
                        await asyncio.sleep(_RETRY_S * num_losses)
        except LoraserveError as error:
            live.fail(error)
        except Exception as error:
            logger.exception("a replica's stream failed")
            live.fail(EngineError(f"The replica failed: {type(error).__name__}."))

    async def _follow(self, live: LiveRequest, attempt: int) -> None:
        """Take what one replica makes of the request, until it ends or the replica is lost.

        Raises:
            _Lost: another one has to go on.
            LoraserveError: the request can't be computed anywhere.
        """
        # its own id: the replica before may still have it
        request_id = RequestId(f"{live.request.request_id}.{attempt}")
        placement = self._placement(live, request_id)
        add = msgspec.structs.replace(live.begin_sending(), request_id=request_id)
        response = self._responses[request_id] = self._calls.stream(add, placement)
        try:
            async with aclosing(self._calls.outputs(response)) as outputs:
                async for output in outputs:
                    if output.error_code in _MOVABLE:
                        raise _Lost(output.error_message or output.error_code)
                    if not live.has_begun:
                        self._on_began(live)
                    live.receive(output)
                    if live.is_finished:
                        return
            raise _Lost("its stream ended early")
        except RequestCancelledError as error:
            raise _Lost("it leaves", is_moved=True) from error
        except (*LOST, RayServeException) as error:
            raise _Lost(f"it is gone ({type(error).__name__})") from error
        except RayTaskError as error:
            raise _Lost(f"it failed: {error.cause!r}") from error
        finally:
            del self._responses[request_id]
            self._table.note_ended(request_id)
            if not live.is_finished:
                response.cancel()

    def _placement(self, live: LiveRequest, request_id: RequestId) -> RoutedRequest:
        request, ref = live.request, live.request.adapter
        digest = None if ref is None else ref.digest
        return RoutedRequest(
            request_id=request_id,
            tenant=request.tenant,
            digest=digest,
            prefixes=prefix_hashes(request.tenant, digest, request.prompt_token_ids),
            tokens_per_prefix=TOKENS_PER_PREFIX,
            node_id=self._calls.home(ref),
        )
