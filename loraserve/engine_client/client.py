"""The server's side of the engine: starts it, talks to it, and when it dies starts another and goes on where it stopped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import zmq

from loraserve.config import EngineConfig
from loraserve.engine_client import messages as m
from loraserve.engine_client.admission import QueueBounds
from loraserve.engine_client.live_request import LiveRequest
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import Chunk, OutputProcessor
from loraserve.engine_client.process import EngineProcess
from loraserve.errors import (
    AdapterRejected,
    EngineCrashed,
    EngineDied,
    EngineUnavailable,
    LoraserveError,
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
)

__all__ = ["Chunk", "EngineClient", "GenerateRequest"]

logger = logging.getLogger(__name__)

_MAX_DEATHS_BEFORE_READY = 3
"""Deaths in a row after which the server's start ends with the reason. Once an engine was ready, others are started
again and again."""
_LOAD_PATIENCE = 4.0
"""A load may be so many times as long without progress as an engine that is ready: between two of its marks lies more, a compiler for example."""
_MAX_QUIET_S = 3.0
"""Time without progress after which requests that are sent now aren't computed now."""
_EXAMINATION_S = 5.0
"""Time that it takes to find out where a process hangs, and to end it."""
_MAX_FAILED_STARTS = 5
_MAX_RESTART_DELAY_S = 5.0
_STABLE_S = 10.0
_REPLAY_PATIENCE_S = 10.0
_REPLAY_ALONE_S = 30.0
"""For so long new requests wait while suspects are replayed; then they are sent beside them."""


