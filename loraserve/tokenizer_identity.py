"""What decides how a ``tokenizer.json`` turns texts into token ids, small enough to be sent.

An adapter knows the ids of the tokenizer that it was trained with; the server has the base's
alone. So a push sends a summary of the adapter's own: hashes of what has megabytes, and whole what
may differ from the base's and still be served: added tokens, rules, special tokens. The server
compares, and keeps the differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

MAX_FILE_BYTES = 64 << 20
"""Bytes of the largest ``tokenizer.json`` that is read: the largest known have 35 MB."""
MAX_BYTES = 1 << 20
"""Bytes of the largest summary."""
MAX_PART_BYTES = 64 << 10
"""Bytes of the largest part of rules that a summary holds."""
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
SPECIAL_FILE, ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
TOKENIZER_FILES: Mapping[str, int] = {
    TOKENIZER_FILE: MAX_FILE_BYTES,
    CONFIG_FILE: 16 << 20,
    SPECIAL_FILE: 1 << 20,
    ADDED_FILE: 16 << 20,
}
"""Files of a tokenizer that a summary is made of, and the bytes of the largest that are read."""
PARTS = ("normalizer", "pre_tokenizer", "post_processor")
"""Rules of a tokenizer that a version may have of its own."""
SPECIAL_TOKENS = ("bos_token", "eos_token")
"""Special tokens that a version may name, by the names that chat templates have for them."""
BLOCK_IDS = 256
"""Ids of a vocabulary that one hash covers, so that the first difference can be found."""
MAX_RULES = 16
"""Steps of one part of rules."""
_PLAIN_RULES: Mapping[str, frozenset[str]] = {
    "normalizer": frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "Prepend", "Replace"}),
    "pre_tokenizer": frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}),
    "post_processor": frozenset({"ByteLevel", "TemplateProcessing", "RobertaProcessing", "BertProcessing"}),
}
"""Rules that a version may have of its own: each takes time and makes text in proportion to a text.

