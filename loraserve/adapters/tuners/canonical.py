"""The fields of an accepted config that decide an adapter's arithmetic where its tensors don't, as
`adapter_digest` frames them behind the kind's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.adapters.tuners.fields import number

Fields = list[tuple[str, str]]


def canonical_plain(config: Mapping[str, Any]) -> Fields:
    """Return no fields: the tensors of these kinds (IA3, VeRA) say everything."""
    return []


def canonical_lycoris(config: Mapping[str, Any]) -> Fields:
    """Return ranks and alphas of LoHa and LoKr, in the order of their keys, since the first match
    wins.
    """
    fields = [(name, _number(number(config["peft_type"], config, name))) for name in ("r", "alpha")]
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        fields.append((name, str(len(pattern))))
        for key, value in pattern.items():
            fields += [("key", key), ("value", _number(value))]
    return fields


def canonical_adalora(config: Mapping[str, Any]) -> Fields:
    """Return what AdaLoRA's scaling is made of; the ranks are the tensors'."""
    return [(name, _number(number("ADALORA", config, name))) for name in ("init_r", "lora_alpha")]


def _number(value: int | float) -> str:
    # 16 and 16.0 are one alpha; hex keeps every bit of any other
    return float(value).hex()
