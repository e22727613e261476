"""What takes several calls (an upload, a download, waiting), written once for both clients.

A procedure is a generator. It yields what is to be done and is given what came of it, or the error that was raised; what it
returns is the result. `run` does these things and blocks, `run_async` awaits them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio.to_thread
import httpx2

from loraserve import errors
from loraserve.sdk.answers import Answer
from loraserve.sdk.call import Call
from loraserve.sdk.transport.transport import AsyncTransport, Transport, error_from_failure

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """Something that reads or writes files: asyncio's thread is not held up by it."""

    do: Callable[[], T]


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Fetch:
    """The bytes of an answer, each piece given to `take` as it comes. What comes of it is the `Answer`.

    Raises (where it's yielded):
        ConnectionFailed, ClientTimeout: the answer isn't complete.
    """

    call: Call[None]
    begin: Callable[[Answer, int | None], object]
    """Told of the answer and how many bytes are to come (None: nobody knows), before the first."""
    take: Callable[[bytes], object]


Step = Call[Any] | Work[Any] | Pause | Fetch
Steps = Generator[Step, Any, T]


def run(transport: Transport, steps: Steps[T]) -> T:
    """Do what `steps` asks for, one thing after another, and return what it returns."""
    value: Any = None
    failure: Exception | None = None
    while True:
        try:
            step = steps.send(value) if failure is None else steps.throw(failure)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        value, failure = None, None
        try:
            match step:
                case Call():
                    value = transport.send(step)
                case Work():
                    value = step.do()
                case Pause():
                    transport.pause(step.seconds)
                case Fetch():
                    value = _fetch(transport, step)
        except (errors.LoraserveError, OSError) as error:
            failure = error


async def run_async(transport: AsyncTransport, steps: Steps[T]) -> T:
    """As `run`."""
    value: Any = None
    failure: Exception | None = None
    while True:
        try:
            step = steps.send(value) if failure is None else steps.throw(failure)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        value, failure = None, None
        try:
            match step:
                case Call():
                    value = await transport.send(step)
                case Work():
                    value = await anyio.to_thread.run_sync(step.do)
                case Pause():
                    await transport.pause(step.seconds)
                case Fetch():
                    value = await _fetch_async(transport, step)
        except (errors.LoraserveError, OSError) as error:
            failure = error


def _fetch(transport: Transport, fetch: Fetch) -> Answer:
    response = transport.open(fetch.call)
    try:
        answer = Answer.of(response)
        fetch.begin(answer, _length(response))
        for piece in response.iter_bytes():
            fetch.take(piece)
        return answer
    except httpx2.TransportError as failure:
        raise error_from_failure(failure, transport.config.url) from failure
    finally:
        response.close()


async def _fetch_async(transport: AsyncTransport, fetch: Fetch) -> Answer:
    response = await transport.open(fetch.call)
    try:
        answer = Answer.of(response)
        await anyio.to_thread.run_sync(fetch.begin, answer, _length(response))
        async for piece in response.aiter_bytes():
            await anyio.to_thread.run_sync(fetch.take, piece)
        return answer
    except httpx2.TransportError as failure:
        raise error_from_failure(failure, transport.config.url) from failure
    finally:
        await response.aclose()


def _length(response: httpx2.Response) -> int | None:
    text = response.headers.get("content-length", "")
    return int(text) if text.isdecimal() and "content-encoding" not in response.headers else None
