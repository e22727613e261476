"""The base model's tokenizer, read from a Hugging Face directory."""

from __future__ import annotations

import copy
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from loraserve.errors import ConfigError, InvariantViolation
from loraserve.text.token_bound import BYTE_OF_CHAR, TokenBound
from loraserve.tokenizer_identity import TokenizerSummary

_MAX_CONFIG_BYTES = 16 << 20
_SHORT_CHARS = 256
"""Length up to which a call that keeps the interpreter's lock is faster than one that releases
it.
"""

# One text is one thread's work: that of the caller, with its priority. The library's own threads
# would have none.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Encodes and decodes as `transformers` does for the same directory.

    Reads ``tokenizer.json`` and, where it is there, ``tokenizer_config.json``. Safe to use from
    several threads.

    Raises:
        ConfigError: the directory has no ``tokenizer.json``, or one that can't be read.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.model_dir = Path(model_dir)
        path = self.model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"The model's directory {self.model_dir} has no tokenizer.json; expected a Hugging Face directory."
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            definition: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"The tokenizer in {path} can't be read: {error}") from error
        # A prompt is never cut or padded behind the caller's back.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        self._path = path
        self.config = read_json_object(self.model_dir / "tokenizer_config.json")
        self._bound = TokenBound(definition)
        decoder = definition.get("decoder") or {}
        self.is_byte_level = decoder.get("type") == "ByteLevel"
        self._has_byte_fallback = any(
            part.get("type") == "ByteFallback" for part in (decoder, *decoder.get("decoders", ()))
        )
        self._fallback_bytes = self._find_fallback_bytes()
        self.base: Tokenizer | None = None
        """Tokenizer that this one shares its vocabulary with; None: it is a base's own."""
        self._changed_ids: frozenset[int] = frozenset()
        self.summary_text = ""
        """Differences from `base`'s, as a `TokenizerSummary`; empty: it is a base's own."""
        self._read_added()
        self._read_config()

    def _read_added(self) -> None:
        """Read the added tokens, and forget what was known of others."""
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._added_tokens: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self.bytes_of: Mapping[int, bytes] = _TokenBytes(self)
        """Table of `token_bytes`: looking a known token up calls no function of ours."""
        self.added_token_ids = frozenset(self._added_tokens)
        self.special_token_ids = frozenset(id_ for id_, token in self._added_tokens.items() if token.special)

    def _read_config(self) -> None:
        """Read the special tokens that the config names."""
        self.bos_token = _token_content(self.config.get("bos_token"))
        self.eos_token = _token_content(self.config.get("eos_token"))
        self.unk_token = _token_content(self.config.get("unk_token"))
        self.pad_token = _token_content(self.config.get("pad_token"))
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        add_bos = self.config.get("add_bos_token")
        self._add_bos: bool | None = add_bos if isinstance(add_bos, bool) else None

    @cached_property
    def summary(self) -> TokenizerSummary | None:
        """Summary to compare adapters' tokenizers with, with the template that chats use.

        It may take a second, once. None: a file can't be read.
        """
        try:
            found = TokenizerSummary.read(self.model_dir)
            template = self.model_dir / "chat_template.jinja"
            if found is None or not template.is_file():
                return found
            return replace(found, chat_templates={"default": template.read_text(encoding="utf-8")})
        except (OSError, ValueError):
            return None

    def with_differences(self, summary: TokenizerSummary) -> Tokenizer:
        """Build a version's tokenizer, which shares this one's vocabulary and merges.

        It takes kilobytes, and encodes as one that is read from the version's own file does.

        Args:
            summary: reduced to what differs.

        Raises:
            ConfigError: a token can't have its id: what `tokenizers` would read from the version's
                own file has other ids, too.
        """
        made = copy.copy(self)
        made.__dict__.pop("summary", None)
        made.base, made.summary_text = self, summary.text()
        made._tokenizer = self._changed(summary)
        made._read_added()
        made._changed_ids = frozenset(token.id for token in summary.added)
        made._check_post_processor()
        for token in summary.added:
            found = made._tokenizer.token_to_id(token.content)
            if found != token.id:
                raise ConfigError(
                    f"the token {token.content!r} has the id {token.id:,}, and tokenizers gives it {found:,}: ids of "
                    "added tokens follow the vocabulary's last one without a gap"
                )
        made.config = {**self.config, **summary.special}
        if summary.add_bos is not None:
            made.config["add_bos_token"] = summary.add_bos
        made._read_config()
        for name, token_id in (("bos_token", made.bos_token_id), ("eos_token", made.eos_token_id)):
            if name in summary.special and token_id is None:
                raise ConfigError(f"its {name} {summary.special[name]!r} isn't one of its tokens")
        return made

    def num_ids(self, num_rows: int) -> int:
        """Compute the bound of the ids that a request may name.

        It is the base's rows; of a version whose added tokens lie behind them, its last one's.

        Args:
            num_rows: rows of the base's head.
        """
        return max(num_rows, 1 + max(self._changed_ids, default=-1))

    def _changed(self, summary: TokenizerSummary) -> Any:
        """Build `tokenizers`' object with these differences; the model in it is this one's."""
        try:
            made = tokenizers.Tokenizer(self._tokenizer.model)
            made.decoder = self._tokenizer.decoder
            own = _rules(summary.parts)
            for name in ("normalizer", "pre_tokenizer", "post_processor"):
                setattr(made, name, getattr(own if name in summary.parts else self._tokenizer, name))
            added = dict(self._added_tokens)
            added |= {
                token.id: tokenizers.AddedToken(
                    token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
                for token in summary.added
            }
            # in the order of their ids, which are given to them in turn
            made.add_tokens([added[id_] for id_ in sorted(added)])
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # tokenizers raises bare Exception, and a panic isn't even one
            raise ConfigError(f"its rules can't be read: {str(error)[:200]}") from error
        return made

    def _check_post_processor(self) -> None:
        """Check that it puts tokens of this vocabulary around texts: its file may have any ids.

        Raises:
            ConfigError: it puts another id there, or none.
        """
        try:
            ids = {token_id for count in (1, 2) for token_id in self._joined([self._encode("", False)] * count, True)}
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the library's isn't an Exception
            raise ConfigError(f"its post-processor can't be used: {str(error)[:200]}") from error
        unknown = next((token_id for token_id in sorted(ids) if self.id_to_token(token_id) is None), None)
        if unknown is not None:
            raise ConfigError(f"its post-processor puts the id {unknown:,} around texts, which no token has")

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode `text` to token ids.

        `add_special_tokens` adds whatever the model's post-processor and ``add_bos_token`` put
        around it.

        Other threads run meanwhile: `tokenizers` lets go of the interpreter's lock for batches
        alone, so a text is a batch of one. Without offsets it takes a third of the time and a tenth
        of the memory.
        """
        return self._with_bos(self._encode(text, add_special_tokens), add_special_tokens)

    def encode_within(
        self,
        text: str,
        pair: str | None = None,
        *,
        max_tokens: int | None,
        keeps_end: bool = False,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Encode `text`, or the two texts of a pair, to token ids, cut to `max_tokens`.

        The texts are cut, not what the post-processor puts around them; of a pair the longer one
        first, as transformers does.

        Args:
            max_tokens: None: nothing is cut.
            keeps_end: whether a text loses tokens at its beginning.
        """
        parts = [self._encode(part, False) for part in (text, pair) if part is not None]
        if max_tokens is not None:
            num_added = self._num_added(len(parts)) if add_special_tokens else 0
            lengths = _cut([len(part) for part in parts], max(0, max_tokens - num_added))
            for part, length in zip(parts, lengths, strict=True):
                _truncate(part, length, keeps_end=keeps_end)
        return self._joined(parts, add_special_tokens)[:max_tokens]

    def _num_added(self, num_parts: int) -> int:
        """Count the special tokens that are put around that many texts."""
        return len(self._joined([self._encode("", False) for _ in range(num_parts)], True))

    def _joined(self, parts: Sequence[Any], add_special_tokens: bool) -> list[int]:
        """Join one encoding, or a pair's two, to token ids."""
        pair = parts[1] if len(parts) > 1 else None
        return self._with_bos(self._tokenizer.post_process(parts[0], pair, add_special_tokens), add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> Any:
        if len(text) <= _SHORT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def _with_bos(self, encoding: Any, add_special_tokens: bool) -> list[int]:
        """Add to an encoding's token ids the first one that ``add_bos_token`` requires."""
        ids: list[int] = encoding.ids
        if not add_special_tokens or self._add_bos is None or self.bos_token_id is None:
            return ids
        starts_with_bos = bool(ids) and ids[0] == self.bos_token_id
        if self._add_bos and not starts_with_bos:
            return [self.bos_token_id, *ids]
        if not self._add_bos and starts_with_bos and encoding.special_tokens_mask[0]:
            return ids[1:]
        return ids

    def least_tokens(self, text: str) -> int:
        """Compute a number of tokens that `text` has at least, from its bytes.

        0 where nothing is proven of this tokenizer.
        """
        # a version's added tokens may be longer than any of the base's
        return self._bound.least_tokens(text) if self.base is None else 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode `token_ids` to text.

        Ids that the vocabulary doesn't have are left out; bytes that aren't UTF-8 become U+FFFD.
        """
        ids = list(token_ids)
        if len(ids) <= _SHORT_CHARS:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        id_: int | None = self._tokenizer.token_to_id(token)
        return id_

    def id_to_token(self, token_id: int) -> str | None:
        """Look up the vocabulary's own spelling (``Ġthe``, ``▁the``, ``<0xE4>``).

        None for an id that the vocabulary doesn't have.
        """
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """Find the bytes that this token adds to a text, special tokens included.

        They are empty for an id that the vocabulary doesn't have.
        """
        return self.bytes_of[token_id]

    def _read_bytes(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._fallback_bytes:
            return bytes((self._fallback_bytes[token_id],))
        if self.is_byte_level:
            try:
                return bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:
                # An added token that isn't spelled in the byte alphabet stands for itself.
                return token.encode()
        return token.encode() if token_id in self._added_tokens else token.replace("▁", " ").encode()

    def is_fallback_byte(self, token_id: int) -> bool:
        """Check whether this token is one byte of a character that the vocabulary lacks.

        Such a token is ``<0xE4>``.
        """
        return token_id in self._fallback_bytes

    def _find_fallback_bytes(self) -> dict[int, int]:
        """Map token ids to bytes, for a decoder that reads ``<0x00>`` … ``<0xFF>`` as bytes."""
        if not self._has_byte_fallback:
            return {}
        ids = ((self._tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        return {id_: byte for id_, byte in ids if id_ is not None}


class _TokenBytes(dict[int, bytes]):
    """Bytes of a tokenizer's tokens, each read when it is first looked up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        # a tokenizer that is dropped is freed at once
        self._tokenizer = weakref.ref(tokenizer)

    def __missing__(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise InvariantViolation("Bytes of a token were looked up after their tokenizer was dropped.")
        if tokenizer.base is not None and token_id not in tokenizer._changed_ids:
            return tokenizer.base.bytes_of[token_id]
        data = tokenizer._read_bytes(token_id)
        if data:
            self[token_id] = data  # at most one entry per token of the vocabulary
        return data


def _rules(parts: Mapping[str, Any]) -> Any:
    """Build a tokenizer of no words that has these rules."""
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}
    return tokenizers.Tokenizer.from_str(json.dumps({**empty, **parts}))


def _cut(lengths: Sequence[int], room: int) -> list[int]:
    """Cut one or two texts to lengths that fit the room together, the longer one first."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    short = min(min(lengths), room // 2)
    return [short, room - short] if lengths[0] <= lengths[1] else [room - short, short]


def _truncate(encoding: Any, length: int, *, keeps_end: bool) -> None:
    """Cut an encoding to that many tokens.

    `tokenizers` keeps what it cuts off, as an encoding for each piece of the new length, and
    post-processes all of these, of a pair each with each: a million of one token take a gigabyte.
    By halves there is one such piece.
    """
    direction = "left" if keeps_end else "right"
    while len(encoding) > 2 * max(1, length):
        encoding.truncate(-(-len(encoding) // 2), direction=direction)
    encoding.truncate(length, direction=direction)


def _token_content(token: object) -> str | None:
    """Read a special token's text.

    It is written as a string, or as an object with its ``content``.
    """
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the object in the file; empty when there is no such file.

    Raises:
        ConfigError: it isn't JSON, isn't an object, or is larger than 16 MiB.
    """
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} should hold a JSON object, it holds a {type(value).__name__}.")
    return value
