"""Prompts and messages, checked and turned into tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from loraserve.api.openai.sampling import check_token_ids, choose_max_tokens
from loraserve.api.services import Services
from loraserve.errors import InvalidRequest, PayloadTooLarge, UnsupportedParameter
from loraserve.limits import LIMITS

_OFF_LOOP_BYTES = 4096
"""About half a millisecond of tokenizing: longer prompts are a thread's work."""

_ROLES = frozenset({"system", "developer", "user", "assistant"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str | None
    """None when the caller gave tokens."""


async def read_prompts(value: object, services: Services, *, add_special_tokens: bool) -> list[Prompt]:
    """The prompts of ``str | [str] | [int] | [[int]]``, in order.

    Raises:
        InvalidRequest: it is none of these, or empty, or has ids that the model doesn't have.
        PayloadTooLarge: the text is over `limits.max_prompt_bytes`.
    """
    vocab_size = services.engine.base.vocab_size
    if isinstance(value, str):
        return [await _from_text(value, services, add_special_tokens, "prompt")]
    if isinstance(value, list) and value:
        _check_length(value, services)
        if all(_is_token_id(item) for item in value):
            return [_from_token_ids(value, vocab_size, "prompt")]
        if all(isinstance(item, str) for item in value):
            _check_bytes(sum(len(item.encode()) for item in value), "prompt")
            return [
                await _from_text(item, services, add_special_tokens, f"prompt.{index}")
                for index, item in enumerate(value)
            ]
        if all(isinstance(item, list) and item and all(_is_token_id(id_) for id_ in item) for item in value):
            return [_from_token_ids(item, vocab_size, f"prompt.{index}") for index, item in enumerate(value)]
    raise InvalidRequest(
        "prompt should be a string, a list of strings, a list of token ids or a list of lists of token ids, none of them empty.",
        param="prompt",
    )


async def read_chat(
    messages: object,
    services: Services,
    *,
    add_generation_prompt: bool,
    add_special_tokens: bool,
    variables: Mapping[str, Any],
) -> Prompt:
    """The prompt that the model's chat template makes of `messages`.

    Raises:
        InvalidRequest: a message is wrong, or the template refuses them.
        UnsupportedParameter: a message has something other than text.
    """
    checked = _read_messages(messages)
    num_bytes = sum(len(message["content"].encode()) for message in checked)
    _check_bytes(num_bytes, "messages")

    def render_and_encode() -> Prompt:
        text = services.chat_template.render(checked, add_generation_prompt, variables=variables)
        _check_bytes(len(text.encode()), "messages")
        return Prompt(tuple(services.tokenizer.encode(text, add_special_tokens)), text)

    prompt = await _run(render_and_encode, num_bytes)
    if not prompt.token_ids:
        raise InvalidRequest("messages make an empty prompt.", param="messages")
    # As in `_from_text`: a token that the logits lack would fail in the engine.
    if max(prompt.token_ids) >= services.engine.base.vocab_size:
        raise InvalidRequest("messages have a token that the tokenizer knows and this model lacks.", param="messages")
    return prompt


async def encode_text(text: str, services: Services, *, add_special_tokens: bool, param: str) -> list[int]:
    """The tokens of `text`, made off the event loop when it is long.

    Raises:
        PayloadTooLarge: it is over `limits.max_prompt_bytes`.
    """
    num_bytes = len(text.encode())
    _check_bytes(num_bytes, param)
    return await _run(lambda: services.tokenizer.encode(text, add_special_tokens), num_bytes)


async def _run(work: Callable[[], T], num_bytes: int) -> T:
    return await asyncio.to_thread(work) if num_bytes > _OFF_LOOP_BYTES else work()


def _check_bytes(num_bytes: int, param: str) -> None:
    if num_bytes > LIMITS.max_prompt_bytes:
        raise PayloadTooLarge(f"{param} is longer than {LIMITS.max_prompt_bytes} bytes.", param=param)


async def _from_text(text: str, services: Services, add_special_tokens: bool, param: str) -> Prompt:
    token_ids = await encode_text(text, services, add_special_tokens=add_special_tokens, param=param)
    if not token_ids:
        raise InvalidRequest(f"{param} is empty.", param=param)
    # The tokenizer may know tokens that were added after the model was trained, and that its logits lack.
    check_token_ids(token_ids, services.engine.base.vocab_size, param)
    return Prompt(tuple(token_ids), text)


def _from_token_ids(token_ids: list[int], vocab_size: int, param: str) -> Prompt:
    check_token_ids(token_ids, vocab_size, param)
    return Prompt(tuple(token_ids), None)


def _check_length(value: list[Any], services: Services) -> None:
    """Before a look at each item: a list that fits the body may have a million."""
    is_tokens = _is_token_id(value[0])
    if is_tokens and len(value) > services.engine.base.max_model_len:
        choose_max_tokens(1, None, len(value), services.engine.base, "prompt")
    if not is_tokens and len(value) > LIMITS.max_prompts:
        raise InvalidRequest(f"prompt has more than {LIMITS.max_prompts} prompts.", param="prompt")


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages should be a list of messages, not an empty one.", param="messages")
    if len(value) > LIMITS.max_messages:
        raise InvalidRequest(f"messages has more than {LIMITS.max_messages} messages.", param="messages")
    return [_read_message(message, f"messages.{index}") for index, message in enumerate(value)]


def _read_message(message: object, param: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{param} should be an object with role and content.", param=param)
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise UnsupportedParameter(f"{param}: tool calls are not supported.", param=param)
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{param}.role should be one of {', '.join(sorted(_ROLES))}.", param=f"{param}.role")
    # OpenAI renamed "system"; templates know the old name.
    checked = {
        "role": "system" if role == "developer" else role,
        "content": _read_content(message, role, f"{param}.content"),
    }
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str) or len(name) > 64:
            raise InvalidRequest(f"{param}.name should be a string of at most 64 characters.", param=f"{param}.name")
        checked["name"] = name
    return checked


def _read_content(message: dict[str, Any], role: str, param: str) -> str:
    content = message.get("content")
    if content is None and role == "assistant":
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
            raise UnsupportedParameter(f"{where}: this model reads text only.", param=where)
        text = part.get(kind) if isinstance(part, dict) and isinstance(kind, str) else None
        if not isinstance(text, str):
            raise InvalidRequest(f'{where} should be {{"type": "text", "text": "…"}}.', param=where)
        texts.append(text)
    return "\n".join(texts)
