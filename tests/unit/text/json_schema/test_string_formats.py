"""Strings of a format are texts that Python's and pydantic's parsers take."""

from __future__ import annotations

import ipaddress
import json
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from typing import Any

import pydantic
import pytest
from campaigns import default_and_campaign

PARSERS: dict[str, list[Callable[[str], object]]] = {
    "date": [date.fromisoformat, pydantic.TypeAdapter(date).validate_python],
    "time": [time.fromisoformat, pydantic.TypeAdapter(time).validate_python],
    "date-time": [datetime.fromisoformat, pydantic.TypeAdapter(datetime).validate_python],
    "duration": [pydantic.TypeAdapter(timedelta).validate_python],
    "ipv4": [ipaddress.IPv4Address],
    "ipv6": [ipaddress.IPv6Address],
    "uuid": [uuid.UUID],
    "hostname": [lambda text: text.encode("idna")],
}


@pytest.mark.parametrize("seed", default_and_campaign(range(20), default=[0]))
@pytest.mark.parametrize("name", PARSERS)
def test_text_of_format_is_parsed(babbler: Any, name: str, seed: int) -> None:
    schema = {"type": "string", "format": name}
    texts = [json.loads(text) for text in babbler.answers(babbler.grammar(schema), 60, seed)]
    assert len(texts) >= 20
    for text in texts:
        for parse in PARSERS[name]:
            parse(text)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31"],
            ["2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31", "2023-13-01"],
        ),
        (
            "date-time",
            ["2024-02-29T23:59:59Z", "2024-01-01T00:00:00.123456+05:30"],
            ["2024-01-01t00:00:00Z", "2024-01-01T00:00:00z", "2024-01-01T00:00:60Z", "0000-01-01T00:00:00Z"],
        ),
        ("time", ["00:00:00Z", "23:59:59.5-01:00"], ["00:00:60Z", "24:00:00Z", "00:00:00z", "00:00:00"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT36H", "P1W", "P3D"], ["P", "PT", "P1S", "P12345678Y"]),
        (
            "hostname",
            ["a", "a-b.example", f"{'a' * 63}.b", "0.0.0.0.arpa"],
            [f"{'a' * 64}.b", "-a", "a-", "a..b", ".".join(["a" * 63] * 4)],
        ),
        (
            "email",
            ["a@b.example", "a.b+c@example.org", "o'x@a-b.de"],
            [f"a@{'a' * 64}.de", "a@", "@b.de", ".a@b.de", f"{'a' * 70}@b.de"],
        ),
    ],
)
def test_format_accepts_only_matching_texts(
    accepts: Callable[..., bool], name: str, good: list[str], bad: list[str]
) -> None:
    schema = {"type": "string", "format": name}
    assert [text for text in good if not accepts(schema, json.dumps(text))] == []
    assert [text for text in bad if accepts(schema, json.dumps(text))] == []


def test_format_holds_beside_pattern_and_length(accepts: Callable[..., bool]) -> None:
    schema = {"type": "string", "format": "date", "pattern": "^20", "maxLength": 10}
    assert accepts(schema, '"2024-02-29"')
    assert not accepts(schema, '"1999-01-01"')
    assert not accepts(schema, '"2023-02-29"')
    host = {"type": "string", "format": "hostname", "maxLength": 3}
    assert accepts(host, '"a.b"')
    assert not accepts(host, '"ab.c"')
