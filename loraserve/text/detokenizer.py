"""Incremental detokenization: the pieces add up to what decoding all tokens at once gives.

`tokenizers.DecodeStream` isn't used: it holds back everything while the text ends in U+FFFD (so a
model that emits invalid UTF-8 streams nothing and costs quadratic time), and it fails for good once
a byte-fallback run turns out to be invalid ("Invalid prefix encountered").
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from itertools import filterfalse
from typing import Protocol

from loraserve.text.tokenizer import Tokenizer

REPLACEMENT = "�"

_CONTEXT_TOKENS = 8
"""Number of settled tokens that are decoded again before new ones: decoders look at the beginning
of the text alone.
"""


class Detokenizer(Protocol):
    """Incremental decoder.

    The results of every `push` and of `finish`, concatenated, equal decoding all tokens at once.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """Decode more tokens to the text that is now certain; it is never taken back.

        An unfinished character is held back.
        """
        ...

    def finish(self) -> str:
        """Decode the text held back, with U+FFFD for bytes that never became a character.

        Call it once, at the end.
        """
        ...


class ByteLevelDetokenizer:
    """Detokenizer of byte-level vocabularies (GPT-2's, Llama 3's, Qwen's).

    Tokens are bytes, so a UTF-8 decoder suffices. `push` runs once a token of every answer, and
    calls no other function of ours.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int] = (),
        shown: Collection[int] = (),
    ) -> None:
        # its table of bytes is made for as long as it is there
        self._tokenizer = tokenizer
        skipped = tokenizer.special_token_ids.difference(shown) if skip_special_tokens else frozenset()
        self._bytes_of, self._is_skipped = tokenizer.bytes_of.__getitem__, skipped.__contains__
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A character that the prompt began and these tokens finish belongs to them: four bytes are
        # the longest character.
        self.push(prompt_token_ids[-_CONTEXT_TOKENS:])

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of, filterfalse(self._is_skipped, token_ids))))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer of any other vocabulary.

    It decodes a short window of tokens with and without the new ones, and returns the difference. A
    run of byte-fallback tokens (``<0xE4><0xB8><0xAD>``) is held back until another token ends it,
    because one invalid byte at its end turns the whole run into U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int] = (),
        shown: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids.difference(shown) if skip_special_tokens else frozenset()
        self._context, self._pending = self._split_prompt(list(prompt_token_ids))
        # text of `_context`, and whether it pins down the decoder's view of "the beginning of the
        # text"
        self._context_text = self._decode(self._context)

    def push(self, token_ids: Sequence[int]) -> str:
        self._pending.extend(token_ids)
        end = len(self._pending)
        while end and self._is_open(self._pending[end - 1]):
            end -= 1
        settled, self._pending = self._pending[:end], self._pending[end:]
        return self._settle(settled)

    def finish(self) -> str:
        settled, self._pending = self._pending, []
        return self._settle(settled)

    def _is_open(self, token_id: int) -> bool:
        # A skipped special token inside a run doesn't end it: the decoder never sees it.
        if token_id in self._skipped:
            return True
        return self._tokenizer.is_fallback_byte(token_id) or self._tokenizer.id_to_token(token_id) is None

    def _settle(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        window = self._context + token_ids
        text = self._decode(window)
        # The decoders that are in use only add at the end; one that rewrites what came before gets
        # its new tokens decoded alone.
        delta = text[len(self._context_text) :] if text.startswith(self._context_text) else self._decode(token_ids)
        self._context, self._context_text = self._shorten(window, text)
        return delta

    def _shorten(self, window: list[int], text: str) -> tuple[list[int], str]:
        """Find the shortest tail of the window that still hides the beginning of the text.

        The decoder doesn't see that beginning; the tail's text isn't empty.
        """
        num_kept = _CONTEXT_TOKENS
        while num_kept < len(window):
            start = len(window) - num_kept
            tail = window[start:]
            # cutting a run of bytes in two would change how it decodes
            if not self._tokenizer.is_fallback_byte(tail[0]) and (tail_text := self._decode(tail)):
                return tail, tail_text
            num_kept *= 2
        return window, text

    def _split_prompt(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Split the prompt's tokens into context and pending ones.

        Tokens of an unfinished last character are pending, as if they were generated.
        """
        start = len(prompt)
        while start and self._tokenizer.is_fallback_byte(prompt[start - 1]):
            start -= 1
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(map(self._tokenizer.token_bytes, prompt[start:])))
        num_open = len(decoder.getstate()[0])
        cut = len(prompt) - num_open
        context, _ = self._shorten(prompt[:cut], "")
        return context, prompt[cut:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode([id_ for id_ in token_ids if id_ not in self._skipped], skip_special_tokens=False)


def decode_stream(
    tokenizer: Tokenizer,
    skip_special_tokens: bool = True,
    prompt_token_ids: Sequence[int] = (),
    *,
    shown: Collection[int] = (),
) -> Detokenizer:
    """Build a detokenizer for tokens that follow `prompt_token_ids`.

    It gives the text that they add to the prompt's.

    Args:
        shown: special tokens that aren't skipped.
    """
    kind = ByteLevelDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens, prompt_token_ids, shown)
