"""Requests on replicas: what one has made of a request continues at another if it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException

from loraserve.cluster.relay.calls import LOST, ReplicaCalls
from loraserve.cluster.relay.links import Links
from loraserve.cluster.routing.members import Members
from loraserve.cluster.routing.routed_request import TOKENS_PER_PREFIX, RoutedRequest, prefix_hashes
from loraserve.engine_client.live_request import LiveRequest
from loraserve.errors import EngineError, EngineUnavailable, LoraserveError, Overloaded
from loraserve.types import RequestId, TokenOutput

logger = logging.getLogger(__name__)

MAX_LOSSES = 4
"""Replicas that may be lost under a request in a row, without a token, until it fails."""
_MOVABLE = frozenset({EngineUnavailable.code, Overloaded.code})
"""Codes with which a replica signals that another should compute the request."""
_RETRY_S = 0.25
_LAST_S = 30.0
"""Seconds in which a request's last output has to come after its replica is done with it."""


class _Lost(Exception):
    """The replica computes the request no more: another one must.

    Attributes:
        is_moved: whether it was taken away from the replica, which would have gone on.
    """

    def __init__(self, reason: str, *, is_moved: bool = False) -> None:
        super().__init__(reason)
        self.is_moved = is_moved


class _Attempt:
    """A request at one replica.

    Attributes:
        ended: done with its last output; a `_Lost` if another replica has to continue.
    """

    def __init__(self, live: LiveRequest, on_began: Callable[[LiveRequest], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._live, self._on_began = live, on_began

    def take(self, output: TokenOutput) -> None:
        if self.ended.done():
            return
        if output.error_code in _MOVABLE:
            self.lose(_Lost(output.error_message or output.error_code))
            return
        if not self._live.has_begun:
            self._on_began(self._live)
        self._live.receive(output)
        if self._live.is_finished:
            self.ended.set_result(None)

    def lose(self, loss: _Lost) -> None:
        if not self.ended.done():
            self.ended.set_exception(loss)


class ReplicaStreams:
    """Has replicas compute requests, one after the other where one is lost.

    Args:
        on_began: called with a request whose first output has come, of any replica.

    Attributes:
        num_replays: requests that continued at another replica, by what became of theirs: lost,
            moved.
    """

    def __init__(self, calls: ReplicaCalls, table: Members, on_began: Callable[[LiveRequest], None]) -> None:
        self.num_replays: Counter[str] = Counter(lost=0, moved=0)
        self._calls, self._table, self._on_began = calls, table, on_began
        self._links = Links(calls, self._take, self._note_link_ended)
        self._attempts: dict[RequestId, _Attempt] = {}
        self._done: set[asyncio.Future[None]] = set()

    def note_routed(self, request_id: RequestId, replica_id: str) -> None:
        """See to it that a replica has a link for the outputs of a request that it accepted."""
        attempt = self._attempts.get(request_id)
        if attempt is None:
            return
        if replica_id in self._table.ids:
            self._links.ensure(replica_id)
        elif not self._links.has(replica_id):
            # no link can be opened any more
            attempt.lose(_Lost("it leaves"))

    def note_left(self, replica_id: str) -> None:
        """Let what has no link yet to a replica that leaves continue at others."""
        self._links.forget(replica_id)

    def move(self, replica_id: str) -> None:
        """Let what a replica still computes continue at others, at once."""
        for attempt in self._at(replica_id):
            attempt.lose(_Lost("it leaves", is_moved=True))

    async def close(self) -> None:
        """End the links."""
        await self._links.close()

    async def compute(self, live: LiveRequest) -> None:
        """Have a replica compute the request, and another one its rest if that one is lost.

        Its outputs, or the error that ends it, go to the request.
        """
        num_losses = number = 0
        try:
            while not live.is_finished:
                num_tokens = len(live.output_token_ids)
                number += 1
                try:
                    await self._follow(live, number)
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

    async def _follow(self, live: LiveRequest, number: int) -> None:
        """Have one replica compute the request, until it ends or the replica is lost.

        Raises:
            _Lost: another one has to continue.
            LoraserveError: the request can't be computed anywhere.
        """
        # its own id: the replica before may still have it
        request_id = RequestId(f"{live.request.request_id}.{number}")
        placement = self._placement(live, request_id)
        add = msgspec.structs.replace(live.begin_sending(), request_id=request_id)
        attempt = self._attempts[request_id] = _Attempt(live, self._on_began)
        response = self._calls.compute(add, placement)
        done = asyncio.ensure_future(_wait_for(response))
        try:
            await asyncio.wait((done, attempt.ended), return_when=asyncio.FIRST_COMPLETED)
            if not attempt.ended.done():
                # its replica has put its last output; or is lost, and this raises
                done.result()
                await asyncio.wait((attempt.ended,), timeout=_LAST_S)
                attempt.lose(_Lost("its last tokens didn't come"))
            attempt.ended.result()
        except (*LOST, RayServeException) as error:
            raise _Lost(f"it is gone ({type(error).__name__})") from error
        except RayTaskError as error:
            raise _Lost(f"it failed: {error.cause!r}") from error
        finally:
            attempt.ended.cancel()
            del self._attempts[request_id]
            self._table.note_ended(request_id)
            if not live.is_finished:
                response.cancel()
            self._done.add(done)
            done.add_done_callback(self._let_go)

    def _let_go(self, done: asyncio.Future[None]) -> None:
        self._done.discard(done)
        if not done.cancelled():
            # whatever it is, the request is over here
            done.exception()

    def _take(self, output: TokenOutput) -> None:
        attempt = self._attempts.get(output.request_id)
        # what a replica makes of a request that went elsewhere is dropped
        if attempt is not None:
            attempt.take(output)

    def _note_link_ended(self, replica_id: str, reason: str | None) -> None:
        """Open another link if there are requests; if it broke, let them continue elsewhere."""
        attempts = self._at(replica_id)
        if attempts and reason is None and replica_id in self._table.ids:
            self._links.ensure(replica_id)
            return
        for attempt in attempts:
            attempt.lose(_Lost(reason or "it leaves"))

    def _at(self, replica_id: str) -> list[_Attempt]:
        return [one for request_id, one in self._attempts.items() if self._table.place(request_id) == replica_id]

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


async def _wait_for(response: Any) -> None:
    await response
