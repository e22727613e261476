"""Checked access to the objects of a quantization_config. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from loraserve.errors import ModelError
from loraserve_kernels.common.formats import GROUP_SIZES

HINT = (
    "Supported formats: GGUF, GPTQ and AutoRound with 4 or 8 bits, AWQ (gemm), FP8 by tensor, channel or block, "
    "compressed-tensors with int8, int4 or FP8 weights, bitsandbytes NF4, and gpt-oss' MXFP4. "
    "Otherwise, give the float checkpoint and --quantize int8, int4, nf4 or fp8."
)


class QuantizationFields:
    """An object of the config, with the path that names it."""

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json: {path} is {shown(value)}; expected an object.", hint=HINT)
        self.path, self.value = path, value

    def get(self, name: str) -> Any:
        return self.value.get(name)

    def refusal(self, name: str, expected: str) -> ModelError:
        return ModelError(
            f"config.json: {self.path}.{name} is {shown(self.get(name))}; only {expected} is implemented.", hint=HINT
        )

    def require(self, name: str, allowed: tuple[object, ...], expected: str) -> Any:
        """Read the field, which must be one of `allowed`.

        None among them stands for an absent field too.
        """
        value = self.get(name)
        # 1 == True, and 0 == False
        if not any(value == item and type(value) is type(item) for item in allowed):
            raise self.refusal(name, expected)
        return value

    def require_empty(self, name: str) -> None:
        if self.get(name):
            raise self.refusal(name, "none")

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"config.json: {self.path}.{name} is {shown(value)}; expected a list of strings.")
        for item in value:
            if item.startswith("re:"):
                try:
                    re.compile(item.removeprefix("re:"))
                except (re.error, RecursionError, OverflowError) as error:
                    raise ModelError(
                        f"config.json: {self.path}.{name} has {shown(item)}, which isn't a regular expression."
                    ) from error
        return tuple(value)

    def whole_number(self, name: str, value: object, allowed: tuple[int, ...], expected: str) -> int:
        """Check a value of the field `name`, which must be one of these numbers.

        Raises:
            ModelError: it isn't.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
            raise ModelError(
                f"config.json: {self.path}.{name} is {shown(value)}; only {expected} is implemented.", hint=HINT
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Read a field that is true, false or absent."""
        value = self.require(name, (None, True, False), "true or false")
        return default if value is None else bool(value)


def check_block(fields: QuantizationFields, name: str, block: list[Any]) -> tuple[int, int]:
    """Check the outputs and inputs of a block that has one scale.

    Raises:
        ModelError: kernels don't have groups of that many inputs.
    """
    rows, columns = block
    for value in block:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise fields.refusal(name, "[outputs, inputs] in whole numbers above 0")
    if columns % GROUP_SIZES[0]:
        raise fields.refusal(name, f"a multiple of {GROUP_SIZES[0]} inputs")
    return rows, columns


def shown(value: object) -> str:
    """Format a value as JSON, cut to 200 characters."""
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:199] + "…"
