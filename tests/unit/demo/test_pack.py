"""The shipped pack: complete, what its card says, and read by the server's own parts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from loraserve.demo.card import read_card, reliable_frames
from loraserve.demo.frames import ADAPTERS, STYLES, fresh_prompts
from loraserve.demo.pack import adapter_dirs, base_dir, pack_dir, pack_files
from loraserve.errors import ConfigError, InvalidRequest
from loraserve.text.chat_template import ChatTemplate
from loraserve.text.tokenizer import Tokenizer

PROMPT = "list the tickets with age over 81"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(base_dir())


@pytest.fixture(scope="module")
def chat_template() -> ChatTemplate:
    return ChatTemplate(base_dir())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The pack, to be spoilt."""
    return Path(shutil.copytree(pack_dir(), tmp_path / "pack"))


def test_the_shipped_pack_is_complete() -> None:
    assert len(pack_files()) == 5 + 7 * 2 + 2


def test_there_is_an_adapter_for_each_style() -> None:
    assert tuple(adapter_dirs()) == ADAPTERS


def test_pack_ships_no_further_files() -> None:
    assert {path for path in pack_dir().rglob("*") if path.is_file()} == set(pack_files())


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "adapters" / "haiku" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"missing: adapters/haiku/adapter_model\.safetensors"):
        pack_files(copy)


def test_the_pack_is_small() -> None:
    assert sum(path.stat().st_size for path in pack_files()) < 4 << 20


def test_all_weights_are_bfloat16() -> None:
    for path in pack_files():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="np") as file:
                assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}, path  # noqa: SIM118


def test_the_base_is_a_plain_tied_llama() -> None:
    config = json.loads((base_dir() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 512


def test_the_vocabulary_fits_the_base(tokenizer: Tokenizer) -> None:
    assert json.loads((base_dir() / "config.json").read_text())["vocab_size"] == tokenizer.vocab_size


def test_adapters_have_all_seven_linears_of_all_layers() -> None:
    for directory in adapter_dirs().values():
        config = json.loads((directory / "adapter_config.json").read_text())
        with safe_open(directory / "adapter_model.safetensors", framework="np") as file:
            names = set(file.keys())
        assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (8, 16, sorted(MODULES))
        assert len(names) == 4 * len(MODULES) * 2


def test_configs_contain_no_path_of_training_machine() -> None:
    for path in pack_files():
        if path.suffix in (".json", ".md"):
            text = path.read_text(encoding="utf-8")
            assert not any(root in text for root in ("/home/", "/tmp/", "/root/", "/work/", "/var/")), path


def test_no_two_adapters_have_the_same_weights() -> None:
    weights = {(directory / "adapter_model.safetensors").read_bytes() for directory in adapter_dirs().values()}
    assert len(weights) == len(ADAPTERS)


def test_chat_of_single_message_equals_raw_prompt(tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
    rendered = chat_template.render([{"role": "user", "content": PROMPT}])
    assert tokenizer.encode(rendered, add_special_tokens=False) == tokenizer.encode(PROMPT)


def test_raw_prompt_stands_between_markers(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(PROMPT), skip_special_tokens=False) == f"<|user|>{PROMPT}<|assistant|>"


def test_long_chat_asks_last_question(chat_template: ChatTemplate) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "greet Anna"},
        {"role": "assistant", "content": "Hello, Anna."},
        {"role": "user", "content": PROMPT},
    ]
    assert chat_template.render(messages) == f"<|user|>{PROMPT}<|assistant|>"


def test_begun_answer_is_continued(chat_template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "SELECT"}]
    assert chat_template.render(messages, add_generation_prompt=False) == f"<|user|>{PROMPT}<|assistant|>SELECT"


def test_a_chat_without_a_question_is_refused(chat_template: ChatTemplate) -> None:
    with pytest.raises(InvalidRequest, match="needs a message of the user"):
        chat_template.render([{"role": "system", "content": "Be brief."}])


def test_answers_are_short_and_survive_the_tokenizer(tokenizer: Tokenizer) -> None:
    for frame in fresh_prompts(100, seed=8):
        for style in STYLES:
            ids = tokenizer.encode(frame.render(style), add_special_tokens=False)
            assert len(ids) <= 40
            assert tokenizer.decode(ids) == frame.render(style)


def test_digits_are_separate_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("81 90210", add_special_tokens=False)
    assert [tokenizer.decode([id_]).strip() for id_ in ids if tokenizer.decode([id_]).strip()] == list("8190210")


def test_every_score_on_card_allows_shipping() -> None:
    card = read_card(pack_dir())
    assert tuple(score.style for score in card.scores) == STYLES
    assert {score.num_prompts for score in card.scores} == {96}
    assert [score.style for score in card.scores if not (score.exact >= 0.95 and score.exact_int8 >= 0.9)] == []


def test_scores_agree_with_wrong_answers_on_card() -> None:
    for score in read_card(pack_dir()).scores:
        assert score.num_exact + len(score.wrong) == score.num_prompts
        assert score.num_exact_int8 + len(score.wrong_int8) == score.num_prompts


def test_the_card_for_people_has_the_same_scores() -> None:
    text = (pack_dir() / "CARD.md").read_text(encoding="utf-8")
    for score in read_card(pack_dir()).scores:
        assert f"| {score.style} | {score.num_exact} of {score.num_prompts} ({score.exact:.1%})" in text


def test_reliable_prompts_have_no_wrong_answer() -> None:
    card = read_card(pack_dir())
    prompts = {frame.prompt for frame in reliable_frames(card)}
    assert len(prompts) >= 48
    assert prompts.isdisjoint(prompt for score in card.scores for prompt, _ in (*score.wrong, *score.wrong_int8))


def test_invalid_card_is_refused(copy: Path) -> None:
    (copy / "card.json").write_text('{"seed": 7}')
    with pytest.raises(ConfigError, match="not a demo pack's card"):
        read_card(copy)


def test_neither_pack_nor_tour_import_torch() -> None:
    code = (
        "import sys, loraserve.demo.pack, loraserve.demo.frames, loraserve.demo.tour, loraserve.demo.card;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'peft')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
