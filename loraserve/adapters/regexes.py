"""A stranger's regular expression, run by RE2: in time that is linear in the name, whatever the expression.

What it means is what Python's ``re`` makes of it, since PEFT uses that. The two engines agree on all that both take, but for a few spellings; these
are refused, as is what only one of them takes. RE2 is imported when the first expression is met.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from loraserve.limits import LIMITS, Limits

# One engine's literal is the other's syntax: RE2 takes {,3} for text, Python a POSIX class for a set (and warns), \1 is an octal number to RE2
# where a digit follows.
_AMBIGUOUS = re.compile(r"\{,|\[\^?\[|\[[:.=]|--|&&|~~|\|\||\\[0-9]")


@dataclass(frozen=True, slots=True, eq=False)
class Regex:
    """An expression that both engines read alike. `text` is as the config has it."""

    text: str
    compiled: Any

    def is_match(self, name: str) -> bool:
        """Whether ``re.match`` finds it at the start of the name."""
        return self.compiled.match(name) is not None

    def is_fullmatch(self, name: str) -> bool:
        return self.compiled.fullmatch(name) is not None

    def group(self, name: str, group: str) -> str | None:
        """What the group has caught where `is_match`; None where it isn't, or the group took no part."""
        match = self.compiled.match(name)
        return None if match is None else match.group(group)


def compile_regex(text: str, frame: str = "{}", limits: Limits = LIMITS) -> Regex | str:
    """The expression put into `frame`, as PEFT frames it, ready to be matched; or why it can't be, in words that end a sentence."""
    if len(text) > limits.max_adapter_regex_length:
        return f"it has {len(text):,} characters; at most {limits.max_adapter_regex_length:,} are taken"
    if not text.isascii() or not text.isprintable():
        return "it isn't plain ASCII"
    ambiguous = _AMBIGUOUS.search(text)
    if ambiguous is not None:
        return f'"{ambiguous[0]}" means one thing to PEFT and another to RE2, which runs regexes here'
    framed = frame.replace("{}", text)
    try:
        # never matched, only read: an expression that PEFT can't take is none
        re.compile(framed)
    except (re.error, RecursionError, OverflowError) as error:
        return f"it is no regex to PEFT ({error})"
    import re2

    options = re2.Options()
    options.max_mem = limits.max_adapter_regex_bytes
    options.log_errors = False
    try:
        return Regex(text, re2.compile(framed, options=options))
    except re2.error as error:
        reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        return f"RE2, which runs regexes here in bounded time, doesn't take it ({reason}); list the modules by name instead"
