"""Models that transformers' code can't serve here are refused by name, with what is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from loraserve.errors import ConfigError, UnknownArchitecture
from loraserve.model.config.implementation import choose_implementation
from loraserve.model.modelling.skeleton import build_skeleton, read_modelled_config

from ..conftest import PagedRun, edit_json, random_tokens, reference_logits, save_model
from .families import HYBRIDS, OTHERS, load, save

DOCS = Path(__file__).parents[4] / "docs/bases.md"

REFUSED = {
    "Bloom": "attention function",
    "Falcon": "attention function",
    "Gemma3": "images",
    "Jamba": "state beside keys and values",
    "Llama4Text": "chunked_attention",
    "Mamba": "state beside keys and values",
    "Mpt": "attention function",
    "Qwen3Next": "no layer that attends",
    "RecurrentGemma": "state beside keys and values",
    "StableLm": "attention function",
    "T5": "encoder",
    "ViT": "no causal language model",
}
"""transformers' config → what the refusal says."""
FIELDS = {"Qwen3Next": {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}}
"""Fields of a config whose defaults leave out what is refused."""


def test_documentation_lists_every_compared_family() -> None:
    section = (
        DOCS.read_text(encoding="utf-8").partition("\n## Families of transformers' code\n")[2].partition("\n## ")[0]
    )
    assert set(re.findall(r"`(\w+ForCausalLM)`", section)) == {*OTHERS, *HYBRIDS}


def test_native_code_is_chosen_where_table_has_architecture(tmp_path: Path) -> None:
    for name, expected in (("LlamaForCausalLM", "native"), ("PhiForCausalLM", "transformers")):
        save(name, tmp_path / name)
        assert choose_implementation(tmp_path / name, "auto") == expected
        assert choose_implementation(tmp_path / name, "transformers") == "transformers"
    with pytest.raises(UnknownArchitecture, match="PhiForCausalLM"):
        choose_implementation(tmp_path / "PhiForCausalLM", "native")


def test_refusal_names_extra_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("PhiForCausalLM", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnknownArchitecture, match="PhiForCausalLM") as caught:
        choose_implementation(tmp_path, "auto")
    assert "loraserve[transformers]" in (caught.value.hint or "")


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(**FIELDS.get(name, {}))
    config.save_pretrained(tmp_path)
    with pytest.raises(UnknownArchitecture, match=REFUSED[name]):
        build_skeleton(read_modelled_config(tmp_path))


def test_unknown_model_type_is_refused(tmp_path: Path) -> None:
    save("PhiForCausalLM", tmp_path)
    edit_json(tmp_path / "config.json", model_type="mystery", auto_map={"AutoConfig": "code.Config"})
    with pytest.raises(UnknownArchitecture, match="mystery"):
        read_modelled_config(tmp_path)


def test_conv1d_layers_are_never_rounded(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=101, n_embd=48, n_head=4, n_layer=2, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    save_model(model, tmp_path)
    run = PagedRun(load(tmp_path))
    tokens = random_tokens(21)
    (found,) = run.step([(run.add(tokens), len(tokens))])
    assert float((found - reference_logits(model, tokens)).abs().max()) < 1e-4
    with pytest.raises(ConfigError, match="--quantize int8: the layers of GPT2LMHeadModel") as caught:
        load(tmp_path, quantize="int8")
    assert caught.value.hint == "Leave --quantize out."


def test_gguf_file_is_refused(tmp_path: Path) -> None:
    save("PhiForCausalLM", tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "gguf", "types": {}})
    with pytest.raises(ConfigError, match="GGUF"):
        load(tmp_path)


def test_attention_of_unknown_argument_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("CohereForCausalLM", tmp_path)
    code = transformers.models.cohere.modeling_cohere.CohereAttention
    forward = code.forward

    def biased(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, position_bias=1.0, **kwargs)

    monkeypatch.setattr(code, "forward", biased)
    with pytest.raises(UnknownArchitecture, match="position_bias"):
        load(tmp_path)


def test_positions_of_batch_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("CohereForCausalLM", tmp_path)
    code = transformers.models.cohere.modeling_cohere.CohereRotaryEmbedding
    forward = code.forward

    def counting(self: Any, x: Any, position_ids: Any) -> Any:
        return forward(self, x, position_ids.new_ones(position_ids.shape).cumsum(-1) - 1)

    monkeypatch.setattr(code, "forward", counting)
    with pytest.raises(UnknownArchitecture, match="batch of two"):
        load(tmp_path)
