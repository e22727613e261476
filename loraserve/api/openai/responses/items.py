"""Input items of a response, checked, and the chat's messages that they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loraserve.api.openai.responses.tools import chat_name, custom_arguments
from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.limits import LIMITS

_ROLES = ("assistant", "developer", "system", "user")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_MAX_ID_LENGTH = 256
_MAX_NAME_LENGTH = 64

Item = dict[str, Any]


_SERVER_ITEMS = frozenset(
    {
        "code_interpreter_call",
        "compaction",
        "compaction_summary",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Types of items that other servers' tools have left in a conversation."""


@dataclass(frozen=True, slots=True)
class ReadItems:
    """Items in the one form that is stored and rendered.

    Attributes:
        places: place of each in the request.
        left_out: types of items that were left out, with the field that they came in.
    """

    items: list[Item]
    places: list[str]
    left_out: tuple[str, ...] = ()


def read_items(value: object, param: str = "input", *, is_stored: bool = False) -> ReadItems:
    """Read a text, or items as clients write them.

    Args:
        param: the field that they came in.
        is_stored: whether they are a stored response's, which the request only names.

    Raises:
        InvalidRequest: one is wrong; `param` names it.
        UnsupportedParameter: one has something other than texts and calls of tools.
    """
    if isinstance(value, str):
        return ReadItems([_message("user", value)], [param])
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{param} should be a string or a list of items, not an empty one.", param=param)
    if len(value) > LIMITS.max_messages:
        raise InvalidRequest(f"{param} has more than {LIMITS.max_messages} items.", param=param)
    items, places, left_out = list[Item](), list[str](), dict[str, None]()
    for index, item in enumerate(value):
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind in _SERVER_ITEMS:
            left_out[f"{param}.{kind}"] = None
            continue
        items.append(_read_item(item, f"{param}.{index}"))
        places.append(param if is_stored else f"{param}.{index}")
    if not items and not is_stored:
        raise InvalidRequest(f"{param} has nothing but items of other servers' tools.", param=param)
    return ReadItems(items, places, tuple(left_out))


def _read_item(item: object, where: str) -> Item:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} should be an object with a type, or with role and content.", param=where)
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    match kind:
        case "message":
            read = _read_message(item, where)
        case "function_call" | "custom_tool_call":
            given = "arguments" if kind == "function_call" else "input"
            read = {
                "type": kind,
                "call_id": _text(item, "call_id", where, _MAX_ID_LENGTH),
                "name": _text(item, "name", where, _MAX_NAME_LENGTH),
                given: _text(item, given, where, None, is_empty_fine=True),
            }
            if item.get("namespace") is not None:
                read["namespace"] = _text(item, "namespace", where, _MAX_NAME_LENGTH)
        case "function_call_output" | "custom_tool_call_output":
            read = {
                "type": kind,
                "call_id": _text(item, "call_id", where, _MAX_ID_LENGTH),
                "output": _texts(item.get("output"), f"{where}.output"),
            }
        case "reasoning":
            content, summary = item.get("content"), item.get("summary")
            thoughts = [] if not content else _parts(content, f"{where}.content")
            summaries = [] if not summary else _parts(summary, f"{where}.summary")
            read = {
                "type": kind,
                "summary": [{"type": "summary_text", "text": text} for text in summaries],
                "content": [{"type": "reasoning_text", "text": text} for text in thoughts],
            }
        case _:
            raise UnsupportedParameter(
                f"{where}.type: only message, reasoning, function_call, custom_tool_call and their outputs are "
                "supported; items of tools that OpenAI's servers run are left out.",
                param=f"{where}.type",
            )
    if isinstance(item.get("id"), str) and 0 < len(item["id"]) <= _MAX_ID_LENGTH:
        read["id"] = item["id"]
    return read


