"""Formats of reasoning before an answer, and the parser that separates the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.format import LarkRules, special_id
from loraserve.text.tool_parsers.parser import Parser, ReasoningDelta, Steps, TextDelta, num_open
from loraserve.types import ThinkingBudget

_SPACE = r"/[ \t\r\n]{0,8}/"
"""White space after reasoning in a grammar: a model that is cut short may sample nothing else."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A family's format of reasoning.

    Attributes:
        name: its name in vLLM's ``--reasoning-parser``.
        openers, closers: texts before and after it.
        wrapper: texts around the answer that aren't part of it.
        is_implied: whether an answer begins with reasoning even without an opener.
    """

    name: str
    openers: tuple[str, ...] = ("<think>",)
    closers: tuple[str, ...] = ("</think>",)
    wrapper: tuple[str, ...] = ()
    is_implied: bool = False

    def is_open(self, prompt: str) -> bool | None:
        """Decide whether an answer to this prompt begins with reasoning.

        False: the prompt has closed it already. None: decided by the answer's beginning.
        """
        tail = prompt.rstrip()
        if tail.endswith(self.closers):
            return False
        return True if self.is_implied or tail.endswith(self.openers) else None

    def shown_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Collect the special tokens that the parser needs in the text."""
        ids = (special_id(tokenizer, marker) for marker in (*self.openers, *self.closers, *self.wrapper))
        return frozenset(id_ for id_ in ids if id_ is not None)

    def budget(self, tokenizer: Tokenizer, num_tokens: int, *, is_open: bool | None) -> ThinkingBudget | None:
        """Bound reasoning; None: its markers aren't single tokens, which can be forced.

        Args:
            is_open: as `is_open` returns it, and not False.
        """
        closers = [marker_id(tokenizer, marker) for marker in self.closers]
        openers = [] if is_open else [marker_id(tokenizer, marker) for marker in self.openers]
        if None in closers or None in openers:
            return None
        blanks = {id_ for text in _BLANKS for id_ in tokenizer.encode(text, add_special_tokens=False)}
        return ThinkingBudget(
            num_tokens=num_tokens,
            closers=tuple(id_ for id_ in closers if id_ is not None),
            openers=tuple(id_ for id_ in openers if id_ is not None),
            blanks=tuple(sorted(blanks)),
            is_open=bool(is_open),
        )

    def add_reasoning(self, rules: LarkRules, *, is_open: bool | None) -> str:
        """Add a rule for reasoning, or for none, to a grammar. Return its symbol."""
        if is_open is False:
            return ""
        opener = rules.marker(self.openers[0]) if is_open is None else ""
        thought = rules.add("thought", f"{opener} {rules.text_until('thinking', self.closers[0])} {_SPACE}")
        return f"{thought}?" if is_open is None else thought


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    format_.name: format_
    for format_ in (
        ReasoningFormat("qwen3"),
        ReasoningFormat("deepseek_r1", is_implied=True),
        ReasoningFormat("mistral", openers=("[THINK]",), closers=("[/THINK]",)),
        ReasoningFormat(
            "granite",
            openers=("<think>", "Here is my thought process:", "Here's my thought process:"),
            closers=("</think>", "Here is my response:", "Here's my response:"),
            wrapper=("<response>", "</response>"),
        ),
    )
}
"""Formats by their names in vLLM's ``--reasoning-parser``."""


_BLANKS = ("\n", "\n\n", " ", "  ")


def marker_id(tokenizer: Tokenizer, marker: str) -> int | None:
    """Find the token that a marker always is, whatever is around it; None: there is none."""
    token_id = tokenizer.token_to_id(marker)
    if token_id is None:
        return None
    # a token of the merges may be written in parts; an added one is found before any merge
    return token_id if token_id in tokenizer.encode(f"a{marker}b", add_special_tokens=False) else None


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Look up the format of this name, if there is one.

    ``auto`` is the format that the chat template's text shows.
    """
    if name != "auto":
        return REASONING_FORMATS.get(name)
    if "[THINK]" in template:
        return REASONING_FORMATS["mistral"]
    if "<|start_of_role|>" in template and ("thought process" in template or "<think>" in template):
        return REASONING_FORMATS["granite"]
    return REASONING_FORMATS["qwen3"] if "</think>" in template else None


class ReasoningParser(Parser):
    """Split a growing text into reasoning and answer, without the white space between them.

    Args:
        is_open: as `ReasoningFormat.is_open` returns it.
    """

    def __init__(self, format_: ReasoningFormat, *, is_open: bool | None) -> None:
        self._format = format_
        self._is_open = is_open
        super().__init__()

    def _parse(self) -> Steps[None]:
        text = self._text
        if self._is_open is not False:
            yield from self._skip_space()
            opener = yield from self._accept(*self._format.openers)
            if opener or self._is_open:
                yield from self._reasoning()
            else:
                text.rewind()
        yield from self._answer()

    def _reasoning(self) -> Steps[None]:
        """Emit reasoning up to its closer, and move to the answer's first character."""
        text, closers = self._text, self._format.closers
        yield from self._skip_space()
        text.settle()
        while True:
            found = min(((at, closer) for closer in closers if (at := text.rest.find(closer)) >= 0), default=None)
            if found is not None:
                at, closer = found
                behind = text.at + at + len(closer)
                text.at += len(text.rest[:at].rstrip())
                self._think(text.settle())
                text.at = behind
                break
            rest = text.rest
            text.at += len(rest) if text.is_over else len(rest[: len(rest) - num_open(rest, closers)].rstrip())
            self._think(text.settle())
            if text.is_over:
                return
            yield
        yield from self._skip_space()
        if self._format.wrapper:
            yield from self._accept(self._format.wrapper[0])
            yield from self._skip_space()
        text.settle()

    def _answer(self) -> Steps[None]:
        """Emit the rest of the text, without the wrapper's end."""
        text, closer = self._text, self._format.wrapper[1:]
        while True:
            rest = text.rest
            at = rest.find(closer[0]) if closer else -1
            text.at += at if at >= 0 else len(rest) - (0 if text.is_over else num_open(rest, closer))
            answer = text.settle()
            if answer:
                self._deltas.append(TextDelta(answer))
            if at >= 0:
                text.at += len(closer[0])
                text.settle()
            elif text.is_over:
                return
            else:
                yield

    def _think(self, reasoning: str) -> None:
        if reasoning:
            self._deltas.append(ReasoningDelta(reasoning))
