"""The official client against a real server on the bundled pack, an adapter's name as ``model``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

pytestmark = pytest.mark.clients

QUESTION = "list the tickets with age over 81"
SQL = "SELECT * FROM tickets WHERE age > 81;"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("openai") / "data").start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def key(server: ServerProcess) -> str:
    key = server.make_tenant("acme")
    directories: dict[str, Path] = adapter_dirs()
    with Client(server.url, api_key=key) as client:
        for name in ("sql", "pirate"):
            client.adapters.push(directories[name], name=name)
    return key


@pytest.fixture
def client(server: ServerProcess, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        yield client


def test_client_lists_models(client: openai.OpenAI) -> None:
    assert {"sql", "pirate"} < {model.id for model in client.models.list()}
    assert client.models.retrieve("sql@1").id == "sql@1"


def test_client_chats_with_adapter(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="sql", messages=MESSAGES, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == SQL
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_adapters_answer_differently(client: openai.OpenAI) -> None:
    base = next(model.id for model in client.models.list() if model.id not in ("sql", "pirate"))
    answers = {
        model: client.chat.completions.create(model=model, messages=MESSAGES, temperature=0).choices[0].message.content  # type: ignore[arg-type]
        for model in (base, "sql", "pirate")
    }
    assert len(set(answers.values())) == 3


def test_client_streams_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="sql@live", messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SQL
    # the role, the text in one piece or more (tokens that wait for a slow reader are joined), the
    # reason, the usage
    assert len(chunks) >= 4
    assert chunks[-1].usage.completion_tokens > 0


def test_client_completes_n_choices_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="sql", prompt=QUESTION, max_tokens=6, n=3, seed=1, logprobs=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert all(value <= 0 for value in logprobs.token_logprobs if value is not None)
    assert answer.choices[0].text.startswith(QUESTION)


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        return (
            client.completions.create(model="pirate", prompt="a", max_tokens=24, temperature=2, seed=seed)
            .choices[0]
            .text
        )

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_scored_prompt_has_same_logprobs_as_generated_text(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="sql", prompt=QUESTION, max_tokens=8, temperature=0, logprobs=0, extra_body={"return_token_ids": True}
    )
    choice = made.choices[0].model_dump()
    prompt = choice["prompt_token_ids"] + choice["token_ids"]
    scored = client.completions.create(model="sql", prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    assert scored.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.token_logprobs is not None
    again = scored.choices[0].logprobs.token_logprobs[len(choice["prompt_token_ids"]) :]
    assert again == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)


def test_vllm_fields_change_engine_behaviour(client: openai.OpenAI) -> None:
    def complete(**fields: object) -> dict[str, Any]:
        answer = client.completions.create(
            model="sql",
            prompt=QUESTION,
            max_tokens=8,
            temperature=0,
            logprobs=0,
            echo=True,
            extra_body={"return_token_ids": True, **fields},
        )
        return answer.choices[0].model_dump()

    plain = complete(prompt_logprobs=2)
    prompt, made = plain["prompt_token_ids"], plain["token_ids"]
    for token_id, logprob, known in zip(
        prompt, plain["logprobs"]["token_logprobs"], plain["prompt_logprobs"], strict=False
    ):
        assert logprob == (None if known is None else pytest.approx(known[str(token_id)]["logprob"], abs=1e-3))
    narrow = complete(allowed_token_ids=made[1:3])
    assert set(narrow["token_ids"]) <= set(made[1:3])
    assert SQL.split()[0] in plain["text"]
    assert SQL.split()[0] not in complete(bad_words=[SQL.split()[0]])["text"]
    cut = complete(truncate_prompt_tokens=5)
    assert cut["prompt_token_ids"] == prompt[-5:]
    sums = [sum(complete(best_of=number)["logprobs"]["token_logprobs"][len(prompt) :]) for number in (1, 3)]
    assert sums[0] == pytest.approx(sums[1], abs=1e-3)


@pytest.mark.parametrize(
    ("body", "error", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"prompt": "word " * 5000}, openai.BadRequestError, "context_length_exceeded"),
        ({"n": 999}, openai.BadRequestError, "invalid_value"),
        ({"suffix": "x"}, openai.BadRequestError, "unsupported_parameter"),
        ({"extra_body": {"guided_regex": "("}}, openai.BadRequestError, "invalid_value"),
    ],
)
def test_client_errors_have_expected_class(
    client: openai.OpenAI, body: dict[str, object], error: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**({"model": "sql", "prompt": "x"} | body))  # type: ignore[call-overload]
    assert caught.value.code == code
    assert caught.value.request_id is not None


def test_bad_key_raises_authentication_error(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-lora-bad", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_a_tenants_prefix_is_a_base_url(server: ServerProcess, key: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/t/acme/v1", api_key=key) as client:
        answer = client.chat.completions.create(model="sql", messages=MESSAGES, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == SQL


async def test_many_streams_at_once_are_each_right(server: ServerProcess, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as client:

        async def ask(number: int) -> str:
            question = [{"role": "user", "content": f"list the tickets with age over {number}"}]
            stream = await client.chat.completions.create(model="sql", messages=question, temperature=0, stream=True)  # type: ignore[call-overload]
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*(ask(number) for number in range(21, 37)))
    right = sum(
        answer == f"SELECT * FROM tickets WHERE age > {number};"
        for number, answer in zip(range(21, 37), answers, strict=True)
    )
    # the pack's card says 95 % and more
    assert right >= 13


def test_client_runs_batch(client: openai.OpenAI) -> None:
    body = {"model": "sql", "messages": MESSAGES, "temperature": 0}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    assert client.files.retrieve(file.id).bytes == file.bytes
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"job": "nightly"}
    )
    deadline = time.monotonic() + 30
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.metadata) == (1, {"job": "nightly"})
    assert [found.id for found in client.batches.list(limit=1)] == [batch.id]
    assert batch.output_file_id is not None
    (answer,) = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert answer["custom_id"] == "one"
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == SQL
    assert {found.id for found in client.files.list()} == {file.id, batch.output_file_id}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
