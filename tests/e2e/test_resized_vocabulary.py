"""An adapter of a base whose embeddings were resized for added tokens: its answers are PEFT's, in a
batch with others, and neither it nor another samples a token that it has no row for.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from added_tokens import CALL, DONE, MAX_TOKENS, PROMPT, TEXT, answer_of, tokenizer_with_tokens, train_tokens
from peft_answers import generate
from safetensors.torch import load_file, save_file
from server_process import ServerProcess
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraserve import Client, errors
from loraserve.demo.pack import base_dir

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

TABLES = ["embed_tokens", "lm_head"]
SAVED = {"modules_to_save": TABLES, "ensure_weight_tying": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("server") / "data")
    server.start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def key(server: ServerProcess) -> str:
    return server.make_tenant("acme")


@pytest.fixture
def client(server: ServerProcess, key: str) -> Iterator[Client]:
    with Client(server.url, api_key=key) as client:
        yield client


def open_base() -> Any:
    return AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32)


def train(folder: Path, *, pads_to: int | None = None, **config: Any) -> tuple[Any, Any]:
    """Train two added tokens; return the resized model as PEFT loads it, and the tokenizer."""
    tokenizer, model = tokenizer_with_tokens(base_dir()), open_base()
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=pads_to)
    num_rows = model.get_input_embeddings().weight.shape[0]
    train_tokens(model, tokenizer, folder, target_modules=["q_proj", "down_proj"], **(config or SAVED))
    loaded = open_base()
    loaded.resize_token_embeddings(num_rows)
    return peft.PeftModel.from_pretrained(loaded, folder).eval(), tokenizer


@pytest.mark.parametrize(
    ("pads_to", "config"),
    [
        (None, SAVED),
        (64, SAVED),
        (None, {"trainable_token_indices": [1536, 1537]}),
    ],
    ids=["saved", "padded", "token-rows"],
)
def test_resized_adapter_is_answered_as_peft(
    client: Client, tmp_path: Path, pads_to: int | None, config: dict[str, Any]
) -> None:
    vocab = client.base().vocab_size
    model, tokenizer = train(tmp_path / "own", pads_to=pads_to, **config)
    name, base = f"own-{pads_to}-{len(config)}", client.base().id
    tokens, logprobs = generate(model, tokenizer(PROMPT).input_ids, MAX_TOKENS)
    alone = answer_of(client, base)
    version = client.adapters.push(str(tmp_path / "own"), name=name)
    assert version.state == "ready", version.checks
    with ThreadPoolExecutor(4) as pool:
        mine, other, *_ = pool.map(lambda asked: answer_of(client, asked), (name, base, name, base))
    assert mine[0] == tokens[: len(mine[0])]
    assert mine[1] == pytest.approx(logprobs[: len(mine[1])], abs=1e-3)
    assert max(other[0]) < vocab
    assert other == alone


@pytest.fixture
def own(client: Client, tmp_path: Path) -> tuple[str, Any]:
    """Return the name of a version with two tokens beyond the base's, and its tokenizer."""
    _, tokenizer = train(tmp_path / "trained")
    client.adapters.push(str(tmp_path / "trained"), name="own")
    return "own", tokenizer


