"""Handling of the config fields that PEFT's other kinds share.

`peft_config.FIELDS` has it for LoRA's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.adapters.config.peft_fields import FIELDS, FieldRule, Handling, refusal


def implemented(why: str) -> FieldRule:
    return FieldRule(Handling.IMPLEMENTED, why)


def ignored(why: str) -> FieldRule:
    return FieldRule(Handling.IGNORED, why)


def refused(why: str, *neutral: object) -> FieldRule:
    return FieldRule(Handling.REFUSED, why, neutral)


AS_IN_LORA = (
    "modules_to_save",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
)
"""Fields of every kind."""

DROPOUT = ignored("dropout acts in training only")
INIT = ignored("it only chose the weights that training began with")
TRANSPOSED = FIELDS["fan_in_fan_out"]


DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "LOHA": {"r": 8, "alpha": 8},
    "LOKR": {"r": 8, "alpha": 8},
    "VERA": {"r": 256},
    "ADALORA": {"init_r": 12, "lora_alpha": 8},
}
"""PEFT's, by kind, of the numbers that a config may leave out; a test compares them with the
classes.
"""


def number(kind: str, config: Mapping[str, Any], name: str) -> Any:
    """Look up the config's value, or PEFT's default where it has none.

    The config's value may be anything.
    """
    return config.get(name, DEFAULTS[kind][name])


def fields(kind: str, **rules: FieldRule) -> dict[str, FieldRule]:
    """Build the table of a kind: what every kind has, then its own."""
    return {
        "peft_type": implemented(f"{kind}: it says which tensors to expect"),
        **{name: FIELDS[name] for name in AS_IN_LORA},
        **rules,
    }


def refusals(config: Mapping[str, Any], table: Mapping[str, FieldRule]) -> list[str]:
    """List the reason for each field that the config sets and the table refuses or lacks."""
    found = (refusal(name, value, table) for name, value in config.items())
    return [why for why in found if why is not None]
