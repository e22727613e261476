"""Bodies of Anthropic's routes, and the chat that they describe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from loraserve.api.anthropic.blocks import Dialogue
from loraserve.api.inference.fields import fields_of
from loraserve.api.inference.schemas import ChatBody, SamplingBody
from loraserve.errors import InvalidRequest, UnsupportedParameter

_TEXT_OR_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _TEXT_OR_BLOCKS},
        "required": ["role", "content"],
    },
}
_TOOL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": {"type": "string"},
        "input_schema": {"type": "object"},
    },
    "required": ["name", "input_schema"],
}
_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_OBJECTS = {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
_TEXTS = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}

_NO_LOGPROBS = "Ask /v1/chat/completions for it."
_MAX_USER_LENGTH = 256

FIELDS: Mapping[str, str] = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
}
"""A chat's fields that a message calls otherwise."""


class MessageTokensBody(SamplingBody):
    """Fields of a message that its prompt is made of, and those that change nothing in it."""

    refused: ClassVar[Mapping[str, str]] = {
        "stop": "Send stop_sequences.",
        "user": "Send metadata.user_id.",
        "max_completion_tokens": "Send max_tokens.",
        "response_format": "Send output_config.format.",
        "reasoning_effort": "Send output_config.effort, or thinking.",
        "n": "Send a request for each answer.",
        "container": "",
        "thread": "Send the whole conversation in messages.",
        **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids"), _NO_LOGPROBS),
        **dict.fromkeys(("regex", "ebnf", "grammar", "json_schema", "structural_tag"), "Send structured_outputs."),
    }

    # checked by `blocks` and below, which have clearer messages than unions
    messages: Annotated[Any, WithJsonSchema(_MESSAGES)]
    system: Annotated[Any, WithJsonSchema({"anyOf": [*_TEXT_OR_BLOCKS["anyOf"], {"type": "null"}]})] = None
    tools: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _TOOL}, {"type": "null"}]})] = None
    tool_choice: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    thinking: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    output_config: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    metadata: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    stop_sequences: Annotated[Any, WithJsonSchema(_TEXTS)] = None
    # what Anthropic's servers do with a conversation, and servers of tools that they call: left out
    context_management: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    mcp_servers: Annotated[Any, WithJsonSchema(_OBJECTS)] = None
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=32)


class MessageBody(MessageTokensBody):
    max_tokens: int = Field(ge=1, lt=1 << 31)


class ChatRequest:
    """Chat that a body requests.

    Attributes:
        body: the chat's body.
        ignored: fields that change nothing, whatever answers.

    Raises:
        InvalidRequest: a field is wrong; `param` names the place.
        UnsupportedParameter: a field requires what isn't implemented.
    """

    def __init__(self, body: MessageTokensBody) -> None:
        dialogue = Dialogue()
        dialogue.add_system(body.system)
        dialogue.add_messages(body.messages)
        ignored = [name for name in ("context_management", "mcp_servers") if getattr(body, name)]
        ignored += dialogue.left_out
        tools, left_out, has_cache_control = _chat_tools(body.tools)
        ignored += dict.fromkeys(left_out.values())
        self._tool_numbers = [
            number for number in range(len(body.tools) if isinstance(body.tools, list) else 0) if number not in left_out
        ]
        if has_cache_control or dialogue.has_cache_control:
            ignored.append("cache_control")
        choice, is_parallel = _chat_choice(body.tool_choice)
        output = fields_of(body.output_config, "output_config", ("effort", "format"))
        self._places = dialogue.places
        self.ignored = tuple(dict.fromkeys(ignored))
        fields: dict[str, Any] = {
            name: getattr(body, name) for name in SamplingBody.model_fields if name in body.model_fields_set
        }
        fields |= {
            "messages": dialogue.messages,
            "max_completion_tokens": body.max_tokens if isinstance(body, MessageBody) else None,
            "user": _user(body.metadata),
            "stop": body.stop_sequences,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": is_parallel,
            "response_format": _chat_format(output.get("format")),
            "reasoning_effort": _effort(output.get("effort")),
            "thinking": body.thinking,
            "chat_template_kwargs": body.chat_template_kwargs,
            "continue_final_message": dialogue.continues_last,
            "add_generation_prompt": not dialogue.continues_last,
        }
        self.body = ChatBody(**fields)

    def place(self, param: str) -> str:
        """Convert a place in the chat's body to the place in the request's."""
        head, _, rest = param.partition(".")
        match head:
            case "messages":
                number = rest.partition(".")[0]
                is_known = number.isdigit() and int(number) < len(self._places)
                return self._places[int(number)] if is_known else param
            case "tools":
                param = _TOOL_NUMBER.sub(lambda found: f"tools.{self._tool_numbers[int(found[1])]}", param, count=1)
                schema = _SCHEMA_PLACE.sub(r"\1.input_schema", param, count=1)
                return _TOOL_PLACE.sub(r"\1", schema, count=1)
            case "tool_choice":
                return param.replace("tool_choice.function", "tool_choice", 1)
            case "response_format":
                inner = rest.removeprefix("json_schema").lstrip(".")
                return f"output_config.format.{inner}" if inner else "output_config.format"
            case _:
                return ".".join([FIELDS.get(head, head), *([rest] if rest else [])])


