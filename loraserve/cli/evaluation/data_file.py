"""Files of data that versions are evaluated on: JSON lines, checked before anything is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraserve.cli.evaluation.metrics import (
    ACCURACY,
    EXACT_MATCH,
    JSON_MATCH,
    LOG_LIKELIHOOD,
    METRICS,
    REGEX_MATCH,
    compile_pattern,
    field_of,
    normalized,
    parse_json,
)
from loraserve.errors import InvalidRequest, PayloadTooLarge

MAX_FILE_BYTES = 64 << 20
MAX_LINE_BYTES = 1 << 20
MAX_LINES = 10_000
MAX_CHOICES = 64
MAX_JSON_FIELDS = 32
_MAX_NAMED = 10
"""Further wrong lines, or ignored fields, that a message names."""

_FIELDS = ("prompt", "messages", "answer", "completion", "choices", "regex", "json_field", "json_fields")


@dataclass(frozen=True, slots=True)
class DataLine:
    """A prompt and its reference answer."""

    number: int
    """Number of the line in the file, from 1."""
    prompt: str | None
    messages: tuple[Mapping[str, Any], ...]
    """Messages of a chat; empty if there is a prompt."""
    answer: str
    choices: tuple[str, ...] = ()
    """Answers to choose from, the reference among them."""
    regex: str | None = None
    json_fields: tuple[str, ...] = ()
    """Paths of fields of the answer as JSON: ``name``, ``items.0.price``."""

    @property
    def question(self) -> str:
        """The prompt, or the last message, for people."""
        return str(self.messages[-1].get("content")) if self.prompt is None else self.prompt

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that the line has a reference for."""
        regex = () if self.regex is None else (REGEX_MATCH,)
        return (EXACT_MATCH, ACCURACY, *regex, *((JSON_MATCH,) if self.json_fields else ()), LOG_LIKELIHOOD)


@dataclass(frozen=True, slots=True)
class DataFile:
    name: str
    sha256: str
    lines: tuple[DataLine, ...]
    ignored: tuple[str, ...]
    """Fields of lines that no metric reads."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that a line has a reference for, in their order."""
        found = {name for line in self.lines for name in line.metrics}
        return tuple(name for name in METRICS if name in found)


class _Fault(Exception):
    """A line can't be used; the message follows its number."""


