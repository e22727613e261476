# Generated from loraserve/sdk/_async/inference.py by `make sdk`: don't edit.
"""`client.completions`, `client.chat.completions` and `client.models`."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Literal, Unpack, overload

from loraserve.contract.chat import ChatCompletion, ChatCompletionChunk
from loraserve.contract.completion import Completion
from loraserve.contract.server import Model, ModelList
from loraserve.sdk._sync.streaming import Stream
from loraserve.sdk._sync.transport import Transport
from loraserve.sdk.call import Call, encode, read_into, segment
from loraserve.sdk.types.fields import ChatFields, CompletionFields, ExtraBody, Message, Prompt, merge


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
        """Return the completion, or with ``stream=True`` an iterator over its pieces.

        Args:
            model: `NAME`, `NAME@ALIAS`, `NAME@VERSION`, a sum of such (``a+0.5*b``), or the base's
                id.
            prompt: text or token ids, one prompt or several.
            timeout: seconds between two bytes of the answer; None: the client's.
        """
        required = {"model": model, "prompt": prompt, "stream": stream}
        body = encode(merge(required, fields, CompletionFields, extra_body))
        call = Call("POST", "/v1/completions", read_into(Completion), body=body, timeout_s=timeout)
        if stream:
            return Stream(self._transport.open(call), Completion, self._transport.config.url)
        return self._transport.send(call)


class Chat:
    """Hold `completions`, as the official client does."""

    def __init__(self, transport: Transport) -> None:
        self.completions = ChatCompletions(transport)


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
        """Return the answer, or with ``stream=True`` an iterator over its pieces.

        Args:
            model: `NAME`, `NAME@ALIAS`, `NAME@VERSION`, a sum of such (``a+0.5*b``), or the base's
                id.
            messages: ``{"role": …, "content": …}``, oldest first.
            timeout: seconds between two bytes of the answer; None: the client's.
        """
        required = {"model": model, "messages": [dict(message) for message in messages], "stream": stream}
        body = encode(merge(required, fields, ChatFields, extra_body))
        call = Call("POST", "/v1/chat/completions", read_into(ChatCompletion), body=body, timeout_s=timeout)
        if stream:
            return Stream(self._transport.open(call), ChatCompletionChunk, self._transport.config.url)
        return self._transport.send(call)


class Models:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> builtins.list[Model]:
        """Return the base and the adapters that this key may use."""
        models = self._transport.send(Call("GET", "/v1/models", read_into(ModelList)))
        return models.data

    def get(self, model: str) -> Model:
        """Return the model.

        Raises:
            ModelNotFound: there is none, or it is another tenant's.
        """
        # ids hold slashes (Hugging Face), colons and @
        path = f"/v1/models/{segment(model, 'model', safe='/:@')}"
        return self._transport.send(Call("GET", path, read_into(Model)))
