"""Calls of engine replicas through Serve's handles."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import RayServeException, RequestCancelledError

from loraserve.cluster.relay.base_message import decode_base
from loraserve.cluster.routing.members import Members
from loraserve.cluster.routing.routed_request import RoutedRequest
from loraserve.cluster.routing.router import PLACEMENT
from loraserve.engine_client import messages as m
from loraserve.errors import AdapterUnavailable, EngineUnavailable, LoraserveError, error_from_code
from loraserve.types import AdapterRef, BaseSpec, Digest, RequestId, TenantId, TokenOutput

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

LOST = (RayActorError, TaskCancelledError, RequestCancelledError)
"""Errors of a call whose replica is gone, or lets go of it."""
_CALL_S = 60.0
_SYSTEM = TenantId("")


class ReplicaCalls:
    """Sends the engine's messages to replicas, and reads what comes back.

    Args:
        on_damage: as `EngineClient`'s.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        table: Members,
        on_damage: Callable[[Digest, Digest], None] | None,
    ) -> None:
        self._describes = handle.options(method_name="describe")
        self._calls = handle.options(method_name="call")
        self._computes = handle.options(method_name="compute")
        self._links = handle.options(method_name="batches", stream=True)
        self._ingress = uuid.uuid4().hex
        self._table, self._on_damage = table, on_damage
        self._node_id: str = ray.get_runtime_context().get_node_id()

    async def describe(self, target: str | None = None) -> BaseSpec:
        """Request the base that a replica serves, once there is one.

        Raises:
            EngineUnavailable: the target is gone, or doesn't answer.
        """
        placement = RoutedRequest(request_id=_call_id(), tenant=_SYSTEM, target=target)
        limit_s = None if target is None else _CALL_S
        return decode_base(await self._send(self._describes, b"", placement, limit_s))

    async def ask(
        self,
        message: m.EngineInput,
        *,
        ref: AdapterRef | None = None,
        target: str | None = None,
        limit_s: float = _CALL_S,
    ) -> m.EngineOutput:
        """Send a replica a message, and wait for its answer.

        Args:
            ref: adapter that it is about, by which the replica is chosen.
            target: the replica to send it to; None: any.
            limit_s: seconds until it counts as away.

        Raises:
            EngineUnavailable: it is gone, or doesn't answer.
            LoraserveError: its answer is an error.
        """
        placement = RoutedRequest(
            request_id=_call_id(),
            tenant=_SYSTEM if ref is None else ref.tenant,
            digest=None if ref is None else ref.digest,
            target=target,
            node_id=None if target is not None else self.home(ref),
        )
        *before, last = await self._send(self._calls, m.encode_input(message), placement, limit_s)
        for encoded in before:
            self._read(encoded)
        reply: m.EngineOutput = m.decode_output(last)
        if isinstance(reply, m.CallReply) and reply.error_code is not None:
            raise error_from_code(reply.error_code, reply.error_message or "")
        return reply

    async def ask_all(self, message: m.EngineInput, *, ref: AdapterRef | None = None) -> list[m.EngineOutput]:
        """Send every replica a message, and collect the answers; a replica that left has none.

        Raises:
            LoraserveError: one's answer is an error, or there is no replica.
        """
        targets = self._table.ids
        if not targets:
            raise EngineUnavailable("No engine replica is ready.", hint="Try again shortly.")
        replies = await asyncio.gather(
            *(self.ask(message, ref=ref, target=one) for one in targets), return_exceptions=True
        )
        for reply, target in zip(replies, targets, strict=True):
            if isinstance(reply, BaseException) and target in self._table.ids:
                raise reply
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    async def tell_all(self, message: m.EngineInput) -> None:
        """Send a message to every replica; one that is lost before it gets it does nothing."""
        try:
            await self.ask_all(message)
        except LoraserveError as error:
            logger.debug("%s wasn't told to a replica: %s", type(message).__name__, error)

    def compute(self, add: m.AddRequest, placement: RoutedRequest) -> Any:
        """Have a replica compute a request, whose outputs come by `batches`.

        Return Serve's response, which is done after the request's last output; it has a `cancel`.
        """
        return _remote(self._computes, m.encode_input(add), placement, ingress=self._ingress)

    async def batches(self, replica_id: str) -> AsyncGenerator[list[TokenOutput], None]:
        """Yield what a replica makes of this ingress' requests, until there are none for a while.

        The first batch is empty: from then on nothing is lost.
        """
        placement = RoutedRequest(request_id=_call_id(), tenant=_SYSTEM, target=replica_id)
        response = _remote(self._links, b"", placement, ingress=self._ingress)
        try:
            async for batch in response:
                yield [output for encoded in batch for output in self._read(encoded)]
        finally:
            # no-op if it has ended
            response.cancel()

    def home(self, ref: AdapterRef | None) -> str | None:
        """Choose the machine on which alone an adapter can be loaded; None: on any.

        Raises:
            AdapterUnavailable: no replica is there.
        """
        if ref is None or not ref.is_ephemeral:
            return None
        reports = self._table.reports
        if reports and all(report.node_id != self._node_id for report in reports.values()):
            raise AdapterUnavailable(
                f"The ephemeral adapter {ref.name} is in the memory of the ingress' machine, and no engine replica is"
                " there.",
                hint="Publish it as a version: every replica reads the store.",
            )
        return self._node_id

    async def _send(
        self, handle: DeploymentHandle[Any], message: bytes, placement: RoutedRequest, limit_s: float | None
    ) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await _remote(handle, message, placement)
        except TimeoutError:
            raise EngineUnavailable(f"No replica answered within {limit_s:.0f} s.", hint="Try again.") from None
        except (*LOST, RayServeException) as error:
            raise EngineUnavailable(f"The replica is gone ({type(error).__name__}).", hint="Try again.") from error
        finally:
            self._table.note_ended(placement.request_id)

    def _read(self, encoded: bytes) -> tuple[TokenOutput, ...]:
        """Read a message's outputs."""
        match m.decode_output(encoded):
            case m.StepOutputs(outputs=outputs):
                return outputs
            case m.AdapterDamaged(digest=digest, blob=blob) if self._on_damage is not None:
                self._on_damage(digest, blob)
        return ()


def _remote(handle: DeploymentHandle[Any], message: bytes, placement: RoutedRequest, **arguments: str) -> Any:
    """Call a replica.

    In a context of its own: Serve's router takes calls at the same time on behalf of one HTTP
    request for one and the same call, and all but the first would wait.
    """
    return Context().run(lambda: handle.remote(message, **arguments, **{PLACEMENT: placement}))


def _call_id() -> RequestId:
    return RequestId(f"call-{uuid.uuid4().hex}")
