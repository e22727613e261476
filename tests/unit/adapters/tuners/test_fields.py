"""Each kind's table of fields against the config class of the installed PEFT, and what becomes of
fields that aren't served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import peft
import pytest

from loraserve.adapters.config.peft_fields import FieldRule
from loraserve.adapters.digest import CANONICAL
from loraserve.adapters.ir import TensorView
from loraserve.adapters.tuners import TUNERS, adalora, ia3, loha, lokr, vera
from loraserve.adapters.tuners.fields import DEFAULTS
from loraserve.errors import AdapterRejected
from loraserve.limits import LIMITS
from loraserve.types import BaseSpec

TABLES: dict[str, tuple[Mapping[str, FieldRule], type[peft.PeftConfig]]] = {
    "LOHA": (loha.FIELDS, peft.LoHaConfig),
    "LOKR": (lokr.FIELDS, peft.LoKrConfig),
    "IA3": (ia3.FIELDS, peft.IA3Config),
    "VERA": (vera.FIELDS, peft.VeraConfig),
    "ADALORA": (adalora.FIELDS, peft.AdaLoraConfig),
}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("IA3", {"fan_in_fan_out": True}),
    ("VERA", {"fan_in_fan_out": True}),
    ("ADALORA", {"use_dora": True}),
    ("ADALORA", {"alora_invocation_tokens": [1, 2]}),
    ("ADALORA", {"ensure_weight_tying": True}),
    ("ADALORA", {"loftq_config": {"loftq_bits": 4}}),
    ("ADALORA", {"kasa_config": {}}),
    ("LOHA", {"a_field_of_tomorrow": {}}),
    ("LOHA", {"a_field_of_tomorrow": 3}),
]


@pytest.mark.parametrize("kind", TABLES)
def test_table_has_exactly_fields_of_installed_peft(kind: str) -> None:
    table, config = TABLES[kind]
    assert set(table) == {field.name for field in dataclasses.fields(config)}
    assert set(TUNERS) - {"LORA"} == set(CANONICAL) == set(TABLES)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_missing_config_fields_have_peft_defaults(kind: str) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(TABLES[kind][1])}
    numbers = {name for name in ("r", "alpha", "init_r", "lora_alpha") if name in defaults}
    # AdaLoRA inherits an r that it doesn't read
    assert set(DEFAULTS[kind]) == numbers - ({"r"} if kind == "ADALORA" else set())
    assert all(defaults[name] == value for name, value in DEFAULTS[kind].items())
    assert CANONICAL[kind]({"peft_type": kind}) == CANONICAL[kind]({"peft_type": kind, **DEFAULTS[kind]})


@pytest.mark.parametrize("kind", TABLES)
def test_each_field_says_why(kind: str) -> None:
    assert all(rule.why for rule in TABLES[kind][0].values())


@pytest.mark.parametrize(("kind", "fields"), REFUSED, ids=[f"{kind} {next(iter(f))}" for kind, f in REFUSED])
def test_answer_changing_field_is_refused_by_name(
    kind: str, fields: dict[str, Any], make_base: Callable[..., BaseSpec]
) -> None:
    config = {
        "peft_type": kind,
        "r": 2,
        "alpha": 2,
        "init_r": 2,
        "lora_alpha": 2,
        "target_modules": ["q_proj"],
        **fields,
    }
    if kind != "ADALORA":
        del config["init_r"], config["lora_alpha"]
    some = TensorView("F32", (1,), np.ones(1, np.float32))
    with pytest.raises(AdapterRejected) as caught:
        TUNERS[kind](config, {"base_model.model.x": some}, make_base(), LIMITS)
    assert any(next(iter(fields)) in problem for problem in caught.value.problems)


def test_only_arithmetic_fields_are_canonical() -> None:
    config = {"peft_type": "LOHA", "r": 4, "alpha": 8, "rank_pattern": {"q_proj": 2, "v_proj": 3}, "rank_dropout": 0.1}
    same = {**config, "alpha": 8.0, "rank_dropout": 0.5, "inference_mode": True}
    turned = {**config, "rank_pattern": {"v_proj": 3, "q_proj": 2}}
    assert CANONICAL["LOHA"](config) == CANONICAL["LOHA"](same)
    assert CANONICAL["LOHA"](config) != CANONICAL["LOHA"](turned)
    assert CANONICAL["LOHA"](config) != CANONICAL["LOHA"]({**config, "alpha": 9})
    assert CANONICAL["ADALORA"]({"peft_type": "ADALORA", "init_r": 4, "lora_alpha": 8}) != CANONICAL["ADALORA"](
        {"peft_type": "ADALORA", "init_r": 5, "lora_alpha": 8}
    )
