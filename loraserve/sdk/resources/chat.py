"""`client.chat.completions`: messages in, a message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from loraserve.sdk.call import Call, encode, read_into
from loraserve.sdk.transport.streaming import AsyncStream, Stream
from loraserve.sdk.transport.transport import AsyncTransport, Transport
from loraserve.sdk.types.fields import ChatFields, Message, merge
from loraserve.sdk.types.inference import ChatCompletion, ChatCompletionChunk

ExtraBody = Mapping[str, Any] | None


def _call(
    model: str,
    messages: Sequence[Message],
    stream: bool,
    fields: ChatFields,
    extra_body: ExtraBody,
    timeout: float | None,
) -> Call[ChatCompletion]:
    required = {"model": model, "messages": [dict(message) for message in messages], "stream": stream}
    body = merge(required, fields, ChatFields, extra_body)
    return Call("POST", "/v1/chat/completions", read_into(ChatCompletion), body=encode(body), timeout_s=timeout)


class Chat:
    """Holds `completions`, as the official client does."""

    def __init__(self, transport: Transport) -> None:
        self.completions = ChatCompletions(transport)


class AsyncChat:
    """Holds `completions`, as the official client does."""

    def __init__(self, transport: AsyncTransport) -> None:
        self.completions = AsyncChatCompletions(transport)


class ChatCompletions:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @overload
    def create(
        self,
        *,
        model: str,
        messages: Sequence[Message],
        stream: Literal[False] = False,
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[ChatFields],
    ) -> ChatCompletion: ...
    @overload
    def create(
        self,
        *,
        model: str,
        messages: Sequence[Message],
        stream: Literal[True],
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[ChatFields],
    ) -> Stream[ChatCompletionChunk]: ...
    def create(
        self,
        *,
        model: str,
        messages: Sequence[Message],
        stream: bool = False,
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[ChatFields],
    ) -> ChatCompletion | Stream[ChatCompletionChunk]:
        """Return the answer, or with ``stream=True`` a `Stream` of its pieces.

        Args:
            model: `NAME`, `NAME@ALIAS`, `NAME@VERSION`, a sum of such (``a+0.5*b``), or the base's id.
            messages: ``{"role": …, "content": …}``, oldest first.
            timeout: seconds between two bytes of the answer; None: the client's.
        """
        call = _call(model, messages, stream, fields, extra_body, timeout)
        if stream:
            return Stream(self._transport.open(call), ChatCompletionChunk, self._transport.config.url)
        return self._transport.send(call)


class AsyncChatCompletions:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    @overload
    async def create(
        self,
        *,
        model: str,
        messages: Sequence[Message],
        stream: Literal[False] = False,
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[ChatFields],
    ) -> ChatCompletion: ...
    @overload
    async def create(
        self,
        *,
        model: str,
        messages: Sequence[Message],
        stream: Literal[True],
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[ChatFields],
    ) -> AsyncStream[ChatCompletionChunk]: ...
    async def create(
        self,
        *,
        model: str,
        messages: Sequence[Message],
        stream: bool = False,
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[ChatFields],
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]:
        """As `ChatCompletions.create`."""
        call = _call(model, messages, stream, fields, extra_body, timeout)
        if stream:
            return AsyncStream(await self._transport.open(call), ChatCompletionChunk, self._transport.config.url)
        return await self._transport.send(call)
