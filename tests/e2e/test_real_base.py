"""Chat with a trained base through the API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from real_model import find_real_model
from server_process import ServerProcess
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraserve import Client

pytestmark = [pytest.mark.real, pytest.mark.slow]
MAX_TOKENS = 24
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three fruits, separated by commas.",
    "Is water wet? Answer in one word.",
)


@pytest.fixture(scope="module", params=["none", "int8"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--quantize", request.param, "--memory-budget", "2GiB", "--host-cache", "64MiB")
    server = ServerProcess(tmp_path_factory.mktemp("real") / "data", model=find_real_model(), flags=flags)
    server.start()
    yield server
    assert server.stop() == 0


def ask(client: Client, question: str) -> str:
    answer = client.chat.completions.create(
        model=client.models.list()[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0,
    )
    content = answer.choices[0].message.content
    assert content is not None
    return content


@pytest.fixture(scope="session")
def answers() -> Mapping[str, str]:
    """transformers' answers to each question."""
    base = find_real_model()
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    texts = {}
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS
            )[0, ids.shape[1] :]
        texts[question] = tokenizer.decode(tokens, skip_special_tokens=True)
    return texts


def test_chat_equals_transformers(server: ServerProcess, answers: Mapping[str, str]) -> None:
    """In float32 the same text; in int8 a text that begins alike."""
    num_equal = 0
    with Client(server.url, api_key=server.make_tenant("acme")) as client:
        for question, expected in answers.items():
            found = ask(client, question)
            num_equal += found == expected
            assert found.split()[:1] == expected.split()[:1], question
    assert num_equal == len(QUESTIONS) or "int8" in server.flags


def test_required_tool_is_called_without_template(server: ServerProcess) -> None:
    """SmolLM2's chat template reads no tools: its messages tell of them."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    with Client(server.url, api_key=server.make_tenant("globex")) as client:
        answer = client.chat.completions.create(
            model=client.models.list()[0].id,
            messages=[{"role": "user", "content": "What is the weather in Oslo? Use the tool."}],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=64,
            temperature=0,
        )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    assert answer.choices[0].finish_reason == "tool_calls"
