"""Messages of content blocks, checked, and the chat's messages that they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.limits import LIMITS

_MAX_ID_LENGTH = 256
_ERROR = "Error: "
"""Prefix of a tool's result that is an error: chat templates have no other way to mark it."""


_BILLING = "x-anthropic-billing-header:"
"""Beginning of a block that Claude Code puts first in the system prompt.

It is another with each request, and would end every prefix hit.
"""


def _is_billing(block: object) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(_BILLING)


@dataclass(slots=True)
class Dialogue:
    """A chat's messages, made of a request's system prompt and its messages' blocks.

    Attributes:
        messages: as a chat's body has them.
        places: for each message, where it came from.
        has_cache_control: whether a block sets what to cache, which changes nothing here.
        left_out: what was left out of the system prompt.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    has_cache_control: bool = False
    left_out: list[str] = field(default_factory=list)
    _call_ids: set[str] = field(default_factory=set)

    @property
    def continues_last(self) -> bool:
        """Whether the answer continues the assistant's last message."""
        role: str = self.messages[-1]["role"]
        return role == "assistant"

    def add_system(self, system: object) -> None:
        """Add the system prompt: a text or blocks of text.

        Raises:
            InvalidRequest: it is neither; `param` names the place.
        """
        if isinstance(system, list):
            kept = [block for block in system if not _is_billing(block)]
            if len(kept) < len(system):
                self.left_out.append("system.x-anthropic-billing-header")
            system = kept or None
        if system is None:
            return
        self._add({"role": "system", "content": self._texts(system, "system")}, "system")

    def add_messages(self, messages: object) -> None:
        """Add the messages.

        Raises:
            InvalidRequest: one is wrong; `param` names it.
            UnsupportedParameter: one has something other than texts, tool calls and thoughts.
        """
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages should be a list of messages, not an empty one.", param="messages")
        if len(messages) > LIMITS.max_messages:
            raise InvalidRequest(f"messages has more than {LIMITS.max_messages} messages.", param="messages")
        for index, message in enumerate(messages):
            where = f"messages.{index}"
            role = message.get("role") if isinstance(message, dict) else None
            match role:
                case "user":
                    self._add_users(self._blocks(message.get("content"), f"{where}.content"), where)
                case "assistant":
                    self._add_assistants(self._blocks(message.get("content"), f"{where}.content"), where)
                case "system":
                    self._add({"role": role, "content": self._texts(message.get("content"), f"{where}.content")}, where)
                case _:
                    raise InvalidRequest(f"{where}.role should be user, assistant or system.", param=f"{where}.role")
        if "tool_calls" in self.messages[-1]:
            place = self.places[-1]
            raise InvalidRequest(
                f"{place} has a tool_use without a tool_result after it.",
                param=place,
                hint="Send its result in a user's message.",
            )

    def _add_users(self, blocks: list[tuple[Mapping[str, Any], str]], where: str) -> None:
        texts: list[dict[str, Any]] | None = None
        for block, place in blocks:
            match block["type"]:
                case "text":
                    if texts is None:
                        texts = []
                        self._add({"role": "user", "content": texts}, where)
                    texts.append({"type": "text", "text": _text(block, "text", place)})
                case "tool_result":
                    self._add_result(block, place)
                    texts = None
                case _:
                    raise _unreadable(place)

    def _add_result(self, block: Mapping[str, Any], place: str) -> None:
        call_id = _id(block, "tool_use_id", place)
        if call_id not in self._call_ids:
            raise InvalidRequest(
                f"{place}.tool_use_id is that of no tool_use before it.",
                param=f"{place}.tool_use_id",
                hint="Send the assistant's message with the tool_use before it.",
            )
        is_error = block.get("is_error")
        if is_error is not None and not isinstance(is_error, bool):
            raise InvalidRequest(f"{place}.is_error should be true or false.", param=f"{place}.is_error")
        content = block.get("content")
        text = "" if content is None or content == [] else self._texts(content, f"{place}.content")
        text = _ERROR + text if is_error else text
        self._add({"role": "tool", "tool_call_id": call_id, "content": text}, place)

    def _add_assistants(self, blocks: list[tuple[Mapping[str, Any], str]], where: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block, place in blocks:
            match block["type"]:
                case "text":
                    texts.append(_text(block, "text", place))
                case "thinking":
                    thoughts.append(_text(block, "thinking", place))
                case "redacted_thinking":
                    pass  # means nothing to this model
                case "tool_use":
                    if not isinstance(block.get("input"), dict):
                        raise InvalidRequest(f"{place}.input should be an object.", param=f"{place}.input")
                    call_id = _id(block, "id", place)
                    self._call_ids.add(call_id)
                    function = {"name": _text(block, "name", place), "arguments": block["input"]}
                    calls.append({"id": call_id, "type": "function", "function": function})
                case _:
                    raise _unreadable(place)
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._add(message, where)

    def _add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def _texts(self, value: object, where: str) -> str:
        """Join blocks of text; a text stays as it is."""
        texts = []
        for block, place in self._blocks(value, where):
            if block["type"] != "text":
                raise _unreadable(place)
            texts.append(_text(block, "text", place))
        return "\n".join(texts)

    def _blocks(self, value: object, where: str) -> list[tuple[Mapping[str, Any], str]]:
        """List blocks with a type, each with its place."""
        if isinstance(value, str):
            return [({"type": "text", "text": value}, where)]
        if not isinstance(value, list) or not value:
            raise InvalidRequest(f"{where} should be a string or a list of content blocks.", param=where)
        found: list[tuple[Mapping[str, Any], str]] = []
        for index, block in enumerate(value):
            place = f"{where}.{index}"
            if not isinstance(block, dict) or not isinstance(block.get("type"), str):
                raise InvalidRequest(
                    f'{place} should be a content block: {{"type": "text", "text": "…"}}.', param=place
                )
            self.has_cache_control |= block.get("cache_control") is not None
            found.append((block, place))
        return found


def _unreadable(place: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{place}: this model reads text, tool_use, tool_result and thinking only.", param=place
    )


def _text(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{place}.{name} should be a string.", param=f"{place}.{name}")
    return value


def _id(block: Mapping[str, Any], name: str, place: str) -> str:
    value = _text(block, name, place)
    if not 0 < len(value) <= _MAX_ID_LENGTH:
        raise InvalidRequest(f"{place}.{name} should have 1 to {_MAX_ID_LENGTH} characters.", param=f"{place}.{name}")
    return value
