"""The replicas of a cluster as one engine: admission, text, replay on another replica."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from contextvars import Context
from typing import TYPE_CHECKING, Any

import msgspec
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException, RequestCancelledError

from loraserve.cluster.members import Members, members
from loraserve.cluster.prefixes import TOKENS_PER_PREFIX, prefix_hashes
from loraserve.cluster.replica import decode_base
from loraserve.cluster.router import PLACEMENT
from loraserve.cluster.summary import StatsSum, merge_residency
from loraserve.cluster.views import PlacementRequest
from loraserve.config import EngineConfig
from loraserve.engine_client import messages as m
from loraserve.engine_client.admission import QueueBounds
from loraserve.engine_client.chunk import Chunk
from loraserve.engine_client.live_request import LiveRequest
from loraserve.engine_client.output import OutputProcessor
from loraserve.errors import (
    EngineError,
    EngineUnavailable,
    LoraserveError,
    ModelError,
    Overloaded,
    error_from_code,
)
from loraserve.limits import LIMITS
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import (
    AdapterRef,
    AdapterResidency,
    BaseSpec,
    Certificate,
    Digest,
    EngineStats,
    RequestId,
    TenantId,
    TokenOutput,
)

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

MAX_LOSSES = 4
"""Replicas that may be lost under a request in a row, without a token, until it fails."""
_MOVABLE = frozenset({EngineUnavailable.code, Overloaded.code})
"""Codes with which a replica says that another should compute the request."""
_RETRY_S = 0.25
_LOOK_S = 1.0
_CALL_S = 60.0
_LOST = (RayActorError, TaskCancelledError, RequestCancelledError)
_SYSTEM = TenantId("")


class _Lost(Exception):
    """The replica computes the request no more: another one must."""


class ClusterEngine:
    """The replicas of a deployment, with `EngineClient`'s interface.

    Requests are admitted here, and their text is made here, so that a replica that is lost takes
    nothing with it: another goes on after the tokens that came.

    Everything happens on the event loop that called `start`.
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
        table: Members | None = None,
    ) -> None:
        """Make a client of the replicas behind `handle`.

        Args:
            drain_s: seconds that streams may stay at a replica that leaves; then they move.
            on_damage: as `EngineClient`'s.
        """
        self.num_replays: Counter[str] = Counter()
        """Requests that went on at another replica, by what became of theirs: lost, moved."""
        self._describes = handle.options(method_name="describe")
        self._calls = handle.options(method_name="call")
        self._streams = handle.options(method_name="outputs", stream=True)
        self._tokenizer = tokenizer
        self._num_slots = config.max_num_seqs
        self._bounds = QueueBounds(config.max_num_seqs, config.max_num_seqs + LIMITS.max_queued_requests)
        self._drain_s, self._max_queue_wait_s = drain_s, max_queue_wait_s
        self._on_damage = on_damage
        self._table = members() if table is None else table
        self._table.on_change = self._replicas_changed
        self._stats = StatsSum()
        self._base: BaseSpec | None = None
        self._is_stopping = False
        self._live: dict[RequestId, LiveRequest] = {}
        self._responses: dict[RequestId, Any] = {}
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
    def members(self) -> Members:
        """The replicas, and where requests went."""
        return self._table

    @property
    def is_ready(self) -> bool:
        """Whether requests sent now are computed now."""
        return self._base is not None and not self._is_stopping and self._has_ready_replica

    @property
    def _has_ready_replica(self) -> bool:
        reports = self._table.reports
        return any(one not in reports or reports[one].status is None for one in self._table.ids)

    def replica_states(self) -> dict[str, float]:
        """Return the number of replicas that compute requests now, and of those that don't."""
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
        if self._is_stopping:
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
        return len(self._live)

    @property
    def num_waiting_clients(self) -> int:
        """Requests that a client waits for, without a first token."""
        return self._bounds.num_waiting

    @property
    def is_computing_here(self) -> bool:
        """Whether requests are under way that processors compute, maybe this machine's."""
        return self._base is not None and self._base.device == "cpu" and bool(self._live)

    async def start(self) -> None:
        """Return once a replica has answered."""
        self._base = decode_base(await self._describe(None))

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, wait up to `grace_s` for those alive; the others fail."""
        self._is_stopping = True
        deadline = time.monotonic() + grace_s
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for live in list(self._live.values()):
            live.fail(EngineUnavailable("The server is shutting down."))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # requests

    async def generate(self, request: m.GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as it is made, wherever; the last chunk has a finish reason.

        Closing the generator aborts the request. It raises what `EngineClient.generate` does.
        """
        processor = OutputProcessor(request, self._tokenizer)
        live = self._admit(request)
        task = asyncio.create_task(self._compute(live), name="cluster-request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            try:
                output = await live.next(self._max_queue_wait_s)
            except TimeoutError:
                raise Overloaded(
                    f"The request got no token within {self._max_queue_wait_s:.0f} s, the server's limit."
                ) from None
            while True:
                chunk = processor.push(output)
                yield chunk
                if chunk.finish_reason is not None:
                    return
                output = await live.next()
        finally:
            self._live.pop(request.request_id, None)
            if not request.is_background:
                self._bounds.leave(request.tenant, has_begun=live.has_begun)
            task.cancel()

    def _admit(self, request: m.GenerateRequest) -> LiveRequest:
        """Count the request as alive.

        Raises:
            Overloaded, RateLimited
        """
        if self._is_stopping:
            raise Overloaded("The server is shutting down.", retry_after_s=5.0)
        if not request.is_background:
            self._bounds.enter(request)
        live = LiveRequest(request)
        if request.timeout_s is not None:
            live.deadline_s = time.monotonic() + request.timeout_s
        self._live[request.request_id] = live
        return live

    async def _compute(self, live: LiveRequest) -> None:
        """Have a replica compute the request, and another one its rest if that one is lost."""
        num_losses = attempt = 0
        try:
            while not live.is_finished:
                num_tokens = len(live.output_token_ids)
                attempt += 1
                try:
                    await self._follow(live, attempt)
                except _Lost as loss:
                    num_losses = num_losses + 1 if len(live.output_token_ids) == num_tokens else 1
                    if num_losses > MAX_LOSSES:
                        raise EngineUnavailable(
                            f"{num_losses} replicas in a row were lost under this request; the last: {loss}.",
                            hint="Try again.",
                        ) from loss
                    self.num_replays["moved" if loss.__cause__ is None else "lost"] += 1
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
        """
        request = live.request
        # its own id: the replica before may still have it
        request_id = RequestId(f"{request.request_id}.{attempt}")
        add = msgspec.structs.replace(live.begin_sending(), request_id=request_id)
        response = _remote(self._streams, m.encode_input(add), self._placement(request, request_id))
        self._responses[request_id] = response
        is_over = False
        try:
            async for encoded in response:
                output = self._read(encoded)
                if output is None:
                    continue
                if output.error_code in _MOVABLE:
                    raise _Lost(output.error_message) from error_from_code(output.error_code or "", "")
                if not live.has_begun and not request.is_background:
                    self._bounds.note_began(request.tenant)
                live.receive(output)
                if live.is_finished:
                    is_over = True
                    return
            raise _Lost("its stream ended early") from EOFError()
        except RequestCancelledError:
            # by `_move`
            raise _Lost("it leaves") from None
        except _LOST as error:
            raise _Lost(f"it died ({type(error).__name__})") from error
        except RayTaskError as error:
            raise _Lost(f"it failed: {error.cause!r}") from error
        except RayServeException as error:
            raise _Lost(str(error)) from error
        finally:
            self._responses.pop(request_id, None)
            self._table.note_ended(request_id)
            if not is_over:
                response.cancel()

    def _read(self, encoded: bytes) -> TokenOutput | None:
        """Return a message's output; None: it had none."""
        match m.decode_output(encoded):
            case m.StepOutputs(outputs=(output,)):
                return output
            case m.AdapterDamaged(digest=digest, blob=blob) if self._on_damage is not None:
                self._on_damage(digest, blob)
        return None

    def _placement(self, request: m.GenerateRequest, request_id: RequestId) -> PlacementRequest:
        ref = request.adapter
        return PlacementRequest(
            request_id=request_id,
            tenant=request.tenant,
            digest=None if ref is None else ref.digest,
            prefixes=prefix_hashes(request.tenant, None if ref is None else ref.digest, request.prompt_token_ids),
            tokens_per_prefix=TOKENS_PER_PREFIX,
        )

    # replicas that come and go

    def _replicas_changed(self, came: frozenset[str], left: frozenset[str]) -> None:
        num = max(1, len(self._table.ids))
        self._bounds.resize(self._num_slots * num, self._num_slots * num + LIMITS.max_queued_requests)
        loop = asyncio.get_running_loop()
        for replica_id in left:
            loop.call_later(self._drain_s, self._move, replica_id)
        for replica_id in came:
            self._spawn(self._welcome(replica_id))

    def _move(self, replica_id: str) -> None:
        """Let what a replica still computes go on at others, unless it is back."""
        if replica_id in self._table.ids:
            return
        if not self._table.ids:
            # it is the best place that there is
            asyncio.get_running_loop().call_later(_LOOK_S, self._move, replica_id)
            return
        for request_id, response in list(self._responses.items()):
            if self._table.place(request_id) == replica_id:
                response.cancel()

    async def _welcome(self, replica_id: str) -> None:
        """Check a new replica, and pin on it what is pinned on the others."""
        try:
            base = decode_base(await self._describe(replica_id))
        except (LoraserveError, RayActorError, RayServeException) as error:
            logger.warning("the replica %s came and didn't answer: %s", replica_id, error)
            return
        known = self._base or base
        if base.digest != known.digest:
            error = ModelError(
                f"The replica {replica_id} serves a base with the digest {base.digest[:12]}, the others"
                f" {known.digest[:12]}.",
                hint="Give all machines the same files of the model.",
            )
            logger.error("%s Nothing is sent to it.", error)
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
                await self._call(m.PinAdapter(call_id=0, adapter=ref, is_pinned=True), ref=ref, target=replica_id)
            except LoraserveError as error:
                logger.warning("the replica %s couldn't load the pinned %s: %s", replica_id, ref.name, error)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # calls

    async def warm(self, ref: AdapterRef) -> None:
        """Return once the adapter is on the device of the replica that its requests go to."""
        await self._call(m.WarmAdapter(call_id=0, adapter=ref), ref=ref)

    async def pin(self, ref: AdapterRef) -> None:
        """Load the adapter onto each replica's device and keep it there, on those that come too."""
        await self._call_all(m.PinAdapter(call_id=0, adapter=ref, is_pinned=True), ref=ref)
        self._pins[ref.digest] = ref

    async def unpin(self, ref: AdapterRef) -> None:
        """Let the adapter be evicted again."""
        self._pins.pop(ref.digest, None)
        await self._call_all(m.PinAdapter(call_id=0, adapter=ref, is_pinned=False), ref=ref)

    def discard(self, digest: Digest) -> None:
        """Let the replicas free an ephemeral adapter that no request uses any more."""
        self._spawn(self._tell_all(m.DiscardAdapter(digest=digest)))

    def forget_texts(self, owner: TenantId, name: str | None = None, version: int | None = None) -> None:
        """Let the replicas forget the texts of a deleted version, adapter or tenant."""
        self._spawn(self._tell_all(m.ForgetTexts(owner=owner, name=name, version=version)))

    async def residency(self, only: Collection[Digest] | None = None) -> tuple[AdapterResidency, ...]:
        """Return every adapter that a replica has in memory, where it is closest to a device."""
        wanted = None if only is None else frozenset(only)
        replies = await self._call_all(m.QueryResidency(call_id=0, only=wanted))
        return merge_residency([reply.adapters for reply in replies if isinstance(reply, m.ResidencyReply)])

    async def verify(self, ref: AdapterRef) -> Certificate:
        """Return how far the adapter's answers are from those of its reference evaluation."""
        reply = await self._call(
            m.VerifyAdapter(call_id=0, adapter=ref), ref=ref, limit_s=LIMITS.verification_timeout_s
        )
        if not isinstance(reply, m.VerifyReply) or reply.certificate is None:
            raise EngineError(f"The replica answered a verification with {type(reply).__name__}.")
        return reply.certificate

    async def _describe(self, target: str | None) -> bytes:
        placement = PlacementRequest(request_id=_call_id(), tenant=_SYSTEM, target=target)
        async with asyncio.timeout(None if target is None else _CALL_S):
            found: bytes = await _remote(self._describes, b"", placement)
        return found

    async def _call_all(self, message: m.EngineInput, *, ref: AdapterRef | None = None) -> list[m.EngineOutput]:
        """Return every replica's answer; those that left meanwhile have none."""
        targets = self._table.ids
        if not targets:
            raise EngineUnavailable("No engine replica is ready.", hint="Try again shortly.")
        replies = await asyncio.gather(
            *(self._call(message, ref=ref, target=one) for one in targets), return_exceptions=True
        )
        for reply, target in zip(replies, targets, strict=True):
            if isinstance(reply, BaseException) and target in self._table.ids:
                raise reply
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    async def _tell_all(self, message: m.EngineInput) -> None:
        try:
            await self._call_all(message)
        except LoraserveError as error:
            logger.debug("%s wasn't told to a replica: %s", type(message).__name__, error)

    async def _call(
        self,
        message: m.EngineInput,
        *,
        ref: AdapterRef | None = None,
        target: str | None = None,
        limit_s: float = _CALL_S,
    ) -> m.EngineOutput:
        """Return a replica's answer.

        Args:
            ref: adapter that it is about, by which the replica is chosen.
            target: the replica to ask; None: any.
            limit_s: seconds until it counts as away.

        Raises:
            EngineUnavailable: it is gone, or doesn't answer.
            LoraserveError: its answer is an error.
        """
        placement = PlacementRequest(
            request_id=_call_id(),
            tenant=_SYSTEM if ref is None else ref.tenant,
            digest=None if ref is None else ref.digest,
            target=target,
        )
        try:
            async with asyncio.timeout(limit_s):
                replies: list[bytes] = await _remote(self._calls, m.encode_input(message), placement)
        except TimeoutError:
            raise EngineUnavailable(f"No replica answered within {limit_s:.0f} s.", hint="Try again.") from None
        except (RayActorError, RayServeException, TaskCancelledError) as error:
            raise EngineUnavailable(f"The replica is gone ({type(error).__name__}).", hint="Try again.") from error
        finally:
            self._table.note_ended(placement.request_id)
        *before, last = replies
        for encoded in before:
            self._read(encoded)
        reply = m.decode_output(last)
        if isinstance(reply, m.CallReply) and reply.error_code is not None:
            raise error_from_code(reply.error_code, reply.error_message or "")
        return reply


def _remote(handle: DeploymentHandle[Any], message: bytes, placement: PlacementRequest) -> Any:
    """Return the response to a call of a replica.

    In a context of its own: Serve's router takes calls at the same time on behalf of one HTTP
    request for one and the same call, and all but the first would wait.
    """
    return Context().run(lambda: handle.remote(message, **{PLACEMENT: placement}))


def _call_id() -> RequestId:
    return RequestId(f"call-{uuid.uuid4().hex}")
