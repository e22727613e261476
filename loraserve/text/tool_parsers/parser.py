"""Incremental parsers of an answer's text, and their results.

A parser is a generator over text that grows: it yields where it needs more. It emits text only once
it is certain that no marker begins there, so that every way of cutting an answer into pieces gives
the same deltas, joined.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A parser's step: it yields to wait for more text, and returns what it has read."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the message's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Beginning of a tool call, whose arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of a call's arguments, which are the text of a JSON object."""

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | CallStart | ArgumentsDelta

_MAX_REREAD = 1 << 18
"""Characters that may be read a second time because they turned out to be no call.

Then markers are content too: otherwise the time to read nested ones would be quadratic.
"""
_SPACE = re.compile(r"\s*")
_NEVER = "(?!)"


class NotACall(Exception):
    """The text at the reader isn't a tool call, but content."""


class GrowingText:
    """Text that is read while it grows.

    Attributes:
        at: position of the reader in `text`.
        start: end of the settled text; the reader can go back to this position.
        is_over: whether the text is complete.
    """

    __slots__ = ("at", "is_over", "start", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = self.start = 0
        self.is_over = False

    def add(self, text: str) -> None:
        """Append text, and drop the settled text."""
        self.text = self.text[self.start :] + text
        self.at -= self.start
        self.start = 0

    @property
    def rest(self) -> str:
        """Text after the reader, copied."""
        return self.text[self.at :]

    def settle(self) -> str:
        """Take the text since the last settling; the reader can't go back behind it."""
        text = self.text[self.start : self.at]
        self.start = self.at
        return text

    def rewind(self) -> None:
        """Go back to the last settling."""
        self.at = self.start


def num_open(text: str, markers: Collection[str]) -> int:
    """Compute the length of the longest end of `text` that is a proper beginning of a marker."""
    return max(
        (n for marker in markers for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])),
        default=0,
    )


