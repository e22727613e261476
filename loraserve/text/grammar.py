"""Compile grammars for a base's tokenizer with llguidance, within bounds."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loraserve.errors import (
    ConfigError,
    GrammarCrashed,
    GrammarDeadEnd,
    GrammarTooComplex,
    InvalidRequest,
    UnsupportedParameter,
)
from loraserve.tokenizer_identity import TokenizerSummary, token_ids

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMPILE_FUEL = 1_000_000
"""Steps of building a grammar's lexer, at 50,000 a millisecond."""
MASK_FUEL = 100_000
"""Steps of the lexer in one mask, at 14,000 a millisecond.

With `MASK_ITEMS` a mask takes 50 ms at most, mostly.
"""
MASK_ITEMS = 10_000
"""Items of the parser in one mask.

An ambiguous grammar makes a few hundred a millisecond, any other some thousand.
"""
MAX_LEXER_STATES = 8192
"""States of a grammar's lexer, of one to two kilobytes each. A lexer with more is rebuilt."""
MAX_GRAMMAR_SIZE = 250_000
"""Symbols in a grammar's productions."""
MAX_OWN_TOKENIZERS = 4
"""Versions' tokenizers that are kept for further grammars, the last ones used."""
BYTES_PER_TOKEN = 256
"""Bytes of llguidance's form of a tokenizer, by its tokens, with room to spare."""

_IGNORED = re.compile(r"\b(?:temperature|capture|stop_capture)\b", re.ASCII)
"""Attributes of Lark's rules that llguidance reads and a matcher doesn't follow."""
_IS_ATTRIBUTE = re.compile(r"Unknown attribute: ([a-z_]+)|Expected token '='")

PLACE = re.compile(r" \(line \d+, column \d+\)|line \d+, column \d+: ")
"""Place that an error's message names."""
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_PANIC = re.compile(r"(?:[A-Z][A-Za-z ]*: )?panic: ")
"""Beginning of llguidance's message where it has caught a panic of its own."""
_UNCLEAR = "it can't be compiled"
_DEAD_END = "NoExtensionBias"
"""llguidance's message where it has no token to allow, and the answer isn't complete."""

CRASH_HINT = "That is a bug of the server: report it, and write the grammar in another way."

_LIMITS = re.compile(
    r"too (?:many|large|complex|big|deep)|limit|max is|fuel|exceed|nest|unable to determine", re.IGNORECASE
)
_MEANINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), meaning)
    for pattern, meaning in (
        (r"Invalid type|type must be", "a type is none of JSON Schema's"),
        (r"Pointer .* does not exist|Reference segment|Unresolvable|retriev|[Rr]esource", "a $ref leads nowhere"),
        (r"oneOf constraints", "the alternatives of oneOf may overlap, and a grammar can't count them: use anyOf"),
        (r"min/maxProperties only", "minProperties and maxProperties need every listed property to be required"),
        (r"NoExtension|[Uu]nsatisfiable|No options in anyOf|always empty|is empty", "nothing satisfies it"),
        (r"circular references", "a $ref with siblings leads back to itself"),
        (r"[Uu]nimplemented|not supported|unsupported", "a part of it can't be enforced"),
        (r"unknown special token", "it names a special token that this model doesn't have"),
        (r"unknown name|not found|no start|start symbol", "a rule is missing"),
        (r"look-?around|look-?ahead|look-?behind", "regexes have no look-around here"),
        (r"regex parse error|invalid regex", "a regex can't be read"),
        (r"disjoint", "patternProperties may overlap, which can't be enforced"),
        (r"[Uu]nknown format", "a format can't be enforced"),
        (r"Expected|must be|invalid|Invalid", "a part of it isn't what its place asks for"),
    )
)
"""Meanings of llguidance's messages.

Their own words hold pieces of the grammar, which no answer repeats.
"""