def test_added_tokens_are_text_everywhere(client: Client, own: tuple[str, Any]) -> None:
    name, tokenizer = own
    vocab = client.base().vocab_size
    call, done = tokenizer.convert_tokens_to_ids([CALL, DONE])
    assert call >= vocab
    # only these may be said
    body = {"allowed_token_ids": [call], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    choice = client.completions.create(model=name, prompt="a", extra_body=body).choices[0]
    assert (choice.text, choice.token_ids) == (CALL * 3, [call] * 3)
    # the version's own end of text, which a bias makes the likeliest
    ended = client.completions.create(
        model=name, prompt=TEXT, max_tokens=3, extra_body={"logit_bias": {str(done): 100}}
    )
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    stopped = client.completions.create(model=name, prompt="a", extra_body={**body, "stop_token_ids": [call]})
    assert stopped.choices[0].finish_reason == "stop"
    chunks = client.completions.create(model=name, prompt="a", stream=True, extra_body=body)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == CALL * 3
    scored = client.completions.create(model=name, prompt=TEXT, max_tokens=0, echo=True, logprobs=2)
    shown = scored.choices[0].logprobs
    assert shown is not None
    assert shown.tokens.count(CALL) == 3
    assert all(number <= 0 for number in shown.token_logprobs[1:])


def test_grammar_has_versions_own_tokens(client: Client, own: tuple[str, Any]) -> None:
    name, _ = own
    form = {"structured_outputs": {"regex": f"{CALL}[ab]{{3}}{CALL}"}, "return_token_ids": True}
    with ThreadPoolExecutor(4) as pool:
        asked = [name, client.base().id] * 2
        answers = list(
            pool.map(
                lambda model: client.completions.create(model=model, prompt=TEXT, max_tokens=24, extra_body=form), asked
            )
        )
    for answer in answers:
        assert re.fullmatch(f"{CALL}[ab]{{3}}{CALL}", answer.choices[0].text)
    for answer in answers[1::2]:
        assert max(answer.choices[0].token_ids) < client.base().vocab_size
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    chat = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": CALL}],
        max_tokens=40,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ).choices[0]
    if chat.finish_reason == "stop":
        assert "a" in json.loads(chat.message.content or "")


def test_drawn_tokens_stay_within_own_rows(client: Client, own: tuple[str, Any]) -> None:
    name, tokenizer = own
    vocab = client.base().vocab_size

    def draw(model: str, seed: int) -> list[int]:
        body = {"temperature": 3.0, "seed": seed, "max_tokens": 12, "ignore_eos": True, "repetition_penalty": 1.3}
        return answer_of(client, model, extra_body=body, temperature=3.0, max_tokens=12)[0]

    with ThreadPoolExecutor(4) as pool:
        mine = list(pool.map(lambda seed: draw(name, seed), range(8)))
        others = list(pool.map(lambda seed: draw(client.base().id, seed), range(8)))
    assert vocab <= max(map(max, mine)) < len(tokenizer)
    assert max(map(max, others)) < vocab


def test_ids_beyond_rows_are_refused(client: Client, own: tuple[str, Any]) -> None:
    name, tokenizer = own
    vocab, end = client.base().vocab_size, len(tokenizer)
    client.completions.create(model=name, prompt=[vocab], max_tokens=1)
    for model, first in ((name, end), (client.base().id, vocab)):
        for body in (
            {"prompt": [first]},
            {"prompt": "a", "extra_body": {"logit_bias": {str(first): 1}}},
            {"prompt": "a", "extra_body": {"allowed_token_ids": [first]}},
            {"prompt": "a", "extra_body": {"stop_token_ids": [first]}},
        ):
            with pytest.raises(errors.InvalidRequest, match=f"ids go from 0 to {first - 1}"):
                client.completions.create(model=model, max_tokens=1, **body)
    with pytest.raises(errors.InvalidRequest, match="can't be part of a sum"):
        client.completions.create(model=f"0.5*{name}", prompt="a", max_tokens=1)


def drop_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    (folder / "special_tokens_map.json").unlink(missing_ok=True)


def use_base_tokenizer(folder: Path) -> None:
    drop_tokenizer(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base_dir() / name, folder / name)


def cut_rows(folder: Path) -> None:
    """Leave one row too few for the tokens."""
    path = folder / "adapter_model.safetensors"
    num_rows = len(AutoTokenizer.from_pretrained(folder))
    cut = {
        name: tensor[: num_rows - 1].contiguous() if tensor.shape[0] == num_rows else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(cut, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_tokenizer, "no tokenizer in its folder has a token for them"),
        (use_base_tokenizer, "no tokenizer in its folder has a token for them"),
        (cut_rows, r"has the token '<\|done\|>' with the id"),
    ],
)
def test_rows_and_tokens_belong_together(
    client: Client, tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    train(tmp_path / "own")
    change(tmp_path / "own")
    with pytest.raises(errors.AdapterRejected, match=words) as refused:
        client.adapters.push(str(tmp_path / "own"), name="bad")
    assert "resize_token_embeddings" in str(refused.value)
