# Generated from loraserve/sdk/_async/responses.py by `make sdk`: don't edit.
"""`client.responses`: chats in items, which the server can store and continue.

Streams of them are the official client's: `client.openai().responses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from loraserve.contract.response import ModelResponse
from loraserve.sdk._sync.transport import Transport
from loraserve.sdk.call import Call, encode, read_into, read_nothing, segment
from loraserve.sdk.types.fields import ExtraBody, ResponseFields, merge


class Responses:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        *,
        model: str,
        input: str | Sequence[Mapping[str, Any]],
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[ResponseFields],
    ) -> ModelResponse:
        """Return the response to the input, and to the responses that it continues.

        Args:
            model: `NAME`, `NAME@ALIAS`, `NAME@VERSION`, a sum of such (``a+0.5*b``), or the base's
                id.
            input: a text, or items, oldest first.
            timeout: seconds between two bytes of the answer; None: the client's.
        """
        items = input if isinstance(input, str) else [dict(item) for item in input]
        required = {"model": model, "input": items}
        body = encode(merge(required, fields, ResponseFields, extra_body))
        call = Call("POST", "/v1/responses", read_into(ModelResponse), body=body, timeout_s=timeout)
        return self._transport.send(call)

    def retrieve(self, response_id: str) -> ModelResponse:
        """Return a stored response.

        Raises:
            ResponseNotFound: there is none, or it is another tenant's, or its time is over.
        """
        path = f"/v1/responses/{segment(response_id, 'response_id')}"
        return self._transport.send(Call("GET", path, read_into(ModelResponse)))

    def delete(self, response_id: str) -> None:
        """Delete a stored response. Those that continue it can't be continued any more.

        Raises:
            ResponseNotFound: as `retrieve`.
        """
        path = f"/v1/responses/{segment(response_id, 'response_id')}"
        self._transport.send(Call("DELETE", path, read_nothing))