def _read_message(item: Mapping[str, Any], where: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role should be one of {', '.join(_ROLES)}.", param=f"{where}.role")
    if isinstance(content, str):
        return _message(role, content)
    return _message(role, *_parts(content, f"{where}.content"))


def _message(role: str, *texts: str) -> Item:
    if role == "assistant":
        content: list[Item] = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    else:
        content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": content}


def _parts(value: object, where: str) -> list[str]:
    """Return the texts of a list of parts."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{where} should be a string or a list of parts.", param=where)
    texts = []
    for index, part in enumerate(value):
        place = f"{where}.{index}"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise InvalidRequest(f'{place} should be {{"type": "input_text", "text": "…"}}.', param=place)
        if kind not in _TEXTS and kind != "refusal":
            raise UnsupportedParameter(f"{place} is {kind[:40]!r}: this model reads text only.", param=place)
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidRequest(f'{place} should be {{"type": "{kind}", "text": "…"}}.', param=place)
        texts.append(text)
    return texts


def _texts(value: object, where: str) -> str:
    return value if isinstance(value, str) else "\n".join(_parts(value, where))


def _text(
    item: Mapping[str, Any], name: str, where: str, max_length: int | None, *, is_empty_fine: bool = False
) -> str:
    value, place = item.get(name), f"{where}.{name}"
    if not isinstance(value, str) or not (value or is_empty_fine) or len(value) > (max_length or len(value)):
        bound = "" if max_length is None else f" of 1 to {max_length} characters"
        raise InvalidRequest(f"{place} should be a string{bound}.", param=place)
    return value


def _has_only_thought(message: Mapping[str, Any]) -> bool:
    return not message["content"] and "tool_calls" not in message


@dataclass(slots=True)
class Conversation:
    """A chat's messages, made of items in their order.

    What the assistant thinks, says and calls one after the other is one message.

    Attributes:
        messages: as a chat's body has them.
        places: for each message, the place of the item that began it.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    _call_ids: set[str] = field(default_factory=set)

    def add_instructions(self, text: str) -> None:
        self._add({"role": "system", "content": text}, "instructions")

    def add(self, read: ReadItems) -> None:
        """Add items that `read_items` returned.

        Raises:
            InvalidRequest: the output of a call that isn't among them; `param` names it.
        """
        for item, place in zip(read.items, read.places, strict=True):
            self._add_item(item, place)

    def _add_item(self, item: Item, place: str) -> None:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                message = self._assistants(place, is_open=_has_only_thought)
                message["content"] = "\n".join(part["text"] for part in item["content"])
            case "message":
                texts = [{"type": "text", "text": part["text"]} for part in item["content"]]
                self._add({"role": item["role"], "content": texts}, place)
            case "reasoning":
                if item["content"]:
                    message = self._assistants(place, is_open=_has_only_thought)
                    thoughts = [part["text"] for part in item["content"]]
                    before = [message["reasoning_content"]] if "reasoning_content" in message else []
                    message["reasoning_content"] = "\n".join([*before, *thoughts])
            case "function_call" | "custom_tool_call":
                message = self._assistants(place, is_open=lambda last: True)
                arguments = item["arguments"] if "arguments" in item else custom_arguments(item["input"])
                function = {"name": chat_name(item["name"], item.get("namespace")), "arguments": arguments}
                calls = message.setdefault("tool_calls", [])
                calls.append({"id": item["call_id"], "type": "function", "function": function})
                self._call_ids.add(item["call_id"])
            case _:
                if item["call_id"] not in self._call_ids:
                    raise InvalidRequest(
                        f"{place}.call_id is that of no call before it.",
                        param=f"{place}.call_id",
                        hint="Send the call too, or the previous_response_id of the response that made it.",
                    )
                self._add({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}, place)

    def _assistants(self, place: str, *, is_open: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the assistant's last message if it goes on, or a new one."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == "assistant" and is_open(last):
            return last
        return self._add({"role": "assistant", "content": ""}, place)

    def _add(self, message: dict[str, Any], place: str) -> dict[str, Any]:
        self.messages.append(message)
        self.places.append(place)
        return message