class GrammarCompiler:
    """Compile grammars for one tokenizer. Safe to use from several threads.

    llguidance and its copy of the tokenizer are loaded at the first use, which takes a second for a
    vocabulary of 128,000 tokens. Without llguidance, as on a machine that has nothing but torch,
    everything else works.

    Args:
        model_dir: the base's folder, with its ``tokenizer.json``.
        vocab_size: the logits' width, which may be more or less than the tokenizer's vocabulary.
        eos_token_ids: tokens that end an answer once its grammar is satisfied.
        differences: of a version's tokenizer from the base's; None: it is the base's.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        differences: TokenizerSummary | None = None,
    ) -> None:
        self._model_dir, self._path = model_dir, model_dir / "tokenizer.json"
        self._differences = differences
        self._own: OrderedDict[str, GrammarCompiler] = OrderedDict()
        self.vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._limits: LLParserLimits | None = None

    def load(self) -> LLTokenizer:
        """Build llguidance's form of the tokenizer on the first call; return it.

        Raises:
            ConfigError: llguidance isn't installed.
            UnsupportedParameter: it can't work with this base's tokenizer.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build()
            return self._tokenizer

    @property
    def own_bytes(self) -> int:
        """Bytes that this tokenizer takes in addition to the base's."""
        return 0 if self._differences is None else BYTES_PER_TOKEN * self.vocab_size

    def of(self, tokenizer: str) -> GrammarCompiler:
        """Find the compiler for a version's tokenizer; it takes a second where it is built now.

        Args:
            tokenizer: its differences from the base's, as `TokenizerSummary.text`; empty: it is the
                base's.

        Raises:
            UnsupportedParameter: they can't be read.
        """
        if not tokenizer:
            return self
        with self._lock:
            if tokenizer not in self._own:
                self._own[tokenizer] = self._make_own(tokenizer)
            self._own.move_to_end(tokenizer)
            while len(self._own) > MAX_OWN_TOKENIZERS:
                self._own.popitem(last=False)
            return self._own[tokenizer]

    def _make_own(self, tokenizer: str) -> GrammarCompiler:
        differences = TokenizerSummary.parse(tokenizer)
        if differences is None:
            raise UnsupportedParameter("This version's tokenizer can't be read, so no grammar can be followed.")
        vocab_size = max(self.vocab_size, differences.added_end)
        return GrammarCompiler(self._model_dir, vocab_size, self._eos_token_ids, differences=differences)

    def compile(self, grammar: str) -> LLMatcher:
        """Compile a matcher at the grammar's beginning, without the interpreter's lock meanwhile.

        Args:
            grammar: llguidance's JSON form, or Lark.

        Raises:
            InvalidRequest: it is no grammar, or has something that isn't implemented.
            GrammarTooComplex: it is over a limit.
            ConfigError, UnsupportedParameter: as `load`.
        """
        matcher = self._matcher(grammar)
        if matcher.is_error():
            raise grammar_error(matcher.get_error())
        return matcher

    def check_attributes(self, lark: str) -> None:
        """Check that no rule of a grammar, which can be compiled, has an attribute without effect.

        llguidance itself finds where a word is an attribute, rather than a rule or text: it is
        run on the grammar with words there that don't exist.

        Raises:
            UnsupportedParameter: one has.
        """
        if not _IGNORED.search(lark):
            return
        ending = "q"
        while ending in lark:
            ending += "q"
        changed = _IGNORED.sub(lambda found: found[0] + ending, lark)
        first = self._matcher(json.dumps({"grammars": [{"lark_grammar": changed}]})).get_error().partition("\n")[0]
        found = _IS_ATTRIBUTE.search(first)
        if found is not None:
            # only this one may stand without a value
            name = (found[1] or "capture").removesuffix(ending)
            position = _POSITION.match(first)
            # the column is one of the changed text
            where = "" if position is None else f"line {position[1]}: "
            raise UnsupportedParameter(
                f"The grammar can't be used: {where}the attribute {name} of a rule is not supported.",
                hint="Send temperature beside the grammar." if name == "temperature" else "Leave it out.",
            )

    def _matcher(self, grammar: str) -> LLMatcher:
        tokenizer = self.load()
        from llguidance import LLMatcher

        return LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)

    def _build(self) -> LLTokenizer:
        try:
            from llguidance import LLParserLimits, LLTokenizer
        except ImportError as error:
            raise ConfigError(
                "Structured output needs llguidance, which isn't installed.", hint="pip install llguidance"
            ) from error
        if not self._eos_token_ids:
            raise UnsupportedParameter(
                "This base names no end-of-text token, so an answer that follows a grammar couldn't end.",
                hint="Add eos_token_id to the base's generation_config.json.",
            )
        self._limits = LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL,
            step_lexer_fuel=MASK_FUEL,
            step_max_items=MASK_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        text, eos_token_ids = self._path.read_text(encoding="utf-8"), list(self._eos_token_ids)
        try:
            if self._differences is not None:
                definition = self._differences.applied_to(json.loads(text))
                text = json.dumps(definition, ensure_ascii=False)
                end = token_ids(definition).get(self._differences.special.get("eos_token", ""))
                eos_token_ids += [] if end is None or end in eos_token_ids else [end]
            try:
                return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos_token_ids)
            except ValueError as error:
                if "vocab size too small" not in str(error):
                    raise
                # the tokenizer has tokens that the logits lack: their bits are never read
                return LLTokenizer(text, eos_token=eos_token_ids)
        except Exception as error:
            raise UnsupportedParameter(
                f"This base's tokenizer can't be used for structured output: {type(error).__name__}.",
                hint="It needs a byte-level vocabulary, or one with byte fallback.",
            ) from error


def is_dead_end(message: str) -> bool:
    """Check whether llguidance reports that it has no token to allow after the answer so far."""
    return message.startswith(_DEAD_END)


def dead_end_error() -> GrammarDeadEnd:
    """Build the error of an answer that can neither continue nor end."""
    return GrammarDeadEnd(
        "The grammar allows no token of this model after the answer so far.",
        hint="A part of the schema, regex or grammar that nothing satisfies can't be answered.",
    )


def grammar_error(message: str) -> InvalidRequest:
    """Build the error for llguidance's message on a grammar, without the grammar's own words."""
    if is_dead_end(message):
        return dead_end_error()
    first = message.strip().partition("\n")[0]
    if _PANIC.match(first):
        return GrammarCrashed("The grammar crashed its compiler.", hint=CRASH_HINT)
    position = _POSITION.match(first)
    where = f"line {position[1]}, column {position[2]}: " if position is not None else ""
    if _LIMITS.search(first):
        return GrammarTooComplex(f"The grammar is too complex to be followed{f' ({where[:-2]})' if where else ''}.")
    meaning = next((text for pattern, text in _MEANINGS if pattern.search(first)), _UNCLEAR)
    reason = re.search(r"^error: ([a-z ,-]{3,80})$", message, re.MULTILINE)
    return InvalidRequest(f"The grammar can't be used: {where}{meaning}{f' ({reason[1]})' if reason else ''}.")
