"""Render a generation's chunks as a dialect has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from loraserve.api.http.sse import DONE, EVENT_STREAM, error_event

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk
    from loraserve.errors import LoraserveError

_PING = b": the first token is awaited\n\n"
"""Comment, which clients skip: proxies end connections that are silent for a minute."""


class Answer(ABC):
    """Answer to one HTTP request in the form of one dialect, in one piece.

    A `Delivery` calls `add` with each chunk, which is in the usage already, then `finish` and
    `whole`.
    """

    @abstractmethod
    def headers(self, first: Chunk | None) -> dict[str, str]:
        """Build the response's headers, given the first chunk of any choice.

        None: a stream begins before it, and what answers isn't certain yet.
        """

    @abstractmethod
    def add(self, index: int, chunk: Chunk) -> None:
        """Take a chunk of choice ``index`` into the whole answer."""

    async def finish(self) -> None:  # noqa: B027 - most answers have nothing to complete
        """Complete the answer once each choice has ended."""

    @abstractmethod
    def whole(self) -> Any:
        """Build the whole answer, as JSON has it."""


class StreamableAnswer(Answer):
    """Answer that a client may also have as a stream of events.

    A `Delivery` then calls `opening`, `render` with each chunk, which is in the usage already, and
    `closing`.

    Attributes:
        is_stream: whether the request is for a stream.
        ending: bytes after the last event of a stream, whatever ended it.
        media_type: of a stream.
    """

    is_stream: bool
    ending: bytes = DONE
    media_type: str = EVENT_STREAM

    def ping(self) -> bytes:
        """Encode what keeps the connection in use while the first token is awaited."""
        return _PING

    def opening(self) -> bytes:
        """Encode the events before the first chunk's."""
        return b""

    @abstractmethod
    def render(self, index: int, chunk: Chunk) -> bytes:
        """Encode the events of a chunk of choice ``index``; empty if it adds nothing."""

    async def closing(self) -> bytes:
        """Encode the events after the last chunk's."""
        return b""

    def failure(self, error: LoraserveError) -> bytes:
        """Encode the events of an error that ends the stream."""
        return error_event(error)
