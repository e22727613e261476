"""A tokenizer.json of the vocabulary in a GGUF file.

Imports no torch. Source of the splits: llama.cpp's `llama-vocab.cpp`, which takes them from the
models' own tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.gguf.gguf_file import Gguf

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD, _MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_MARKS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_MARKS_SLASH}|{_SPACES}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_MARKS_SLASH}|{_SPACES}"
_SPLITS: Mapping[str, tuple[Sequence[str], bool]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "midm-2.0", "pixtral", "lfm2"), ((_LLAMA3,), True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), ((_LLAMA3,), False)),
    **dict.fromkeys(("chatglm-bpe",), ((_LLAMA3,), False)),
    "glm4": ((_LLAMA3,), True),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2"), ((_QWEN2,), False)
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), ((r"\p{N}", _GPT2), False)
    ),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "jais", "trillion", "exaone4"), ((_GPT2,), False)),
    "tekken": ((_TEKKEN,), True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), ((_GPT4O,), False)),
}
"""Splits by `tokenizer.ggml.pre`: a text's, one after the other, and whether a split that is a
token itself isn't merged.
"""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
"""SentencePiece's sign for a space."""
_NAMES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_WORDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>")
"""Tokens that end an answer whatever the file's own keys are, as llama.cpp takes them."""


class GgufVocabulary:
    """The tokens of a file, and the files that a Hugging Face directory has of them.

    Raises:
        ModelError: the file has no tokenizer, or one of a kind that isn't implemented.
    """

    def __init__(self, gguf: Gguf) -> None:
        self._gguf, self._metadata = gguf, gguf.metadata
        self._model = self._get("model")
        self._tokens: list[str] = self._list("tokens")
        types = self._metadata.get("tokenizer.ggml.token_type")
        self._types = types if isinstance(types, list) and len(types) == len(self._tokens) else None
        if self._model not in ("gpt2", "llama"):
            raise ModelError(
                f"{gguf.files[0]} has a tokenizer of the kind {self._model!r}; expected gpt2 (byte-level BPE) or "
                "llama (SentencePiece).",
                hint="Give the Hugging Face directory of the base.",
            )

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def tokenizer(self) -> dict[str, Any]:
        """Build tokenizer.json."""
        parts = self._byte_level() if self._model == "gpt2" else self._sentence_piece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            **parts,
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """Build tokenizer_config.json."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for name in _NAMES:
            token = self._token(name)
            if token is not None:
                config[f"{name}_token"] = token
        config["add_bos_token"] = self._adds_bos()
        return config

    def chat_template(self) -> str | None:
        """Read the template of chats; None: the file has none."""
        template = self._metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def generation_config(self) -> dict[str, Any]:
        """Build generation_config.json: the tokens that end an answer."""
        ends = [self._metadata.get(f"tokenizer.ggml.{name}") for name in _ENDS]
        ends += [number for number, token in self._special() if token in _END_WORDS]
        valid = dict.fromkeys(end for end in ends if isinstance(end, int) and 0 <= end < len(self._tokens))
        return {"eos_token_id": list(valid)}

    def _get(self, name: str) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            raise ModelError(
                f"{self._gguf.files[0]} has no tokenizer.ggml.{name}.",
                hint="Give a file with its tokenizer, or the Hugging Face directory of the base.",
            )
        return value

    def _list(self, name: str) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list):
            raise ModelError(f"{self._gguf.files[0]}: tokenizer.ggml.{name} isn't an array.")
        return value

    def _kind(self, number: int) -> int:
        return _NORMAL if self._types is None else self._types[number]

    def _special(self) -> list[tuple[int, str]]:
        return [(i, token) for i, token in enumerate(self._tokens) if self._kind(i) in (_CONTROL, _UNKNOWN)]

    def _token(self, name: str) -> str | None:
        number = self._metadata.get(f"tokenizer.ggml.{_NAMES[name]}")
        return self._tokens[number] if isinstance(number, int) and 0 <= number < len(self._tokens) else None

    def _adds_bos(self) -> bool:
        flag = self._metadata.get("tokenizer.ggml.add_bos_token")
        if isinstance(flag, bool):
            return flag
        # as llama.cpp does where a file is silent
        pre = str(self._metadata.get("tokenizer.ggml.pre"))
        return self._model == "llama" or (pre in _SPLITS and _SPLITS[pre][1] and pre != "glm4")

    def _added_tokens(self) -> list[dict[str, Any]]:
        kinds = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
        return [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kinds[self._kind(number)],
            }
            for number, token in enumerate(self._tokens)
            if self._kind(number) in kinds
        ]

    def _byte_level(self) -> dict[str, Any]:
        pre = str(self._metadata.get("tokenizer.ggml.pre"))
        if pre not in _SPLITS:
            raise ModelError(
                f"{self._gguf.files[0]} splits texts as {pre!r} (tokenizer.ggml.pre), which isn't implemented.",
                hint="Give the Hugging Face directory of the base.",
            )
        splits, ignores_merges = _SPLITS[pre]
        merges = self._list("merges")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        return {
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    *(
                        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
                        for split in splits
                    ),
                    {**byte_level, "use_regex": False},
                ],
            },
            "post_processor": self._post_processor(),
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                **_bpe(self._tokens, [merge.split(" ", 1) for merge in merges]),
                "ignore_merges": ignores_merges,
            },
        }

    def _sentence_piece(self) -> dict[str, Any]:
        scores = self._list("scores")
        adds_space = self._metadata.get("tokenizer.ggml.add_space_prefix")
        prefixes = adds_space is not False
        normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefixes:
            normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "post_processor": self._post_processor(),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                **_bpe(self._tokens, _merges_of(self._tokens, scores, self._kind)),
                "unk_token": self._token("unk"),
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
            },
        }

    def _post_processor(self) -> dict[str, Any] | None:
        """Build what puts the first token before a text."""
        first = self._token("bos")
        number = self._metadata.get("tokenizer.ggml.bos_token_id")
        if first is None or not self._adds_bos():
            return None
        special = {"SpecialToken": {"id": first, "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                special,
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": first, "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {first: {"id": first, "ids": [number], "tokens": [first]}},
        }


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [list(merge) for merge in merges],
    }


def _merges_of(tokens: Sequence[str], scores: Sequence[float], kind: Any) -> list[list[str]]:
    """Compute the merges that make SentencePiece's tokens, those of the best score first."""
    ids = {token: number for number, token in enumerate(tokens) if kind(number) in (_NORMAL, _USER_DEFINED, _UNUSED)}
    merges: list[tuple[float, int, int, list[str]]] = []
    for token, number in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-scores[number], ids[left], ids[right], [left, right]))
    merges.sort(key=lambda merge: merge[:3])
    return [merge for _, _, _, merge in merges]
