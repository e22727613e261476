from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from loraserve import AsyncClient, Client


def test_completion_sends_only_given_fields(server: Any, client: Client) -> None:
    server.answer_with_completion()
    client.completions.create(model="sql@3", prompt=[1, 2], max_tokens=4, top_k=None, extra_body={"new": 1})
    asked = server.asked[0]
    assert (asked.method, asked.path) == ("POST", "/v1/completions")
    assert asked.json == {
        "model": "sql@3",
        "prompt": [1, 2],
        "stream": False,
        "max_tokens": 4,
        "top_k": None,
        "new": 1,
    }
    assert asked.headers["authorization"] == "Bearer sk-lora-test"
    assert "x-tenant" not in asked.headers


def test_completion_is_typed_and_names_answering_version(server: Any, client: Client) -> None:
    server.answer_with_completion(
        x_request_id="req-1", x_loraserve_adapter="sql@1", x_loraserve_ignored="foo, bar", server_timing="queue;dur=1"
    )
    completion = client.completions.create(model="sql", prompt="list")
    assert completion.choices[0].text == "SELECT"
    assert completion.usage is not None
    assert completion.usage.total_tokens == 3
    assert completion.answer is not None
    assert (completion.answer.request_id, completion.answer.adapter) == ("req-1", "sql@1")
    assert completion.answer.ignored == ("foo", "bar")


def test_fields_of_a_newer_server_are_kept(server: Any, client: Client) -> None:
    server.answer({"data": [{"id": "sql", "created": 1, "owned_by": "acme", "colour": "red"}]})
    assert client.models.list()[0].model_dump()["colour"] == "red"


def test_adapter_sum_is_sent_as_text_or_field(server: Any, client: Client) -> None:
    server.answer_with_completion()
    server.answer_with_completion()
    server.answer({"id": "c", "created": 1, "model": "base", "choices": []})
    client.completions.create(model="a+0.5*b", prompt="x")
    client.completions.create(model="base", prompt="x", adapters=[{"name": "a"}, {"name": "b", "weight": 0.5}])
    client.chat.completions.create(model="base", messages=[], adapters=[{"name": "a@2", "weight": -1}])
    assert server.asked[0].json["model"] == "a+0.5*b"
    assert server.asked[1].json["adapters"] == [{"name": "a"}, {"name": "b", "weight": 0.5}]
    assert server.asked[2].json["adapters"] == [{"name": "a@2", "weight": -1}]


def test_misspelt_field_is_refused_with_a_guess(server: Any, client: Client) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        client.completions.create(model="sql", prompt="x", max_token=1)  # type: ignore[call-overload]
    assert server.asked == []


