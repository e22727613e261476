"""Prompts and messages, checked and turned into tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from loraserve.api.inference.sampling import check_token_ids, choose_max_tokens
from loraserve.api.services import Services
from loraserve.errors import ContextLengthExceeded, InvalidRequest, PayloadTooLarge, UnsupportedParameter
from loraserve.limits import LIMITS

_ROLES = frozenset({"system", "developer", "user", "assistant"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str | None
    """Text of the prompt; None: the caller gave tokens."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Tokenize one request.

    It is done on the event loop if the request is short, otherwise on a thread in its tenant's
    turn.
    """

    services: Services
    tenant: str
    num_bytes: int
    """Size of the request's body: what reading it takes, whichever field is long."""

    async def prompts(self, value: object, *, add_special_tokens: bool) -> list[Prompt]:
        """Return the prompts of ``str | [str] | [int] | [[int]]``, in order.

        Raises:
            InvalidRequest: it is none of these, or empty, or has ids that the model doesn't have.
            PayloadTooLarge: the text is over `limits.max_prompt_bytes`.
            ContextLengthExceeded: a text can't be short enough, whatever its tokens.
        """
        return await self._run(lambda: _read_prompts(value, self.services, add_special_tokens))

    async def chat(
        self,
        messages: object,
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        variables: Mapping[str, Any],
        is_bounded: bool = True,
    ) -> Prompt:
        """Return the prompt that the model's chat template makes of `messages`.

        Args:
            is_bounded: whether it has to fit the context.

        Raises:
            InvalidRequest: a message is wrong, or the template refuses them.
            UnsupportedParameter: a message has something other than text.
            ContextLengthExceeded: they can't be short enough, whatever their tokens.
        """

        def render_and_encode() -> Prompt:
            checked = _read_messages(messages)
            _check_bytes(sum(len(message["content"].encode()) for message in checked), "messages")
            text = self.services.chat_template.render(checked, add_generation_prompt, variables=variables)
            _check_bytes(len(text.encode()), "messages")
            if is_bounded:
                _check_fits(text, self.services, "messages")
            return Prompt(tuple(self.services.tokenizer.encode(text, add_special_tokens)), text)

        prompt = await self._run(render_and_encode)
        if not prompt.token_ids:
            raise InvalidRequest("messages render to an empty prompt.", param="messages")
        # As in `_from_text`: a token that the logits lack would fail in the engine.
        if max(prompt.token_ids) >= self.services.engine.base.vocab_size:
            raise InvalidRequest(
                "messages contain a token that the tokenizer has and this model doesn't.", param="messages"
            )
        return prompt

    async def text(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Return the tokens of `text`, however many.

        Raises:
            PayloadTooLarge: it is over `limits.max_prompt_bytes`.
        """

        def encode() -> list[int]:
            _check_bytes(len(text.encode()), param)
            return self.services.tokenizer.encode(text, add_special_tokens)

        return await self._run(encode)

    async def _run(self, work: Callable[[], T]) -> T:
        return await self.services.text_threads.run(self.tenant, self.num_bytes, work)


def _read_prompts(value: object, services: Services, add_special_tokens: bool) -> list[Prompt]:
    vocab_size = services.engine.base.vocab_size
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and texts:
        _check_length(texts, services)
        if all(_is_token_id(item) for item in texts):
            return [_from_token_ids(texts, vocab_size, "prompt")]
        if all(isinstance(item, str) for item in texts):
            names = ["prompt"] if isinstance(value, str) else [f"prompt.{index}" for index in range(len(texts))]
            _check_bytes(sum(len(text.encode()) for text in texts), "prompt")
            # all of them, before any takes time
            for text, name in zip(texts, names, strict=True):
                _check_fits(text, services, name)
            return [
                _from_text(text, services, add_special_tokens, name) for text, name in zip(texts, names, strict=True)
            ]
        if all(isinstance(item, list) and item for item in texts):
            for item in texts:
                _check_length(item, services)
            if all(_is_token_id(id_) for item in texts for id_ in item):
                return [_from_token_ids(item, vocab_size, f"prompt.{index}") for index, item in enumerate(texts)]
    raise InvalidRequest(
        "prompt should be a string, a list of strings, a list of token ids or a list of lists of token ids, "
        "none of them empty.",
        param="prompt",
    )


def _check_bytes(num_bytes: int, param: str) -> None:
    if num_bytes > LIMITS.max_prompt_bytes:
        raise PayloadTooLarge(f"{param} is longer than {LIMITS.max_prompt_bytes} bytes.", param=param)


def _check_fits(text: str, services: Services, param: str) -> None:
    """Check that the text's bytes can be as few tokens as the context has room for.

    Raises:
        ContextLengthExceeded: they can't.
    """
    context = services.engine.base.max_model_len
    # no token is less than a byte, and no character more than four
    if 4 * len(text) > context and (least := services.tokenizer.least_tokens(text)) > context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens. However, "
            f"your {param} has at least {least} tokens. "
            f"Please reduce the length of the {param}.",
            param=param,
        )


def _from_text(text: str, services: Services, add_special_tokens: bool, param: str) -> Prompt:
    token_ids = services.tokenizer.encode(text, add_special_tokens)
    if not token_ids:
        raise InvalidRequest(f"{param} is empty.", param=param)
    # The tokenizer may know tokens that were added after the model was trained, and that its logits
    # lack.
    check_token_ids(token_ids, services.engine.base.vocab_size, param)
    return Prompt(tuple(token_ids), text)


def _from_token_ids(token_ids: list[int], vocab_size: int, param: str) -> Prompt:
    check_token_ids(token_ids, vocab_size, param)
    return Prompt(tuple(token_ids), None)


def _check_length(value: list[Any], services: Services) -> None:
    """Check the number of items before looking at each: a body may have a million."""
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