class Parser(ABC):
    """Turn a growing text into deltas. `push` each piece, then `finish` once."""

    def __init__(self) -> None:
        self._text = GrowingText()
        self._deltas: list[Delta] = []
        self._steps = self._parse()

    def push(self, text: str) -> Sequence[Delta]:
        """Parse more text; return the deltas that no further text can change."""
        self._text.add(text)
        next(self._steps, None)
        return self._take()

    def finish(self) -> Sequence[Delta]:
        """Finish parsing; return the remaining deltas: no more text will come."""
        self._text.is_over = True
        next(self._steps, None)
        return self._take()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Read all of the text. Where the text is over, don't yield."""

    def _take(self) -> Sequence[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _skip_space(self) -> Steps[None]:
        """Move past white space, to a character or the end of the text."""
        yield from self._run(_SPACE)

    def _peek(self) -> Steps[str]:
        """Peek at the next character; empty at the end of the text."""
        while self._text.at == len(self._text.text) and not self._text.is_over:
            yield
        return self._text.text[self._text.at : self._text.at + 1]

    def _next(self) -> Steps[str]:
        """Read the next character, and move past it.

        Raises:
            NotACall: the text is over.
        """
        char = yield from self._peek()
        if not char:
            raise NotACall
        self._text.at += 1
        return char

    def _accept(self, *literals: str) -> Steps[str | None]:
        """Move past the first of the literals that comes next, if one does."""
        text = self._text
        while True:
            for literal in literals:
                if text.text.startswith(literal, text.at):
                    text.at += len(literal)
                    return literal
                if not text.is_over and literal.startswith(text.text[text.at : text.at + len(literal)]):
                    break
            else:
                return None
            yield

    def _expect(self, literal: str) -> Steps[None]:
        """Move past the literal.

        Raises:
            NotACall: something else comes next.
        """
        if not (yield from self._accept(literal)):
            raise NotACall

    def _run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Read the characters that come next, as long as they are of these.

        Args:
            characters: a character class and a star.
        """
        text = self._text
        pieces: list[str] = []
        while True:
            found = characters.match(text.text, text.at)
            if found is not None:
                pieces.append(found[0])
                text.at = found.end()
            if text.at < len(text.text) or text.is_over:
                return "".join(pieces)
            yield


class ToolParser(Parser):
    """Parser of one family's tool calls.

    White space around a call isn't content. A marker that no call follows is, unless it is one of
    `hidden`.

    Args:
        tool_names: names of the request's tools. What isn't marked is a call only if it names one.
        hidden: markers that are special tokens, which the content leaves out.
    """

    def __init__(self, tool_names: Collection[str], hidden: Collection[str] = ()) -> None:
        self._tool_names = frozenset(tool_names)
        self._hidden = frozenset(hidden)
        self._num_calls = 0
        super().__init__()

    def _read_marked(self, starts: Sequence[str]) -> Steps[None]:
        """Read content, and calls behind each of the markers, up to the end of the text."""
        num_reread = 0
        while marker := (yield from self._content_until(starts if num_reread < _MAX_REREAD else ())):
            num_before = self._num_calls
            try:
                yield from self._skip_space()
                yield from self._expect(marker)
                yield from self._calls(marker)
            except NotACall:
                num_reread += self._text.at - self._text.start
                if not self._give_back() and self._num_calls == num_before:
                    yield from self._skip_space()
                    yield from self._expect(marker)
                    content = self._text.settle()
                    self._say(content.removesuffix(marker) if marker in self._hidden else content)

    @abstractmethod
    def _calls(self, marker: str) -> Steps[None]:
        """Read the calls behind a marker, and whatever ends them.

        Raises:
            NotACall: something else is there. Calls that were begun stay.
        """

    def _give_back(self) -> bool:
        """Go back to the end of the last call: what follows is content.

        Return whether it isn't: what the text's end has cut off, behind a call, is dropped.
        """
        if self._num_calls and self._text.is_over:
            self._text.at = len(self._text.text)
            self._text.settle()
            return True
        self._text.rewind()
        return False

    def _content_until(self, starts: Sequence[str]) -> Steps[str | None]:
        """Emit content up to the first of the markers, and return it; None at the end of the text.

        The reader stops before the white space that stands before the marker.
        """
        text = self._text
        markers = sorted({*starts, *self._hidden}, key=len, reverse=True)
        # the longest of those that begin at one place
        pattern = re.compile("|".join(map(re.escape, markers)) or _NEVER)
        while True:
            found = pattern.search(text.text, text.at)
            if found is not None and found[0] in starts:
                text.at += len(text.text[text.at : found.start()].rstrip())
                self._say(text.settle())
                return found[0]
            if found is not None:
                text.at = found.start()
                self._say_around_calls(text.settle())
                text.at = found.end()
                text.settle()
                continue
            if text.is_over:
                text.at = len(text.text)
                content = text.settle()
                # behind a call, a marker that the text's end has cut off is dropped
                is_cut = bool(starts and self._num_calls) and num_open(content, markers) == len(content.lstrip())
                self._say_around_calls("" if is_cut else content)
                return None
            rest = text.rest
            text.at += len(rest[: len(rest) - num_open(rest, markers)].rstrip())
            self._say(text.settle())
            yield

    def _end(self, ends: Sequence[str]) -> Steps[None]:
        """Move past the marker that ends calls, if it is there, and past brackets before it.

        A marker that the text's end has cut off isn't content either.
        """
        text = self._text
        text.settle()
        yield from self._run(_CLOSING)
        if (yield from self._accept(*ends)) is None:
            if text.is_over and any(end.startswith(text.rest) for end in ends):
                text.at = len(text.text)
            else:
                text.rewind()
        text.settle()

    def _say(self, content: str) -> None:
        if content:
            self._deltas.append(TextDelta(content))

    def _say_around_calls(self, content: str) -> None:
        """Emit content, unless it is white space behind a call."""
        if not (self._num_calls and content.isspace()):
            self._say(content)

    def _begin_call(self, name: str) -> int:
        """Announce a call; what was read up to here is settled. Return its index."""
        index = self._num_calls
        self._num_calls += 1
        self._deltas.append(CallStart(index, name))
        self._text.settle()
        return index

    def _argue(self, index: int, arguments: str) -> None:
        if arguments:
            self._deltas.append(ArgumentsDelta(index, arguments))


_CLOSING = re.compile(r"[\s}\]]*")
