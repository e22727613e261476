"""Calls of models whose chat template reads no tools: they are told of tools in words.

The system's message lists the tools and says how to call one, in Hermes' format; results of calls
come back as the user's messages. llama.cpp and Ollama do the like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from loraserve.text.tool_parsers.hermes import Hermes

_ABOUT_TOOLS = """You can call functions. Each line between <tools> and </tools> describes one as JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as JSON, between <tool_call> and </tool_call>:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
Its result comes back between <tool_response> and </tool_response>. Where no function helps, answer in words."""

_REFUSES_SYSTEM = re.compile(r"raise_exception\([^)]{0,200}system", re.IGNORECASE)


class Generic(Hermes):
    name = "generic"

    def __init__(self, tokenizer: Any, template: str) -> None:
        super().__init__(tokenizer, template)
        # Gemma 1 and 2, Mistral 7B 0.1: a template without the role, or that refuses it
        self._takes_system = "system" in template and _REFUSES_SYSTEM.search(template) is None

    @staticmethod
    def is_of(template: str) -> bool:
        return False

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        texts = (json.dumps(dict(call), ensure_ascii=False) for call in calls)
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)

    def shown(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Write messages in words alone, for any chat template.

        Args:
            messages: checked ones, whose calls are text already.
            tools: those that may be called, as a template would get them; none: nothing is said of
                tools, and results of earlier calls are words all the same.
        """
        found: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] != "tool":
                found.append(dict(message))
                continue
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            # results of one answer's calls are one message: many templates want turns
            if found and found[-1].get("has_results"):
                found[-1]["content"] += f"\n{result}"
            else:
                found.append({"role": "user", "content": result, "has_results": True})
        for message in found:
            message.pop("has_results", None)
        if not tools:
            return found
        about = _ABOUT_TOOLS.format(tools="\n".join(json.dumps(_function(tool), ensure_ascii=False) for tool in tools))
        role = "system" if self._takes_system else "user"
        first = found[0] if found and found[0]["role"] in ("system", role) else None
        if first is None:
            return [{"role": role, "content": about}, *found]
        before_user = role == "user" and first["role"] == "user"
        first["content"] = f"{about}\n\n{first['content']}" if before_user else f"{first['content']}\n\n{about}"
        return found


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool["function"]
    return function
