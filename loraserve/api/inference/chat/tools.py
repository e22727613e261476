"""Tools of a request: which the model may call, and whether it has to."""

from __future__ import annotations

import json
import re
from typing import Any

from loraserve.errors import InvalidRequest, PayloadTooLarge, UnsupportedParameter
from loraserve.limits import LIMITS
from loraserve.text.chat_format import ChatFormat, ToolUse
from loraserve.text.tool_parsers.format import Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MODES = ("none", "auto", "required")


def read_tools(
    value: object, chat_format: ChatFormat, *, choice: object = None, is_parallel: bool = True
) -> ToolUse | None:
    """Read the tools that the model may call; None if it may call none.

    Args:
        value, choice, is_parallel: fields ``tools``, ``tool_choice``, ``parallel_tool_calls``.

    Raises:
        InvalidRequest: a tool or the choice is wrong; `param` names it.
        UnsupportedParameter: the model can't call tools.
        PayloadTooLarge: the tools are over `limits.max_tools_bytes`.
    """
    shown = _read_shown(value)
    tools = tuple(_read_tool(tool, f"tools.{index}.function") for index, tool in enumerate(shown))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            param = f"tools.{index}.function.name"
            raise InvalidRequest(f"{param}: another tool has this name already.", param=param)
    mode, chosen = _read_choice(choice, names)
    if not tools or mode == "none":
        return None
    _check_format(chat_format)
    if chosen is not None:
        kept = [index for index, name in enumerate(names) if name in chosen]
        tools, shown = tuple(tools[index] for index in kept), [shown[index] for index in kept]
    return ToolUse(
        tools,
        tuple({"type": "function", "function": _shown_function(tool["function"])} for tool in shown),
        is_forced=mode == "required",
        is_parallel=is_parallel,
    )


def _check_format(chat_format: ChatFormat) -> None:
    if not chat_format.template.takes_tools and not chat_format.writes_tools:
        raise UnsupportedParameter(
            "This model's chat template doesn't read tools, so the model wouldn't know of them.",
            param="tools",
            hint="Start the server with --tool-call-parser auto or generic: then messages tell the model of tools.",
        )
    if chat_format.tools is None:
        raise UnsupportedParameter(
            "Nothing is known of how this model writes tool calls.",
            param="tools",
            hint="Start the server with --tool-call-parser, generic where the model has no format of its own.",
        )


def _read_shown(value: object) -> list[dict[str, Any]]:
    """Check the tools as they came, each an object with a function."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > LIMITS.max_tools:
        raise InvalidRequest(f"tools should be a list of at most {LIMITS.max_tools} tools.", param="tools")
    if len(json.dumps(value, ensure_ascii=False).encode()) > LIMITS.max_tools_bytes:
        raise PayloadTooLarge(f"tools are longer than {LIMITS.max_tools_bytes} bytes of JSON.", param="tools")
    for index, tool in enumerate(value):
        param = f"tools.{index}"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind is not None and kind != "function":
            raise UnsupportedParameter(f"{param}.type: only functions are supported.", param=f"{param}.type")
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            raise InvalidRequest(
                f'{param} should be {{"type": "function", "function": {{"name": "…", "parameters": {{…}}}}}}.',
                param=param,
            )
    return value


def _read_tool(tool: dict[str, Any], param: str) -> Tool:
    function = tool["function"]
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{param}.name should be 1 to 64 letters, digits, underscores, dots or dashes.", param=f"{param}.name"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{param}.description should be a string.", param=f"{param}.description")
    parameters = function.get("parameters")
    if parameters is not None and not (isinstance(parameters, dict) and parameters.get("type", "object") == "object"):
        raise InvalidRequest(
            f'{param}.parameters should be the JSON schema of an object: {{"type": "object", "properties": {{…}}}}.',
            param=f"{param}.parameters",
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{param}.strict should be true or false.", param=f"{param}.strict")
    return Tool(name, parameters, is_strict=bool(strict), param=f"{param}.parameters")


def _shown_function(function: dict[str, Any]) -> dict[str, Any]:
    """Select what the template gets of a function, in the caller's order."""
    shown = {key: value for key, value in function.items() if key != "strict" and value is not None}
    shown.setdefault("parameters", {"type": "object", "properties": {}})
    return shown


def _read_choice(choice: object, names: list[str]) -> tuple[str, set[str] | None]:
    """Read a mode, and the names of the tools that may be called if not all may."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in _MODES:
            raise InvalidRequest(
                f"tool_choice should be one of {', '.join(_MODES)}, or an object that names a function.",
                param="tool_choice",
            )
        if choice == "required" and not names:
            raise InvalidRequest("tool_choice: required needs tools.", param="tool_choice")
        return choice, None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "function":
        return "required", {_chosen_name(choice, names, "tool_choice")}
    if isinstance(choice, dict) and kind == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"), names)
    raise InvalidRequest(
        'tool_choice should be {"type": "function", "function": {"name": "…"}} or {"type": "allowed_tools", …}.',
        param="tool_choice",
    )


def _read_allowed(allowed: object, names: list[str]) -> tuple[str, set[str]]:
    param = "tool_choice.allowed_tools"
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequest(
            f'{param} should be {{"mode": "auto" or "required", "tools": [{{"type": "function", …}}]}}.', param=param
        )
    return mode, {_chosen_name(tool, names, f"{param}.tools.{index}") for index, tool in enumerate(tools)}


def _chosen_name(choice: object, names: list[str], param: str) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            f'{param} should be {{"type": "function", "function": {{"name": "…"}}}}.', param=f"{param}.function.name"
        )
    if name not in names:
        raise InvalidRequest(
            f"{param}.function.name is none of the request's tools.",
            param=f"{param}.function.name",
            hint=f"Tools: {', '.join(names[:20])}." if names else "Send tools.",
        )
    return name
