"""A version's own tokenizer: the base's vocabulary with added tokens, in a request's every text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tokenizers import Tokenizer as HFTokenizer

from loraserve.api.inference.target import TargetSelector
from loraserve.api.services import Services
from loraserve.errors import AdapterNotReady, AdapterRejected
from loraserve.registry.binding import Binding, Fallback, Shadow
from loraserve.registry.model_name import parse_model
from loraserve.text.tokenizer import Tokenizer
from loraserve.tokenizer_identity import TokenizerSummary
from loraserve.types import BaseSpec
from tests.api.openai.conftest import EOS

BASE = "org/base:1"
CALL, END = "<call>", "<|end|>"
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def base(small_base: BaseSpec, model_dir: Path) -> BaseSpec:
    """A base that pads its embedding's rows, as Qwen's do."""
    tokenizer = Tokenizer(model_dir)
    return msgspec.structs.replace(
        small_base,
        vocab_size=tokenizer.vocab_size + 8,
        max_model_len=256,
        eos_token_ids=(tokenizer.token_to_id(EOS),),
    )


def files_of(model_dir: Path, change: Callable[[dict[str, Any]], object] = lambda value: None) -> dict[str, bytes]:
    """Return the tokenizer's files that training saved: the base's with two tokens."""
    tokenizer = HFTokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.add_tokens([CALL])
    tokenizer.add_special_tokens([END])
    definition = json.loads(tokenizer.to_str())
    change(definition)
    config = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": json.dumps(definition).encode(), "tokenizer_config.json": json.dumps(config).encode()}


def summary_of(files: dict[str, bytes]) -> bytes:
    found = TokenizerSummary.of_files(files)
    assert found is not None
    return found.text().encode()


@pytest.fixture
async def own(publish: Callable[..., Any], client: httpx2.AsyncClient, model_dir: Path) -> str:
    """Return the name of a version with a tokenizer of its own."""
    return f"sql@{await publish('sql', tokenizer=summary_of(files_of(model_dir)))}"


async def tokens_of(client: httpx2.AsyncClient, model: str, text: str) -> list[int]:
    answer = await client.post("/tokenize", json={"model": model, "prompt": text})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["tokens"]
    return tokens


async def test_text_has_versions_own_tokens(
    client: httpx2.AsyncClient, own: str, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.json").write_bytes(files_of(model_dir)["tokenizer.json"])
    trained = HFTokenizer.from_file(str(tmp_path / "own.json"))
    text = f"a {CALL} b{END}c<|user|>"
    assert await tokens_of(client, own, text) == trained.encode(text).ids
    assert len(await tokens_of(client, "sql@1", text)) > len(trained.encode(text).ids)
    assert await tokens_of(client, "sql@1", text) == await tokens_of(client, BASE, text)
    for model, expected in ((own, text), ("sql@1", "a ")):
        answer = await client.post("/detokenize", json={"model": model, "tokens": trained.encode(text).ids})
        assert answer.json()["prompt"].startswith(expected)
        assert (CALL in answer.json()["prompt"]) == (model == own)


async def complete(client: httpx2.AsyncClient, model: str, prompt: str, **body: Any) -> httpx2.Response:
    return await client.post(
        "/v1/completions", json={"model": model, "prompt": prompt, "seed": 1, "max_tokens": 64, **body}
    )


async def test_answers_differ_by_version_in_batch(client: httpx2.AsyncClient, own: str, engine: Any) -> None:
    engine.script, engine.step_s = f"x{CALL}y", 0.005
    answers = await asyncio.gather(
        *(complete(client, model, f"{CALL}?", logprobs=1, return_token_ids=True) for model in (own, "sql@1", own, BASE))
    )
    mine, other, again, base = (answer.json()["choices"][0] for answer in answers)
    assert mine["text"] == other["text"] == base["text"] == again["text"] == f"x{CALL}y"
    assert len(mine["prompt_token_ids"]) == 2
    assert len(other["prompt_token_ids"]) == len(base["prompt_token_ids"]) == len(CALL) + 1
    assert mine["logprobs"]["tokens"][:3] == ["x", CALL, "y"]
    assert other["logprobs"]["tokens"][:3] == ["x", "<", "c"]


async def test_stream_and_echo_show_own_tokens(client: httpx2.AsyncClient, own: str, engine: Any) -> None:
    engine.script = f"x{CALL}y"
    async with client.stream(
        "POST", "/v1/completions", json={"model": own, "prompt": "q", "stream": True, "max_tokens": 9}
    ) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == f"x{CALL}y"
    echoed = await complete(client, own, f"a{CALL}b", echo=True)
    assert echoed.json()["choices"][0]["text"] == f"a{CALL}bx{CALL}y"


async def test_own_end_token_stops_answer(client: httpx2.AsyncClient, own: str, engine: Any) -> None:
    engine.script = f"done{END}more"
    ended = (await complete(client, own, "q")).json()["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == ("done", "stop")
    # to the base it is text
    other = (await complete(client, "sql@1", "q")).json()["choices"][0]
    assert other["text"] == f"done{END}more"


TEMPLATE = b"{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


async def test_template_writes_own_special_tokens(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any, model_dir: Path
) -> None:
    tokenizer = summary_of(files_of(model_dir))
    version = await publish("sql", tokenizer=tokenizer, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": CALL}]
    answer = await client.post("/v1/chat/completions", json={"model": f"sql@{version}", "messages": messages})
    assert answer.status_code == 200, answer.text
    (asked,) = engine.seen
    (call, end) = asked.prompt_token_ids
    assert asked.tokenizer.id_to_token(call) == CALL
    assert asked.tokenizer.id_to_token(end) == END


async def test_template_of_config_becomes_versions(
    client: httpx2.AsyncClient, publish: Callable[..., Any], services: Services, acme: Any, engine: Any, model_dir: Path
) -> None:
    files = {name: data for name, data in files_of(model_dir).items() if name == "tokenizer.json"}
    for template, kept in ((TEMPLATE.decode(), True), ((model_dir / "chat_template.jinja").read_text(), False)):
        config = json.dumps({"chat_template": template}).encode()
        version = await publish("sql", tokenizer=summary_of({**files, "tokenizer_config.json": config}))
        record = await services.registry.get_version(acme.caller.tenant, "sql", version)
        assert record.extras is not None
        assert (record.extras.chat_template is not None) == kept
        (detail,) = [check["detail"] for check in record.checks if check["name"] == "tokenizer"]
        assert detail.endswith("template is the version's" if kept else "template is the base's")
    named = json.dumps({"chat_template": [{"name": "rag", "template": "x"}]}).encode()
    with pytest.raises(AdapterRejected, match="has the chat templates rag; a version has one"):
        await publish("sql", tokenizer=summary_of({**files, "tokenizer_config.json": named}))


@pytest.mark.parametrize("form", [{"structured_outputs": {"regex": f"a{CALL}b"}}, {"guided_choice": [f"a{CALL}b"]}])
async def test_grammar_is_for_own_vocabulary(
    client: httpx2.AsyncClient, own: str, engine: Any, form: dict[str, Any]
) -> None:
    assert (await complete(client, own, "q", **form)).status_code == 200
    assert (await complete(client, "sql@1", "q", **form)).status_code == 200
    mine, other = engine.seen
    assert CALL in mine.params.tokenizer
    assert (other.params.tokenizer, other.params.grammar) == ("", mine.params.grammar)


async def test_special_token_in_grammar_is_own(client: httpx2.AsyncClient, own: str) -> None:
    lark = 'start: "a" ' + END
    assert (await complete(client, own, "q", structured_outputs={"grammar": lark})).status_code == 200
    refused = await complete(client, "sql@1", "q", structured_outputs={"grammar": lark})
    assert (refused.status_code, "special token that this model doesn't have" in refused.text) == (400, True)


def add_in_middle(value: dict[str, Any]) -> None:
    value["added_tokens"].append({**value["added_tokens"][-1], "id": 40, "content": "<middle>"})


def leave_gap(value: dict[str, Any]) -> None:
    value["added_tokens"].append(
        {**value["added_tokens"][-1], "id": value["added_tokens"][-1]["id"] + 2, "content": "<gap>"}
    )


def rename_special(value: dict[str, Any]) -> None:
    next(token for token in value["added_tokens"] if token["content"] == EOS)["content"] = "<|done|>"


def change_merges(value: dict[str, Any]) -> None:
    value["model"]["vocab"]["ab"] = 256
    value["model"]["merges"] = ["a b"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_in_middle, "the token '<middle>' has the id 40, and tokenizers gives it"),
        (leave_gap, "the token '<gap>' has the id 264, and tokenizers gives it 263"),
        (rename_special, r"has the token '<\|done\|>' where the base has '<\|eos\|>'"),
        (change_merges, "has another vocabulary: .* the first that differs has an id from 256 to 511"),
    ],
)
async def test_bad_twin_is_refused_by_name(
    publish: Callable[..., Any], model_dir: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    with pytest.raises(AdapterRejected, match=words):
        await publish("sql", tokenizer=summary_of(files_of(model_dir, change)))


async def test_tokens_beyond_rows_are_refused(
    publish: Callable[..., Any], model_dir: Path, services: Services, base: BaseSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = msgspec.structs.replace(base, vocab_size=base.vocab_size - 7)
    monkeypatch.setattr(services.registry.publisher, "_base", lambda: narrow)
    with pytest.raises(AdapterRejected, match=r"'<\|end\|>' with the id 262; .* has 262 rows of embeddings"):
        await publish("sql", tokenizer=summary_of(files_of(model_dir)))


async def test_sum_of_two_tokenizers_is_refused(
    client: httpx2.AsyncClient, own: str, publish: Callable[..., Any], model_dir: Path
) -> None:
    def rename(value: dict[str, Any]) -> None:
        value["added_tokens"][-1]["content"] = "<|other|>"

    files = files_of(model_dir, rename)
    del files["tokenizer_config.json"]
    other = await publish("other", seed=1, tokenizer=summary_of(files))
    plain = await publish("plain", seed=2)
    assert (await complete(client, f"{own}+plain@{plain}", CALL)).status_code == 200
    refused = await complete(client, f"{own}+other@{other}", "q")
    assert (refused.status_code, "have tokenizers of their own, which differ" in refused.text) == (400, True)


async def test_stored_differences_are_kept_in_bounds(
    client: httpx2.AsyncClient, own: str, services: Services, engine: Any
) -> None:
    await asyncio.gather(*(complete(client, own, CALL) for _ in range(4)))
    kept = {id(request.tokenizer) for request in engine.seen}
    assert len(kept) == 1
    # kilobytes beside the base's own, which it shares
    assert 0 < services.version_chats.num_bytes < 64 << 10
    adapter = await services.registry.resolve(engine.seen[0].tenant, parse_model(own, BASE))
    assert await services.version_chats.tokenizer(adapter) is engine.seen[0].tokenizer


async def test_target_with_own_tokenizer_takes_no_prompt(
    client: httpx2.AsyncClient, own: str, services: Services, acme: Any
) -> None:
    one, two = [await services.registry.resolve(acme.caller.tenant, parse_model(name, BASE)) for name in (own, "sql@1")]
    assert one is not None
    assert two is not None
    error = AdapterNotReady("It isn't loaded.")
    for first, other, is_same in ((one, two, False), (two, one, False), (one, None, False), (two, None, True)):
        shadow = None if other is None else Shadow(other, "id", "live", 1.0)
        target = TargetSelector(Binding(first, fallback=Fallback(other), shadow=shadow), BASE)
        assert (target.shadow is not None) == (is_same and shadow is not None)
        assert target.fall_back(error) == is_same
    target = TargetSelector(Binding(two, shadow=Shadow(two, "id", "live", 1.0)), BASE)
    assert target.shadow is not None
