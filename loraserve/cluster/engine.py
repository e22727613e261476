"""The replicas of a cluster as one engine: admission, text, replay on another replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from loraserve.cluster.relay.calls import ReplicaCalls
from loraserve.cluster.relay.streams import ReplicaStreams
from loraserve.cluster.routing.members import Members, members
from loraserve.cluster.summary import StatsSum, merge_residency
from loraserve.config import EngineConfig
from loraserve.engine_client import messages as m
from loraserve.engine_client.admission import QueueBounds
from loraserve.engine_client.chunk import Chunk
from loraserve.engine_client.live_request import LiveRequest
from loraserve.engine_client.live_requests import LiveRequests
from loraserve.errors import (
    EngineError,
    EngineUnavailable,
    LoraserveError,
)
from loraserve.limits import LIMITS
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import (
    AdapterRef,
    AdapterResidency,
    BasePrecision,
    BaseSpec,
    Certificate,
    Digest,
    EngineStats,
    TenantId,
)

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class ClusterEngine:
    """The replicas of a deployment, with `EngineClient`'s interface.

    Requests are admitted here, and their text is made here, so that a replica that is lost takes
    nothing with it: another continues after the tokens that came.

    Everything happens on the event loop that made it.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        drain_s: float,
        on_damage: Callable[[Digest, Digest], None] | None = None,
        max_queue_wait_s: float = LIMITS.max_queue_wait_s,
    ) -> None:
        """Make a client of the replicas behind `handle`.

        Args:
            drain_s: seconds that streams may stay at a replica that leaves; then they move.
            on_damage: as `EngineClient`'s.
        """
        self._num_slots = config.max_num_seqs
        self._bounds = QueueBounds(config.max_num_seqs, config.max_num_seqs + LIMITS.max_queued_requests)
        self._requests = LiveRequests(self._bounds, tokenizer, max_queue_wait_s=max_queue_wait_s)
        self._drain_s = drain_s
        self._table = members()
        # Serve may be set to run its router on a loop of its own
        later = asyncio.get_running_loop().call_soon_threadsafe
        self._calls = ReplicaCalls(handle, self._table, on_damage)
        self._streams = ReplicaStreams(self._calls, self._table, self._requests.note_began)
        self._table.on_change = lambda came, left: later(self._replicas_changed, came, left)
        self._table.on_routed = lambda request_id, replica_id: later(self._streams.note_routed, request_id, replica_id)
        self._stats = StatsSum()
        self._base: BaseSpec | None = None
        self._pins: dict[Digest, AdapterRef] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # state

    @property
    def base(self) -> BaseSpec:
        """The base model's facts; known once `start` has returned."""
        if self._base is None:
            raise EngineUnavailable("The base model isn't loaded yet.")
        return self._base

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges of all replicas together."""
        return self._stats.of({one: report.stats for one, report in self._table.reports.items()})

    @property
    def num_replays(self) -> Mapping[str, int]:
        """Number of requests that continued at another replica, by what became of theirs."""
        return self._streams.num_replays

    @property
    def members(self) -> Members:
        """The replicas, and where requests went."""
        return self._table

    @property
    def is_ready(self) -> bool:
        """Whether requests sent now are computed now."""
        return self._base is not None and not self._requests.is_stopping and self._has_ready_replica

    @property
    def _has_ready_replica(self) -> bool:
        reports = self._table.reports
        return any(one not in reports or reports[one].status is None for one in self._table.ids)

    def replica_states(self) -> dict[str, float]:
        """Count the replicas that compute requests now, and those that don't."""
        reports = self._table.reports
        num_away = sum(one in reports and reports[one].status is not None for one in self._table.ids)
        return {"ready": float(len(self._table.ids) - num_away), "away": float(num_away)}

    @property
    def is_live(self) -> bool:
        """Whether replicas run or can be started: Serve sees to that."""
        return True

    @property
    def status(self) -> str | None:
        """Reason why requests can't be computed now; None if they can."""
        if self._requests.is_stopping:
            return "The server is shutting down."
        if self._base is None or not self._table.ids:
            return "No engine replica is ready yet."
        if not self._has_ready_replica:
            return next(report.status for report in self._table.reports.values() if report.status is not None)
        return None

    @property
    def num_restarts(self) -> int:
        """Engine processes that replicas started in place of one that ended."""
        return sum(report.num_restarts for report in self._table.reports.values())

    @property
    def num_hangs(self) -> int:
        """Engine processes that replicas killed since they made no progress."""
        return sum(report.num_hangs for report in self._table.reports.values())

    @property
    def num_live_requests(self) -> int:
        """Requests between admission and end."""
        return len(self._requests.by_id)

    @property
    def num_waiting_clients(self) -> int:
        """Requests that a client waits for, without a first token."""
        return self._bounds.num_waiting

    @property
    def is_computing_here(self) -> bool:
        """Whether requests are under way that processors compute, maybe this machine's."""
        return self._base is not None and self._base.device == "cpu" and bool(self._requests.by_id)

    async def start(self) -> None:
        """Wait until a replica has answered; one that leaves meanwhile needn't be the last."""
        while self._base is None:
            try:
                self._base = await self._calls.describe()
            except EngineUnavailable as error:
                logger.info("a replica was asked for its base and didn't answer: %s", error)
                await asyncio.sleep(_LOOK_S)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, wait up to `grace_s` for those alive; the others fail."""
        await self._requests.stop(grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._streams.close()

    # requests

    def generate(self, request: m.GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as it is made, wherever; the last chunk has a finish reason.

        Closing the generator aborts the request. It raises what `EngineClient.generate` does.
        """
        return self._requests.generate(request, self._send)

    def _send(self, live: LiveRequest) -> Callable[[], object]:
        """Begin to compute a request at a replica; return what ends it there."""
        task = asyncio.create_task(self._streams.compute(live), name="cluster-request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task.cancel

    # replicas that come and go

    def _replicas_changed(self, came: frozenset[str], left: frozenset[str]) -> None:
        num = max(1, len(self._table.ids))
        self._bounds.resize(self._num_slots * num, self._num_slots * num + LIMITS.max_queued_requests)
        loop = asyncio.get_running_loop()
        for replica_id in left:
            self._streams.note_left(replica_id)
            loop.call_later(self._drain_s, self._move, replica_id)
        for replica_id in came:
            self._spawn(self._welcome(replica_id))

    def _move(self, replica_id: str) -> None:
        """Let what a replica still computes continue at others, unless it is back."""
        if replica_id in self._table.ids:
            return
        if not self._table.ids:
            # it is the best place that there is
            asyncio.get_running_loop().call_later(_LOOK_S, self._move, replica_id)
            return
        self._streams.move(replica_id)

    async def _welcome(self, replica_id: str) -> None:
        """Check a new replica, and pin on it what is pinned on the others."""
        try:
            base = await self._calls.describe(replica_id)
        except LoraserveError as error:
            logger.warning("the replica %s came and didn't answer: %s", replica_id, error)
            return
        known = self._base or base
        if base.digest != known.digest:
            logger.error(
                "the replica %s serves a base with the digest %s, the others one with %s: nothing is sent to it."
                " Give all machines the same files of the model.",
                *(replica_id, base.digest[:12], known.digest[:12]),
            )
            self._table.remove(replica_id)
            return
        if (base.arithmetic, base.instructions, base.device) != (known.arithmetic, known.instructions, known.device):
            logger.warning(
                "the replica %s computes as %s with %s on %s, the others as %s with %s on %s: a stream that moves"
                " there may go on with other tokens",
                *(replica_id, base.arithmetic, base.instructions, base.device),
                *(known.arithmetic, known.instructions, known.device),
            )
        for ref in list(self._pins.values()):
            try:
                await self._calls.ask(m.PinAdapter(call_id=0, adapter=ref, is_pinned=True), ref=ref, target=replica_id)
            except LoraserveError as error:
                logger.warning("the replica %s couldn't load the pinned %s: %s", replica_id, ref.name, error)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # calls

    async def warm(self, ref: AdapterRef) -> None:
        """Wait until the adapter is on the device of the replica that its requests go to."""
        await self._calls.ask(m.WarmAdapter(call_id=0, adapter=ref), ref=ref)

    async def pin(self, ref: AdapterRef) -> None:
        """Load the adapter onto each replica's device and keep it there, on those that come too."""
        await self._calls.ask_all(m.PinAdapter(call_id=0, adapter=ref, is_pinned=True), ref=ref)
        self._pins[ref.digest] = ref

    async def unpin(self, ref: AdapterRef) -> None:
        """Let the adapter be evicted again."""
        self._pins.pop(ref.digest, None)
        await self._calls.ask_all(m.PinAdapter(call_id=0, adapter=ref, is_pinned=False), ref=ref)

    def discard(self, digest: Digest) -> None:
        """Let the replicas free an ephemeral adapter that no request uses any more."""
        self._spawn(self._calls.tell_all(m.DiscardAdapter(digest=digest)))

    def forget_texts(self, owner: TenantId, name: str | None = None, version: int | None = None) -> None:
        """Let the replicas forget the texts of a deleted version, adapter or tenant."""
        self._spawn(self._calls.tell_all(m.ForgetTexts(owner=owner, name=name, version=version)))

    async def residency(self, only: Collection[Digest] | None = None) -> tuple[AdapterResidency, ...]:
        """List every adapter that a replica has in memory, where it is closest to a device."""
        wanted = None if only is None else frozenset(only)
        replies = await self._calls.ask_all(m.QueryResidency(call_id=0, only=wanted))
        return merge_residency([reply.adapters for reply in replies if isinstance(reply, m.ResidencyReply)])

    async def verify(self, ref: AdapterRef) -> Certificate:
        """Measure how far the adapter's answers are from those of its reference evaluation."""
        reply = await self._calls.ask(
            m.VerifyAdapter(call_id=0, adapter=ref), ref=ref, limit_s=LIMITS.verification_timeout_s
        )
        if not isinstance(reply, m.VerifyReply) or reply.certificate is None:
            raise EngineError(f"The replica answered a verification with {type(reply).__name__}.")
        return reply.certificate

    async def measure_base(self) -> BasePrecision | str:
        """Measure what rounding costs the base of a replica, or explain why nothing is measured."""
        reply = await self._calls.ask(m.MeasureBase(call_id=0), limit_s=LIMITS.verification_timeout_s)
        if not isinstance(reply, m.BaseMeasured):
            raise EngineError(f"The replica answered a measurement with {type(reply).__name__}.")
        return reply.precision or reply.note