A regex of a tenant's may take endless time, in a thread of the server.
"""
_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
_MAX_PREPENDED = 8
_MAX_ID = (1 << 31) - 1
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
_UNSET = (None, False, "")
"""Values of a model's fields with which they do nothing, as if they weren't there."""
_COSMETIC = {"trim_offsets": (True, False), "use_regex": (True,)}
"""Settings of a pre-tokenizer that change no token with these values; not every version of the
library writes them.
"""


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """Hashes of the parts of a tokenizer that decide a text's tokens.

    Padding, truncation and what else is for batches isn't among them.

    Attributes:
        num_tokens: tokens, added ones included.
        tokens: of the tokens with their ids.
        merges: of the merges, in order.
        normalizer, pre_tokenizer: of the settings.
        post_processor: of the tokens that are put around a text.
    """

    num_tokens: int
    tokens: str
    merges: str
    normalizer: str
    pre_tokenizer: str
    post_processor: str

    @classmethod
    def of(cls, definition: Mapping[str, Any]) -> Self:
        """Return the identity of a tokenizer.json's object.

        Raises:
            AttributeError, LookupError, TypeError: it isn't one.
        """
        ids = token_ids(definition)
        return cls(
            num_tokens=len(ids),
            tokens=_hash(sorted(ids.items())),
            merges=_hash(merges(definition)),
            normalizer=_hash(_without_cosmetics(definition.get("normalizer"))),
            pre_tokenizer=_hash(_without_cosmetics(definition.get("pre_tokenizer"))),
            post_processor=_hash(_added_around(definition.get("post_processor"))),
        )

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the identity in a JSON object of its fields; None for another text."""
        try:
            value = json.loads(text)
            given = {field.name: value[field.name] for field in fields(cls)}
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        hashes = [item for name, item in given.items() if name != "num_tokens"]
        is_one = type(given["num_tokens"]) is int and all(isinstance(item, str) for item in hashes)
        return cls(**given) if is_one else None


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token beside a vocabulary's own, with what `tokenizers` looks at to find it in a text."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """Return an entry of a tokenizer.json's ``added_tokens``.

        Raises:
            LookupError, TypeError, ValueError: it isn't one.
        """
        token_id, content = value["id"], value["content"]
        is_id = type(token_id) is int and 0 <= token_id <= _MAX_ID
        if not is_id or not isinstance(content, str) or not content:
            raise ValueError("an added token has no id, or no content")
        return cls(token_id, content, **{flag: bool(value.get(flag)) for flag in _FLAGS})


@dataclass(frozen=True, slots=True)
class TokenizerSummary:
    """Tokenizer of an adapter, compared with the base's; and, reduced, its differences.

    Attributes:
        identity: of the ``tokenizer.json``; None: there is none.
        model: hash of the vocabulary and merges without added tokens.
        blocks: hash of each `BLOCK_IDS` ids of that vocabulary.
        added: added tokens; of a reduced one, those that differ from the base's.
        parts: rules by the names of `PARTS`, of `MAX_PART_BYTES` at most; of a reduced one, those
            that differ.
        special: special tokens by the names of `SPECIAL_TOKENS`, as far as they are named.
        add_bos: whether texts begin with ``bos_token``; None: the post-processor says.
        chat_templates: those of ``tokenizer_config.json``, by name.
        decoder: hash of the rules by which tokens become text; empty: it isn't known.
        is_reduced: whether what isn't in it is the base's.
    """

    identity: TokenizerIdentity | None = None
    model: str = ""
    blocks: tuple[str, ...] = ()
    added: tuple[AddedToken, ...] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    special: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    decoder: str = ""
    is_reduced: bool = False

    @classmethod
    def of_files(cls, files: Mapping[str, bytes]) -> TokenizerSummary | None:
        """Return the summary of a tokenizer's files; None: there are none.

        Args:
            files: by the names of `TOKENIZER_FILES`.

        Raises:
            ValueError: one can't be read, or two contradict each other; the message names it.
        """
        if not files:
            return None
        read = {name: _read_object(name, data) for name, data in files.items()}
        config, listed = read.get(CONFIG_FILE, {}), read.get(ADDED_FILE, {})
        special = _special_tokens(config, read.get(SPECIAL_FILE, {}))
        add_bos = config.get("add_bos_token")
        common: dict[str, Any] = {
            "special": special,
            "add_bos": add_bos if isinstance(add_bos, bool) else None,
            "chat_templates": _templates(config.get("chat_template")),
        }
        definition = read.get(TOKENIZER_FILE)
        if definition is None:
            tokens = tuple(AddedToken.of({"content": content, "id": id_}) for content, id_ in listed.items())
            return _in_unicode(cls(added=tokens, **common))
        try:
            identity, ids = TokenizerIdentity.of(definition), token_ids(definition)
            added = tuple(sorted(map(AddedToken.of, definition.get("added_tokens") or ()), key=lambda token: token.id))
            model, blocks = _model_hashes(definition)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{TOKENIZER_FILE} isn't a tokenizer ({type(error).__name__})") from None
        for content, id_ in listed.items():
            if ids.get(content) != id_:
                raise ValueError(
                    f"{ADDED_FILE} gives the token {content!r} the id {id_}, and {TOKENIZER_FILE} {ids.get(content)}"
                )
        parts = {name: definition.get(name) for name in PARTS}
        parts = {name: part for name, part in parts.items() if len(_canonical(part)) <= MAX_PART_BYTES}
        common["decoder"] = _hash(_decoding(definition.get("decoder")))
        return _in_unicode(cls(identity, model, blocks, added, parts, **common))

    @classmethod
    def read(cls, directory: Path) -> TokenizerSummary | None:
        """Return the summary of the files in a directory; None: there are none.

        It may take a second: call it on a thread.

        Raises:
            ValueError: as `of_files`; or a file is too large.
            OSError: one can't be read.
        """
        files = {}
        for name, max_bytes in TOKENIZER_FILES.items():
            path = directory / name
            if path.is_file():
                if path.stat().st_size > max_bytes:
                    raise ValueError(f"{name} has more than {max_bytes:,} bytes")
                files[name] = path.read_bytes()
        return cls.of_files(files)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the summary that `text` once returned; None for another text."""
        try:
            value = json.loads(text)
            if value.keys() - {field.name for field in fields(cls)}:
                return None
            identity = value.get("identity")
            read_identity = None if identity is None else TokenizerIdentity.parse(json.dumps(identity))
            added = tuple(_token_of(row) for row in value.get("added", ()))
            found = cls(
                read_identity,
                value.get("model", ""),
                tuple(value.get("blocks", ())),
                added,
                value.get("parts", {}),
                value.get("special", {}),
                value.get("add_bos"),
                value.get("chat_templates", {}),
                value.get("decoder", ""),
                value.get("is_reduced", False),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        texts = [found.model, found.decoder, *found.blocks]
        names = [*found.special.items(), *found.chat_templates.items()] if _are_objects(found) else None
        is_one = (
            (identity is None) == (read_identity is None)
            and names is not None
            and all(isinstance(item, str) for item in (*texts, *(text for pair in names for text in pair)))
            and set(found.parts) <= set(PARTS)
            and set(found.special) <= set(SPECIAL_TOKENS)
            and (found.add_bos is None or isinstance(found.add_bos, bool))
            and isinstance(found.is_reduced, bool)
            and _is_unicode(value)
        )
        return found if is_one else None

    def text(self) -> str:
        """Return it as canonical JSON."""
        value: dict[str, Any] = {
            "identity": None if self.identity is None else asdict(self.identity),
            "model": self.model,
            "blocks": list(self.blocks),
            "added": [_row_of(token) for token in self.added],
            "parts": dict(self.parts),
            "special": dict(self.special),
            "add_bos": self.add_bos,
            "chat_templates": dict(self.chat_templates),
            "decoder": self.decoder,
            "is_reduced": self.is_reduced,
        }
        return _canonical({name: item for name, item in value.items() if item not in (None, "", [], {}, False)})

    @property
    def added_end(self) -> int:
        """The id behind the last of the added tokens; 0: there are none."""
        return max((token.id + 1 for token in self.added), default=0)

    def conflict(self, base: Self) -> str | None:
        """Return why no base with that tokenizer can serve this one, as in "it …"; None: it can.

        Args:
            base: summary of the base's own.
        """
        mine, other = self.identity, base.identity
        if other is None:
            return "can't be compared: the base's can't be read"
        if mine is not None and self.model != base.model:
            return _model_difference(self, base)
        by_id, by_content = {token.id: token for token in base.added}, {token.content: token for token in base.added}
        own = {token.id: token for token in self.added}
        for token in self.added:
            if own[token.id] != token:
                return f"gives the id {token.id:,} to two tokens, {token.content!r} and {own[token.id].content!r}"
            known, same = by_id.get(token.id), by_content.get(token.content)
            if known is not None and known.content != token.content:
                return f"has the token {token.content!r} where the base has {known.content!r} (id {token.id:,})"
            if same is not None and same.id != token.id:
                return f"gives the token {token.content!r} the id {token.id:,}; the base's is {same.id:,}"
        missing = next((token for token in base.added if token.id not in own), None)
        if mine is not None and missing is not None and not self.is_reduced:
            return f"lacks the base's token {missing.content!r} (id {missing.id:,})"
        if mine is None and any(token.id not in by_id for token in self.added):
            token = next(token for token in self.added if token.id not in by_id)
            return f"is in {ADDED_FILE} alone, which adds {token.content!r}"
        return None

    def unserved_rules(self, base: Self) -> dict[str, str]:
        """Return the rules that differ from the base's and that no version has: what is in them.

        The base's are used in their place. Those of a GGUF file are loraserve's own words for what
        llama.cpp names, and so differ from a folder's also where they do the same.
        """
        found = {}
        for name in self._differing_parts(base):
            if name not in self.parts or len(_canonical(self.parts[name])) > MAX_PART_BYTES:
                found[name] = f"more than {MAX_PART_BYTES:,} bytes"
            elif (rule := _unserved_rule(name, self.parts[name])) is not None:
                found[name] = rule
        return found

    def _differing_parts(self, base: Self) -> list[str]:
        mine, other = self.identity, base.identity
        if mine is None or other is None:
            return []
        return [name for name in PARTS if getattr(mine, name) != getattr(other, name)]

    def reduced(self, base: Self) -> Self:
        """Return what of it differs from the base's, which it doesn't conflict with."""
        known, mine = {token.id: token for token in base.added}, self.identity
        unserved = self.unserved_rules(base)
        return replace(
            self,
            blocks=(),
            added=tuple(token for token in self.added if mine is not None and known.get(token.id) != token),
            parts={name: self.parts[name] for name in self._differing_parts(base) if name not in unserved},
            special={name: token for name, token in self.special.items() if base.special.get(name) != token},
            add_bos=None if self.add_bos == base.add_bos else self.add_bos,
            chat_templates={},
            decoder="",
            is_reduced=True,
        )

    @property
    def has_differences(self) -> bool:
        """Whether a reduced summary differs from the base's tokenizer in anything."""
        return bool(self.added or self.parts or self.special or self.add_bos is not None)

    def applied_to(self, definition: Mapping[str, Any]) -> dict[str, Any]:
        """Return a base's tokenizer.json with these differences."""
        added = {token["id"]: token for token in definition.get("added_tokens") or ()}
        added |= {token.id: asdict(token) for token in self.added}
        return {**definition, **self.parts, "added_tokens": [added[id_] for id_ in sorted(added)]}


def _unserved_rule(name: str, part: Any) -> str | None:
    """Return what of a part of rules isn't one of `_PLAIN_RULES`; None: nothing."""
    if part is None:
        return None
    kind = part.get("type") if isinstance(part, dict) else None
    steps = part.get(_STEPS[name]) if kind == "Sequence" else [part]
    if not isinstance(steps, list) or len(steps) > MAX_RULES:
        return f"more than {MAX_RULES} steps"
    for step in steps:
        kind = step.get("type") if isinstance(step, dict) else None
        if not isinstance(kind, str) or kind not in _PLAIN_RULES[name]:
            return f"the step {kind!r}"
        pattern, content = step.get("pattern"), step.get("content", "")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        if kind == "Replace" and not (isinstance(text, str) and isinstance(content, str) and len(content) <= len(text)):
            return "a Replace by a regex, or by a longer text"
        if kind == "Prepend" and len(str(step.get("prepend", ""))) > _MAX_PREPENDED:
            return "a long Prepend"
    return None


def _in_unicode(found: TokenizerSummary) -> TokenizerSummary:
    if not _is_unicode(json.loads(found.text())):
        raise ValueError(f"{TOKENIZER_FILE}, {CONFIG_FILE} or {SPECIAL_FILE} has half of a surrogate pair")
    return found


def _is_unicode(value: Any) -> bool:
    """Return whether all texts in a JSON value can be encoded: escapes may be half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_objects(found: TokenizerSummary) -> bool:
    return all(isinstance(value, dict) for value in (found.parts, found.special, found.chat_templates))


def _model_difference(own: TokenizerSummary, base: TokenizerSummary) -> str:
    """Return how two vocabularies without added tokens differ."""
    if own.identity is not None and base.identity is not None and own.blocks == base.blocks:
        return "merges tokens by other rules" if own.identity.merges != base.identity.merges else "has another model"
    pairs = enumerate(zip(own.blocks, base.blocks, strict=False))
    number = next((number for number, (mine, other) in pairs if mine != other), min(len(own.blocks), len(base.blocks)))
    mine_tokens = 0 if own.identity is None else own.identity.num_tokens
    base_tokens = 0 if base.identity is None else base.identity.num_tokens
    return (
        f"has another vocabulary: {mine_tokens:,} tokens, the base's {base_tokens:,}, and the first that differs has "
        f"an id from {number * BLOCK_IDS:,} to {(number + 1) * BLOCK_IDS - 1:,}"
    )


def _model_hashes(definition: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the hash of a tokenizer's model, and of each block of its ids."""
    model = definition["model"]
    vocab = model.get("vocab") or {}
    rest = {
        name: value for name, value in model.items() if name not in ("vocab", "merges", "type") and value not in _UNSET
    }
    tokens = sorted(vocab.items(), key=lambda item: item[1]) if isinstance(vocab, dict) else [*map(tuple, vocab)]
    whole = _hash([tokens, merges(definition), rest])
    ids = token_ids({"model": model})
    blocks: dict[int, list[tuple[int, str]]] = {}
    for content, id_ in ids.items():
        blocks.setdefault(id_ // BLOCK_IDS, []).append((id_, content))
    return whole, tuple(_hash(sorted(blocks[number]))[:8] for number in sorted(blocks))


def _read_object(name: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} isn't JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} isn't an object")
    return value


def _special_tokens(config: Mapping[str, Any], listed: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that two files name.

    Raises:
        ValueError: they name different ones.
    """
    found = {}
    for name in SPECIAL_TOKENS:
        mine, other = _content(config.get(name)), _content(listed.get(name))
        if mine is not None and other is not None and mine != other:
            raise ValueError(f"{CONFIG_FILE} has the {name} {mine!r}, and {SPECIAL_FILE} {other!r}")
        token = other if mine is None else mine
        if token is not None:
            found[name] = token
    return found


def _content(token: object) -> str | None:
    """Return a special token's text: a string, or an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _templates(value: object) -> dict[str, str]:
    """Return the chat templates of a config, which has one or a list of named ones."""
    if isinstance(value, str):
        return {"default": value}
    found: Iterable[Any] = value if isinstance(value, list) else ()
    return {
        item["name"]: item["template"]
        for item in found
        if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
    }


def _row_of(token: AddedToken) -> list[Any]:
    return [token.id, token.content, *(int(getattr(token, flag)) for flag in _FLAGS)]


def _token_of(row: list[Any]) -> AddedToken:
    id_, content, *flags = row
    return AddedToken.of({"id": id_, "content": content, **dict(zip(_FLAGS, flags, strict=True))})


def token_ids(definition: Mapping[str, Any]) -> dict[str, int]:
    """Return each token's id; a list of (token, score) numbers its tokens."""
    vocab = definition["model"].get("vocab") or {}
    ids = dict(vocab) if isinstance(vocab, dict) else {pair[0]: number for number, pair in enumerate(vocab)}
    for token in definition.get("added_tokens") or ():
        ids[token["content"]] = token["id"]
    return ids


def merges(definition: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the merges as pairs, whichever way they are written."""
    found = definition["model"].get("merges") or []
    return [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in found]


def _without_cosmetics(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_cosmetics(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_cosmetics(item)
        for name, item in value.items()
        if not (name in _COSMETIC and item in _COSMETIC[name])
    }


def _decoding(rule: Any) -> Any:
    """Return of a decoder what changes a text, whichever version of the library wrote it."""
    if not isinstance(rule, dict):
        return None
    kind = rule.get("type")
    if kind == "Sequence":
        return [_decoding(step) for step in rule.get("decoders") or ()]
    if kind == "ByteLevel":
        # its settings are for texts that become tokens
        return {"type": kind}
    if kind == "Metaspace":
        prepends = rule.get("prepend_scheme", "always" if rule.get("add_prefix_space", True) else "never")
        return {"type": kind, "replacement": rule.get("replacement", "▁"), "prepends": prepends}
    return rule


def _added_around(processor: Any) -> Any:
    """Return the parts of a post-processor that add tokens; None where none does."""
    if not isinstance(processor, dict) or processor.get("type") == "ByteLevel":
        return None
    if processor.get("type") == "Sequence":
        return [part for part in map(_added_around, processor.get("processors") or ()) if part is not None] or None
    return _without_cosmetics(processor)


def _hash(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
