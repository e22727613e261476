"""Every LoraConfig field is implemented, ignored because it can't matter, or refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import peft.tuners.lora.config as peft_lora
import pytest

from loraserve.adapters.config.peft_config import read_settings
from loraserve.adapters.config.peft_fields import FIELDS, Handling


def problems_of(config: dict[str, Any]) -> list[str]:
    return [p.message for p in read_settings(config)[1]]


def test_the_table_has_exactly_pefts_fields() -> None:
    import peft

    assert set(FIELDS) == {f.name for f in dataclasses.fields(peft.LoraConfig)}


def test_defaults_of_peft_are_accepted(make_config: Callable[..., dict[str, Any]]) -> None:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]).to_dict()
    config |= {"target_modules": ["q_proj"], "peft_type": "LORA"}
    assert problems_of(config) == []


SET: dict[str, Any] = {
    "layer_replication": [[0, 2]],
    "fan_in_fan_out": True,
    "megatron_config": {"a": 1},
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "kasa_config": {"a": 1},
    "velora_config": {"num_groups": 64},
    "monteclora_config": {"num_samples": 8},
    "arrow_config": {"top_k": 3},
}


def test_every_refused_field_has_an_example_here() -> None:
    assert set(SET) == {name for name, rule in FIELDS.items() if rule.handling is Handling.REFUSED}


@pytest.mark.parametrize("name", SET)
def test_answer_changing_field_is_refused_by_name(name: str, make_config: Callable[..., dict[str, Any]]) -> None:
    messages = problems_of(make_config(**{name: SET[name]}))
    assert len(messages) == 1
    assert messages[0].startswith(f"{name} = ")
    assert FIELDS[name].why in messages[0]


OBJECTS: dict[str, Any] = {
    "use_bdlora": peft_lora.BdLoraConfig,
    "kasa_config": peft_lora.KasaConfig,
    "velora_config": peft_lora.VeloraConfig,
    "monteclora_config": peft_lora.MontecloraConfig,
    "arrow_config": peft_lora.ArrowConfig,
    "loftq_config": peft_lora.LoftQConfig,
    "eva_config": peft_lora.EvaConfig,
    "corda_config": peft_lora.CordaConfig,
    "lora_ga_config": peft_lora.LoraGAConfig,
}
"""Fields that hold an object → PEFT's class of it."""


def test_every_field_holding_object_is_listed() -> None:
    objects = {name for name, rule in FIELDS.items() if rule.is_object or rule.parts is not None}
    # PEFT throws a runtime_config away as it reads a file
    in_peft = {f.name for f in dataclasses.fields(peft_lora.LoraConfig) if "Config" in str(f.type)} - {"runtime_config"}
    assert objects == set(OBJECTS) == in_peft


@pytest.mark.parametrize("name", [name for name in OBJECTS if FIELDS[name].handling is Handling.REFUSED])
def test_empty_object_means_peft_defaults_and_is_refused(name: str, make_config: Callable[..., dict[str, Any]]) -> None:
    config = make_config(**{name: {}})
    assert getattr(peft_lora.LoraConfig(**{k: v for k, v in config.items() if k != "peft_type"}), name)
    assert problems_of(config) == [f"{name} = {{}} is refused: PEFT fills it with its defaults: {FIELDS[name].why}."]
    assert problems_of(make_config(**{name: None})) == []
    for other in ("", [], 0):
        assert problems_of(make_config(**{name: other}))


@pytest.mark.parametrize("name", [name for name in OBJECTS if FIELDS[name].handling is Handling.IGNORED])
def test_ignored_object_has_exactly_peft_keys(name: str, make_config: Callable[..., dict[str, Any]]) -> None:
    keys = {f.name for f in dataclasses.fields(OBJECTS[name])}
    assert FIELDS[name].parts == keys
    for value in (None, {}, dict.fromkeys(keys, 1)):
        assert problems_of(make_config(**{name: value})) == []
    [unknown] = problems_of(make_config(**{name: {"tomorrow": 1}}))
    assert unknown.startswith(f"{name} has 'tomorrow': this field is unknown, and it may change the answers")
    [other] = problems_of(make_config(**{name: 3}))
    assert other == f"{name} = 3 is refused: PEFT expects an object or null."


def test_missing_config_fields_have_peft_defaults(make_config: Callable[..., dict[str, Any]]) -> None:
    config = make_config()
    del config["r"], config["lora_alpha"]
    settings, problems = read_settings(config)
    oracle = peft_lora.LoraConfig(target_modules=["q_proj"])
    assert problems == []
    assert settings is not None
    assert (settings.r, settings.lora_alpha) == (oracle.r, oracle.lora_alpha)


