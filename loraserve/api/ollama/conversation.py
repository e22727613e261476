"""Messages as Ollama's clients send them, and the chat's messages that they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from loraserve.errors import UnsupportedParameter


def chat_messages(value: object) -> object:
    """Convert the messages to a chat's; what is none stays, and is refused as a chat's is.

    Raises:
        UnsupportedParameter: one has images; `param` names it.
    """
    if not isinstance(value, list):
        return value
    calls = _OpenCalls()
    return [
        _chat_message(message, number, calls) if isinstance(message, dict) else message
        for number, message in enumerate(value)
    ]


def refuse_images(images: object, place: str) -> None:
    """Refuse images; an empty list is none.

    Raises:
        UnsupportedParameter: there are some.
    """
    if images:
        raise UnsupportedParameter(
            f"{place}: this model reads text only.", param=place, hint="Send the request without images."
        )


@dataclass(slots=True)
class _OpenCalls:
    """Calls of the assistant's last message that have no result yet, as (id, name).

    Ollama's clients send calls without ids, and results by the tool's name or in the calls' order.
    """

    waiting: list[tuple[str, object]] = field(default_factory=list)

    def begin(self, calls: list[tuple[str, object]]) -> None:
        self.waiting = calls

    def take(self, given_id: object, name: object, number: int) -> object:
        """Choose the id of a result: its own, or that of the call that it answers."""
        if given_id:
            self.waiting = [call for call in self.waiting if call[0] != given_id]
            return given_id
        found = next((call for call in self.waiting if name in (None, call[1])), None)
        if found is None:
            return _call_id(number, 0)
        self.waiting.remove(found)
        return found[0]


def _chat_message(message: dict[str, Any], number: int, calls: _OpenCalls) -> dict[str, Any]:
    refuse_images(message.get("images"), f"messages.{number}.images")
    role = message.get("role")
    role = role.lower() if isinstance(role, str) else role
    found: dict[str, Any] = {"role": role, "content": message.get("content")}
    if message.get("tool_calls"):
        found["tool_calls"] = _chat_calls(message["tool_calls"], number)
    if role == "assistant":
        found["reasoning_content"] = message.get("thinking")
        made = found.get("tool_calls")
        calls.begin([_id_and_name(call) for call in made if isinstance(call, dict)] if isinstance(made, list) else [])
    elif role == "tool":
        name = message.get("tool_name")
        found["tool_call_id"] = calls.take(message.get("tool_call_id"), name, number)
        found["name"] = name
    return found


def _chat_calls(value: object, number: int) -> object:
    """Give each call the id that a chat's has."""
    if not isinstance(value, list):
        return value
    return [
        {**call, "id": call.get("id") or _call_id(number, index), "type": "function"}
        if isinstance(call, dict)
        else call
        for index, call in enumerate(value)
    ]


def _call_id(number: int, index: int) -> str:
    return f"call_{number}_{index}"


def _id_and_name(call: dict[str, Any]) -> tuple[str, object]:
    function = call.get("function")
    return call["id"], function.get("name") if isinstance(function, dict) else None
