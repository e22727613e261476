"""Formats of strings, as regexes of what parsers take.

llguidance's own take what RFC 3339 and RFC 5321 do, and so second 60, year 0000, February 29 of any
year, a lower-case ``t`` or ``z``, and labels of any length. Python's and pydantic's parsers refuse
such texts, or some of them do.
"""

from __future__ import annotations

from loraserve.text.json_schema.nodes import Node

# years from 0001, days that their month has
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # never 0000
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
)
_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_MINUTE}:{_MINUTE}(?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR}:{_MINUTE})"
# numbers of six digits at most: pydantic's durations have days of nine
_NUMBER = "[0-9]{1,6}"
_CLOCK = f"(?:{_NUMBER}H(?:{_NUMBER}M(?:{_NUMBER}S)?)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
_CALENDAR = f"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
# RFC 1035's labels, and local parts of 64 characters
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P(?:{_CALENDAR}(?:T{_CLOCK})?|T{_CLOCK}|{_NUMBER}W)$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "email": rf"^{_ATOM}{{1,32}}(?:\.{_ATOM}{{1,31}})?@{_LABEL}(?:\.{_LABEL})*$",
}
"""Patterns by format."""

_MAX_LENGTHS = {"hostname": 253, "email": 254}

LLGUIDANCE_FORMATS = frozenset({"ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance enforces as parsers do."""


def write_out_format(node: Node) -> None:
    """Replace a node's format, if it is one of `PATTERNS`, by its pattern and length.

    A pattern and a length of the node's own hold as well.
    """
    name = node.get("format")
    if not isinstance(name, str) or name not in PATTERNS:
        return
    del node["format"]
    if "pattern" in node:
        parts = node.get("allOf")
        node["allOf"] = [*(parts if isinstance(parts, list) else ()), {"pattern": PATTERNS[name]}]
    else:
        node["pattern"] = PATTERNS[name]
    if name in _MAX_LENGTHS:
        longest = node.get("maxLength")
        is_shorter = isinstance(longest, int | float) and longest <= _MAX_LENGTHS[name]
        node["maxLength"] = longest if is_shorter else _MAX_LENGTHS[name]
