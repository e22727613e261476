"""Prompts and messages, checked and turned into tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from loraserve.api.inference.messages import RoleProbe, read_messages
from loraserve.api.inference.sampling import check_token_ids, choose_max_tokens
from loraserve.api.inference.schemas import InferenceBody
from loraserve.api.services import Services
from loraserve.errors import ContextLengthExceeded, InvalidRequest, PayloadTooLarge
from loraserve.limits import LIMITS
from loraserve.text.chat_format import ChatFormat, ToolUse
from loraserve.text.chat_template import ChatTemplate
from loraserve.text.tokenizer import Tokenizer
from loraserve.text.version_template import VersionTemplate
from loraserve.types import BaseSpec

T = TypeVar("T")
_NUM_END_TOKENS = 64
"""Tokens of a prompt's end that decide whether the answer begins with reasoning."""


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str | None
    """Text of the prompt; None: the caller gave tokens, or not all of the text is kept."""
    is_cut_text: bool = False
    """Whether it is a part of a text, with special tokens that the tokenizer may have added."""

    def end_text(self, tokenizer: Tokenizer) -> str:
        """Decode the text, or its end: markers of reasoning there decide how the answer begins."""
        if self.text is not None:
            return self.text
        # decoding all of a long prompt takes long
        return tokenizer.decode(self.token_ids[-_NUM_END_TOKENS:], skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class PromptCut:
    """Number of a prompt's tokens that are kept, at its end or at its start."""

    num_tokens: int
    keeps_end: bool = True

    def apply(self, token_ids: list[int]) -> list[int]:
        """Return the tokens that are kept."""
        return token_ids[-self.num_tokens :] if self.keeps_end else token_ids[: self.num_tokens]


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
    tokenizer: Tokenizer
    """Tokenizer of what the request is bound to."""

    @property
    def num_ids(self) -> int:
        """The bound of the ids that a prompt may have."""
        return self.tokenizer.num_ids(self.services.engine.base.vocab_size)

    async def prompts(self, value: object, *, add_special_tokens: bool, cut: PromptCut | None = None) -> list[Prompt]:
        """Read the prompts of ``str | [str] | [int] | [[int]]``, in order.

        Args:
            cut: tokens of each prompt that are kept; None: all, which have to fit.

        Raises:
            InvalidRequest: it is none of these, or empty, or has ids that the model doesn't have.
            PayloadTooLarge: the text is over `limits.max_prompt_bytes`.
            ContextLengthExceeded: a text can't be short enough, whatever its tokens.
        """
        return await self.run(lambda: _read_prompts(value, self, add_special_tokens, cut))

    async def chat(
        self,
        messages: object,
        *,
        chat_format: ChatFormat,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        variables: Mapping[str, Any],
        tool_use: ToolUse | None = None,
        is_bounded: bool = True,
        continues_last: bool = False,
        cut: PromptCut | None = None,
    ) -> Prompt:
        """Render the prompt that the model's chat template makes of `messages`.

        Args:
            variables: those of the request, which go before the chat format's.
            tool_use: tools that the template shows to the model.
            is_bounded: whether it has to fit the context.
            continues_last: whether it ends with the last message's text, which is continued.
            cut: tokens of it that are kept; None: all.

        Raises:
            InvalidRequest: a message is wrong, or the template refuses them.
            ChatTemplateFailed: the version's own template refuses them, or is over its bounds.
            UnsupportedParameter: a message has something other than text, or an old-style call.
            ContextLengthExceeded: they can't be short enough, whatever their tokens.
        """

        template = chat_format.template
        set_variables = {**chat_format.variables, **variables}

        def read() -> tuple[list[dict[str, Any]], tuple[Mapping[str, Any], ...] | None]:
            checked = read_messages(messages, chat_format)
            _check_bytes(sum(len(message["content"].encode()) for message in checked), "messages")
            return chat_format.shown(checked, tool_use)

        def render(template: ChatTemplate) -> str:
            shown, tools = read()
            if (probe := RoleProbe.of(shown)) is not None:
                probe.check(template.render(probe.messages, False, tools, set_variables))
            if continues_last:
                return template.render_continued(shown, tools, set_variables)
            return template.render(shown, add_generation_prompt, tools, set_variables)

        async def ask(template: VersionTemplate) -> str:
            shown, tools = await self.run(read)

            async def rendered(
                messages: Sequence[Mapping[str, Any]], is_open: bool = False, continues_last: bool = False
            ) -> str:
                question = await self.run(
                    lambda: template.question(
                        self.tenant, messages, is_open, tools, set_variables, continues_last=continues_last
                    )
                )
                return await self.services.templates.render(self.tenant, question)

            if (probe := RoleProbe.of(shown)) is not None:
                probe.check(await rendered(probe.messages))
            return await rendered(shown, add_generation_prompt, continues_last)

        def encode(text: str) -> Prompt:
            _check_bytes(len(text.encode()), "messages")
            if is_bounded and cut is None:
                _check_fits(text, self, "messages")
            token_ids = self.tokenizer.encode(text, add_special_tokens)
            kept = _kept(token_ids, cut)
            return Prompt(tuple(kept), text if len(kept) == len(token_ids) else None)

        if isinstance(template, VersionTemplate):
            text = await ask(template)
            prompt = await self.run(lambda: encode(text))
        else:
            prompt = await self.run(lambda: encode(render(template)))
        if not prompt.token_ids:
            raise InvalidRequest("messages render to an empty prompt.", param="messages")
        # As in `_from_text`: a token that the logits lack would fail in the engine.
        if max(prompt.token_ids) >= self.num_ids:
            raise InvalidRequest(
                "messages contain a token that the tokenizer has and this model doesn't.", param="messages"
            )
        return prompt

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Encode words that an answer mustn't have, by vLLM's rule.

        A word is refused where a space precedes it, too, if that makes another token of its
        beginning. White space alone, of which vLLM's rule leaves nothing, is refused as it is.

        Raises:
            InvalidRequest: one is too long, or has no token.
        """
        if not words:
            return ()
        for index, word in enumerate(words):
            if len(word.encode()) > LIMITS.max_bad_word_bytes:
                raise InvalidRequest(
                    f"bad_words.{index} is longer than {LIMITS.max_bad_word_bytes} bytes.", param=f"bad_words.{index}"
                )
        return await self.run(lambda: _bad_words(words, self))

    async def text(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Encode `text` to tokens, however many.

        Raises:
            PayloadTooLarge: it is over `limits.max_prompt_bytes`.
        """

        def encode() -> list[int]:
            _check_bytes(len(text.encode()), param)
            return self.tokenizer.encode(text, add_special_tokens)

        return await self.run(encode)

    async def run(self, work: Callable[[], T]) -> T:
        """Run work on the request's texts to its result."""
        return await self.services.text_threads.run(self.tenant, self.num_bytes, work)


def read_cut(body: InferenceBody, asked: int | None, base: BaseSpec) -> PromptCut | None:
    """Read which tokens of the prompt `truncate_prompt_tokens` keeps; None: all.

    Args:
        asked: tokens that the answer may have; None: as many as there is room for.

    Raises:
        InvalidRequest: it keeps none, or more than the context has.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return None
    keeps_end = body.truncation_side == "left"
    if keep == -1:
        return PromptCut(max(1, base.max_model_len - max(1, asked or 0)), keeps_end)
    if not 1 <= keep <= base.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens should be -1, or from 1 to {base.max_model_len}.", param="truncate_prompt_tokens"
        )
    return PromptCut(keep, keeps_end)


def _read_prompts(value: object, reader: PromptReader, add_special_tokens: bool, cut: PromptCut | None) -> list[Prompt]:
    services = reader.services
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and texts:
        _check_length(texts, services, cut)
        if all(_is_token_id(item) for item in texts):
            return [_from_token_ids(_kept(texts, cut), reader.num_ids, "prompt")]
        if all(isinstance(item, str) for item in texts):
            names = ["prompt"] if isinstance(value, str) else [f"prompt.{index}" for index in range(len(texts))]
            _check_bytes(sum(len(text.encode()) for text in texts), "prompt")
            # all of them, before any takes time
            for text, name in zip(texts, names, strict=True):
                if cut is None:
                    _check_fits(text, reader, name)
            return [
                _from_text(text, reader, add_special_tokens, cut, name) for text, name in zip(texts, names, strict=True)
            ]
        if all(isinstance(item, list) and item for item in texts):
            for item in texts:
                _check_length(item, services, cut)
            if all(_is_token_id(id_) for item in texts for id_ in item):
                return [
                    _from_token_ids(_kept(item, cut), reader.num_ids, f"prompt.{index}")
                    for index, item in enumerate(texts)
                ]
    raise InvalidRequest(
        "prompt should be a string, a list of strings, a list of token ids or a list of lists of token ids, "
        "none of them empty.",
        param="prompt",
    )


def _bad_words(words: Sequence[str], reader: PromptReader) -> tuple[tuple[int, ...], ...]:
    vocab_size = reader.num_ids
    found: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        text = word.lstrip() or word
        bare, spaced = (tuple(reader.tokenizer.encode(prefix + text, add_special_tokens=False)) for prefix in ("", " "))
        if not bare or max(bare) >= vocab_size:
            raise InvalidRequest(f"bad_words.{index} has no tokens of this model.", param=f"bad_words.{index}")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0] and max(spaced) < vocab_size:
            found.append(spaced)
    return tuple(found)


def _check_bytes(num_bytes: int, param: str) -> None:
    if num_bytes > LIMITS.max_prompt_bytes:
        raise PayloadTooLarge(f"{param} is longer than {LIMITS.max_prompt_bytes} bytes.", param=param)


def _check_fits(text: str, reader: PromptReader, param: str) -> None:
    """Check that the text's bytes can be as few tokens as the context has room for.

    Raises:
        ContextLengthExceeded: they can't.
    """
    context = reader.services.engine.base.max_model_len
    # no token is less than a byte, and no character more than four
    if 4 * len(text) > context and (least := reader.tokenizer.least_tokens(text)) > context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens. However, "
            f"your {param} has at least {least} tokens. "
            f"Please reduce the length of the {param}.",
            param=param,
        )


def _from_text(text: str, reader: PromptReader, add_special_tokens: bool, cut: PromptCut | None, param: str) -> Prompt:
    whole = reader.tokenizer.encode(text, add_special_tokens)
    token_ids = _kept(whole, cut)
    if not token_ids:
        raise InvalidRequest(f"{param} is empty.", param=param)
    # The tokenizer may have tokens that were added after the model was trained, and that its logits
    # lack.
    check_token_ids(token_ids, reader.num_ids, param)
    is_cut = len(token_ids) < len(whole)
    return Prompt(tuple(token_ids), None if is_cut else text, is_cut)


def _kept(token_ids: list[int], cut: PromptCut | None) -> list[int]:
    return token_ids if cut is None else cut.apply(token_ids)


def _from_token_ids(token_ids: list[int], vocab_size: int, param: str) -> Prompt:
    check_token_ids(token_ids, vocab_size, param)
    return Prompt(tuple(token_ids), None)


def _check_length(value: list[Any], services: Services, cut: PromptCut | None) -> None:
    """Check the number of items before looking at each: a body may have a million."""
    is_tokens = _is_token_id(value[0])
    if is_tokens and cut is None and len(value) > services.engine.base.max_model_len:
        choose_max_tokens(1, None, len(value), services.engine.base, "prompt")
    if not is_tokens and len(value) > LIMITS.max_prompts:
        raise InvalidRequest(f"prompt has more than {LIMITS.max_prompts} prompts.", param="prompt")


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
