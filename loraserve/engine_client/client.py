"""The API's interface to the engine: requests, and questions about adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import partial
from typing import Any

from loraserve.config import EngineConfig
from loraserve.engine_client import messages as m
from loraserve.engine_client.admission import QueueBounds
from loraserve.engine_client.calls import PendingCalls
from loraserve.engine_client.chunk import Chunk
from loraserve.engine_client.live_request import LiveRequest
from loraserve.engine_client.live_requests import LiveRequests
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.supervisor import EngineSupervisor
from loraserve.errors import (
    AdapterRejected,
    EngineUnavailable,
    LoraserveError,
    error_from_code,
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
    KernelChoice,
    TenantId,
    TokenOutput,
)

__all__ = ["Chunk", "EngineClient", "GenerateRequest"]


class EngineClient:
    """The API's interface to the engine.

    Everything happens on the event loop that called `start`.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        max_queued_requests: int = LIMITS.max_queued_requests,
        max_queue_wait_s: float = LIMITS.max_queue_wait_s,
        hang_timeout_s: float = 30.0,
        load_timeout_s: float | None = None,
        on_damage: Callable[[Digest, Digest], None] | None = None,
    ) -> None:
        """Make a client; `start` starts its engine.

        Args:
            config: passed to each engine process.
            tokenizer: of the base; text is made here, not in the engine. None: only `outputs` is
                called, not `generate`.
            max_queued_requests: requests beyond the sequences that run at once; more are refused
                unless their tenant has less than its part.
            max_queue_wait_s: seconds that a request waits for its first token.
            hang_timeout_s: seconds without progress after which an engine is killed and replaced.
            load_timeout_s: the same while it loads the base; None: four times that.
            on_damage: called with the digest of a version and of its blob that the engine found
                damaged or gone, before the request that met it fails.
        """
        self.stats = EngineStats()
        bounds = QueueBounds(config.max_num_seqs, config.max_num_seqs + max_queued_requests)
        self._requests = LiveRequests(
            bounds, tokenizer, max_queue_wait_s=max_queue_wait_s, check_engine=self._check_engine
        )
        self._live = self._requests.by_id
        self._on_damage = on_damage
        self._calls = PendingCalls()
        self._supervisor = EngineSupervisor(
            config,
            self._calls,
            self._live,
            self._on_message,
            hang_timeout_s=hang_timeout_s,
            load_timeout_s=load_timeout_s,
        )

    @property
    def base(self) -> BaseSpec:
        """The base model's facts; known once `start` has returned."""
        return self._supervisor.base

    @property
    def is_ready(self) -> bool:
        """Whether requests sent now are computed now."""
        return self._supervisor.is_ready and not self._requests.is_stopping

    @property
    def is_live(self) -> bool:
        """Whether the engine runs or can be replaced.

        False too where it hangs and isn't replaced in time.
        """
        return self._supervisor.is_live

    @property
    def status(self) -> str | None:
        """Reason why requests can't be computed now, without anything of tenants.

        None if they can.
        """
        return "The server is shutting down." if self._requests.is_stopping else self._supervisor.status

    @property
    def pid(self) -> int | None:
        """Process id of the engine, for operators and tests."""
        return self._supervisor.pid

    @property
    def kernels(self) -> tuple[KernelChoice, ...]:
        """Kernels that the engine chose on a CPU; known once `start` has returned."""
        return self._supervisor.kernels

    @property
    def num_restarts(self) -> int:
        """Engines that were started in place of one that ended."""
        return self._supervisor.num_restarts

    @property
    def num_hangs(self) -> int:
        """Engines that were killed since they made no progress."""
        return self._supervisor.num_hangs

    @property
    def num_live_requests(self) -> int:
        """Requests between admission and end."""
        return len(self._live)

    @property
    def num_waiting_clients(self) -> int:
        """Requests that a client waits for, without a first token."""
        return self._requests.bounds.num_waiting

    @property
    def is_computing_here(self) -> bool:
        """Whether requests are under way that this machine's processors compute, not a GPU."""
        return self._supervisor.device == "cpu" and bool(self._live)

    async def start(self) -> None:
        """Start the engine and return once the base is loaded.

        One that dies or hangs first is replaced a few times.

        Raises:
            LoraserveError: why no engine can be had.
        """
        await self._supervisor.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, wait up to ``grace_s`` for those alive, and stop the engine.

        Requests that are alive by then fail.
        """
        await self._requests.stop(grace_s)
        await self._supervisor.stop()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as it is made; the last chunk has a finish reason.

        Closing the generator aborts the request.

        Raises:
            Overloaded: too many requests are alive, or this one waited too long for its first
                token.
            RateLimited: too many of the tenant's requests wait.
            DeadlineExceeded: the request's own timeout was over before its first token.
            AdapterUnavailable, EngineError: the request failed.
        """
        return self._requests.generate(request, self._send)

    async def outputs(
        self, request: GenerateRequest, *, output_token_ids: Sequence[int] = ()
    ) -> AsyncGenerator[TokenOutput, None]:
        """Yield what the engine makes of a request, without text and without the stop strings.

        Closing the generator aborts the request.

        Args:
            output_token_ids: tokens that another engine made of it: this one continues after them.

        Raises:
            as `generate`, but that nothing bounds the wait for the first token.
        """
        live = self._requests.admit(request)
        live.output_token_ids.extend(output_token_ids)
        try:
            self._send(live)
            while True:
                output = await live.next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._requests.leave(live)
            self._abort(live)

    async def warm(self, ref: AdapterRef) -> None:
        """Wait until the adapter is on the device.

        Raises:
            AdapterUnavailable: it can't be loaded.
        """
        await self._call(lambda call_id: m.WarmAdapter(call_id=call_id, adapter=ref))

    async def pin(self, ref: AdapterRef) -> None:
        """Load the adapter onto the device and keep it there, across engine restarts too."""
        await self._call(lambda call_id: m.PinAdapter(call_id=call_id, adapter=ref, is_pinned=True))
        self._supervisor.pins[ref.digest] = ref

    async def unpin(self, ref: AdapterRef) -> None:
        """Let the adapter be evicted again."""
        self._supervisor.pins.pop(ref.digest, None)
        await self._call(lambda call_id: m.PinAdapter(call_id=call_id, adapter=ref, is_pinned=False))

    def discard(self, digest: Digest) -> None:
        """Let the engine free an ephemeral adapter that no request uses any more."""
        # an engine that is started again has nothing of it
        if self._supervisor.is_up:
            self._supervisor.send(m.DiscardAdapter(digest=digest))

    def forget_texts(self, owner: TenantId, name: str | None = None, version: int | None = None) -> None:
        """Let the engine forget the texts of a deleted version, adapter or tenant."""
        # an engine that is started again has none
        if self._supervisor.is_up:
            self._supervisor.send(m.ForgetTexts(owner=owner, name=name, version=version))

    async def residency(self, only: Collection[Digest] | None = None) -> tuple[AdapterResidency, ...]:
        """List every adapter that the engine has in memory; with `only`, those of these."""
        wanted = None if only is None else frozenset(only)
        adapters: tuple[AdapterResidency, ...] = await self._call(
            lambda call_id: m.QueryResidency(call_id=call_id, only=wanted)
        )
        return adapters

    async def verify(self, ref: AdapterRef) -> Certificate:
        """Measure how far the adapter's answers are from those of its reference evaluation.

        The verdict may be "failed".

        Requests that run meanwhile continue. Cancelling this frees what it holds.

        Raises:
            AdapterRejected: the adapter can never be served here.
            AdapterUnavailable, EngineError, Overloaded: it can't be verified now.
            EngineDied: the engine died meanwhile, maybe of this.
        """
        try:
            async with asyncio.timeout(LIMITS.verification_timeout_s):
                certificate: Certificate = await self._call(
                    lambda call_id: m.VerifyAdapter(call_id=call_id, adapter=ref),
                    abort=lambda call_id: m.AbortVerification(call_id=call_id),
                )
        except TimeoutError:
            raise EngineUnavailable(
                f"The adapter could not be verified within {LIMITS.verification_timeout_s:.0f} s.", hint="Try again."
            ) from None
        return certificate

    async def measure_base(self) -> BasePrecision | str:
        """Measure what rounding costs the base, or give the reason why nothing is measured.

        Measured while serving, in idle time: it may take minutes, and isn't bounded.

        Raises:
            EngineUnavailable: the engine isn't there, or ended meanwhile.
            LoraserveError: it can't be measured.
        """
        found: BasePrecision | str = await self._call(lambda call_id: m.MeasureBase(call_id=call_id))
        return found

    # requests

    def _check_engine(self) -> None:
        """Check that there is an engine, or may be one again.

        Raises:
            EngineUnavailable
        """
        if self._supervisor.failure is not None:
            raise EngineUnavailable(f"The engine can't be started: {self._supervisor.failure}")

    def _send(self, live: LiveRequest) -> Callable[[], None]:
        """Send a request, once there is an engine; return what ends it there."""
        if self._supervisor.is_up:
            self._supervisor.send_request(live)
        return partial(self._abort, live)

    def _abort(self, live: LiveRequest) -> None:
        """Notify the engine that a request is over, unless it ended it."""
        if live.is_sent and not live.is_finished:
            self._supervisor.send(m.AbortRequest(request_id=live.request.request_id))

    def _on_message(self, message: m.EngineOutput) -> None:
        match message:
            case m.StepOutputs(outputs=outputs):
                for output in outputs:
                    live = self._live.get(output.request_id)
                    if live is not None:
                        if not live.has_begun:
                            self._requests.note_began(live)
                        live.receive(output)
            case m.Heartbeat(stats=stats):
                self.stats = stats
            case m.AdapterDamaged(digest=digest, blob=blob):
                if self._on_damage is not None:
                    self._on_damage(digest, blob)
            case m.CallReply(call_id=call_id, error_code=None):
                self._calls.answer(call_id, ())
            case m.CallReply(call_id=call_id, error_code=code, error_message=text):
                self._calls.refuse(call_id, error_from_code(code or "", text or ""))
            case m.ResidencyReply(call_id=call_id, adapters=adapters):
                self._calls.answer(call_id, adapters)
            case m.VerifyReply(call_id=call_id, certificate=Certificate() as certificate):
                self._calls.answer(call_id, certificate)
            case m.BaseMeasured(call_id=call_id, error_code=str(code), error_message=text):
                self._calls.refuse(call_id, error_from_code(code, text or ""))
            case m.BaseMeasured(call_id=call_id):
                self._calls.answer(call_id, message.precision or message.note)
            case m.VerifyReply(call_id=call_id):
                self._calls.refuse(call_id, _verification_error(message))
            case _:
                pass

    async def _call(
        self, make: Callable[[int], m.EngineInput], *, abort: Callable[[int], m.EngineInput] | None = None
    ) -> Any:
        """Send a message and return the engine's answer.

        Args:
            make: returns the message of a call's id.
            abort: returns the message that takes the call back when this is cancelled.
        """
        if not self._supervisor.is_ready:
            raise EngineUnavailable("The engine isn't running yet.", hint="Try again shortly.")
        call_id = self._calls.next_id()
        with self._calls.open(call_id) as reply:
            try:
                self._supervisor.send(make(call_id))
                return await reply
            except asyncio.CancelledError:
                if abort is not None:
                    self._supervisor.send(abort(call_id))
                raise


def _verification_error(reply: m.VerifyReply) -> LoraserveError:
    text = reply.error_message or "The adapter could not be verified."
    error = error_from_code(reply.error_code or "", text)
    return AdapterRejected(text) if reply.is_permanent and not isinstance(error, AdapterRejected) else error
