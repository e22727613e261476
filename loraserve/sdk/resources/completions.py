"""`client.completions`: text in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack, overload

from loraserve.sdk.call import Call, encode, read_into
from loraserve.sdk.transport.streaming import AsyncStream, Stream
from loraserve.sdk.transport.transport import AsyncTransport, Transport
from loraserve.sdk.types.fields import CompletionFields, Prompt, merge
from loraserve.sdk.types.inference import Completion

ExtraBody = Mapping[str, Any] | None


def _call(
    model: str, prompt: Prompt, stream: bool, fields: CompletionFields, extra_body: ExtraBody, timeout: float | None
) -> Call[Completion]:
    body = merge({"model": model, "prompt": prompt, "stream": stream}, fields, CompletionFields, extra_body)
    return Call("POST", "/v1/completions", read_into(Completion), body=encode(body), timeout_s=timeout)


class Completions:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @overload
    def create(
        self,
        *,
        model: str,
        prompt: Prompt,
        stream: Literal[False] = False,
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[CompletionFields],
    ) -> Completion: ...
    @overload
    def create(
        self,
        *,
        model: str,
        prompt: Prompt,
        stream: Literal[True],
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[CompletionFields],
    ) -> Stream[Completion]: ...
    def create(
        self,
        *,
        model: str,
        prompt: Prompt,
        stream: bool = False,
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[CompletionFields],
    ) -> Completion | Stream[Completion]:
        """Return the completion, or with ``stream=True`` a `Stream` of its pieces.

        Args:
            model: `NAME`, `NAME@ALIAS`, `NAME@VERSION`, a sum of such (``a+0.5*b``), or the base's id.
            prompt: text or token ids, one prompt or several.
            timeout: seconds between two bytes of the answer; None: the client's.
        """
        call = _call(model, prompt, stream, fields, extra_body, timeout)
        if stream:
            return Stream(self._transport.open(call), Completion, self._transport.config.url)
        return self._transport.send(call)


class AsyncCompletions:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    @overload
    async def create(
        self,
        *,
        model: str,
        prompt: Prompt,
        stream: Literal[False] = False,
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[CompletionFields],
    ) -> Completion: ...
    @overload
    async def create(
        self,
        *,
        model: str,
        prompt: Prompt,
        stream: Literal[True],
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[CompletionFields],
    ) -> AsyncStream[Completion]: ...
    async def create(
        self,
        *,
        model: str,
        prompt: Prompt,
        stream: bool = False,
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[CompletionFields],
    ) -> Completion | AsyncStream[Completion]:
        """As `Completions.create`."""
        call = _call(model, prompt, stream, fields, extra_body, timeout)
        if stream:
            return AsyncStream(await self._transport.open(call), Completion, self._transport.config.url)
        return await self._transport.send(call)
