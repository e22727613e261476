"""Families that people serve, by the configs of transformers' own classes.

Those that aren't read are refused by the name of their architecture. docs/bases.md has the same
table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from loraserve.errors import ModelError, UnknownArchitecture
from loraserve.model.config.architectures import ARCHITECTURES
from loraserve.model.config.model_config import parse_config
from loraserve.model.config.wrappers import WRAPPERS
from loraserve.model.modelling.skeleton import build_skeleton

DOCS = Path(__file__).parents[4] / "docs/bases.md"

FAMILIES: dict[str, bool] = {
    **dict.fromkeys(ARCHITECTURES, True),
    **dict.fromkeys(WRAPPERS, True),
    "ApertusForCausalLM": False,
    "ArceeForCausalLM": False,
    "BambaForCausalLM": False,
    "Cohere2ForCausalLM": False,
    "CohereForCausalLM": False,
    "DeepseekV3ForCausalLM": False,
    "Ernie4_5_MoeForCausalLM": False,
    "FalconH1ForCausalLM": False,
    "Gemma3nForConditionalGeneration": False,
    "Gemma4ForConditionalGeneration": False,
    "Glm4MoeForCausalLM": False,
    "GptOssForCausalLM": False,
    "GraniteMoeHybridForCausalLM": False,
    "JambaForCausalLM": False,
    "Lfm2ForCausalLM": False,
    "Lfm2MoeForCausalLM": False,
    "Llama4ForConditionalGeneration": False,
    "NemotronForCausalLM": False,
    "NemotronHForCausalLM": False,
    "PhimoeForCausalLM": False,
    "Qwen3NextForCausalLM": False,
    "Qwen3VLMoeForConditionalGeneration": False,
    "Qwen3_5ForCausalLM": False,
    "Qwen3_5ForConditionalGeneration": False,
    "Qwen3_5MoeForConditionalGeneration": False,
    "Starcoder2ForCausalLM": False,
}
"""Class of transformers → whether loraserve's own code serves it."""
REFUSED = {
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "JambaForCausalLM",
    "Llama4ForConditionalGeneration",
    "NemotronHForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
}
"""Classes that transformers' code doesn't serve either."""


def default_config(name: str) -> dict[str, Any]:
    """config.json as transformers saves it of the class's defaults."""
    config = getattr(transformers, name).config_class()
    return {**config.to_dict(), "architectures": [name]}


@pytest.mark.parametrize("name", [name for name, is_read in FAMILIES.items() if is_read])
def test_family_is_read_from_default_config(name: str) -> None:
    config = parse_config(default_config(name), {})
    assert config.num_layers > 0
    assert config.max_model_len > 0


@pytest.mark.parametrize("name", [name for name, is_read in FAMILIES.items() if not is_read])
def test_unread_family_is_refused_by_name(name: str) -> None:
    with pytest.raises((UnknownArchitecture, ModelError), match=name):
        parse_config(default_config(name), {})


def listed_families(section: str) -> set[str]:
    """Return the architectures that a section of docs/bases.md names."""
    text = DOCS.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"`(\w+(?:ForCausalLM|ForConditionalGeneration))`", text))


def test_documentation_lists_every_readable_family() -> None:
    assert listed_families("Families") == {*ARCHITECTURES, *WRAPPERS}


def test_unread_family_is_modelled_or_refused_by_name(subtests: Any) -> None:
    # what the section lists, tests/unit/model/modelling compares with transformers
    modelled = listed_families("Families of transformers' code")
    assert {name for name, is_read in FAMILIES.items() if not is_read} - modelled == REFUSED
    for name in sorted(REFUSED):
        config = getattr(transformers, name).config_class()
        config.architectures = [name]
        with subtests.test(name=name), pytest.raises(UnknownArchitecture, match=name):
            build_skeleton(config)
