"""What becomes of the config fields that PEFT's other kinds share, as `peft_config.FIELDS` says it of LoRA's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.adapters.peft_fields import FIELDS, FieldRule, Handling
from loraserve.adapters.strict_json import shown


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


def fields(kind: str, **rules: FieldRule) -> dict[str, FieldRule]:
    """The table of a kind: what every kind has, then its own."""
    return {
        "peft_type": implemented(f"{kind}: it says which tensors to expect"),
        **{name: FIELDS[name] for name in AS_IN_LORA},
        **rules,
    }


def refusals(config: Mapping[str, Any], table: Mapping[str, FieldRule]) -> list[str]:
    """What the config asks for and the table doesn't have, or refuses; each with its reason."""
    problems = []
    for name, value in config.items():
        rule = table.get(name)
        # a newer PEFT's field that is switched off says nothing
        if value is None or value is False or value in ("", [], {}):
            continue
        if rule is None:
            problems.append(
                f"{shown(name)} = {shown(value)}: this server doesn't know the field, and it may change the answers."
            )
        elif rule.handling is Handling.REFUSED and not any(
            value == neutral and type(value) is type(neutral) for neutral in rule.neutral
        ):
            problems.append(f"{name} = {shown(value)} is refused: {rule.why}.")
    return problems
