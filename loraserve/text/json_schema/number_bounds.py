"""Bounds of numbers: exclusive ones that llguidance lets through, and one on digits."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from loraserve.errors import UnsupportedParameter
from loraserve.text.json_schema.nodes import Node, Path, place, subschemas

LARGEST = 9_000_000_000_000_000_000
"""Largest number that an answer writes, by amount, where its schema has no bound.

It has 19 digits, as identifiers of 64 bits have.
"""
FRACTION_DIGITS = 9
"""Digits behind the point of a number for which the schema names no unit."""

_UNIT = Decimal(1).scaleb(-FRACTION_DIGITS)
_MERGES = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
"""Keywords with which a bound may meet another part's."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def move_exclusive_bounds(root: Node, param: str) -> None:
    """Replace exclusive bounds that llguidance lets through by inclusive ones next to them.

    Such a bound is a whole number, and the other one less than 1 away: ``0 < x <= 0.5`` lets 0
    through. The new bound is one `FRACTION_DIGITS` behind the point from the old one, or nearer in
    a narrow range.

    Raises:
        UnsupportedParameter: no number that floating point has lies between the bounds.
    """
    nodes = list(subschemas(root))
    merges = any(_MERGES & node.keys() for _, node in nodes)
    for path, node in nodes:
        if node.get("type") != "integer":
            _move(node, (*path, "exclusiveMinimum"), param, merges=merges)
            _move(node, (*path, "exclusiveMaximum"), param, merges=merges)


def _move(node: Node, path: Path, param: str, *, merges: bool) -> None:
    key = str(path[-1])
    is_lower = key == "exclusiveMinimum"
    own, other = ("minimum", "maximum") if is_lower else ("maximum", "minimum")
    sign = 1 if is_lower else -1
    # measured upwards, an upper bound is a lower one of the mirror image
    inclusive = _decimal(node.get(own))
    exclusive = inclusive if node.get(key) is True else _decimal(node.get(key))
    if exclusive is None or (inclusive is not None and sign * inclusive > sign * exclusive):
        return
    bound = sign * exclusive
    others = [
        sign * value
        for name in (other, "exclusiveMaximum" if is_lower else "exclusiveMinimum")
        if (value := _decimal(node.get(name))) is not None
    ]
    end = min(others, default=None)
    is_near = end is not None and bound < end < bound + 1
    if bound < 0 or bound != bound.to_integral_value() or not (is_near or (merges and (end is None or end > bound))):
        return
    width = Decimal(1) if end is None else min(end - bound, Decimal(1))
    step = min(_UNIT, Decimal(1).scaleb(width.adjusted() - FRACTION_DIGITS // 2))
    # as near as the floating point numbers there are
    while float(bound + step) <= float(bound):
        step *= 10
    moved = float(bound + step)
    if end is not None and Decimal(str(moved)) >= end:
        where = place(param, path)
        raise UnsupportedParameter(
            f"{where}: no number lies between it and the other bound.", param=where, hint="Widen the range."
        )
    del node[key]
    node[own] = sign * moved


def bound_digits(root: Node) -> None:
    """Bound the digits of numbers, where the schema doesn't do so.

    A weak model may write digits until its answer is cut off. A schema that names a number of more
    digits is left as it is, and so are units (``multipleOf``), which bound a number's fraction.
    """
    nodes = [node for _, node in subschemas(root)]
    if not all(map(_is_moderate, nodes)):
        return
    # units of parts that meet are multiplied, in 32 bits
    may_have_unit = not (any("multipleOf" in node for node in nodes) and any(_MERGES & node.keys() for node in nodes))
    for node in nodes:
        types = node.get("type")
        names = types if isinstance(types, list) else [types]
        if "number" not in names and "integer" not in names:
            continue
        if "minimum" not in node and "exclusiveMinimum" not in node:
            node["minimum"] = -LARGEST
        if "maximum" not in node and "exclusiveMaximum" not in node:
            node["maximum"] = LARGEST
        if "number" in names and may_have_unit and "multipleOf" not in node:
            node["multipleOf"] = float(_UNIT)


def _is_moderate(node: Mapping[str, Any]) -> bool:
    """Check whether the bounded numbers include all that a schema names."""
    listed = node.get("enum")
    named = [node.get("const"), *(listed if isinstance(listed, list) else ()), *(node.get(key) for key in _BOUNDS)]
    return all(_has_few_digits(number) for number in map(_decimal, named) if number is not None)


def _has_few_digits(number: Decimal) -> bool:
    exponent = number.normalize().as_tuple().exponent
    return abs(number) < LARGEST and isinstance(exponent, int) and -exponent <= FRACTION_DIGITS


def _decimal(value: object) -> Decimal | None:
    """Parse a JSON number as it is written; None if it is none, or isn't finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    number = Decimal(str(value))
    return number if number.is_finite() else None
