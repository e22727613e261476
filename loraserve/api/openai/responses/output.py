"""Output items of a response, and the events of a stream that builds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ulid import ULID

from loraserve.api.inference.chat.choice import ChatChoice
from loraserve.api.openai.responses.tools import ResponseTools, custom_text
from loraserve.text.tool_parsers.parser import ArgumentsDelta, CallStart, ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

Event = tuple[str, dict[str, Any]]
"""Name and payload of an event, without its number."""

_MESSAGE, _REASONING, _CALL, _CUSTOM = "message", "reasoning", "function_call", "custom_tool_call"
_PREFIXES = {_MESSAGE: "msg_", _REASONING: "rs_", _CALL: "fc_", _CUSTOM: "ctc_"}
_EVENTS = {
    _MESSAGE: "response.output_text",
    _REASONING: "response.reasoning_text",
    _CALL: "response.function_call_arguments",
    _CUSTOM: "response.custom_tool_call_input",
}


@dataclass(slots=True)
class _OpenItem:
    """Item that is still being made."""

    item: dict[str, Any]
    place: dict[str, Any]
    """Fields that place its events in the answer."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        kind: str = self.item["type"]
        return kind

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, text: str, **more: Any) -> Event:
        """Add text, and return its event."""
        self.pieces.append(text)
        return f"{_EVENTS[self.kind]}.delta", {**self.place, "delta": text, **more}


class ResponseOutput:
    """Turn a choice's chunks into output items, in the order in which they were made.

    Log probabilities belong to the text that their tokens are in: those of reasoning and calls are
    left out.

    Attributes:
        items: those that are complete.
    """

    def __init__(self, choice: ChatChoice, tools: ResponseTools) -> None:
        self.items: list[dict[str, Any]] = []
        self._choice, self._tools = choice, tools
        self._open: _OpenItem | None = None
        self._logprobs: list[dict[str, Any]] = []
        """Log probabilities of tokens whose text hasn't come yet."""

    def add(self, chunk: Chunk) -> list[Event]:
        """Return the events of what the chunk adds."""
        self._logprobs += self._choice.logprobs_of(chunk)
        events: list[Event] = []
        for delta in self._choice.read(chunk):
            match delta:
                case TextDelta(text):
                    opened = self._begin(_MESSAGE, events)
                    opened.logprobs += self._logprobs
                    events.append(opened.add(text, logprobs=self._logprobs))
                case ReasoningDelta(text):
                    events.append(self._begin(_REASONING, events).add(text))
                case CallStart(index, name):
                    events += self._close("completed")
                    self._begin_call(self._choice.calls[index].id, name, events)
                case ArgumentsDelta(_, text):
                    self._add_arguments(text, events)
            self._logprobs = []
        return events

    def finish(self, status: str) -> list[Event]:
        """Return the events of the end.

        An answer without text is an empty message.

        Args:
            status: of the last item: ``completed``, or ``incomplete`` if it was cut off.
        """
        events: list[Event] = []
        if not self.items and self._open is None:
            self._begin(_MESSAGE, events)
        return [*events, *self._close(status)]

    def _begin_call(self, call_id: str, function: str, events: list[Event]) -> None:
        tool = self._tools.called(function)
        named = {"name": tool.name} | ({} if tool.namespace is None else {"namespace": tool.namespace})
        if tool.is_custom:
            self._begin(_CUSTOM, events, call_id=call_id, **named, input="")
        else:
            self._begin(_CALL, events, call_id=call_id, **named, arguments="")

    def _add_arguments(self, text: str, events: list[Event]) -> None:
        if self._open is not None and self._open.kind == _CUSTOM:
            # its text is known once the JSON around it is whole
            self._open.pieces.append(text)
        else:
            events.append(self._begin(_CALL, events).add(text))

    def _begin(self, kind: str, events: list[Event], **fields: Any) -> _OpenItem:
        """Return the open item if it is of this kind; otherwise end it and begin one."""
        if self._open is not None and self._open.kind == kind:
            return self._open
        events += self._close("completed")
        index = len(self.items)
        item = {"id": f"{_PREFIXES[kind]}{ULID()}", "type": kind, "status": "in_progress", **fields}
        if kind == _MESSAGE:
            item |= {"role": "assistant", "content": []}
        elif kind == _REASONING:
            item |= {"summary": [], "content": []}
        place = {"item_id": item["id"], "output_index": index}
        events.append(("response.output_item.added", {"output_index": index, "item": dict(item)}))
        if kind not in (_CALL, _CUSTOM):
            place["content_index"] = 0
            events.append(("response.content_part.added", {**place, "part": _part(kind, "", [])}))
        self._open = _OpenItem(item, place)
        return self._open

    def _close(self, status: str) -> Iterator[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return
        item, place, kind, text = opened.item, opened.place, opened.kind, opened.text
        if kind == _CALL:
            item["arguments"] = text
            yield f"{_EVENTS[kind]}.done", {**place, "name": item["name"], "arguments": text}
        elif kind == _CUSTOM:
            item["input"] = custom_text(text)
            yield f"{_EVENTS[kind]}.delta", {**place, "delta": item["input"]}
            yield f"{_EVENTS[kind]}.done", {**place, "input": item["input"]}
        else:
            part = _part(kind, text, opened.logprobs)
            item["content"] = [part]
            done = {**place, "text": text}
            yield f"{_EVENTS[kind]}.done", done | ({"logprobs": opened.logprobs} if kind == _MESSAGE else {})
            yield "response.content_part.done", {**place, "part": part}
        item["status"] = status
        self.items.append(item)
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == _REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
