"""`client.models`: what `model=` may name."""

from __future__ import annotations

import builtins

from loraserve.sdk.call import Call, read_into, segment
from loraserve.sdk.transport.transport import AsyncTransport, Transport
from loraserve.sdk.types.inference import Model, ModelList


def _list() -> Call[ModelList]:
    return Call("GET", "/v1/models", read_into(ModelList))


def _get(model: str) -> Call[Model]:
    # Ids hold slashes (Hugging Face), colons and @.
    return Call("GET", f"/v1/models/{segment(model, 'model', safe='/:@')}", read_into(Model))


class Models:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> builtins.list[Model]:
        """The base and the adapters that this key may use."""
        return self._transport.send(_list()).data

    def get(self, model: str) -> Model:
        """Raises ModelNotFound where there is none, or it is another tenant's."""
        return self._transport.send(_get(model))


class AsyncModels:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> builtins.list[Model]:
        """As `Models.list`."""
        return (await self._transport.send(_list())).data

    async def get(self, model: str) -> Model:
        """As `Models.get`."""
        return await self._transport.send(_get(model))
