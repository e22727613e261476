"""Calls over HTTP, with retries: one transport that blocks and one that awaits. What they decide alike stands in `_Attempt`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import anyio
import httpx2

from loraserve import errors
from loraserve.sdk.answers import Answer, error_from_response
from loraserve.sdk.call import Call
from loraserve.sdk.config import CONNECT_TIMEOUT_S, ClientConfig

T = TypeVar("T")


class _Attempt:
    """Counts the tries of one call and decides after each."""

    def __init__(self, config: ClientConfig, call: Call[T]) -> None:
        self._config = config
        self._call = call
        self._count = 0

    def build(self, client: httpx2.Client | httpx2.AsyncClient) -> httpx2.Request:
        """The request as it goes out this time; a retry says that it is one."""
        call = self._call
        headers = self._config.headers | dict(call.headers)
        content: bytes | Iterator[bytes] | AsyncIterator[bytes] | None = call.body
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        if call.piece is not None:
            headers |= call.piece.headers
            content = call.piece.pieces() if isinstance(client, httpx2.Client) else call.piece.apieces()
        if self._count:
            headers["x-retry-count"] = str(self._count)
        return client.build_request(
            call.method,
            self._config.url + call.path,
            params=dict(call.params) or None,
            headers=headers,
            content=content,
            timeout=timeout_of(self._config.timeout_s if call.timeout_s is None else call.timeout_s),
        )

    def after_failure(self, failure: httpx2.TransportError) -> float:
        """Seconds to wait before the next try.

        Raises:
            ConnectionFailed, ClientTimeout: there is no next try.
        """
        # A connection that was never made carried nothing: even a call that mustn't happen twice may be tried again.
        never_sent = isinstance(failure, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
        # A server that is too slow isn't helped by the same work once more.
        too_slow = isinstance(failure, httpx2.TimeoutException) and not never_sent
        may_retry = never_sent or (self._call.is_repeatable and not too_slow)
        delay = self._config.retry.delay_after_failure(self._count) if may_retry else None
        if delay is None:
            raise error_from_failure(failure, self._config.url) from failure
        self._count += 1
        return delay

    def after_refusal(self, response: httpx2.Response) -> float:
        """Seconds to wait before the next try. The response's body must have been read.

        Raises:
            LoraserveError: the error that the refusal stands for; there is no next try.
        """
        delay = self._config.retry.delay_after_answer(self._count, response.status_code, response.headers)
        if delay is None:
            raise error_from_response(response)
        self._count += 1
        return delay


class Transport:
    """Blocking. Safe to share between threads."""

    def __init__(
        self,
        config: ClientConfig,
        http: httpx2.Client | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.config = config
        self._is_ours = http is None
        self._http = http if http is not None else httpx2.Client()
        self._sleep = sleep

    def send(self, call: Call[T]) -> T:
        """Return what the call's reader makes of the answer.

        Raises:
            LoraserveError: the server refused, didn't answer, or answered something else.
        """
        response = self._exchange(call, is_stream=False)
        return call.read(Answer.of(response), response.content)

    def open(self, call: Call[T]) -> httpx2.Response:
        """Return an accepted response whose body is still to come; the caller closes it."""
        return self._exchange(call, is_stream=True)

    def _exchange(self, call: Call[T], *, is_stream: bool) -> httpx2.Response:
        attempt = _Attempt(self.config, call)
        while True:
            try:
                response = self._http.send(attempt.build(self._http), stream=is_stream)
                if response.is_success:
                    return response
                response.read()
                response.close()
                delay = attempt.after_refusal(response)
            except httpx2.TransportError as failure:
                delay = attempt.after_failure(failure)
            self._sleep(delay)

    def pause(self, seconds: float) -> None:
        """Return after so long; as between two tries."""
        self._sleep(seconds)

    def close(self) -> None:
        if self._is_ours:
            self._http.close()


class AsyncTransport:
    """Awaiting; runs under asyncio and trio."""

    def __init__(
        self,
        config: ClientConfig,
        http: httpx2.AsyncClient | None = None,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
    ) -> None:
        self.config = config
        self._is_ours = http is None
        self._http = http if http is not None else httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None))
        self._sleep = sleep

    async def send(self, call: Call[T]) -> T:
        """As `Transport.send`."""
        response = await self._exchange(call, is_stream=False)
        return call.read(Answer.of(response), response.content)

    async def open(self, call: Call[T]) -> httpx2.Response:
        """As `Transport.open`."""
        return await self._exchange(call, is_stream=True)

    async def _exchange(self, call: Call[T], *, is_stream: bool) -> httpx2.Response:
        attempt = _Attempt(self.config, call)
        while True:
            try:
                response = await self._http.send(attempt.build(self._http), stream=is_stream)
                if response.is_success:
                    return response
                await response.aread()
                await response.aclose()
                delay = attempt.after_refusal(response)
            except httpx2.TransportError as failure:
                delay = attempt.after_failure(failure)
            await self._sleep(delay)

    async def pause(self, seconds: float) -> None:
        """As `Transport.pause`."""
        await self._sleep(seconds)

    async def close(self) -> None:
        if self._is_ours:
            await self._http.aclose()


def timeout_of(seconds: float) -> httpx2.Timeout:
    """`seconds` between two bytes of an answer; less to connect, since a server that is there accepts at once."""
    return httpx2.Timeout(seconds, connect=min(seconds, CONNECT_TIMEOUT_S))


def error_from_failure(failure: httpx2.TransportError, url: str) -> errors.ClientError:
    """What to tell the caller when no answer came, or only the beginning of one."""
    reason = str(failure) or type(failure).__name__
    if isinstance(failure, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        return errors.ConnectionFailed(
            f"No server answers at {url} ({reason}).",
            hint="Start one (loraserve serve), or point LORASERVE_URL at one that runs.",
        )
    if isinstance(failure, httpx2.TimeoutException):
        return errors.ClientTimeout(
            f"{url} didn't answer in time ({reason}).", hint="Look at its load with: loraserve ps"
        )
    return errors.ConnectionFailed(
        f"The connection to {url} broke before the answer was complete ({reason}).",
        hint="See the server's log for the reason.",
    )