_TOOL_NUMBER = re.compile(r"tools\.(\d+)")
_SCHEMA_PLACE = re.compile(r"(tools\.\d+)\.function\.parameters\b")
_TOOL_PLACE = re.compile(r"(tools\.\d+)\.function\b")


def _chat_tools(tools: object) -> tuple[Any, dict[int, str], bool]:
    """Convert the tools to a chat's; list those left out, and find whether one sets what to cache.

    Tools that Anthropic's servers run, or that its models were trained on, have a type with a date:
    ``web_search_20250305``.
    """
    if not isinstance(tools, list):
        return tools, {}, False
    found, left_out, has_cache_control = [], dict[int, str](), False
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if not isinstance(tool, dict):
            raise InvalidRequest(
                f'{where} should be {{"name": "…", "description": "…", "input_schema": {{…}}}}.', param=where
            )
        kind = tool.get("type")
        if isinstance(kind, str) and _DATED.fullmatch(kind):
            left_out[index] = f"tools.{kind}"
            continue
        if kind not in (None, "custom"):
            raise UnsupportedParameter(
                f"{where}.type: only the caller's own tools are supported; this server runs none.",
                param=f"{where}.type",
            )
        has_cache_control |= tool.get("cache_control") is not None
        given = {name: value for name, value in tool.items() if name not in _SILENT and value not in (None, False)}
        own = fields_of(given, where, ("type", "name", "description", "input_schema", "strict"))
        if "input_schema" not in own:
            raise InvalidRequest(f"{where}.input_schema is missing.", param=f"{where}.input_schema")
        function: dict[str, Any] = {name: own[name] for name in ("name", "description", "strict") if name in own}
        function["parameters"] = own["input_schema"]
        found.append({"type": "function", "function": function})
    return found, left_out, has_cache_control


_DATED = re.compile(r"[a-z_]{1,40}_20\d{6}")
_SILENT = frozenset({"cache_control", "eager_input_streaming"})
"""A tool's fields that change nothing: arguments come as they are made in any case."""

_MODES = {"auto": "auto", "any": "required", "none": "none"}


def _chat_choice(choice: object) -> tuple[Any, bool]:
    """Convert the choice to a chat's, and find whether an answer may have several calls."""
    fields = fields_of(choice, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    is_alone = fields.get("disable_parallel_tool_use", False)
    if not isinstance(is_alone, bool):
        param = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequest(f"{param} should be true or false.", param=param)
    kind = fields.get("type") if fields else "auto"
    if kind == "tool":
        if not isinstance(fields.get("name"), str):
            raise InvalidRequest("tool_choice.name should be a tool's name.", param="tool_choice.name")
        return {"type": "function", "function": {"name": fields["name"]}}, not is_alone
    if not isinstance(kind, str) or kind not in _MODES:
        raise InvalidRequest("tool_choice.type should be auto, any, tool or none.", param="tool_choice.type")
    return _MODES[kind], not is_alone


def _chat_format(wanted: object) -> dict[str, Any] | None:
    where = "output_config.format"
    fields = fields_of(wanted, where, ("type", "schema"))
    if not fields:
        return None
    if fields.get("type") != "json_schema":
        raise InvalidRequest(f"{where}.type should be json_schema.", param=f"{where}.type")
    inner = {"schema": fields["schema"]} if "schema" in fields else {}
    return {"type": "json_schema", "json_schema": inner}


def _effort(effort: object) -> str | None:
    if effort is not None and not (isinstance(effort, str) and 0 < len(effort) <= 32):
        param = "output_config.effort"
        raise InvalidRequest(f"{param} should be a string of 1 to 32 characters.", param=param)
    return effort


def _user(metadata: object) -> str | None:
    """Read the end user, which stays on one version during a split."""
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise InvalidRequest("metadata should be an object.", param="metadata")
    user = metadata.get("user_id")
    if user is not None and not (isinstance(user, str) and len(user) <= _MAX_USER_LENGTH):
        raise InvalidRequest(
            f"metadata.user_id should be a string of at most {_MAX_USER_LENGTH} characters.", param="metadata.user_id"
        )
    return user
