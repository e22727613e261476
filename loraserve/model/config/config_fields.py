"""Fields of config.json, each checked for what it must be; whatever isn't is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loraserve.errors import ModelError
from loraserve.model.config.architecture import Architecture


class Fields:
    """The config's fields, with the architecture's defaults behind them.

    Each getter raises ModelError naming the field.
    """

    def __init__(self, config: Mapping[str, Any], architecture: Architecture) -> None:
        self.config, self.architecture = config, architecture

    def get(self, name: str) -> Any:
        if name in self.config:
            return self.config[name]
        if name not in self.architecture.defaults:
            raise ModelError(f"config.json has no {name}, which {self.architecture.name} needs.")
        return self.architecture.defaults[name]

    def refuse(self, name: str, allowed: object) -> None:
        value = self.config.get(name)
        if value is not None and value != allowed:
            raise ModelError(f"config.json: {name} is {shown(value)}; only {shown(allowed)} is implemented.")

    def count(self, name: str) -> int:
        return to_count(self.get(name), name)

    def optional_count(self, name: str) -> int | None:
        value = self.get(name)
        return None if value is None else to_count(value, name)

    def number(self, name: str) -> float:
        return to_number(self.get(name), name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} is {shown(value)}; expected true or false.")
        return value

    def rule(self, rule: bool | str) -> bool:
        return self.flag(rule) if isinstance(rule, str) else rule

    def multiplier(self, name: str | None, default: float = 1.0) -> float:
        return default if name is None else self.number(name)

    def cap(self, name: str | None) -> float | None:
        return None if name is None or self.get(name) is None else self.number(name)


def to_count(value: object, name: str) -> int:
    """Check the value of a field: a whole number above 0.

    Raises:
        ModelError: it's something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise ModelError(f"config.json: {name} is {shown(value)}; expected a whole number above 0.")
    return value


def to_number(value: object, name: str) -> float:
    """Check the value of a field: a finite number above 0.

    Raises:
        ModelError: it's something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ModelError(f"config.json: {name} is {shown(value)}; expected a number above 0.")
    return float(value)


def to_object(value: object, name: str) -> Mapping[str, Any]:
    """Check the value of a field: an object; an empty one if it is missing or null.

    Raises:
        ModelError: it's something else.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"config.json: {name} is {shown(value)}; expected an object.")
    return value or {}


def shown(value: object) -> str:
    """Format a value as messages show it: JSON, cut off where it's long."""
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:119] + "…"
