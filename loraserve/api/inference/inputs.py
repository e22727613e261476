"""Texts to be pooled, checked, turned into tokens and cut as their request sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loraserve.api.inference.prompts import Prompt, PromptCut
from loraserve.api.inference.sampling import check_token_ids
from loraserve.api.inference.schemas import PoolingBody
from loraserve.api.services import Services
from loraserve.errors import ContextLengthExceeded, InvalidRequest, PayloadTooLarge
from loraserve.limits import LIMITS
from loraserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Named:
    """A text, or the two of a pair, with the path of its field."""

    param: str
    text: str
    pair: str | None = None


@dataclass(frozen=True, slots=True)
class InputReader:
    """Tokenize the inputs of one request, on a thread in its tenant's turn unless it is short."""

    services: Services
    tenant: str
    num_bytes: int
    """Size of the request's body."""
    body: PoolingBody
    tokenizer: Tokenizer
    """Tokenizer of what the request is bound to."""

    async def inputs(self, value: object, *, add_special_tokens: bool) -> list[Prompt]:
        """Read the prompts of ``str | [str] | [int] | [[int]]`` in the field ``input``, in order.

        Raises:
            InvalidRequest: it is none of these, or empty, or has ids that the model doesn't have.
            PayloadTooLarge: the text is over `limits.max_prompt_bytes`.
            ContextLengthExceeded: an input is longer than the context, and isn't to be cut.
        """
        return await self._run(lambda: self._read(value, add_special_tokens))

    async def texts(self, texts: Sequence[Named]) -> list[Prompt]:
        """Encode texts and pairs to prompts.

        Raises:
            InvalidRequest, PayloadTooLarge, ContextLengthExceeded: as `inputs`.
        """
        return await self._run(lambda: self._encode(texts, add_special_tokens=True))

    async def _run(self, work: Callable[[], list[Prompt]]) -> list[Prompt]:
        return await self.services.text_threads.run(self.tenant, self.num_bytes, work)

    def _read(self, value: object, add_special_tokens: bool) -> list[Prompt]:
        if isinstance(value, str):
            return self._encode([Named("input", value)], add_special_tokens=add_special_tokens)
        if isinstance(value, list) and value:
            if _is_token_id(value[0]):
                return [self._from_token_ids(value, "input")]
            check_num_inputs(len(value), "input")
            if all(isinstance(item, str) for item in value):
                named = [Named(f"input.{index}", text) for index, text in enumerate(value)]
                return self._encode(named, add_special_tokens=add_special_tokens)
            if all(isinstance(item, list) for item in value):
                return [self._from_token_ids(item, f"input.{index}") for index, item in enumerate(value)]
        raise InvalidRequest(
            "input should be a string, a list of strings, a list of token ids or a list of lists of token ids, "
            "none of them empty.",
            param="input",
        )

    def _encode(self, texts: Sequence[Named], *, add_special_tokens: bool) -> list[Prompt]:
        # a pair counts as often as it is read
        num_bytes = sum(len(named.text.encode()) + len((named.pair or "").encode()) for named in texts)
        if num_bytes > LIMITS.max_prompt_bytes:
            param = texts[0].param.partition(".")[0]
            raise PayloadTooLarge(f"{param} is longer than {LIMITS.max_prompt_bytes} bytes.", param=param)
        # all of them, before any takes time
        for named in texts:
            if not named.text or named.pair == "":
                raise InvalidRequest(f"{named.param} is empty.", param=named.param)
            self._check_can_fit(named)
        return [self._from_text(named, add_special_tokens) for named in texts]

    def _check_can_fit(self, named: Named) -> None:
        """Check that the text's bytes can be as few tokens as the context has room for."""
        context = self.services.engine.base.max_model_len
        for text in (named.text, named.pair or ""):
            # no token is less than a byte, and no character more than four
            if self._max_tokens is None and 4 * len(text) > context:
                least = self.tokenizer.least_tokens(text)
                if least > context:
                    raise self._too_long(f"at least {least}", named.param)

    def _from_text(self, named: Named, add_special_tokens: bool) -> Prompt:
        token_ids = self.tokenizer.encode_within(
            named.text,
            named.pair,
            max_tokens=self._max_tokens,
            keeps_end=self.body.truncation_side == "left",
            add_special_tokens=add_special_tokens,
        )
        return self._checked(token_ids, named.param, named.text)

    def _from_token_ids(self, token_ids: list[Any], param: str) -> Prompt:
        # before each is looked at: a body may have a million
        limit = self._max_tokens
        if limit is None and len(token_ids) > self.services.engine.base.max_model_len:
            raise self._too_long(str(len(token_ids)), param)
        if not all(_is_token_id(token_id) for token_id in token_ids):
            raise InvalidRequest(f"{param} should have token ids alone.", param=param)
        if limit is not None and len(token_ids) > limit:
            token_ids = PromptCut(limit, keeps_end=self.body.truncation_side == "left").apply(token_ids)
        return self._checked(token_ids, param, None)

    def _checked(self, token_ids: list[int], param: str, text: str | None) -> Prompt:
        base = self.services.engine.base
        if not token_ids:
            raise InvalidRequest(f"{param} is empty.", param=param)
        if len(token_ids) > base.max_model_len:
            raise self._too_long(str(len(token_ids)), param)
        # a tokenizer may have tokens that the model lacks
        check_token_ids(token_ids, self.tokenizer.num_ids(base.vocab_size), param)
        return Prompt(tuple(token_ids), text)

    @property
    def _max_tokens(self) -> int | None:
        """Tokens that a longer input is cut to; None: none is cut."""
        limit, context = self.body.truncate_prompt_tokens, self.services.engine.base.max_model_len
        if limit is None:
            return None
        return context if limit == -1 else min(limit, context)

    def _too_long(self, num_tokens: str, param: str) -> ContextLengthExceeded:
        context = self.services.engine.base.max_model_len
        return ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens. However, your {param} has {num_tokens} tokens. "
            f"Please reduce its length, or send truncate_prompt_tokens.",
            param=param,
        )


def check_num_inputs(count: int, param: str) -> None:
    """Check the number of inputs that one request has.

    Raises:
        InvalidRequest: it is over the limit.
    """
    if count > LIMITS.max_pooled_inputs:
        raise InvalidRequest(
            f"{param} has {count} entries; at most {LIMITS.max_pooled_inputs} are allowed in one request.", param=param
        )


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
