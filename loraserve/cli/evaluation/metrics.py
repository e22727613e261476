"""Metrics of an answer against its reference; of each, more is better."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

EXACT_MATCH = "exact_match"
"""The answer is the reference, but for white space at either end."""
ACCURACY = "accuracy"
"""The answer has the reference in it as whole words in any case; of choices, it comes first."""
REGEX_MATCH = "regex_match"
JSON_MATCH = "json_match"
LOG_LIKELIHOOD = "log_likelihood"
"""Mean log probability of a token of the reference, in nats."""
METRICS = (EXACT_MATCH, ACCURACY, REGEX_MATCH, JSON_MATCH, LOG_LIKELIHOOD)

MAX_PATTERN_BYTES = 1 << 20
"""Size of a compiled expression."""

_FENCE = re.compile(r"\A```[A-Za-z]*\n(.*?)\n?```\Z", re.DOTALL)


def normalized(text: str) -> str:
    """Fold the case, and each run of white space into a space."""
    return " ".join(text.casefold().split())


def is_exact(answer: str, reference: str) -> bool:
    return answer.strip() == reference.strip()


def is_accurate(answer: str, reference: str, choices: Sequence[str] = ()) -> bool:
    """Check that the reference is in the answer, and before all other choices.

    Of choices that begin at the same place, the longest counts.
    """
    text, expected = normalized(answer), normalized(reference)
    at = _place(text, expected)
    if at is None:
        return False
    others = ((_place(text, choice), choice) for choice in map(normalized, choices) if choice != expected)
    return all(other is None or (at, -len(expected)) < (other, -len(choice)) for other, choice in others)


def matches(answer: str, pattern: str) -> bool:
    """Check that the expression matches a part of the answer."""
    compiled = compile_pattern(pattern)
    return not isinstance(compiled, str) and compiled.search(answer) is not None


def compile_pattern(pattern: str) -> Any:
    """Compile the expression by RE2, which takes linear time; return why it can't be, as text."""
    import re2

    options = re2.Options()
    options.max_mem = MAX_PATTERN_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options=options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        return reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)


def has_fields(answer: str, reference: str, names: Sequence[str]) -> bool:
    """Check that the answer is a JSON object with the reference's values of these fields.

    It may be in a code block of Markdown.
    """
    found, expected = parse_json(answer), parse_json(reference)
    if found is None or expected is None:
        return False
    try:
        return all(_is_equal(field_of(found, name), field_of(expected, name)) for name in names)
    except RecursionError:
        return False


def parse_json(text: str) -> Mapping[str, Any] | None:
    """Parse a JSON object; None if the text is none."""
    text = text.strip()
    fenced = _FENCE.match(text)
    try:
        value = json.loads(text if fenced is None else fenced[1])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def field_of(value: Any, path: str) -> tuple[Any] | None:
    """Find the field at ``items.0.price``; None if there is none.

    A name with dots in it is found, too, where it is that of a whole field.
    """
    if isinstance(value, dict) and path in value:
        return (value[path],)
    name, dot, rest = path.partition(".")
    if not dot:
        return (value[int(path)],) if _is_index(value, path) else None
    if isinstance(value, dict):
        return field_of(value[name], rest) if name in value else None
    return field_of(value[int(name)], rest) if _is_index(value, name) else None


def _is_index(value: object, text: str) -> bool:
    return isinstance(value, list) and text.isascii() and text.isdigit() and len(text) < 10 and int(text) < len(value)


def _is_equal(found: Any, expected: Any) -> bool:
    """Compare two values of JSON, which keeps ``true`` and ``1`` apart."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_is_equal(found[key], expected[key]) for key in found)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_is_equal, found, expected))
    return isinstance(found, bool) == isinstance(expected, bool) and bool(found == expected)


def _place(text: str, words: str) -> int | None:
    """Find where the words begin in the text, as whole words."""
    before = r"(?<!\w)" if re.match(r"\w", words) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", words) else ""
    found = re.search(before + re.escape(words) + after, text)
    return None if found is None else found.start()
