"""An adapter that was trained with added tokens, pushed with its tokenizer: answers are PEFT's, and
bad twins are refused by name.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from added_tokens import CALL, DONE, MAX_TOKENS, PROMPT, TEXT, answer_of, tokenizer_with_tokens, train_tokens
from peft_answers import generate
from server_process import ServerProcess
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraserve import Client, errors
from loraserve.demo.pack import base_dir

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def padded_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled base with 16 rows more than tokens, as Qwen's have."""
    folder = tmp_path_factory.mktemp("padded")
    shutil.copytree(base_dir(), folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32)
    model.resize_token_embeddings(model.config.vocab_size + 16)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(padded_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("server") / "data", model=padded_base)
    server.start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def key(server: ServerProcess) -> str:
    return server.make_tenant("acme")


def train(base: Path, folder: Path, *, num_rows: int | None = None, **config: Any) -> tuple[Any, Any]:
    """Train the rows of two added tokens; return the model as PEFT loads it, and the tokenizer."""
    tokenizer = tokenizer_with_tokens(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if num_rows is not None:
        model.resize_token_embeddings(num_rows)
    if not config:
        config["trainable_token_indices"] = tokenizer.convert_tokens_to_ids([CALL, DONE])
    trained = train_tokens(model, tokenizer, folder, target_modules=["q_proj", "v_proj", "down_proj"], **config)
    if num_rows is not None:
        return trained, tokenizer
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(loaded, folder).eval(), tokenizer


@pytest.mark.parametrize(
    "config",
    [{}, {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": False}],
    ids=["token-rows", "saved"],
)
def test_added_tokens_are_answered_as_peft(
    server: ServerProcess, key: str, padded_base: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    model, tokenizer = train(padded_base, tmp_path / "own", **config)
    name = f"own-{len(config)}"
    tokens, logprobs = generate(model, tokenizer(PROMPT).input_ids, MAX_TOKENS)
    with Client(server.url, api_key=key) as client:
        version = client.adapters.push(str(tmp_path / "own"), name=name)
        assert version.state == "ready", version.checks
        base = client.base().id
        with ThreadPoolExecutor(4) as pool:
            mine, other, *_ = pool.map(lambda asked: answer_of(client, asked), (name, base, name, base))
        assert mine[0] == tokens[: len(mine[0])]
        assert mine[1] == pytest.approx(logprobs[: len(mine[1])], abs=1e-3)
        assert other[0] != mine[0]


def test_text_of_added_tokens_is_own(server: ServerProcess, key: str, padded_base: Path, tmp_path: Path) -> None:
    _, tokenizer = train(padded_base, tmp_path / "own")
    base_tokenizer = AutoTokenizer.from_pretrained(padded_base)
    with Client(server.url, api_key=key) as client:
        client.adapters.push(str(tmp_path / "own"), name="texts")
        form = {"structured_outputs": {"regex": f"{CALL}[ab]{{3}}"}, "return_token_ids": True}
        for model, expected in (("texts", tokenizer), (client.base().id, base_tokenizer)):
            choice = client.completions.create(model=model, prompt=TEXT, max_tokens=12, extra_body=form).choices[0]
            assert choice.prompt_token_ids == expected(TEXT).input_ids
            assert re.fullmatch(f"{CALL}[ab]{{3}}", choice.text)
            assert choice.finish_reason == "stop"
            assert expected.decode(choice.token_ids, skip_special_tokens=True) == choice.text
        # what is pulled is what was pushed
        version = client.adapters.push(str(tmp_path / "own"), name="texts")
        client.adapters.pull("texts", tmp_path / "pulled")
        assert not (tmp_path / "pulled" / "tokenizer.json").exists()
        again = client.adapters.push(str(tmp_path / "pulled"), name="again")
        assert again.digest == version.digest
        assert len(tokenizer(TEXT).input_ids) < len(base_tokenizer(TEXT).input_ids)


def add_in_middle(value: dict[str, Any]) -> None:
    value["added_tokens"][-1]["id"] = 700


def rename_special(value: dict[str, Any]) -> None:
    value["added_tokens"][1]["content"] = "<|human|>"


def change_merge(value: dict[str, Any]) -> None:
    merges = value["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_in_middle, "has the id 700, and tokenizers gives it"),
        (rename_special, r"has the token '<\|human\|>' where the base has '<\|user\|>' \(id 1\)"),
        (change_merge, "merges tokens by other rules"),
    ],
)
def test_bad_twin_is_refused_by_name(
    server: ServerProcess, key: str, padded_base: Path, tmp_path: Path, change: Any, words: str
) -> None:
    train(padded_base, tmp_path / "own")
    file = tmp_path / "own" / "tokenizer.json"
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))
    with (
        Client(server.url, api_key=key) as client,
        pytest.raises((errors.AdapterBaseMismatch, errors.AdapterFormatError), match=words) as refused,
    ):
        client.adapters.push(str(tmp_path / "own"), name="bad")
    assert "Train with the base's tokenizer" in str(refused.value)


def test_rows_without_tokens_are_refused_by_name(
    server: ServerProcess, key: str, padded_base: Path, tmp_path: Path
) -> None:
    train(padded_base, tmp_path / "own", num_rows=1560, modules_to_save=["embed_tokens", "lm_head"])
    with (
        Client(server.url, api_key=key) as client,
        pytest.raises(errors.AdapterRejected, match=r"8 rows beyond the 1,552 .* no tokenizer in its folder has"),
    ):
        client.adapters.push(str(tmp_path / "own"), name="bad")
