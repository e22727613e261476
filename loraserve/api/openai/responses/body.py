"""Body of POST /v1/responses, and the chat that it asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from loraserve.api.inference.fields import fields_of
from loraserve.api.inference.schemas import ChatBody, SamplingBody
from loraserve.api.openai.responses.tools import ResponseTools
from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.limits import LIMITS

_TEXT = {"type": "string", "minLength": 1}
_ITEM = {
    "type": "object",
    "properties": {"type": {"type": "string"}, "role": {"type": "string"}, "content": {}},
}
_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function"]},
        "name": _TEXT,
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["type", "name"],
}
_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}

_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_LOGPROBS = "message.output_text.logprobs"
_HARMLESS = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Values of `include` that are taken though no answer has them."""
_NO_TOKENS = "Ask /v1/chat/completions for it."

FIELDS: Mapping[str, str] = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
"""A chat's fields that a response calls otherwise."""


class ResponseBody(SamplingBody):
    refused: ClassVar[Mapping[str, str]] = {
        "background": "Send the request without it, and keep the connection.",
        "conversation": "Send previous_response_id.",
        "prompt": "Send the prompt's text as instructions and input.",
        "max_tool_calls": "",
        "context_management": "",
        "moderation": "",
        "messages": "Send input.",
        "n": "Send a request for each answer.",
        "max_tokens": "Send max_output_tokens.",
        "max_completion_tokens": "Send max_output_tokens.",
        "response_format": "Send text.format.",
        "reasoning_effort": "Send reasoning.effort.",
        "logprobs": f'Send include: ["{_LOGPROBS}"].',
        "prompt_logprobs": _NO_TOKENS,
        "return_token_ids": _NO_TOKENS,
        **dict.fromkeys(("regex", "ebnf", "grammar", "json_schema", "structural_tag"), "Send structured_outputs."),
    }

    # checked by `items`, which has clearer messages than a union
    input: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM}]})]
    instructions: str | None = None
    """The system's message. Those of the previous response don't hold any more."""
    max_output_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    tools: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _FUNCTION}, {"type": "null"}]})] = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, *_OBJECT["anyOf"]]})] = None
    parallel_tool_calls: bool = True
    text: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    reasoning: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    metadata: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    store: bool = True
    """Whether it can be continued, and read again, for a time."""
    previous_response_id: str | None = Field(default=None, min_length=1, max_length=64)
    truncation: str = "disabled"
    include: list[str] = Field(default=[], max_length=16)
    top_logprobs: int = Field(default=0, ge=0, le=LIMITS.max_chat_top_logprobs)
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=32)

    @property
    def has_logprobs(self) -> bool:
        return _LOGPROBS in self.include


def check_body(body: ResponseBody) -> tuple[str, ...]:
    """Check the fields that have no counterpart in a chat; return those that are ignored.

    Raises:
        InvalidRequest: one is wrong; `param` names it.
        UnsupportedParameter: one asks for what isn't implemented.
    """
    ignored = []
    for index, name in enumerate(body.include):
        if name in _HARMLESS:
            ignored.append(f"include.{name}")
        elif name != _LOGPROBS:
            raise UnsupportedParameter(f"include.{index}: only {_LOGPROBS} can be included.", param=f"include.{index}")
    if body.top_logprobs and not body.has_logprobs:
        raise InvalidRequest(f'top_logprobs needs include: ["{_LOGPROBS}"].', param="top_logprobs")
    if body.truncation != "disabled":
        raise UnsupportedParameter(
            "truncation should be disabled: leaving out items of a conversation isn't supported.",
            param="truncation",
            hint="Send fewer items, or truncate_prompt_tokens.",
        )
    _check_metadata(body.metadata)
    reasoning = fields_of(body.reasoning, "reasoning", ("effort", "summary", "generate_summary"))
    effort = reasoning.pop("effort", None)
    if effort is not None and not (isinstance(effort, str) and 0 < len(effort) <= 32):
        raise InvalidRequest("reasoning.effort should be a string of 1 to 32 characters.", param="reasoning.effort")
    verbosity = fields_of(body.text, "text", ("format", "verbosity")).get("verbosity")
    if verbosity not in (None, "low", "medium", "high"):
        raise InvalidRequest("text.verbosity should be low, medium or high.", param="text.verbosity")
    # reasoning comes whole, not as a summary
    return (*ignored, *(f"reasoning.{name}" for name in reasoning))


