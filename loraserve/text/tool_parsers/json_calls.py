"""Tool calls that are JSON: ``{"name": …, "arguments": {…}}``, alone, or several."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

import orjson

from loraserve.text.tool_parsers.parser import NotACall, Steps, ToolParser

_ARGUMENTS = ("arguments", "parameters")
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\]')
_SCALAR = re.compile(r"[^\s,:{}\[\]\"]*")
_BETWEEN_OBJECTS = re.compile(r"[\s;,]*")


class JsonToolParser(ToolParser):
    """Parser of JSON calls behind a marker, or, unmarked, at the beginning of the answer.

    Arguments are passed on as the model writes them. Once a call's name and the first character of
    its arguments were read it stays a call, even where the rest isn't JSON.

    Args:
        starts: markers that calls follow.
        ends: markers behind calls; none needs to be there.
        bare: characters that begin calls without a marker, if the answer begins with one.
    """

    def __init__(
        self,
        tool_names: Collection[str],
        hidden: Collection[str] = (),
        *,
        starts: Sequence[str],
        ends: Sequence[str] = (),
        bare: str = "",
    ) -> None:
        self._starts = tuple(starts)
        self._ends = tuple(ends)
        self._bare = bare
        self._is_marked = True
        super().__init__(tool_names, hidden)

    def _parse(self) -> Steps[None]:
        if self._bare:
            yield from self._read_unmarked()
        self._is_marked = True
        yield from self._read_marked(self._starts)

    def _read_unmarked(self) -> Steps[None]:
        self._is_marked = False
        try:
            yield from self._skip_space()
            first = yield from self._peek()
            if not first or first not in self._bare:
                raise NotACall
            yield from self._calls("")
        except NotACall:
            self._give_back()

    def _calls(self, marker: str) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._accept("[")):
            yield from self._call_list()
        else:
            yield from self._call_objects()
        yield from self._end(self._ends)

    def _call_list(self) -> Steps[None]:
        """Read calls up to the bracket that closes the list; the opening one is read."""
        while True:
            yield from self._skip_space()
            yield from self._call_object()
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                yield from self._expect("]")
                return

    def _call_objects(self) -> Steps[None]:
        """Read one call, and those behind it, with ``;`` or nothing between them."""
        while True:
            yield from self._call_object()
            yield from self._run(_BETWEEN_OBJECTS)
            if (yield from self._peek()) != "{":
                self._text.rewind()
                return

    def _call_object(self, *, is_nested: bool = False) -> Steps[None]:
        """Read an object with a call's name and arguments, in either order, among other keys."""
        name: str | None = None
        early: str | None = None
        has_begun = False
        yield from self._expect("{")
        yield from self._skip_space()
        is_over = yield from self._accept("}")
        while not is_over:
            key = yield from self._string()
            yield from self._skip_space()
            yield from self._expect(":")
            yield from self._skip_space()
            if key == "name" and name is None:
                name = yield from self._name()
                if early is not None:
                    self._argue(self._begin_call(name), early)
                    has_begun = True
            elif key in _ARGUMENTS and early is None and not has_begun:
                if name is None:
                    early = yield from self._arguments()
                else:
                    has_begun = yield from self._stream_arguments(name)
            elif key == "function" and not is_nested and name is None and early is None and not has_begun:
                # {"type": "function", "function": {…}}
                yield from self._call_object(is_nested=True)
                has_begun = True
            else:
                yield from self._value(lambda _: None)
            yield from self._skip_space()
            if (yield from self._accept(",")):
                yield from self._skip_space()
            else:
                yield from self._expect("}")
                is_over = "}"
        if not has_begun:
            if name is None or not self._is_marked:
                raise NotACall
            self._argue(self._begin_call(name), "{}")
        self._text.settle()

    def _name(self) -> Steps[str]:
        name = yield from self._string()
        if not name or not (self._is_marked or name in self._tool_names):
            raise NotACall
        return name

    def _stream_arguments(self, name: str) -> Steps[bool]:
        """Begin a call, and emit its arguments as they come."""
        if (yield from self._peek()) == "{":
            index = self._begin_call(name)

            def take(piece: str) -> None:
                self._argue(index, piece)
                self._text.settle()

            yield from self._value(take)
        else:
            arguments = yield from self._arguments()
            self._argue(self._begin_call(name), arguments)
        return True

    def _arguments(self) -> Steps[str]:
        """Parse whole arguments: an object, a string that holds one, or null for none."""
        pieces: list[str] = []
        yield from self._value(pieces.append)
        arguments = "".join(pieces)
        if arguments.startswith("{"):
            return arguments
        if arguments == "null":
            return "{}"
        try:
            unquoted = orjson.loads(arguments)
            if isinstance(unquoted, str) and isinstance(orjson.loads(unquoted), dict):
                return unquoted
        except orjson.JSONDecodeError:
            pass
        raise NotACall

    def _string(self) -> Steps[str]:
        if (yield from self._peek()) != '"':
            raise NotACall
        pieces: list[str] = []
        yield from self._value(pieces.append)
        try:
            value = orjson.loads("".join(pieces))
        except orjson.JSONDecodeError:
            raise NotACall from None
        if not isinstance(value, str):
            raise NotACall
        return value

    def _value(self, take: Callable[[str], None]) -> Steps[None]:
        """Read a JSON value, and pass it on as it comes.

        Its quotes or brackets mark its end. What the text's end cuts off is all there is of it.
        """
        text = self._text
        first = yield from self._peek()
        if first not in ('"', "{", "["):
            scalar = yield from self._run(_SCALAR)
            if not scalar:
                raise NotACall
            take(scalar)
            return
        depth = 0
        is_string = False
        while True:
            begin, is_complete = text.at, False
            while found := (_INSIDE_STRINGS if is_string else _OUTSIDE_STRINGS).search(text.text, text.at):
                text.at = found.end()
                if found[0] == "\\":
                    if text.at == len(text.text):
                        # the character that it escapes comes with the next piece
                        text.at -= 1
                        break
                    text.at += 1
                    continue
                if found[0] == '"':
                    is_string = not is_string
                else:
                    depth += 1 if found[0] in "{[" else -1
                if depth == 0 and not is_string:
                    is_complete = True
                    break
            else:
                text.at = len(text.text)
            take(text.text[begin : text.at])
            if is_complete or (text.is_over and text.at == len(text.text)):
                return
            if text.is_over:
                # a last backslash escapes nothing
                take(text.text[text.at :])
                text.at = len(text.text)
                return
            yield
