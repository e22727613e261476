"""Keep an engine process running: start, watch and replace it; replay what was alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from loraserve.background import Backoff
from loraserve.config import EngineConfig
from loraserve.engine_client import messages as m
from loraserve.engine_client.calls import PendingCalls
from loraserve.engine_client.live_request import LiveRequest
from loraserve.engine_client.process import KILL_PATIENCE_S, EngineProcess
from loraserve.errors import EngineCrashed, EngineDied, EngineUnavailable, LoraserveError
from loraserve.types import AdapterRef, BaseSpec, Digest, KernelChoice, RequestId

logger = logging.getLogger(__name__)

_MAX_DEATHS_BEFORE_READY = 3
"""Deaths in a row after which the server's start fails.

Once an engine was ready, others are started again and again.
"""
_LOAD_PATIENCE = 4.0
"""Multiple of the hang timeout that a load may take without progress.

Its marks are further apart, with a compiler in between.
"""
_MAX_QUIET_S = 3.0
"""Seconds without progress after which new requests aren't computed at once."""
_EXAMINATION_S = 5.0
"""Seconds that it takes to find out where a process hangs, and to kill it."""
_MAX_FAILED_STARTS = 5
_RESTART_BACKOFF = Backoff(0.2, 5.0)
_STABLE_S = 10.0
"""Seconds after which an engine that dies isn't counted together with the one before it."""
_REPLAY_PATIENCE_S = 10.0
"""Seconds that a suspect is computed alone before the next one is sent."""
_REPLAY_ALONE_S = 30.0
"""Seconds that new requests wait while suspects are replayed; then they are sent with them."""


