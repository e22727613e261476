"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.errors import openai_envelope
from loraserve.api.http.json_body import dump_json
from loraserve.api.http.sse import named_event
from loraserve.api.inference.chat.turn import ChatAnswer, ChatPrompt, ChatTurn
from loraserve.api.inference.fields import json_fields, parse_body, renamed
from loraserve.api.inference.quota import admitted_caller
from loraserve.api.inference.schemas import ChatBody
from loraserve.api.openai.responses.answer import ResponseAnswer
from loraserve.api.openai.responses.body import FIELDS, ResponseBody, chat_body, check_body, place_in_response
from loraserve.api.openai.responses.items import Conversation, Item, read_items
from loraserve.api.openai.responses.output import Event
from loraserve.api.openai.responses.tools import ResponseTools
from loraserve.api.services import Services, services_of
from loraserve.contract.response import InputTokens
from loraserve.conversations.stored_responses import ResponseRecord, StoredResponses, response_not_found
from loraserve.errors import LoraserveError
from loraserve.tenancy.identity.auth import Caller

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

router = APIRouter()

_PREVIOUS = "previous_response_id"


@router.post("/responses", response_model=None)
async def create_response(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Answer the input, after the responses that it continues.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ResponseNotFound: the tenant has no such previous response.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full, or the database of previous responses is away.
        RateLimited: the tenant's share is used up.
    """
    services = services_of(request)
    asked = await _read(services, caller, raw)
    with renamed(asked.place, FIELDS):
        turn = await ChatTurn.begin(
            request,
            caller,
            asked.chat,
            asked.ignored,
            prefix="resp_",
            names=FIELDS,
            num_more_bytes=asked.num_stored_bytes,
        )
    answer = ResponseAnswer(turn, asked.body, asked.tools)
    return await turn.respond(request, _Exchange(turn, answer, caller, asked.items, services.responses))


@router.post("/responses/input_tokens")
async def count_input_tokens(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> InputTokens:
    """Count the tokens of a response's prompt, however many they are.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ResponseNotFound: the tenant has no such previous response.
        ModelNotFound: the tenant has no such model.
    """
    asked = await _read(services_of(request), caller, raw)
    with renamed(asked.place, FIELDS):
        read = await ChatPrompt.read(
            request, caller, asked.chat, asked.ignored, num_more_bytes=asked.num_stored_bytes, is_bounded=False
        )
    return InputTokens(object="response.input_tokens", input_tokens=len(read.prompt.token_ids))


@dataclass(frozen=True, slots=True)
class _ReadResponse:
    """Checked body of a response, and the chat that it is the answer of.

    Attributes:
        items: those of the input.
        places: place of each of the chat's messages.
        ignored: fields and tools that change nothing.
        num_stored_bytes: size of the responses that it continues.
    """

    body: ResponseBody
    tools: ResponseTools
    items: list[Item]
    places: list[str]
    chat: ChatBody
    ignored: tuple[str, ...]
    num_stored_bytes: int

    def place(self, param: str) -> str:
        """Return the place in the response's body for a place in its chat's."""
        return place_in_response(param, self.places, self.tools)


async def _read(services: Services, caller: Caller, raw: dict[str, Any]) -> _ReadResponse:
    body, ignored = parse_body(ResponseBody, raw)
    tools, read = ResponseTools.read(body.tools), read_items(body.input)
    ignored = (*ignored, *check_body(body), *dict.fromkeys(tools.ignored), *read.left_out)
    conversation, num_bytes = await _conversation(services, caller, body)
    conversation.add(read)
    chat = chat_body(body, conversation.messages, tools)
    return _ReadResponse(body, tools, read.items, conversation.places, chat, ignored, num_bytes)


async def _conversation(services: Services, caller: Caller, body: ResponseBody) -> tuple[Conversation, int]:
    """Return the messages before the input, and the size of those that were stored."""
    conversation = Conversation()
    if body.instructions is not None:
        conversation.add_instructions(body.instructions)
    if body.previous_response_id is None:
        return conversation, 0
    if services.responses is None:
        raise response_not_found(_PREVIOUS)
    stored = await services.responses.conversation(caller.tenant, body.previous_response_id)
    num_bytes = sum(response.num_bytes for response in stored)

    def add() -> None:
        for response in stored:
            for items in (orjson.loads(response.input), orjson.loads(response.answer)["output"]):
                conversation.add(read_items(items, _PREVIOUS, is_stored=True))

    await services.text_threads.run(caller.tenant, num_bytes, add)
    return conversation, num_bytes


class _Exchange(ChatAnswer):
    """Way of one response from its first chunk to its end."""

    # these clients know the last event by its name
    ending = b""

    def __init__(
        self, turn: ChatTurn, answer: ResponseAnswer, caller: Caller, items: list[Item], store: StoredResponses | None
    ) -> None:
        super().__init__(turn)
        self._answer, self._caller, self._items, self._store = answer, caller, items, store
        self._num_events = 0

    def add(self, index: int, chunk: Chunk) -> None:
        self._answer.output.add(chunk)

    async def finish(self) -> None:
        """End the last item, and store the response."""
        self._answer.output.finish(self._answer.final_status)
        await self._save()

    def whole(self) -> dict[str, Any]:
        return self._answer.final()

    def opening(self) -> bytes:
        begun = self._answer.in_progress()
        return self._frames([("response.created", {"response": begun}), ("response.in_progress", {"response": begun})])

    def render(self, index: int, chunk: Chunk) -> bytes:
        return self._frames(self._answer.output.add(chunk))

    async def closing(self) -> bytes:
        """Store the response, and return the events of its end."""
        answer = self._answer
        events = answer.output.finish(answer.final_status)
        await self._save()
        return self._frames([*events, (f"response.{answer.final_status}", {"response": answer.final()})])

    def failure(self, error: LoraserveError) -> bytes:
        """Return the last events of an answer that an error has ended."""
        detail = openai_envelope(error)["error"]
        told = {name: detail[name] for name in ("code", "message", "param")}
        return self._frames([("error", told), ("response.failed", {"response": self._answer.failed(error)})])

    def _frames(self, events: Iterable[Event]) -> bytes:
        frames = []
        for name, payload in events:
            frames.append(named_event(name, {"sequence_number": self._num_events, **payload}))
            self._num_events += 1
        return b"".join(frames)

    async def _save(self) -> None:
        answer = self._answer
        if not answer.is_stored or self._store is None:
            answer.is_stored = False
            return
        response = ResponseRecord(
            self.turn.context.id,
            answer.previous_id,
            dump_json(_with_ids(self._items, self.turn.context.id)),
            answer.as_stored(),
        )
        answer.is_stored = await self._store.save(self._caller.tenant, response)


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def _with_ids(items: list[Item], response_id: str) -> list[Item]:
    """Return the items, each with an id of its own: clients list them from one to the next."""
    suffix, seen, found = response_id.partition("_")[2], set[str](), []
    for index, item in enumerate(items):
        own = item.get("id")
        if own is None or own in seen:
            own = f"{_PREFIXES[item['type']]}_{suffix}_{index}"
        seen.add(own)
        found.append({**item, "id": own, "status": "completed"})
    return found