def test_chat_sends_messages(server: Any, client: Client) -> None:
    message = {"role": "assistant", "content": "hello"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    server.answer({"id": "c", "created": 1, "model": "sql", "choices": [choice]})
    answer = client.chat.completions.create(
        model="sql", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3
    )
    assert answer.choices[0].message.content == "hello"
    assert server.asked[0].path == "/v1/chat/completions"
    assert server.asked[0].json["messages"] == [{"role": "user", "content": "hi"}]


async def test_async_chat_sends_the_same(server: Any, async_client: AsyncClient) -> None:
    server.answer({"id": "c", "created": 1, "model": "sql", "choices": []})
    await async_client.chat.completions.create(model="sql", messages=[{"role": "user", "content": "hi"}])
    assert server.asked[0].json == {
        "model": "sql",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": False,
    }


def test_vectors_come_as_base64_and_are_numbers(server: Any, client: Client) -> None:
    data = base64.b64encode(np.array([0.5, -2.0], dtype="<f4").tobytes()).decode()
    answer = {"object": "list", "model": "sql", "usage": {"prompt_tokens": 2, "total_tokens": 2}}
    server.answer(answer | {"data": [{"object": "embedding", "index": 0, "embedding": data}]})
    server.answer(answer | {"data": [{"object": "embedding", "index": 0, "embedding": [0.5, -2.0]}]})
    for fields in ({}, {"encoding_format": "float", "pooling": "mean"}):
        embeddings = client.embeddings.create(model="sql", input=["a"], dimensions=2, **fields)
        assert embeddings.data[0].embedding == [0.5, -2.0]
    assert (server.asked[0].method, server.asked[0].path) == ("POST", "/v1/embeddings")
    assert server.asked[0].json == {"model": "sql", "input": ["a"], "encoding_format": "base64", "dimensions": 2}
    assert server.asked[1].json["encoding_format"] == "float"
    with pytest.raises(TypeError, match="pooling"):
        client.embeddings.create(model="sql", input="a", poling="mean")  # type: ignore[call-arg]


def test_scores_and_rerankings_report_method(server: Any, client: Client) -> None:
    server.answer({"model": "sql", "scoring": "cosine", "data": [{"object": "score", "index": 0, "score": 0.5}]})
    scores = client.scores.create(model="sql", text_1="a", text_2=["b"])
    assert (scores.scoring, scores.data[0].score) == ("cosine", 0.5)
    assert (server.asked[0].path, server.asked[0].json["text_2"]) == ("/v1/score", ["b"])
    results = [{"index": 1, "relevance_score": 0.5, "document": {"text": "c"}}, {"index": 0, "relevance_score": 0.1}]
    server.answer({"id": "r", "model": "sql", "scoring": "classification_head", "results": results})
    reranking = client.rerankings.create(model="sql", query="a", documents=["b", "c"], top_n=2)
    assert [(item.index, item.document and item.document.text) for item in reranking.results] == [(1, "c"), (0, None)]
    assert server.asked[1].json == {"model": "sql", "query": "a", "documents": ["b", "c"], "top_n": 2}


def test_model_ids_with_slashes_and_colons_reach_route(server: Any, client: Client) -> None:
    server.answer({"id": "org/base:sql", "created": 1, "owned_by": "acme"})
    assert client.models.get("org/base:sql").id == "org/base:sql"
    assert server.asked[0].path == "/v1/models/org/base:sql"


def test_admin_acts_for_a_tenant(server: Any) -> None:
    server.answer({"data": []})
    with Client(server.url, api_key="k" * 32, tenant="acme") as client:
        client.models.list()
    assert server.asked[0].headers["x-tenant"] == "acme"


def test_official_client_comes_configured(server: Any) -> None:
    pytest.importorskip("openai")
    server.answer_with_completion()
    with Client(server.url, api_key="sk-lora-test", tenant="acme") as client, client.openai() as official:
        assert official.completions.create(model="sql", prompt="x").choices[0].text == "SELECT"
    asked = server.asked[0]
    assert asked.path == "/v1/completions"
    assert asked.headers["authorization"] == "Bearer sk-lora-test"
    assert asked.headers["x-tenant"] == "acme"


RESPONSE = {
    "id": "resp_1",
    "created_at": 1,
    "model": "sql",
    "status": "completed",
    "store": True,
    "output": [
        {"id": "rs_1", "type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "SELECT"}]},
    ],
    "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
}


def test_response_is_created_reread_and_deleted(server: Any, client: Client) -> None:
    server.answer(RESPONSE)
    server.answer(RESPONSE)
    server.answer({"id": "resp_1", "deleted": True})
    made = client.responses.create(model="sql", input="list", previous_response_id="resp_0", max_output_tokens=4)
    assert (made.output_text, made.store) == ("SELECT", True)
    assert client.responses.retrieve("resp_1").id == "resp_1"
    client.responses.delete("resp_1")
    asked = [(one.method, one.path) for one in server.asked]
    assert asked == [
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
    ]
    expected = {"model": "sql", "input": "list", "previous_response_id": "resp_0", "max_output_tokens": 4}
    assert server.asked[0].json == expected
    with pytest.raises(TypeError, match="Did you mean store"):
        client.responses.create(model="sql", input="x", stores=True)  # type: ignore[call-arg]
