"""The tries of one call: what is sent each time, and what follows a failure or a refusal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2

from loraserve import errors
from loraserve.sdk.answers import error_from_response
from loraserve.sdk.call import Call
from loraserve.sdk.config import CONNECT_TIMEOUT_S, ClientConfig


class Attempt:
    """Count the tries of one call and decide after each."""

    def __init__(self, config: ClientConfig, call: Call[Any]) -> None:
        self._config = config
        self._call = call
        self._count = 0

    def build(
        self,
        client: httpx2.Client | httpx2.AsyncClient,
        content: bytes | Iterator[bytes] | AsyncIterator[bytes] | None,
    ) -> httpx2.Request:
        """Return this try's request; a retry carries its number in a header."""
        call = self._call
        headers = self._config.headers | dict(call.headers)
        if call.body is not None:
            headers.setdefault("Content-Type", "application/json")
        if call.piece is not None:
            headers |= call.piece.headers
        if self._count:
            headers["x-retry-count"] = str(self._count)
        return client.build_request(
            call.method,
            self._config.url + call.path,
            params=dict(call.params) or None,
            headers=headers,
            content=content,
            timeout=_timeout(self._config.timeout_s if call.timeout_s is None else call.timeout_s),
        )

    def after_failure(self, failure: httpx2.TransportError) -> float:
        """Return the seconds to wait before the next try.

        Raises:
            ConnectionFailed, ClientTimeout: there is no next try.
        """
        # a connection that was never made carried nothing: even a call that mustn't happen twice
        # may be tried again
        never_sent = isinstance(failure, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
        # a second copy of the same work doesn't help a server that is too slow
        too_slow = isinstance(failure, httpx2.TimeoutException) and not never_sent
        may_retry = never_sent or (self._call.is_repeatable and not too_slow)
        delay = self._config.retry.delay_after_failure(self._count) if may_retry else None
        error = error_from_failure(failure, self._config.url)
        if delay is None:
            raise error from failure
        return self._wait(delay, error)

    def after_refusal(self, response: httpx2.Response) -> float:
        """Return the seconds to wait before the next try. The response's body must have been read.

        Raises:
            LoraserveError: the error that the refusal stands for; there is no next try.
            ConfigError: the server needs a key, and none was given.
        """
        delay = self._config.retry.delay_after_answer(self._count, response.status_code, response.headers)
        error = error_from_response(response)
        if self._config.api_key is None and isinstance(error, errors.AuthenticationError):
            raise self._config.missing_key() from error
        if delay is None:
            raise error
        return self._wait(delay, error)

    def _wait(self, delay: float, error: errors.LoraserveError) -> float:
        self._count += 1
        if self._config.on_wait is not None:
            self._config.on_wait(delay, error)
        return delay


def error_from_failure(failure: httpx2.TransportError, url: str) -> errors.ClientError:
    """Return the error for an answer that didn't come, or of which only the beginning came."""
    reason = str(failure) or type(failure).__name__
    if isinstance(failure, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        return errors.ConnectionFailed(
            f"No server answers at {url} ({reason}).",
            hint="Start one (loraserve serve), or point LORASERVE_URL at one that runs.",
        )
    if isinstance(failure, httpx2.TimeoutException):
        return errors.ClientTimeout(f"{url} didn't answer in time ({reason}).", hint="See: loraserve ps")
    return errors.ConnectionFailed(
        f"The connection to {url} broke before the answer was complete ({reason}).",
        hint="Check the server's log for the reason.",
    )


def _timeout(seconds: float) -> httpx2.Timeout:
    """Allow `seconds` between two bytes, and fewer to connect.

    A server that runs accepts at once.
    """
    return httpx2.Timeout(seconds, connect=min(seconds, CONNECT_TIMEOUT_S))
