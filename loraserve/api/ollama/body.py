"""Bodies of Ollama's routes that generate, and the chat that each is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from loraserve.api.inference.fields import parse_body
from loraserve.api.inference.schemas import MAX_MODEL_LENGTH, ChatBody, WeightedAdapter
from loraserve.api.ollama.conversation import chat_messages, refuse_images
from loraserve.api.ollama.options import CHAT_NAMES, KEEP_ALIVE, OPTIONS, OllamaOptions, read_options, unloads
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS

_NULL = {"type": "null"}
_FORMAT = {"anyOf": [{"enum": ["", "json"]}, {"type": "object", "description": "A JSON schema."}, _NULL]}
_THINK = {"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 1, "maxLength": 32}, _NULL]}
_OBJECTS = {"anyOf": [{"type": "array", "items": {"type": "object"}}, _NULL]}
_CHOICE = {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}, _NULL]}
_CALL = {
    "type": "object",
    "properties": {"function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
    "required": ["function"],
}
_MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "content": {"anyOf": [{"type": "string"}, _NULL]},
            "thinking": {"anyOf": [{"type": "string"}, _NULL]},
            "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, _NULL]},
            "tool_name": {"anyOf": [{"type": "string"}, _NULL]},
            "tool_call_id": {"anyOf": [{"type": "string"}, _NULL]},
        },
        "required": ["role"],
    },
    "description": "None: the model is loaded.",
}

FIELDS: Mapping[str, str] = {
    **{chat: f"{OPTIONS}.{name}" for name, chat in CHAT_NAMES.items()},
    "response_format": "format",
    "max_completion_tokens": f"{OPTIONS}.num_predict",
}
"""A chat's fields that Ollama's requests call otherwise."""
_TEXT_FIELDS: Mapping[str, str] = {**FIELDS, "messages": "prompt"}
_MESSAGE_FIELDS = {"reasoning_content": "thinking", "name": "tool_name"}
_SCHEMA = "response_format.json_schema.schema"
_OWN_TEMPLATE = "Push the version with a chat_template.jinja of its own."
_REFUSED: Mapping[str, str] = {
    **{name: f"Send {OPTIONS}.{name}." for name in CHAT_NAMES},
    "max_tokens": f"Send {OPTIONS}.num_predict.",
    "response_format": "Send format.",
    "template": _OWN_TEMPLATE,
    "_debug_render_only": "",
}


def _drop_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class OllamaBody(BaseModel):
    """Fields that chats and generated texts have in common."""

    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)

    refused: ClassVar[Mapping[str, str]] = _REFUSED

    model: str = Field(min_length=1, max_length=MAX_MODEL_LENGTH)
    stream: bool = True
    options: OllamaOptions = OllamaOptions()
    format: Annotated[Any, WithJsonSchema(_FORMAT)] = None
    think: Annotated[Any, WithJsonSchema(_THINK)] = None
    keep_alive: Annotated[Any, WithJsonSchema(KEEP_ALIVE)] = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=LIMITS.max_chat_top_logprobs)
    # what Ollama does with a prompt that is longer than its context: here it is refused
    truncate: bool = False
    shift: bool = False
    # a chat's fields of this server
    adapters: list[Annotated[WeightedAdapter, BeforeValidator(_drop_nulls)]] | None = Field(
        default=None, max_length=LIMITS.max_composition_terms
    )
    user: str | None = None
    priority: int = Field(default=0, ge=-1000, le=1000)
    timeout: float | None = Field(default=None, gt=0, le=LIMITS.max_request_timeout_s)


class OllamaChatBody(OllamaBody):
    messages: Annotated[Any, WithJsonSchema(_MESSAGES)] = None
    tools: Annotated[Any, WithJsonSchema(_OBJECTS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None


class OllamaGenerateBody(OllamaBody):
    refused: ClassVar[Mapping[str, str]] = {
        **_REFUSED,
        "suffix": "Send a prompt that ends where the text is wanted.",
        "context": "Send the conversation's messages to /api/chat.",
    }

    prompt: str = ""
    """None: the model is loaded."""
    system: str = ""
    raw: bool = False
    """Whether the prompt is taken as it is, without a template."""
    images: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "maxItems": 0}, _NULL]})] = None


class _DefaultedChat(ChatBody):
    """Chat whose fields have Ollama's defaults, where the version and the base have none."""

    temperature: float = Field(default=0.8, ge=0, le=100)
    top_p: float = Field(default=0.9, ge=0, le=1)
    top_k: int = Field(default=40, ge=-1, lt=1 << 31)


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """Chat that a request describes.

    Attributes:
        body: the chat's body.
        text: the prompt as it is; None: the body's messages are.
        ignored: fields that change nothing, whatever answers.
        fields: the chat's fields that the request calls otherwise.
        has_prompt: whether there is something to answer; otherwise the model is loaded.
        is_unload: whether the model should leave memory after a request without a prompt.
    """

    body: ChatBody
    text: str | None
    ignored: tuple[str, ...]
    fields: Mapping[str, str]
    has_prompt: bool
    is_unload: bool

    @classmethod
    def read_chat(cls, raw: Mapping[str, Any]) -> OllamaRequest:
        """Read a body of /api/chat.

        Raises:
            InvalidRequest: a field is wrong; `param` names the place.
            UnsupportedParameter: a field requires what isn't implemented.
        """
        options, of_options = read_options(raw.get(OPTIONS))
        body, ignored = parse_body(OllamaChatBody, {**raw, OPTIONS: options})
        messages = chat_messages([] if body.messages is None else body.messages)
        continued = _continues_last(messages)
        return cls._of(
            body,
            (*ignored, *of_options),
            messages=messages,
            fields=FIELDS,
            more={
                "tools": body.tools,
                "tool_choice": body.tool_choice,
                "think": body.think,
                "continue_final_message": continued,
                "add_generation_prompt": not continued,
            },
        )

    @classmethod
    def read_generate(cls, raw: Mapping[str, Any]) -> OllamaRequest:
        """Read a body of /api/generate.

        Raises:
            InvalidRequest, UnsupportedParameter: as `read_chat`.
        """
        options, of_options = read_options(raw.get(OPTIONS))
        body, ignored = parse_body(OllamaGenerateBody, {**raw, OPTIONS: options})
        ignored = (*ignored, *of_options)
        refuse_images(body.images, "images")
        messages: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
        messages += [{"role": "user", "content": body.prompt}] if body.prompt else []
        if not body.raw:
            kept = messages if body.prompt else []
            return cls._of(body, ignored, messages=kept, fields=_TEXT_FIELDS, more={"think": body.think})
        if body.system:
            raise InvalidRequest(
                "raw takes the prompt as it is; system would need the chat template.",
                param="system",
                hint="Write it into the prompt, or send the request without raw.",
            )
        if body.think is not None:
            ignored = (*ignored, "think")
        return cls._of(body, ignored, messages=messages, text=body.prompt, fields=_TEXT_FIELDS, more={})

    @classmethod
    def _of(
        cls,
        body: OllamaBody,
        ignored: tuple[str, ...],
        *,
        messages: object,
        fields: Mapping[str, str],
        more: Mapping[str, Any],
        text: str | None = None,
    ) -> OllamaRequest:
        """Make the chat of what both routes have."""
        is_unload = False
        if body.keep_alive is not None:
            ignored = (*ignored, "keep_alive")
            is_unload = unloads(body.keep_alive)
        ignored += tuple(name for name in ("truncate", "shift") if getattr(body, name))
        chat = _DefaultedChat(
            model=body.model,
            messages=messages,
            stream=body.stream,
            response_format=_response_format(body.format),
            logprobs=body.logprobs,
            top_logprobs=body.top_logprobs,
            adapters=body.adapters,
            user=body.user,
            priority=body.priority,
            timeout=body.timeout,
            **body.options.chat_fields(),
            **more,
        )
        return cls(chat, text, ignored, fields, has_prompt=messages != [], is_unload=is_unload)

    def place(self, param: str) -> str:
        """Convert a place in the chat's body to the place in the request's."""
        head, _, rest = param.partition(".")
        match head:
            case "messages" if self.fields is _TEXT_FIELDS:
                has_system = len(self.body.messages) > 1
                return "system" if has_system and rest.startswith("0") else "prompt"
            case "messages":
                number, _, name = rest.partition(".")
                return f"{head}.{number}.{_MESSAGE_FIELDS[name]}" if name in _MESSAGE_FIELDS else param
            case "response_format":
                inner = param.removeprefix(_SCHEMA) if param.startswith(_SCHEMA) else ""
                return f"format{inner}"
            case _:
                return ".".join([self.fields.get(head, head), *([rest] if rest else [])])


def _continues_last(messages: object) -> bool:
    """Check whether the answer continues the assistant's last message, as Ollama's templates do."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant" and not last.get("tool_calls")


def _response_format(wanted: object) -> dict[str, Any] | None:
    """Convert `format` to a chat's field: ``json``, or a schema."""
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return {"type": "json_object"}
    if not isinstance(wanted, dict):
        raise InvalidRequest('format should be "json" or a JSON schema.', param="format")
    return {"type": "json_schema", "json_schema": {"schema": wanted}}
