"""Log probabilities in OpenAI's two shapes.

They are parallel lists (completions) and a list of objects (chat).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from loraserve.text.detokenizer import decode_stream
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import TokenLogprobs

_LOWEST = -9999.0
"""JSON has no infinity; OpenAI says this for a token that can't be."""


class CompletionLogprobs:
    """Render one choice's logprobs as they grow.

    Offsets are into the choice's own text, which starts with the prompt under echo.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = decode_stream(tokenizer, skip_special_tokens, prompt_token_ids)
        self._offset = 0

    def render(self, token_ids: Sequence[int], entries: Iterable[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Return the lists for these tokens alone.

        None (a prompt's first token, which nothing predicts) is null.
        """
        tokens, logprobs, top_logprobs, offsets = [], [], [], []
        for token_id, entry in zip(token_ids, entries, strict=True):
            tokens.append(self._text(token_id))
            logprobs.append(None if entry is None else finite_logprob(entry.logprob))
            top_logprobs.append(None if entry is None else self._top(entry))
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token_id]))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top_logprobs, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = {self._text(token_id): finite_logprob(logprob) for token_id, logprob in entry.top}
        # the sampled token is there even when it isn't among the likeliest
        top.setdefault(self._text(entry.token_id), finite_logprob(entry.logprob))
        return top

    def _text(self, token_id: int) -> str:
        """Return the token's text.

        Part of a character is spelled ``bytes:\\xe4\\xb8``, as OpenAI's did, so that two of them
        differ.
        """
        data = self._tokenizer.token_bytes(token_id)
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


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """``content`` of a chat choice's logprobs."""
    return [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, *candidate) for candidate in entry.top[:num_top]],
        }
        for entry in entries
    ]


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite_logprob(logprob), "bytes": list(data)}


def finite_logprob(logprob: float) -> float:
    """Return the log probability as JSON can have it."""
    # a NaN compares as False, too
    return logprob if logprob > _LOWEST else _LOWEST
