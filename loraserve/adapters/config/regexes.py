"""A stranger's regular expression, run in bounded time, whatever the expression.

RE2 runs it, or sets of positions where RE2 doesn't take it. What it means is what Python's ``re``
makes of it, since PEFT uses that. RE2 and Python agree on all that both take, but for a few
spellings; these, and what RE2 doesn't have (lookaround above all), are left to `expressions`. RE2
is imported when the first expression is met.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from loraserve.adapters.config.expressions import Budget, Expression, parse_as_python, parse_expression
from loraserve.limits import LIMITS, Limits

# Python takes a POSIX class for a set, and warns that it won't for ever.
_UNSETTLED = re.compile(r"\[\^?\[|\[[:.=]|--|&&|~~|\|\|")
# One engine's literal is the other's syntax: RE2 takes {,3} for text, and \1 for an octal number
# where a digit follows.
_NOT_RE2 = re.compile(r"\{,|\\[0-9]")


@dataclass(frozen=True, slots=True, eq=False)
class Regex:
    """An expression that is matched as Python's ``re`` would.

    `text` is as the config has it; `compiled` is RE2's, or an `Expression`.
    """

    text: str
    compiled: Any

    def is_match(self, name: str) -> bool:
        """Check whether ``re.match`` finds it at the start of the name.

        Raises:
            AdapterUnsupported: the config's regexes take more steps than they may.
        """
        if isinstance(self.compiled, Expression):
            return self.compiled.is_match(name)
        return self.compiled.match(name) is not None

    def is_fullmatch(self, name: str) -> bool:
        """Check whether ``re.fullmatch`` finds it; raises as `is_match`."""
        if isinstance(self.compiled, Expression):
            return self.compiled.is_fullmatch(name)
        return self.compiled.fullmatch(name) is not None

    def group(self, name: str, group: str) -> str | None:
        """Look up what the group has caught where `is_match`.

        None where it isn't, or the group took no part. The expression must have been compiled with
        `has_groups`.
        """
        match = self.compiled.match(name)
        return None if match is None else match.group(group)


def compile_regex(
    text: str,
    frame: str = "{}",
    limits: Limits = LIMITS,
    budget: Budget | None = None,
    *,
    has_groups: bool = False,
) -> Regex | str:
    """Compile the expression put into `frame`, as PEFT frames it.

    Where it can't be, return why, in words that end a sentence.

    Args:
        budget: what all of a config's regexes may take together; None: it has one of its own.
        has_groups: what groups have caught is needed: for what RE2 takes alone.
    """
    if len(text) > limits.max_adapter_regex_length:
        return f"it has {len(text):,} characters; at most {limits.max_adapter_regex_length:,} are allowed"
    if not text.isascii() or not text.isprintable():
        return "it isn't plain ASCII"
    unsettled = _UNSETTLED.search(text)
    if unsettled is not None:
        return (
            f'"{unsettled[0]}" means one thing to PEFT and another to other engines; list the modules by name instead'
        )
    framed = frame.replace("{}", text)
    try:
        # never matched, only read: an expression that PEFT can't take is none
        parsed = parse_as_python(framed)
    except (re.error, RecursionError, OverflowError) as error:
        return f"PEFT can't compile it ({error})"
    other = _NOT_RE2.search(text)
    compiled = (
        f'"{other[0]}" means one thing to PEFT and another to RE2; list the modules by name instead'
        if other is not None
        else _compile_by_re2(framed, limits)
    )
    if not isinstance(compiled, str):
        return Regex(text, compiled)
    if has_groups:
        return compiled
    expression = parse_expression(parsed, budget or Budget(limits))
    if isinstance(expression, str):
        return f"{expression}; list the modules by name instead"
    return Regex(text, expression)


def _compile_by_re2(framed: str, limits: Limits) -> Any:
    """RE2's program, or why there is none."""
    import re2

    options = re2.Options()
    options.max_mem = limits.max_adapter_regex_bytes
    options.log_errors = False
    try:
        return re2.compile(framed, options=options)
    except re2.error as error:
        reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        return (
            f"RE2, which this server matches regexes with, doesn't accept it ({reason}); "
            "list the modules by name instead"
        )