class EngineSupervisor:
    """Run one engine process after another.

    Everything happens on the event loop that called `start`.

    Attributes:
        live: requests between admission and end, replayed to each new engine.
        pins: adapters that each new engine keeps on the device.
        is_up: whether the engine takes new requests.
        failure: reason why no engine can be had; None: one runs or is being started.
        device: where steps are computed: cpu or cuda; empty before `start`.
    """

    def __init__(
        self,
        config: EngineConfig,
        calls: PendingCalls,
        live: dict[RequestId, LiveRequest],
        on_message: Callable[[m.EngineOutput], None],
        *,
        hang_timeout_s: float,
        load_timeout_s: float | None,
    ) -> None:
        """Make a supervisor; `start` starts its engine.

        Args:
            calls: failed when an engine ends.
            live: requests between admission and end.
            on_message: called with everything that an engine sends once it is ready.
            hang_timeout_s: seconds without progress after which an engine is killed and replaced.
            load_timeout_s: the same while it loads the base; None: four times that.
        """
        self.num_restarts = self.num_hangs = 0
        self.live = live
        self.pins: dict[Digest, AdapterRef] = {}
        self.is_up = False
        self.failure: LoraserveError | None = None
        self.device = ""
        self._config, self._calls, self._on_message = config, calls, on_message
        self._hang_timeout_s = hang_timeout_s
        self._load_timeout_s = _LOAD_PATIENCE * hang_timeout_s if load_timeout_s is None else load_timeout_s
        self._base: BaseSpec | None = None
        self._process: EngineProcess | None = None
        self._loading: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def base(self) -> BaseSpec:
        """The base model's facts; known once `start` has returned."""
        if self._base is None:
            raise EngineUnavailable("The base model isn't loaded yet.")
        return self._base

    @property
    def kernels(self) -> tuple[KernelChoice, ...]:
        """Kernels that the first engine chose, and those that follow it compute with."""
        return self._config.kernels

    @property
    def is_ready(self) -> bool:
        """Whether requests sent now are computed now."""
        return self.is_up and not self._is_quiet

    @property
    def is_live(self) -> bool:
        """Whether the engine runs or can be replaced.

        False too where it hangs and isn't replaced in time.
        """
        if self.failure is not None or self._process is None:
            return False
        return not self.is_up or self._stuck_s < self._hang_timeout_s + _EXAMINATION_S

    @property
    def status(self) -> str | None:
        """Reason why requests can't be computed now, without anything of tenants.

        None if they can.
        """
        if self.failure is not None:
            return "The engine can't be started; the log has the reason."
        if self._loading is not None:
            return f"The engine is {self._loading.vitals.doing}."
        if not self.is_up:
            return "The engine is being started."
        if self._is_quiet:
            return (
                f"The engine made no progress for {self._quiet_s:.0f} s;"
                f" after {self._hang_timeout_s:g} s it is replaced."
            )
        return None

    @property
    def pid(self) -> int | None:
        """Process id of the engine, for operators and tests."""
        return None if self._process is None else self._process.pid

    @property
    def _quiet_s(self) -> float:
        """Seconds since the engine last made progress."""
        return 0.0 if self._process is None else self._process.vitals.quiet_s

    @property
    def _stuck_s(self) -> float:
        """The same without the seconds in which it waited for a core."""
        return 0.0 if self._process is None else self._process.vitals.stuck_s

    @property
    def _is_quiet(self) -> bool:
        return self._quiet_s > min(_MAX_QUIET_S, self._hang_timeout_s)

    async def start(self) -> None:
        """Start an engine and return once the base is loaded.

        One that dies or hangs first is replaced a few times.

        Raises:
            LoraserveError: why no engine can be had.
        """
        for attempt in range(1, _MAX_DEATHS_BEFORE_READY + 1):
            try:
                await self._launch()
                break
            except EngineDied as error:
                logger.error(
                    "the engine died before it was ready (%d of %d): %s", attempt, _MAX_DEATHS_BEFORE_READY, error
                )
                if attempt == _MAX_DEATHS_BEFORE_READY:
                    raise EngineUnavailable(
                        f"The engine died {attempt} times in a row before it was ready. The last time, {error}.",
                        hint="The log has more. If it hung in a kernel, try another --quantize or --dtype;"
                        " if it was killed, check whether the base fits into memory (loraserve plan)."
                        " If the machine is just slow, raise --engine-hang-timeout.",
                    ) from error
        self.is_up = True
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def stop(self) -> None:
        """Stop the engine; start no other."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._calls.fail_all(EngineUnavailable("The server is shutting down."))
        if self._process is not None:
            await self._process.close()
        self.is_up = False

    def send(self, message: m.EngineInput) -> None:
        """Send a message to the engine, without waiting; no-op if there is none."""
        if self._process is not None:
            self._process.send(message)

    def send_request(self, live: LiveRequest) -> None:
        """Send a request, or the rest of one that an earlier engine began."""
        if self._process is not None:
            self._process.send(live.begin_sending())

    # one engine after another

    async def _launch(self) -> None:
        """Start a process and return once it is ready; `_process` is the new one then."""
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
            raise EngineUnavailable("The base model's files changed while the server ran.", hint="Restart the server.")
        self._base = ready.base
        self.device = ready.device
        # chosen by measuring times: streams must continue in the same arithmetic in the engines
        # that follow
        self._config = msgspec.structs.replace(self._config, kernels=ready.kernels)

    async def _supervise(self) -> None:
        """Keep an engine running until none can be started.

        Then, or if this fails, end every request and call.
        """
        try:
            await self._keep_running()
        except Exception as error:
            logger.exception("the engine's supervisor failed")
            self.failure = EngineUnavailable(
                f"The engine's supervisor failed: {type(error).__name__}.", hint="Restart the server."
            )
        self._end_all(EngineUnavailable("The engine died and could not be started again."))

    def _end_all(self, error: LoraserveError) -> None:
        """End every request and call with an error; take no new ones."""
        self.is_up = False
        self._calls.fail_all(error)
        for live in list(self.live.values()):
            live.fail(error)

    async def _keep_running(self) -> None:
        """Replay what was alive, wait for the engine's end, start the next.

        Return when none can be started.
        """
        num_deaths = 0
        while True:
            started = time.monotonic()
            ended = asyncio.create_task(self._wait_for_end())
            try:
                await self._replay(ended)
                reason = await ended
            finally:
                ended.cancel()
            self.is_up = False
            num_deaths = 1 if time.monotonic() - started > _STABLE_S else num_deaths + 1
            logger.error("the engine %s; %d requests are live", reason, len(self.live))
            # a process that was stopped from outside is no evidence against its requests
            self._count_crash(is_suspicious=self._process is None or not self._process.was_stopped)
            if not await self._relaunch(num_deaths):
                return

    async def _wait_for_end(self) -> str:
        """Wait until the engine is dead; return why it is to be replaced."""
        process = self._process
        if process is None:
            return "was never started"
        exited, hung = asyncio.create_task(process.wait()), asyncio.create_task(process.hung())
        try:
            await asyncio.wait({exited, hung}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return process.describe_end(exited.result())
            self.is_up = False
            self.num_hangs += 1
            process.kill()
            await asyncio.wait({exited}, timeout=KILL_PATIENCE_S)
            if not exited.done():
                self._give_up_on(process)
                await exited
            return f"{hung.result()}. It was killed"
        finally:
            exited.cancel()
            hung.cancel()

    def _give_up_on(self, process: EngineProcess) -> None:
        """Fail what is alive, since a killed engine doesn't end and holds its memory.

        Once it does, another is started.
        """
        self.failure = EngineUnavailable(
            f"The engine's process {process.pid} was killed {KILL_PATIENCE_S:g} s ago and hasn't ended:"
            " it probably waits for a disk or a device.",
            hint="Check the system's log; restart the machine if the process never ends.",
        )
        logger.error("%s", self.failure)
        self._end_all(self.failure)

    async def _relaunch(self, num_deaths: int) -> bool:
        """Start another engine; return False when that fails too often."""
        if self._process is not None:
            await self._process.close(grace_s=0.0)
        if num_deaths > 2:
            await asyncio.sleep(_RESTART_BACKOFF.delay_s(num_deaths))
        for attempt in range(1, _MAX_FAILED_STARTS + 1):
            try:
                await self._launch()
            # OSError, ZMQError: no memory, no file descriptors, no room for the sockets
            except (LoraserveError, OSError, zmq.ZMQError) as error:
                logger.error("the engine could not be started again (attempt %d): %s", attempt, error)
                self.failure = error if isinstance(error, LoraserveError) else EngineUnavailable(str(error))
                await asyncio.sleep(_RESTART_BACKOFF.delay_s(attempt))
            else:
                self.failure = None
                self.num_restarts += 1
                return True
        return False

    def _count_crash(self, *, is_suspicious: bool) -> None:
        """Fail a request in flight at two crashes in a row.

        Suspects are replayed one by one, so that it fails alone.

        Args:
            is_suspicious: whether one of those in flight may be why.
        """
        self._calls.fail_all(EngineDied("The engine died.", hint="Try again."))
        for live in list(self.live.values()):
            if not live.is_sent or live.is_finished:
                continue
            live.is_sent = False
            live.num_crashes += is_suspicious
            if live.num_crashes >= 2:
                live.fail(EngineCrashed("The engine died twice while it computed this request."))
                self.live.pop(live.request.request_id, None)

    async def _replay(self, ended: asyncio.Task[str]) -> None:
        """Send a new engine the suspects of the last crash one at a time, then the rest.

        The step that kills an engine is thus computed for its culprit alone, the only request in
        flight without a token of this engine.
        """
        # suspects may queue for a slot or an adapter; new requests needn't wait for all of them
        timer = asyncio.get_running_loop().call_later(_REPLAY_ALONE_S, self._send_new)
        try:
            await self._replay_suspects(ended)
        finally:
            timer.cancel()
        if not ended.done():
            self._send_new()

    async def _replay_suspects(self, ended: asyncio.Task[str]) -> None:
        for ref in self.pins.values():
            self.send(m.PinAdapter(call_id=self._calls.next_id(), adapter=ref, is_pinned=True))
        for live in [live for live in self.live.values() if live.num_crashes > 0]:
            if ended.done():
                return
            if live.request.request_id not in self.live:
                continue
            live.has_progressed.clear()
            self.send_request(live)
            progressed = asyncio.create_task(live.has_progressed.wait())
            await asyncio.wait({progressed, ended}, timeout=_REPLAY_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            progressed.cancel()

    def _send_new(self) -> None:
        """Send every request that isn't a suspect, and take new ones."""
        for live in self.live.values():
            if not live.is_sent and not live.is_finished and live.num_crashes == 0:
                self.send_request(live)
        self.is_up = True