ALORA: dict[str, Any] = {"alora_invocation_tokens": [1, 2], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"brand_new": 3}, "'brand_new' = 3: this field is unknown, and it may change the answers"),
        ({"brand_new": True}, "'brand_new' = True"),
        ({"brand_new": 0}, "'brand_new' = 0"),
        ({"brand_new": {}}, "'brand_new' = {}: this field is unknown, and it may change the answers"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"r": 4.0}, "r is 4.0"),
        ({"r": None}, "r is None"),
        ({"r": 513}, "1 to 512"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": 10**30}, "lora_alpha is 1000"),
        ({"use_rslora": 1}, "use_rslora is 1"),
        ({"use_dora": "true"}, "use_dora is 'true'"),
        ({"rank_pattern": [1]}, "expected an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj'] is 0"),
        ({"rank_pattern": {r"(k)\1.*q": 2}}, "is refused: it has a back-reference"),
        ({"alpha_pattern": {f".*{i}": 1 for i in range(65)}}, "more than 64 keys that are regexes"),
        ({"rank_pattern": {str(i): 1 for i in range(2049)}}, "2,049 keys"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern['q_proj'] is 'x'"),
        ({"target_modules": None}, "missing or empty"),
        ({"target_modules": []}, "missing or empty"),
        ({"target_modules": ""}, "missing or empty"),
        (
            {"target_modules": "k++_proj"},
            "target_modules = 'k++_proj' is refused: as one string it is a regex, and it has a possessive repetition",
        ),
        ({"target_modules": ["q_proj", 3]}, "expected a list of module names"),
        ({"target_modules": 3}, "expected a list of module names"),
        ({"exclude_modules": "(?>k)_proj"}, "exclude_modules = '(?>k)_proj' is refused"),
        ({"layers_to_transform": [0, -1]}, "layers_to_transform is [0, -1]"),
        ({"layers_to_transform": True}, "layers_to_transform is True"),
        ({"layers_to_transform": [0], "target_modules": "all-linear"}, "can't be used"),
        ({"layers_to_transform": [0], "target_modules": ".*_proj"}, "can't be used"),
        ({"layers_pattern": "layers"}, "without layers_to_transform"),
        ({"layers_pattern": "(?=la)yers", "layers_to_transform": [0]}, "layers_pattern = '(?=la)yers' is refused: RE2"),
        ({"layers_pattern": 3, "layers_to_transform": [0]}, "layers_pattern is 3"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"lora_bias": 1}, "lora_bias is 1"),
        ({"lora_bias": True, "use_dora": True}, "lora_bias is refused together with use_dora"),
        ({"lora_bias": True, "init_lora_weights": "gaussian"}, "lora_bias is refused with an init_lora_weights"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'"),
        ({"modules_to_save": ["(lm_head|norm)"]}, "modules_to_save names '(lm_head|norm)'"),
        ({"trainable_token_indices": 3}, "trainable_token_indices is 3"),
        ({"trainable_token_indices": [1, -1]}, "trainable_token_indices is [1, -1]"),
        ({"trainable_token_indices": [True]}, "trainable_token_indices is [True]"),
        ({"trainable_token_indices": {"lm_head": []}}, "trainable_token_indices is {'lm_head': []}"),
        ({"trainable_token_indices": {"lm_head": ["x"]}}, "trainable_token_indices is ['x']"),
        ({"alora_invocation_tokens": [1.5], "task_type": "CAUSAL_LM"}, "alora_invocation_tokens is [1.5]"),
        ({"alora_invocation_tokens": [1]}, "would never activate this adapter"),
        ({"alora_invocation_tokens": [1], "task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS'"),
        (ALORA | {"use_dora": True}, "together with use_dora"),
        (ALORA | {"init_lora_weights": "mica"}, "alora_invocation_tokens is refused with init_lora_weights = 'mica'"),
        ({"use_dora": True, "init_lora_weights": "mica"}, "use_dora is refused with init_lora_weights = 'mica'"),
        (ALORA | {"bias": "all"}, "together with bias: PEFT applies bias to every token"),
        (ALORA | {"modules_to_save": ["lm_head"]}, "together with modules_to_save"),
        (ALORA | {"trainable_token_indices": [1]}, "together with trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "changed the base's weights"),
        ({"init_lora_weights": "magic"}, "this value is unknown"),
        ({"init_lora_weights": 7}, "this value is unknown"),
    ],
)
def test_bad_value_is_refused_with_reason(
    changes: dict[str, Any], word: str, make_config: Callable[..., dict[str, Any]]
) -> None:
    messages = problems_of(make_config(**changes))
    assert len(messages) == 1
    assert word in messages[0]
    assert len(messages[0]) < 400


@pytest.mark.parametrize(
    "changes",
    [
        {"brand_new": None},
        {"brand_new": False},
        {"brand_new": []},
        {"bias": "none"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"lora_alpha": 8.5},
        {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "base_model_name_or_path": "../../etc/passwd"},
        {"qalora_group_size": 16, "megatron_core": "megatron.core", "loftq_config": {}},
        {"target_modules": "all-linear"},
        {"layers_to_transform": 1, "layers_pattern": "layers"},
        {"layers_to_transform": 1, "layers_pattern": ["h", "la.*"]},
        {"target_modules": "All-Linear"},
        {"target_modules": "(?!k).*_proj", "exclude_modules": "(?!.*q).*", "rank_pattern": {"(?!k).*q": 2}},
        {"target_modules": ".*_proj", "exclude_modules": r".*\.k_proj"},
        {"modules_to_save": [], "trainable_token_indices": [], "alora_invocation_tokens": []},
        ALORA | {"use_rslora": True, "lora_bias": True, "bias": "none"},
    ],
)
def test_value_without_effect_is_accepted(changes: dict[str, Any], make_config: Callable[..., dict[str, Any]]) -> None:
    assert problems_of(make_config(**changes)) == []


def test_every_problem_is_reported_at_once(make_config: Callable[..., dict[str, Any]]) -> None:
    assert len(problems_of(make_config(r=0, use_qalora=True, brand_new=1, lora_alpha="x"))) == 4
