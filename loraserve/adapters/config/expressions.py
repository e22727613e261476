"""A stranger's regular expression that RE2 doesn't take, matched by sets of positions.

It takes a bounded number of steps, whatever the expression. Python's own parser reads it, so that
it means what Python's ``re`` makes of it. It is then evaluated without trying one way after
another: of each part, the set of positions at which it may end is computed from the set of those at
which it may begin, as the bits of an integer. That takes a number of steps that is a polynomial of
the lengths of the expression and of the name, and a budget bounds them in all. Which of several
matches Python would find first doesn't matter, since only whether there is one matters. Where it
does matter, because a part refers back to what another has caught or may not be tried again, the
expression is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from re import _constants, _parser  # type: ignore[attr-defined]  # Python's own, which have no stubs
from typing import Any

from loraserve.errors import AdapterUnsupported
from loraserve.limits import LIMITS, Limits

MAX_DEPTH = 64
"""Limit on how deep groups and lookarounds nest."""

# What Python's re takes for the same letter, apart from the other case: İ and ı, the Kelvin sign, ſ
_OTHER_CASES = {"i": "\u0130\u0131", "k": "\u212a", "s": "\u017f"}
_TYPE_FLAGS = re.ASCII | re.LOCALE | re.UNICODE


class Budget:
    """Steps that the expressions of one config may still take, all of them together."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._most = self._left = limits.max_adapter_regex_steps

    def spend(self) -> None:
        """Take one step.

        Raises:
            AdapterUnsupported: there is none left.
        """
        self._left -= 1
        if self._left < 0:
            raise AdapterUnsupported(
                "Matching the config's regexes to the names of this base's modules takes more than "
                f"{self._most:,} steps; "
                "list the modules by name instead."
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Chars:
    """Node that matches a character it accepts.

    `known` is what `accepts` has returned: names are made of few characters.
    """

    accepts: Callable[[str], bool]
    known: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _At:
    """Node that matches no character, at the positions of a name where `holds` is true."""

    holds: Callable[[str, int], bool]


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Repeat:
    """Repetition of `part`, at least `least` times and at most `most`; None: any number."""

    part: _Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """Lookaround: it matches no character, where its part matches, or doesn't.

    `width`: how far before the position it begins; None: it begins there.
    """

    part: _Node
    is_wanted: bool
    width: int | None


_Node = _Chars | _At | _Sequence | _Choice | _Repeat | _Look


class Expression:
    """An expression as Python's parser reads it."""

    def __init__(self, node: _Node, budget: Budget) -> None:
        self._node = node
        self._budget = budget

    def is_match(self, name: str) -> bool:
        """Check whether ``re.match`` finds it at the start of the name.

        Raises:
            AdapterUnsupported: the budget is used up.
        """
        return _Evaluation(name, self._budget).ends(self._node, 1) != 0

    def is_fullmatch(self, name: str) -> bool:
        """Check whether ``re.fullmatch`` finds it.

        Raises:
            AdapterUnsupported: the budget is used up.
        """
        return _Evaluation(name, self._budget).ends(self._node, 1) >> len(name) == 1


def parse_expression(parsed: Any, budget: Budget) -> Expression | str:
    """Convert what Python's parser made of an expression into one that is ready to be matched.

    Or return why it can't be, in words that end a sentence.
    """
    try:
        return Expression(_Reader().read(parsed, parsed.state.flags, 0), budget)
    except _NotTakenError as error:
        return str(error)


def parse_as_python(text: str) -> Any:
    """Parse an expression with Python's own parser.

    Nothing is compiled: of a large range of characters, that alone may take long.

    Raises:
        re.error, RecursionError, OverflowError: Python doesn't take it.
    """
    return _parser.parse(text)


class _NotTakenError(Exception):
    pass


class _Reader:
    """Reader of Python's parse of an expression, which it turns into nodes."""

    def read(self, parsed: Any, flags: int, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise _NotTakenError(f"its groups are nested deeper than {MAX_DEPTH}")
        parts = tuple(self._read_one(str(op), value, flags, depth) for op, value in parsed)
        return parts[0] if len(parts) == 1 else _Sequence(parts)

    def _read_one(self, op: str, value: Any, flags: int, depth: int) -> _Node:
        match op:
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                return _Chars(_acceptance(op, value, flags))
            case "AT":
                return _At(_position_test(str(value), flags))
            case "BRANCH":
                return _Choice(tuple(self.read(part, flags, depth + 1) for part in value[1]))
            case "SUBPATTERN":
                _, added, removed, part = value
                if added & _TYPE_FLAGS:
                    flags &= ~_TYPE_FLAGS
                return self.read(part, (flags | added) & ~removed, depth + 1)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, part = value
                unbounded = most is _constants.MAXREPEAT or most == _constants.MAXREPEAT
                return _Repeat(self.read(part, flags, depth + 1), int(least), None if unbounded else int(most))
            case "ASSERT" | "ASSERT_NOT":
                direction, part = value
                return self._read_look(direction, part, op == "ASSERT", flags, depth)
            case "FAILURE":
                return _Choice(())
            case "GROUPREF" | "GROUPREF_EXISTS":
                raise _NotTakenError("it has a back-reference, which can't be matched in bounded time")
            case "POSSESSIVE_REPEAT" | "ATOMIC_GROUP":
                raise _NotTakenError(
                    "it has a possessive repetition or an atomic group, which this server doesn't support"
                )
            case _:
                raise _NotTakenError(f"it has {op}, which this server doesn't support")

    def _read_look(self, direction: int, part: Any, is_wanted: bool, flags: int, depth: int) -> _Node:
        width = None
        if direction < 0:
            shortest, longest = part.getwidth()
            if shortest != longest:
                raise _NotTakenError("PEFT can't compile it (look-behind requires fixed-width pattern)")
            width = int(shortest)
        return _Look(self.read(part, flags, depth + 1), is_wanted, width)


class _Evaluation:
    """Matcher of a single name.

    Sets of positions, from 0 to its length, are the bits of integers.
    """

    def __init__(self, name: str, budget: Budget) -> None:
        self._name = name
        self._budget = budget
        self._places: dict[str, int] = {}
        for position, char in enumerate(name):
            self._places[char] = self._places.get(char, 0) | 1 << position
        self._masks: dict[_Node, int] = {}
        self._looks: dict[tuple[_Node, int], bool] = {}

    def ends(self, node: _Node, starts: int) -> int:
        """Find where the node may end that begins at one of `starts`."""
        if not starts:
            return 0
        self._budget.spend()
        if isinstance(node, _Chars):
            return (starts & self._mask(node)) << 1
        if isinstance(node, _Sequence):
            for part in node.parts:
                starts = self.ends(part, starts)
            return starts
        if isinstance(node, _Choice):
            found = 0
            for part in node.parts:
                found |= self.ends(part, starts)
            return found
        if isinstance(node, _Repeat):
            return self._repeat(node, starts)
        if isinstance(node, _At):
            return starts & self._mask(node)
        return sum(1 << position for position in _bits(starts) if self._looks_right(node, position))

    def _repeat(self, node: _Repeat, starts: int) -> int:
        # positions never go back: after as many rounds as there are positions, another changes
        # nothing
        rounds = len(self._name) + 1
        for _ in range(min(node.least, rounds)):
            before, starts = starts, self.ends(node.part, starts)
            if starts == before:
                break
        found = new = starts
        for _ in range(rounds if node.most is None else min(node.most - node.least, rounds)):
            new = self.ends(node.part, new) & ~found
            if not new:
                break
            found |= new
        return found

    def _looks_right(self, node: _Look, position: int) -> bool:
        key = (node, position)
        if key not in self._looks:
            if node.width is None:
                is_there = self.ends(node.part, 1 << position) != 0
            else:
                start = position - node.width
                is_there = start >= 0 and bool(self.ends(node.part, 1 << start) >> position & 1)
            self._looks[key] = is_there == node.is_wanted
        return self._looks[key]

    def _mask(self, node: _Chars | _At) -> int:
        """Find, as bits, where the name has a character that the node accepts.

        For an anchor, return the positions that it holds at.
        """
        mask = self._masks.get(node)
        if mask is None:
            if isinstance(node, _Chars):
                mask = 0
                for char, places in self._places.items():
                    is_accepted = node.known.get(char)
                    if is_accepted is None:
                        is_accepted = node.known[char] = node.accepts(char)
                    if is_accepted:
                        mask |= places
            else:
                mask = sum(1 << i for i in range(len(self._name) + 1) if node.holds(self._name, i))
            self._masks[node] = mask
        return mask


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _acceptance(op: str, value: Any, flags: int) -> Callable[[str], bool]:
    """Build a test of whether a character is one of a literal's, a set's or the dot's."""
    if op == "ANY":
        return lambda char: bool(flags & re.DOTALL) or char != "\n"
    if op != "IN":
        return lambda char: (value in _cases(char, flags)) == (op == "LITERAL")
    items: Sequence[tuple[Any, Any]] = value
    is_negated = str(items[0][0]) == "NEGATE"

    def accepts(char: str) -> bool:
        cases = _cases(char, flags)
        return any(_has(str(kind), item, char, cases, flags) for kind, item in items) != is_negated

    return accepts


def _has(kind: str, item: Any, char: str, cases: set[int], flags: int) -> bool:
    match kind:
        case "LITERAL":
            return item in cases
        case "RANGE":
            return any(item[0] <= case <= item[1] for case in cases)
        case "CATEGORY":
            return _is_of(str(item), char, flags)
        case "NEGATE":
            return False
        case _:
            raise _NotTakenError(f"it has {kind}, which this server doesn't support")


def _cases(char: str, flags: int) -> set[int]:
    """List the code points that stand for the character.

    They are itself, and its other cases where they count for the same.
    """
    if not flags & re.IGNORECASE:
        return {ord(char)}
    if flags & re.ASCII and not char.isascii():
        return {ord(char)}
    others = "" if flags & re.ASCII else _OTHER_CASES.get(char.lower(), "")
    return {ord(case) for case in {char, char.lower(), char.upper(), *others} if len(case) == 1}


def _is_of(category: str, char: str, flags: int) -> bool:
    is_plain = not flags & re.ASCII or char.isascii()
    match category.removeprefix("CATEGORY_").removeprefix("NOT_"):
        case "DIGIT":
            is_in = is_plain and char.isdecimal()
        case "SPACE":
            is_in = is_plain and char.isspace() and not (flags & re.ASCII and char in "\x1c\x1d\x1e\x1f")
        case "WORD":
            is_in = is_plain and (char.isalnum() or char == "_")
        case other:
            raise _NotTakenError(f"it has {other}, which this server doesn't support")
    return is_in != ("NOT_" in category)


def _position_test(where: str, flags: int) -> Callable[[str, int], bool]:
    """Build a test of whether an anchor or a boundary holds at a position of a name."""
    is_by_line = bool(flags & re.MULTILINE)
    match where:
        case "AT_BEGINNING_STRING":
            return lambda _, i: i == 0
        case "AT_BEGINNING":
            return lambda name, i: i == 0 or (is_by_line and name[i - 1] == "\n")
        case "AT_END_STRING":
            return lambda name, i: i == len(name)
        case "AT_END":
            return lambda name, i: name[i:] == "" or (name[i] == "\n" and (is_by_line or i == len(name) - 1))
        case "AT_BOUNDARY" | "AT_NON_BOUNDARY":

            def is_word(name: str, i: int) -> bool:
                return 0 <= i < len(name) and _is_of("CATEGORY_WORD", name[i], flags)

            is_boundary = where == "AT_BOUNDARY"
            # in a name without characters, Python has neither
            return lambda name, i: bool(name) and (is_word(name, i - 1) != is_word(name, i)) == is_boundary
        case _:
            raise _NotTakenError(f"it has {where}, which this server doesn't support")