class EngineClient:
    """The one door to the engine for the API. Everything runs on the event loop that called `start`.

    Args:
        config: handed to each engine process.
        tokenizer: of the base; text is made here, not in the engine.
        max_queued_requests: over the sequences that run at once; beyond it those of tenants that have their part of them are refused.
        hang_timeout_s: an engine that makes no progress for so long is killed and replaced.
        load_timeout_s: the same while it loads the base; None: four times that.
        on_damage: told the digest of a version, and which of its blobs the engine found damaged or gone; before whoever asked for it is.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        max_queued_requests: int = LIMITS.max_queued_requests,
        max_queue_wait_s: float = LIMITS.max_queue_wait_s,
        hang_timeout_s: float = 30.0,
        load_timeout_s: float | None = None,
        on_damage: Callable[[Digest, Digest], None] | None = None,
    ) -> None:
        self.num_restarts = self.num_hangs = 0
        self.stats = EngineStats()
        self._config = config
        self._tokenizer = tokenizer
        self._bounds = QueueBounds(config.max_num_seqs, config.max_num_seqs + max_queued_requests)
        self._max_queue_wait_s = max_queue_wait_s
        self._hang_timeout_s = hang_timeout_s
        self._load_timeout_s = _LOAD_PATIENCE * hang_timeout_s if load_timeout_s is None else load_timeout_s
        self._on_damage = on_damage
        self._base: BaseSpec | None = None
        self._device = ""
        self._process: EngineProcess | None = None
        self._loading: EngineProcess | None = None
        self._is_up = False
        self._failure: LoraserveError | None = None
        self._is_stopping = False
        self._supervisor: asyncio.Task[None] | None = None
        self._live: dict[RequestId, LiveRequest] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._operator_pins: dict[Digest, AdapterRef] = {}

    @property
    def base(self) -> BaseSpec:
        """The base model's facts; known once `start` has returned."""
        if self._base is None:
            raise EngineUnavailable("The base model isn't loaded yet.")
        return self._base

    @property
    def is_ready(self) -> bool:
        """Whether requests sent now are computed now."""
        return self._is_up and not self._is_stopping and not self._is_quiet

    @property
    def is_live(self) -> bool:
        """Whether the engine runs or can be brought back; False too where it hangs and isn't replaced in time."""
        if self._failure is not None or self._process is None:
            return False
        return not self._is_up or self._quiet_s < self._hang_timeout_s + _EXAMINATION_S

    @property
    def status(self) -> str | None:
        """Reason why requests can't be computed now, in words that tell nothing of tenants; None if they can."""
        if self._is_stopping:
            return "The server is shutting down."
        if self._failure is not None:
            return "The engine can't be started; the log says why."
        if self._loading is not None:
            return f"The engine is {self._loading.vitals.doing}."
        if not self._is_up:
            return "The engine is being started."
        if self._is_quiet:
            return f"The engine made no progress for {self._quiet_s:.0f} s; after {self._hang_timeout_s:g} s it is replaced."
        return None

    @property
    def pid(self) -> int | None:
        """The engine process, for operators and tests."""
        return None if self._process is None else self._process.pid

    @property
    def num_live_requests(self) -> int:
        return len(self._live)

    @property
    def is_computing_here(self) -> bool:
        """Whether requests are under way that this machine's processors compute, not a GPU."""
        return self._device == "cpu" and bool(self._live)

    async def start(self) -> None:
        """Start the engine and return once the base is loaded. One that dies or hangs before is tried again, but not for ever.

        Raises:
            LoraserveError: why it can't be.
        """
        for attempt in range(1, _MAX_DEATHS_BEFORE_READY + 1):
            try:
                await self._launch()
                break
            except EngineDied as error:
                logger.error("the engine was never ready (%d of %d): %s", attempt, _MAX_DEATHS_BEFORE_READY, error)
                if attempt == _MAX_DEATHS_BEFORE_READY:
                    raise EngineUnavailable(
                        f"The engine died {attempt} times in a row before it was ready. The last time {error}.",
                        hint="The log has more. Where it hangs in a kernel, try another --quantize or --dtype; where it was killed,"
                        " see whether the base fits into memory (loraserve plan). If the machine is only slow, raise --engine-hang-timeout.",
                    ) from error
        self._is_up = True
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, wait up to ``grace_s`` for those alive, end the others with an error, and stop the engine."""
        self._is_stopping = True
        deadline = time.monotonic() + grace_s
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for live in list(self._live.values()):
            live.fail(EngineUnavailable("The server is shutting down."))
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self._fail_calls(EngineUnavailable("The server is shutting down."))
        if self._process is not None:
            await self._process.close()
        self._is_up = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as it is made; the last chunk has a finish reason. Closing the generator aborts the request.

        Raises:
            Overloaded: too many requests are alive, or this one waited too long for its first token.
            RateLimited: too many of its tenant's wait.
            DeadlineExceeded: its own time was over before its first token.
            AdapterUnavailable, EngineError: why it failed.
        """
        processor = OutputProcessor(request, self._tokenizer)
        live = self._admit(request)
        try:
            if self._is_up:
                self._send(live)
            try:
                output = await live.next(self._max_queue_wait_s)
            except TimeoutError:
                raise Overloaded(f"No token could be made within {self._max_queue_wait_s:.0f} s.") from None
            while True:
                chunk = processor.push(output)
                yield chunk
                if chunk.finish_reason is not None:
                    return
                output = await live.next()
        finally:
            self._leave(live)

    async def warm(self, ref: AdapterRef) -> None:
        """Return once the adapter is on the device.

        Raises:
            AdapterUnavailable: it can't be.
        """
        await self._call(lambda call_id: m.WarmAdapter(call_id=call_id, adapter=ref))

    async def pin(self, ref: AdapterRef) -> None:
        """Bring the adapter to the device and keep it there, across engine restarts too."""
        await self._call(lambda call_id: m.PinAdapter(call_id=call_id, adapter=ref, is_pinned=True))
        self._operator_pins[ref.digest] = ref

    async def unpin(self, ref: AdapterRef) -> None:
        self._operator_pins.pop(ref.digest, None)
        await self._call(lambda call_id: m.PinAdapter(call_id=call_id, adapter=ref, is_pinned=False))

    async def residency(self) -> tuple[AdapterResidency, ...]:
        """Return every adapter that the engine has in some memory."""
        adapters: tuple[AdapterResidency, ...] = await self._call(lambda call_id: m.QueryResidency(call_id=call_id))
        return adapters

    async def verify(self, ref: AdapterRef) -> Certificate:
        """Return how far the adapter's answers are from those of a plain evaluation of it. Its verdict may be that it failed.

        Requests that run meanwhile go on. Cancelling this frees what it holds.

        Raises:
            AdapterRejected: it can never be served here, and why.
            AdapterUnavailable, EngineError, Overloaded: it couldn't be found out now.
            EngineDied: the engine did meanwhile, maybe of this.
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

    # requests

    def _admit(self, request: GenerateRequest) -> LiveRequest:
        if self._failure is not None:
            raise EngineUnavailable(f"The engine can't be started: {self._failure}")
        if self._is_stopping:
            raise Overloaded("The server is shutting down.", retry_after_s=5.0)
        if not request.is_background:
            self._bounds.enter(request)
        live = LiveRequest(request)
        if request.timeout_s is not None:
            live.deadline_s = time.monotonic() + request.timeout_s
        self._live[request.request_id] = live
        return live

    def _send(self, live: LiveRequest) -> None:
        if self._process is None:
            return
        request = live.request
        live.is_sent = True
        live.num_outputs_since_sent = 0
        self._process.send(
            m.AddRequest(
                request_id=request.request_id,
                tenant=request.tenant,
                adapter=request.adapter,
                prompt_token_ids=request.prompt_token_ids,
                params=request.params,
                output_token_ids=tuple(live.output_token_ids),
                priority=request.priority,
                weight=request.weight,
                kv_share=request.kv_share,
                timeout_s=live.remaining_s(time.monotonic()),
            )
        )

    def _leave(self, live: LiveRequest) -> None:
        """Every ending passes here; the engine is told unless it said so itself."""
        self._live.pop(live.request.request_id, None)
        if not live.request.is_background:
            self._bounds.leave(live.request.tenant, has_begun=live.has_begun)
        live.has_progressed.set()
        if live.is_sent and not live.is_finished and self._process is not None:
            self._process.send(m.AbortRequest(request_id=live.request.request_id))

    def _on_message(self, message: m.EngineOutput) -> None:
        match message:
            case m.StepOutputs(outputs=outputs):
                for output in outputs:
                    live = self._live.get(output.request_id)
                    if live is not None:
                        if not live.has_begun and not live.request.is_background:
                            self._bounds.note_began(live.request.tenant)
                        live.receive(output)
            case m.Heartbeat(stats=stats):
                self.stats = stats
            case m.AdapterDamaged(digest=digest, blob=blob):
                if self._on_damage is not None:
                    self._on_damage(digest, blob)
            case m.CallReply(call_id=call_id, error_code=None):
                self._answer(call_id, ())
            case m.CallReply(call_id=call_id, error_code=code, error_message=text):
                self._refuse(call_id, error_from_code(code or "", text or ""))
            case m.ResidencyReply(call_id=call_id, adapters=adapters):
                self._answer(call_id, adapters)
            case m.VerifyReply(call_id=call_id, certificate=Certificate() as certificate):
                self._answer(call_id, certificate)
            case m.VerifyReply(call_id=call_id):
                self._refuse(call_id, _verification_error(message))
            case _:
                pass

    # calls

    async def _call(
        self, make: Callable[[int], m.EngineInput], *, abort: Callable[[int], m.EngineInput] | None = None
    ) -> Any:
        """Return what the engine answers to a message.

        Args:
            abort: makes what the engine is told when nobody waits for its answer any more.
        """
        if self._process is None or not self._is_up or self._is_quiet:
            raise EngineUnavailable("The engine isn't up; try again shortly.")
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._process.send(make(call_id))
            return await future
        except asyncio.CancelledError:
            if abort is not None:
                self._process.send(abort(call_id))
            raise
        finally:
            self._calls.pop(call_id, None)

    def _refuse(self, call_id: int, error: LoraserveError) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def _answer(self, call_id: int, value: object) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            future.set_result(value)

    def _fail_calls(self, error: LoraserveError) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    # the process

    @property
    def _quiet_s(self) -> float:
        """Time since the engine last made progress."""
        return 0.0 if self._process is None else self._process.vitals.quiet_s

    @property
    def _is_quiet(self) -> bool:
        return self._quiet_s > min(_MAX_QUIET_S, self._hang_timeout_s)

    async def _launch(self) -> None:
        process = EngineProcess(
            self._config,
            self._on_message,
            hang_timeout_s=self._hang_timeout_s,
            load_timeout_s=self._load_timeout_s,
        )
        self._loading = process
        try:
            ready = await process.start()
        except BaseException:
            process.kill()
            await process.close()
            raise
        finally:
            self._loading = None
        self._process = process
        if self._base is not None and self._base.digest != ready.base.digest:
            process.kill()
            await process.close()
            raise EngineUnavailable("The base model's files changed while the server ran; restart the server.")
        self._base = ready.base
        self._device = ready.device
        # the clock chose them: those that follow shall go on with streams in the same arithmetic
        self._config = msgspec.structs.replace(self._config, kernels=ready.kernels)

    async def _supervise(self) -> None:
        """Keep an engine running until it can't be started any more; then, or should this break, every request is told."""
        try:
            await self._keep_running()
        except Exception as error:
            logger.exception("the engine's supervisor broke")
            self._failure = EngineUnavailable(f"The engine's supervisor broke: {type(error).__name__}.")
        self._is_up = False
        self._fail_calls(EngineUnavailable("The engine died and could not be started again."))
        for live in list(self._live.values()):
            live.fail(EngineUnavailable("The engine died and could not be started again."))

    async def _keep_running(self) -> None:
        """Replay what was alive, wait for the engine's end, start the next; return when none can be started."""
        num_deaths = 0
        while True:
            started = time.monotonic()
            ended = asyncio.create_task(self._wait_for_end())
            try:
                await self._replay(ended)
                reason = await ended
            finally:
                ended.cancel()
            self._is_up = False
            num_deaths = 1 if time.monotonic() - started > _STABLE_S else num_deaths + 1
            logger.error("the engine %s; %d requests are alive", reason, len(self._live))
            # a process that something outside stopped says nothing against the requests that it had
            self._count_crash(is_suspicious=self._process is None or not self._process.was_stopped)
            if not await self._relaunch(num_deaths):
                return

    async def _wait_for_end(self) -> str:
        """Return why the engine is to be replaced, once it is dead."""
        process = self._process
        if process is None:
            return "was never started"
        exited, hung = asyncio.create_task(process.wait()), asyncio.create_task(process.hung())
        try:
            await asyncio.wait({exited, hung}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return process.describe_end(exited.result())
            self._is_up = False
            self.num_hangs += 1
            process.kill()
            await exited
            return f"{hung.result()}. It was killed"
        finally:
            exited.cancel()
            hung.cancel()

    def _count_crash(self, *, is_suspicious: bool = True) -> None:
        """Fail a request in flight at two crashes in a row; since suspects are replayed one by one, it fails alone.

        Args:
            is_suspicious: whether one of those in flight may be why.
        """
        self._fail_calls(EngineDied("The engine died; try again."))
        for live in list(self._live.values()):
            if not live.is_sent or live.is_finished:
                continue
            live.is_sent = False
            live.num_crashes += is_suspicious
            if live.num_crashes >= 2:
                live.fail(EngineCrashed("The engine died twice while it computed this request."))
                self._live.pop(live.request.request_id, None)

    async def _relaunch(self, num_deaths: int) -> bool:
        """Start another engine; False when it can't be."""
        if self._process is not None:
            await self._process.close(grace_s=0.0)
        if num_deaths > 2:
            await asyncio.sleep(min(_MAX_RESTART_DELAY_S, 0.1 * 2**num_deaths))
        for attempt in range(1, _MAX_FAILED_STARTS + 1):
            try:
                await self._launch()
            except (
                LoraserveError,
                OSError,
                zmq.ZMQError,
            ) as error:  # OSError: no memory, no file descriptors, no room for the sockets
                logger.error("the engine could not be started again (attempt %d): %s", attempt, error)
                self._failure = error if isinstance(error, LoraserveError) else EngineUnavailable(str(error))
                await asyncio.sleep(min(_MAX_RESTART_DELAY_S, 0.1 * 2**attempt))
            else:
                self._failure = None
                self.num_restarts += 1
                return True
        return False

    async def _replay(self, ended: asyncio.Task[str]) -> None:
        """Give a new engine what was alive: suspects of the last crash one at a time, each until a step of its own went well, then the rest.

        The step that kills an engine is thus computed for its culprit alone, which then is the only one in flight without a token of this engine's.
        """
        # Suspects may queue for a place or an adapter; whoever is new needn't wait for all of them.
        timer = asyncio.get_running_loop().call_later(_REPLAY_ALONE_S, self._send_new)
        try:
            await self._replay_suspects(ended)
        finally:
            timer.cancel()
        if not ended.done():
            self._send_new()

    async def _replay_suspects(self, ended: asyncio.Task[str]) -> None:
        for ref in self._operator_pins.values():
            if self._process is not None:
                self._process.send(m.PinAdapter(call_id=next(self._call_ids), adapter=ref, is_pinned=True))
        for live in [live for live in self._live.values() if live.num_crashes > 0]:
            if ended.done():
                return
            if live.request.request_id not in self._live:
                continue
            live.has_progressed.clear()
            self._send(live)
            progressed = asyncio.create_task(live.has_progressed.wait())
            await asyncio.wait({progressed, ended}, timeout=_REPLAY_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            progressed.cancel()

    def _send_new(self) -> None:
        """The engine has every request that isn't a suspect, and is up."""
        for live in self._live.values():
            if not live.is_sent and not live.is_finished and live.num_crashes == 0:
                self._send(live)
        self._is_up = True


def _verification_error(reply: m.VerifyReply) -> LoraserveError:
    text = reply.error_message or "The adapter could not be verified."
    error = error_from_code(reply.error_code or "", text)
    return AdapterRejected(text) if reply.is_permanent and not isinstance(error, AdapterRejected) else error
