"""Log probabilities in OpenAI's two shapes.

They are parallel lists (completions) and a list of objects (chat).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from loraserve.text.detokenizer import decode_stream
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import TokenLogprobs

_SPACES = re.compile(r"\s{0,64}")
_LOWEST = -9999.0
"""JSON has no infinity; OpenAI has this for a token that can't be."""


class CompletionLogprobs:
    """Render one choice's logprobs as they grow.

    Offsets are into the choice's own text, which starts with the prompt under echo.

    Args:
        prompt_token_ids: the prompt that the choice follows.
        num_top: how many of the likeliest tokens are shown with each.
        num_own: how many tokens that the request names are shown with each that was made, in the
            place of the likeliest; 0: it names none.
        as_ids: whether tokens are shown as ``token_id:7``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int],
        *,
        num_top: int,
        num_own: int = 0,
        as_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top, self._num_own = num_top, num_own
        self._as_ids = as_ids
        self._detokenizer = decode_stream(tokenizer, skip_special_tokens, prompt_token_ids)
        self._offset = 0

    def render(self, token_ids: Sequence[int], entries: Iterable[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Build the lists for these tokens alone.

        None (a prompt's first token, which nothing predicts) is null.
        """
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token_id]))
        return self._lists(token_ids, entries, offsets, self._num_own or self._num_top)

    def render_prompt(
        self, token_ids: Sequence[int], entries: Iterable[TokenLogprobs | None], text: str
    ) -> dict[str, list[Any]]:
        """Build the lists for the prompt's tokens, before any other's.

        A special token has a width only if the text has it: those that the tokenizer puts around a
        text aren't in it, and those that a caller writes are, also where special ones are skipped.

        Args:
            text: the prompt as it is shown, which the choice's text begins with.
        """
        detokenizer = decode_stream(self._tokenizer, skip_special_tokens=False)
        offsets, offset = [], 0
        for token_id in token_ids:
            offsets.append(min(offset, len(text)))
            if token_id in self._tokenizer.special_token_ids and not self._has_at(text, offset, token_id):
                continue
            offset += len(detokenizer.push([token_id]))
        self._offset = len(text)
        return self._lists(token_ids, entries, offsets, self._num_top)

    def _has_at(self, text: str, offset: int, token_id: int) -> bool:
        """Check whether the text has the token there; white space before it may be the token's."""
        token = self._tokenizer.id_to_token(token_id) or ""
        found = _SPACES.match(text, offset)
        return text.startswith(token, offset) or (found is not None and text.startswith(token, found.end()))

    def _lists(
        self, token_ids: Sequence[int], entries: Iterable[TokenLogprobs | None], offsets: list[int], num_top: int
    ) -> dict[str, list[Any]]:
        tokens, logprobs, top_logprobs = [], [], []
        for token_id, entry in zip(token_ids, entries, strict=True):
            tokens.append(self._text(token_id))
            logprobs.append(None if entry is None else finite_logprob(entry.logprob))
            top_logprobs.append(None if entry is None else self._top(entry, num_top))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top_logprobs, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        # the token itself too, before the likeliest, as vLLM's, or behind those that are named
        own, shown = (entry.token_id, entry.logprob), entry.top[:num_top]
        top: dict[str, float] = {}
        for token_id, logprob in (*shown, own) if self._num_own else (own, *shown):
            # of two others with the same text, the likelier
            top.setdefault(self._text(token_id), finite_logprob(logprob))
        return top

    def _text(self, token_id: int) -> str:
        """Decode the token's text.

        Part of a character is spelled ``bytes:\\xe4\\xb8``, as OpenAI's did, so that two of them
        differ, and a token without text (one that is kept in reserve) as ``token_id:7``.
        """
        data = self._tokenizer.token_bytes(token_id)
        if self._as_ids or not data:
            return _id_text(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def join_logprobs(parts: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Concatenate the lists of several `CompletionLogprobs.render` calls."""
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part.items():
            joined[name].extend(values)
    return joined


def chat_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], num_top: int, *, has_own: bool = False, as_ids: bool = False
) -> list[dict[str, Any]]:
    """``content`` of a chat choice's logprobs.

    Args:
        has_own: whether the request names the tokens that are shown with each; then the token
            itself comes before them, unless it is one of them.
        as_ids: whether tokens are shown as ``token_id:7``.
    """
    return [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob, as_ids),
            "top_logprobs": [
                _chat_token(tokenizer, *candidate, as_ids) for candidate in _candidates(entry, num_top, has_own)
            ],
        }
        for entry in entries
    ]


def _candidates(entry: TokenLogprobs, num_top: int, has_own: bool) -> Sequence[tuple[int, float]]:
    shown = entry.top[:num_top]
    if not has_own or any(token_id == entry.token_id for token_id, _ in shown):
        return shown
    return ((entry.token_id, entry.logprob), *shown)


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    text = _id_text(token_id) if as_ids or not data else data.decode("utf-8", "replace")
    return {"token": text, "logprob": finite_logprob(logprob), "bytes": list(data)}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs | None], num_top: int
) -> list[orjson.Fragment | None]:
    """Build vLLM's ``prompt_logprobs``: of each token of the prompt, the likeliest and itself.

    They are by id. The first token has none, since nothing predicts it. Each is JSON already, a
    sixth of the size of its objects.
    """
    return [
        None if entry is None else orjson.Fragment(orjson.dumps(_prompt_token(tokenizer, entry, num_top)))
        for entry in entries
    ]


def _prompt_token(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> dict[str, dict[str, Any]]:
    known: dict[int, tuple[float, int | None]]
    known = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)}
    # where it isn't one of the likeliest, how many are likelier wasn't counted
    known.setdefault(entry.token_id, (entry.logprob, None))
    return {
        str(token_id): {
            "logprob": finite_logprob(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, (logprob, rank) in known.items()
    }


def _id_text(token_id: int) -> str:
    """Format vLLM's spelling of a token by its id."""
    return f"token_id:{token_id}"


def finite_logprob(logprob: float) -> float:
    """Clamp the log probability to what JSON can have."""
    # a NaN compares as False, too
    return logprob if logprob > _LOWEST else _LOWEST
