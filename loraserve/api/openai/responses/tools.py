"""Tools of a response: functions, tools of free text, and those that only OpenAI's servers run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraserve.api.inference.fields import fields_of
from loraserve.errors import InvalidRequest, UnsupportedParameter

CUSTOM_INPUT = "input"
"""Parameter of the function that stands for a tool of free text."""
_SERVER_TOOLS = frozenset(
    {
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "tool_search",
        "web_search",
        "web_search_preview",
        "apply_patch",
    }
)
"""Types of tools that a server runs, or that need a model trained on them."""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """Tool as its response names it.

    Attributes:
        namespace: of a function that came in one; None otherwise.
        is_custom: whether it takes free text.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class ResponseTools:
    """Tools of a response, and the functions of a chat that stand for them.

    Attributes:
        functions: a chat's `tools`; what isn't a list stays as it came.
        ignored: tools that were left out, and parts of tools that nothing follows.
        places: for each function, the place of its tool in the response's body.
    """

    functions: Any = None
    ignored: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    _tools: dict[str, CalledTool] = field(default_factory=dict)

    @classmethod
    def read(cls, tools: object) -> ResponseTools:
        """Read a body's `tools`.

        Raises:
            InvalidRequest: one is wrong; `param` names the place.
            UnsupportedParameter: one is of an unknown type.
        """
        found = cls(functions=tools)
        if isinstance(tools, list):
            found.functions = []
            for index, tool in enumerate(tools):
                found._add(tool, f"tools.{index}", None)
        return found

    def called(self, function: str) -> CalledTool:
        """Return the tool that a function of the chat stands for."""
        return self._tools.get(function) or CalledTool(function)

    def _add(self, tool: object, where: str, namespace: str | None) -> None:
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise InvalidRequest(
                f'{where} should be {{"type": "function", "name": "…", "parameters": {{…}}}}.', param=where
            )
        given = {name: value for name, value in tool.items() if value not in (None, False) or name == "strict"}
        # every tool is shown, also one that could be found by a search
        if given.pop("defer_loading", None):
            self.ignored.append("tools.defer_loading")
        match tool["type"]:
            case "function":
                function = fields_of(given, where, ("type", "name", "description", "parameters", "strict"))
                del function["type"]
                self._add_function(function, where, CalledTool(str(function.get("name")), namespace))
            case "custom":
                own = fields_of(given, where, ("type", "name", "description", "format"))
                self._add_custom(own, where, namespace)
            case "namespace" if namespace is None:
                own = fields_of(given, where, ("type", "name", "description", "tools"))
                inner = own.get("tools")
                if not isinstance(inner, list) or not isinstance(own.get("name"), str):
                    raise InvalidRequest(f"{where} should have a name and a list of tools.", param=where)
                for index, one in enumerate(inner):
                    self._add(one, f"{where}.tools.{index}", own["name"])
            case kind if kind in _SERVER_TOOLS:
                self.ignored.append(f"tools.{kind}")
            case _:
                raise UnsupportedParameter(
                    f"{where}.type: functions, custom tools and namespaces of these are supported, and tools that "
                    "OpenAI's servers run are left out.",
                    param=f"{where}.type",
                )

    def _add_function(self, function: dict[str, Any], where: str, tool: CalledTool) -> None:
        if tool.namespace is not None:
            function["name"] = chat_name(tool.name, tool.namespace)
        self._tools[str(function.get("name"))] = tool
        self.functions.append({"type": "function", "function": function})
        self.places.append(where)

    def _add_custom(self, own: Mapping[str, Any], where: str, namespace: str | None) -> None:
        about = own.get("description", "")
        form = fields_of(own.get("format"), f"{where}.format", ("type", "syntax", "definition"))
        if form.get("type") == "grammar":
            # told to the model, not enforced: JSON holds the text
            about = f"{about}\n\nIts input follows this {form.get('syntax')} grammar:\n{form.get('definition')}".strip()
            self.ignored.append("tools.format")
        text = {"type": "string", "description": "The whole input, as plain text."}
        function = {
            **({"name": own["name"]} if "name" in own else {}),
            "description": about,
            "parameters": {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]},
        }
        self._add_function(function, where, CalledTool(str(own.get("name")), namespace, is_custom=True))


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that stands for a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def custom_arguments(text: str) -> str:
    """Return the arguments of a call of free text, as a function has them."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def custom_text(arguments: str) -> str:
    """Return the text of a call of free text; arguments that are no such object as they are."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