def chat_body(body: ResponseBody, messages: Sequence[Mapping[str, Any]], tools: ResponseTools) -> ChatBody:
    """Return the chat that the response is the answer of.

    Raises:
        InvalidRequest: `text` or `tool_choice` is wrong; `param` names the place.
        UnsupportedParameter: the choice is a tool that isn't the caller's.
    """
    shared = {name: getattr(body, name) for name in SamplingBody.model_fields if name in body.model_fields_set}
    return ChatBody(
        **shared,
        messages=list(messages),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs,
        tools=tools.functions,
        tool_choice=_chat_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_chat_format(body.text),
        reasoning_effort=(body.reasoning or {}).get("effort"),
        verbosity=(body.text or {}).get("verbosity"),
        chat_template_kwargs=body.chat_template_kwargs,
    )


_TOOL_PLACE = re.compile(r"tools\.(\d+)(?:\.function)?\b")
_CHOICE_PLACE = re.compile(r"tool_choice(?:\.allowed_tools)?((?:\.tools\.\d+)?)(?:\.function)?((?:\.name)?)")


def place_in_response(param: str, places: Sequence[str], tools: ResponseTools) -> str:
    """Return the place in a response's body for a place in its chat's.

    Args:
        places: place of each message.
    """
    head, _, rest = param.partition(".")
    match head:
        case "messages":
            number = rest.partition(".")[0]
            return places[int(number)] if number.isdigit() and int(number) < len(places) else "input"
        case "tools":
            return _TOOL_PLACE.sub(lambda found: tools.places[int(found[1])], param, count=1)
        case "tool_choice":
            return _CHOICE_PLACE.sub(r"tool_choice\1\2", param, count=1)
        case "response_format":
            inner = rest.removeprefix("json_schema").lstrip(".")
            return f"text.format.{inner}" if inner else "text.format"
        case _:
            return FIELDS.get(head, param)


def _check_metadata(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or len(value) > _MAX_METADATA:
        raise InvalidRequest(f"metadata should be an object of at most {_MAX_METADATA} texts.", param="metadata")
    for key, text in value.items():
        if not isinstance(text, str) or len(key) > _MAX_KEY or len(text) > _MAX_VALUE:
            raise InvalidRequest(
                f"metadata should have keys of at most {_MAX_KEY} characters and texts of at most {_MAX_VALUE}.",
                param="metadata",
            )


def _chat_format(text: object) -> dict[str, Any] | None:
    fields = fields_of(text, "text", ("format", "verbosity"))
    wanted = fields.get("format")
    if wanted is None:
        return None
    where = "text.format"
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    match kind:
        case "text" | "json_object":
            return {"type": kind}
        case "json_schema":
            inner = fields_of(wanted, where, ("type", "name", "schema", "strict", "description"))
            return {"type": kind, "json_schema": inner}
        case _:
            raise InvalidRequest(f"{where}.type should be text, json_object or json_schema.", param=f"{where}.type")


def _chat_choice(choice: object) -> Any:
    if not isinstance(choice, dict):
        return choice
    match choice.get("type"):
        case "function" | "custom":
            if not isinstance(choice.get("name"), str):
                raise InvalidRequest(
                    'tool_choice.name is missing: tool_choice should be {"type": "function", "name": "…"}.',
                    param="tool_choice.name",
                )
            return {"type": "function", "function": {"name": choice["name"]}}
        case "allowed_tools":
            tools = choice.get("tools")
            if isinstance(tools, list):
                tools = [
                    {"type": "function", "function": {"name": tool.get("name")}} if isinstance(tool, dict) else tool
                    for tool in tools
                ]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
        case _:
            raise UnsupportedParameter(
                "tool_choice.type should be function or allowed_tools; this server runs no tools of its own.",
                param="tool_choice.type",
            )