def read_data(path: Path) -> DataFile:
    """Read the file and check each line.

    Raises:
        PayloadTooLarge: the file or the number of lines is over its bound.
        InvalidRequest: the file can't be read or is empty, or a line is wrong; the message has its
            number.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"The data {path} can't be read: {error.strerror}.") from error
    if len(data) > MAX_FILE_BYTES:
        raise PayloadTooLarge(f"The data {path} has more than {MAX_FILE_BYTES >> 20} MiB.", hint="Take a part of it.")
    lines: list[DataLine] = []
    faults: list[tuple[int, str]] = []
    ignored: dict[str, None] = {}
    for number, raw in enumerate(data.split(b"\n"), 1):
        if not raw.strip():
            continue
        if len(lines) + len(faults) >= MAX_LINES:
            raise PayloadTooLarge(f"The data {path} has more than {MAX_LINES:,} lines.", hint="Take a part of it.")
        try:
            record = _record(raw)
            lines.append(_line(number, record))
            ignored |= dict.fromkeys(name for name in record if name not in _FIELDS)
        except _Fault as fault:
            faults.append((number, str(fault)))
    if faults:
        number, fault_text = faults[0]
        raise InvalidRequest(f"{path}:{number}: {fault_text}", hint=_others([at for at, _ in faults[1:]]))
    if not lines:
        raise InvalidRequest(
            f"The data {path} has no lines.", hint='A line is such as {"prompt": "2 + 2 =", "answer": "4"}.'
        )
    return DataFile(path.name, hashlib.sha256(data).hexdigest(), tuple(lines), tuple(ignored))


def named(words: Sequence[object]) -> str:
    """Join the words, and say how many more there are."""
    more = len(words) - _MAX_NAMED
    return ", ".join(map(str, words[:_MAX_NAMED])) + (f" and {more} more" if more > 0 else "")


def _others(numbers: Sequence[int]) -> str | None:
    if not numbers:
        return None
    return f"Other lines are wrong too: {named(numbers)}."


def _record(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_LINE_BYTES:
        raise _Fault(f"the line has {len(raw):,} bytes; at most {MAX_LINE_BYTES:,} are allowed.")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _Fault("the line isn't UTF-8.") from None
    except json.JSONDecodeError as error:
        raise _Fault(f"the line isn't JSON: {error.msg} at column {error.colno}.") from None
    except (ValueError, RecursionError):
        raise _Fault("the line's JSON can't be read: it is nested too deeply, or has a number too long.") from None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _Fault("the line has half of a surrogate pair, which is no text.") from None
    if not isinstance(value, dict):
        raise _Fault('the line isn\'t a JSON object, such as {"prompt": "2 + 2 =", "answer": "4"}.')
    return {name: item for name, item in value.items() if item is not None}


def _line(number: int, record: Mapping[str, Any]) -> DataLine:
    if ("prompt" in record) == ("messages" in record):
        raise _Fault("the line should have either prompt or messages.")
    messages = _messages(record)
    answers = [record[name] for name in ("answer", "completion") if name in record]
    if not answers and messages and messages[-1]["role"] == "assistant":
        # the form of data to train on
        answers, messages = [messages[-1].get("content")], messages[:-1]
    if len(answers) != 1:
        raise _Fault("the line should have either answer or completion, or an assistant's message at the end.")
    (answer,) = answers
    if not isinstance(answer, str) or not answer.strip():
        raise _Fault("the answer should be text that isn't empty.")
    if "messages" in record and not messages:
        raise _Fault("messages has nothing but the answer.")
    return DataLine(
        number,
        None if "messages" in record else _text(record, "prompt"),
        messages,
        answer,
        choices=_choices(record, answer),
        regex=_regex(record),
        json_fields=_json_fields(record, answer),
    )


def _messages(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    messages = record.get("messages", [])
    is_right = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not is_right or (not messages and "messages" in record):
        raise _Fault('messages should be a list such as [{"role": "user", "content": "2 + 2 ="}].')
    return tuple(messages)


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str) or not value:
        raise _Fault(f"{name} should be text that isn't empty.")
    return value


def _choices(record: Mapping[str, Any], answer: str) -> tuple[str, ...]:
    choices = record.get("choices")
    if choices is None:
        return ()
    if not _are_texts(choices) or not 2 <= len(choices) <= MAX_CHOICES:
        raise _Fault(f"choices should be a list of 2 to {MAX_CHOICES} texts.")
    found = [normalized(choice) for choice in choices]
    if len(set(found)) != len(found):
        raise _Fault("choices has the same text twice.")
    if normalized(answer) not in found:
        raise _Fault("the answer should be one of the choices.")
    return tuple(choices)


def _regex(record: Mapping[str, Any]) -> str | None:
    if "regex" not in record:
        return None
    text = _text(record, "regex")
    fault = compile_pattern(text)
    if isinstance(fault, str):
        raise _Fault(f"RE2 can't compile the regex: {fault}.")
    return text


def _json_fields(record: Mapping[str, Any], answer: str) -> tuple[str, ...]:
    names: list[Any] = []
    for key in ("json_field", "json_fields"):
        value = record.get(key, [])
        names += value if isinstance(value, list) else [value]
    if not names and not {"json_field", "json_fields"} & record.keys():
        return ()
    if not _are_texts(names) or not 1 <= len(names) <= MAX_JSON_FIELDS:
        raise _Fault(f"json_fields should be a list of 1 to {MAX_JSON_FIELDS} names, such as items.0.price.")
    reference = parse_json(answer)
    if reference is None:
        raise _Fault("the answer should be a JSON object: the line has json_fields.")
    missing = [name for name in names if field_of(reference, name) is None]
    if missing:
        raise _Fault(f"the answer has no field {missing[0]!r}, which json_fields names.")
    return tuple(dict.fromkeys(names))


def _are_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) and value.strip() for value in values)
