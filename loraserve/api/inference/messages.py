"""Messages of a chat, checked, in the form that chat templates take."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loraserve.api.http.json_body import parse_json
from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.limits import LIMITS
from loraserve.text.chat_format import ChatFormat

_ROLES = ("assistant", "developer", "system", "tool", "user")
_OTHER_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Roles of some models' own, such as ``ipython`` or ``critic``: their templates write them."""
_MAX_NAME_LENGTH = 64
_MAX_ID_LENGTH = 256
_REASONING = ("reasoning_content", "reasoning")


def read_messages(value: object, chat_format: ChatFormat) -> list[dict[str, Any]]:
    """Convert the messages to those that the model's template takes.

    Raises:
        InvalidRequest: one is wrong; `param` names it.
        UnsupportedParameter: one has something other than text, or the older form of a tool call.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages should be a list of messages, not an empty one.", param="messages")
    if len(value) > LIMITS.max_messages:
        raise InvalidRequest(f"messages has more than {LIMITS.max_messages} messages.", param="messages")
    reader = _Reader(chat_format)
    return [reader.read(message, f"messages.{index}") for index, message in enumerate(value)]


def last_answer(messages: Sequence[dict[str, Any]]) -> str:
    """Return the last checked message's text if it is the assistant's, otherwise no text."""
    last = messages[-1]
    return _read_content(last, "assistant", "messages") if last["role"] == "assistant" else ""


class RoleProbe:
    """Same messages with marks in the place of their contents, to see which a template writes.

    Attributes:
        messages: the marked ones.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        name = f"CONTENT{secrets.token_hex(8)}"
        self._marks = [f"{name}-{index}." for index in range(len(messages))]
        self.messages = [{**message, "content": mark} for message, mark in zip(messages, self._marks, strict=True)]

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> RoleProbe | None:
        """Mark messages of which some have a role that OpenAI doesn't have; None: none has."""
        return cls(messages) if any(message["role"] not in _ROLES for message in messages) else None

    def check(self, text: str) -> None:
        """Check that the template wrote each message of another role, behind its role.

        Args:
            text: the prompt of the marked messages.

        Raises:
            InvalidRequest: it left one out; the message names the role.
        """
        start = 0
        for message, mark in zip(self.messages, self._marks, strict=True):
            end, role = text.find(mark, start), message["role"]
            if role not in _ROLES and (end < 0 or role not in text[start:end]):
                raise InvalidRequest(
                    f"The model's chat template doesn't write messages of the role {role!r}.",
                    param="messages",
                    hint=f"Roles that every template knows are {', '.join(_ROLES)}.",
                )
            start = max(start, end)


class _Reader:
    """Read messages in their order: a tool's result is for a call before it."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format = chat_format
        self._call_id: Callable[[str], str] = (
            (lambda call_id: call_id) if chat_format.tools is None else chat_format.tools.template_call_id
        )
        self._names: dict[str, str] = {}

    def read(self, message: object, param: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise InvalidRequest(f"{param} should be an object with role and content.", param=param)
        role = message.get("role")
        if role == "function" or message.get("function_call"):
            raise UnsupportedParameter(
                f"{param}: function_call and the role function are not supported.",
                param=param,
                hint='Send tool_calls in the assistant\'s message, and its result with "role": "tool".',
            )
        if not isinstance(role, str) or not (role in _ROLES or _is_other_role(role)):
            raise InvalidRequest(
                f"{param}.role should be one of {', '.join(_ROLES)}, or another one that the model's chat template "
                "writes: up to 64 letters, digits, - and _.",
                param=f"{param}.role",
            )
        # OpenAI renamed "system"; templates use the old name.
        checked: dict[str, Any] = {
            "role": "system" if role == "developer" else role,
            "content": _read_content(message, role, f"{param}.content"),
        }
        name = message.get("name")
        if name is not None:
            checked["name"] = _text(name, f"{param}.name", _MAX_NAME_LENGTH)
        if role == "assistant":
            self._add_calls(message, checked, param)
        elif message.get("tool_calls"):
            raise InvalidRequest(
                f"{param}: only the assistant's messages have tool_calls.", param=f"{param}.tool_calls"
            )
        elif role == "tool":
            call_id = _text(message.get("tool_call_id"), f"{param}.tool_call_id", _MAX_ID_LENGTH)
            checked["tool_call_id"] = self._call_id(call_id)
            if call_id in self._names:
                checked.setdefault("name", self._names[call_id])
        return checked

    def _add_calls(self, message: dict[str, Any], checked: dict[str, Any], param: str) -> None:
        """Add the assistant's tool calls and reasoning."""
        for field in _REASONING:
            reasoning = message.get(field)
            if reasoning is not None:
                if not isinstance(reasoning, str):
                    raise InvalidRequest(f"{param}.{field} should be a string.", param=f"{param}.{field}")
                checked.setdefault("reasoning_content", reasoning)
        calls = message.get("tool_calls")
        if not calls:
            return
        where = f"{param}.tool_calls"
        if not isinstance(calls, list) or len(calls) > LIMITS.max_tools:
            raise InvalidRequest(f"{where} should be a list of at most {LIMITS.max_tools} calls.", param=where)
        read = [self._read_call(call, f"{where}.{index}") for index, call in enumerate(calls)]
        is_text = self._format.writes_tools or not self._format.template.takes_tool_calls
        if self._format.tools is not None and is_text:
            checked["content"] += self._format.tools.written([call["function"] for call in read])
        else:
            checked["tool_calls"] = read

    def _read_call(self, call: object, param: str) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
            raise InvalidRequest(
                f'{param} should be {{"id": "…", "type": "function", "function": {{"name": "…", "arguments": "…"}}}}.',
                param=param,
            )
        call_id = _text(call.get("id"), f"{param}.id", _MAX_ID_LENGTH)
        name = _text(function.get("name"), f"{param}.function.name", _MAX_NAME_LENGTH)
        self._names[call_id] = name
        arguments = _read_arguments(function.get("arguments"), f"{param}.function.arguments")
        return {
            "id": self._call_id(call_id),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def _is_other_role(role: str) -> bool:
    """Check whether a role may be one of the model's own, and no known one in other letters."""
    return _OTHER_ROLE.fullmatch(role) is not None and role.lower() not in _ROLES


def _read_arguments(value: object, param: str) -> dict[str, Any] | str:
    """Parse the object that arguments hold, which templates write in their own way.

    What isn't JSON, as a model may have written it, stays a string. So does JSON that no body may
    hold: no template could write a lone surrogate, or a thousand levels.
    """
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} should be a string that holds a JSON object.", param=param)
    try:
        arguments = parse_json(value.encode()) if value.strip() else {}
    except InvalidRequest:
        return value
    return arguments if isinstance(arguments, dict) else value


def _read_content(message: dict[str, Any], role: str, param: str) -> str:
    content = message.get("content")
    if content is None and role in ("assistant", "tool"):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{param} should be a string or a list of parts.", param=param)
    texts = []
    for index, part in enumerate(content):
        where = f"{param}.{index}"
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise UnsupportedParameter(f"{where} is {kind[:40]!r}: this model reads text only.", param=where)
        text = part.get(kind) if isinstance(part, dict) and isinstance(kind, str) else None
        if not isinstance(text, str):
            raise InvalidRequest(f'{where} should be {{"type": "text", "text": "…"}}.', param=where)
        texts.append(text)
    return "\n".join(texts)


def _text(value: object, param: str, max_length: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= max_length:
        raise InvalidRequest(f"{param} should be a string of 1 to {max_length} characters.", param=param)
    return value
