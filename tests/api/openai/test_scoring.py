"""POST /v1/score and /v1/rerank: pairs of texts by the cosine of their vectors, or by a head."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load, save

from loraserve.limits import LIMITS

pytestmark = pytest.mark.usefixtures("no_leaks")


async def ask(client: httpx2.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json={"model": "sql", **body})
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


async def vectors(client: httpx2.AsyncClient, *texts: str, **body: Any) -> np.ndarray:
    data = (await ask(client, "/v1/embeddings", input=texts, **body))["data"]
    return np.array([item["embedding"] for item in data])


@pytest.fixture
async def head(client: httpx2.AsyncClient, services: Any, acme: Any, make_upload: Callable[..., Any]) -> None:
    """The newest version of ``sql`` has a classification head, the fake engine's of two labels."""
    config, weights = make_upload(1)
    config = json.dumps(json.loads(config) | {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]})
    weights = save(load(weights) | {"base_model.model.score.weight": np.ones((2, 8), np.float32)})
    uploads = services.registry.uploads
    staged = await uploads.stage(acme.caller.tenant)
    staged.write(weights)
    await services.registry.publisher.publish(acme.caller.tenant, "sql", config.encode(), staged, actor="test")
    await uploads.release(acme.caller.tenant, staged)


async def test_score_is_cosine_of_text_vectors(client: httpx2.AsyncClient, engine: Any) -> None:
    for fields in ({}, {"pooling": "mean"}):
        a, b, c = await vectors(client, "one", "two", "three", **fields)
        engine.seen.clear()
        for path in ("/v1/score", "/score"):
            answer = await ask(client, path, text_1="one", text_2=["two", "three"], **fields)
            assert [(item["object"], item["index"]) for item in answer["data"]] == [("score", 0), ("score", 1)]
            np.testing.assert_allclose([item["score"] for item in answer["data"]], [a @ b, a @ c], atol=1e-6)
            assert (answer["object"], answer["scoring"], answer["model"]) == ("list", "cosine", "sql")
        # each text is computed once
        assert len(engine.seen) == 6
        assert answer["usage"]["prompt_tokens"] == 11


async def test_pairs_are_accepted_under_each_field_name(client: httpx2.AsyncClient) -> None:
    sides = (["a", "b"], ["c", "d"])
    names = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
    answers = [(await ask(client, "/v1/score", **dict(zip(pair, sides, strict=True))))["data"] for pair in names]
    assert all(answer == answers[0] for answer in answers)
    a, b, c, d = await vectors(client, "a", "b", "c", "d")
    np.testing.assert_allclose([item["score"] for item in answers[0]], [a @ c, b @ d], atol=1e-6)
    [one] = (await ask(client, "/v1/score", text_1="a", text_2="c"))["data"]
    assert one["score"] == answers[0][0]["score"]


async def test_documents_are_ordered_by_score(client: httpx2.AsyncClient) -> None:
    documents = ["one", "two", "three", "two"]
    q, *rest = await vectors(client, "query", *documents)
    wanted = sorted(range(4), key=lambda i: (-(q @ rest[i]), i))
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        answer = await ask(client, path, query="query", documents=documents)
        assert [item["index"] for item in answer["results"]] == wanted
        assert [item["document"] for item in answer["results"]] == [{"text": documents[i]} for i in wanted]
        assert answer["scoring"] == "cosine"
        scores = [item["relevance_score"] for item in answer["results"]]
        assert scores == sorted(scores, reverse=True)
    fields = {"documents": [{"text": text} for text in documents], "top_n": 2, "return_documents": False}
    few = await ask(client, "/v1/rerank", query="query", **fields)
    assert few["results"] == [{"index": i, "relevance_score": s} for i, s in zip(wanted[:2], scores, strict=False)]
    assert len((await ask(client, "/v1/rerank", query="query", documents="one", top_n=9))["results"]) == 1


@pytest.mark.usefixtures("head")
async def test_classification_head_scores_each_pair_as_single_text(client: httpx2.AsyncClient, engine: Any) -> None:
    answer = await ask(client, "/v1/score", text_1="ab", text_2=["cd", "e"])
    assert answer["scoring"] == "classification_head"
    assert [engine.tokenizer.decode(request.prompt_token_ids) for request in engine.seen] == ["abcd", "abe"]
    assert all(request.pooling.classify for request in engine.seen)
    raw = await ask(client, "/v1/score", text_1="ab", text_2=["cd", "e"], use_activation=False)
    for one, other in zip(answer["data"], raw["data"], strict=True):
        # the softmax of the second label
        assert one["score"] == pytest.approx(1 / (1 + math.exp(-other["score"])))
    ranked = await ask(client, "/v1/rerank", query="ab", documents=["cd", "e"])
    by_index = {item["index"]: item["relevance_score"] for item in ranked["results"]}
    assert [by_index[0], by_index[1]] == [item["score"] for item in answer["data"]]
    assert answer["usage"]["prompt_tokens"] == 7
    # the base has none
    assert (await ask(client, "/v1/score", model="org/base:1", text_1="a", text_2="b"))["scoring"] == "cosine"


@pytest.mark.usefixtures("head")
async def test_a_head_of_three_labels_makes_no_score(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.api.openai.scoring._MAX_LABELS", 1)
    response = await client.post("/v1/score", json={"model": "sql", "text_1": "a", "text_2": "b"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "model")
    assert "2 labels" in error["message"]


@pytest.mark.usefixtures("head")
async def test_long_pair_has_longer_text_truncated_first(client: httpx2.AsyncClient, engine: Any) -> None:
    await ask(client, "/v1/score", text_1="abc", text_2="0123456789", truncate_prompt_tokens=8)
    assert engine.tokenizer.decode(engine.seen[-1].prompt_token_ids) == "abc01234"
    long = {"query": "abc", "documents": ["0" * 300], "truncate_prompt_tokens": -1}
    await ask(client, "/v1/rerank", **long)
    assert len(engine.seen[-1].prompt_token_ids) == engine.base.max_model_len


MANY = ["a"] * (LIMITS.max_pooled_inputs + 1)
BAD: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("nothing", "/v1/score", {}, 400, "text_1"),
    ("one side", "/v1/score", {"text_1": "a"}, 400, "text_2"),
    ("one side of others", "/v1/score", {"queries": "a"}, 400, "documents"),
    ("sides of two pairs", "/v1/score", {"text_1": "a", "data_2": "b"}, 400, "text_2"),
    ("two pairs", "/v1/score", {"text_1": "a", "text_2": "b", "data_1": "c", "data_2": "d"}, 400, "text_1"),
    ("other lengths", "/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "text_1"),
    ("an empty side", "/v1/score", {"text_1": [], "text_2": ["c"]}, 400, "text_1"),
    ("an empty text", "/v1/score", {"text_1": "a", "text_2": ["b", ""]}, 400, "text_2.1"),
    ("a number", "/v1/score", {"text_1": "a", "text_2": [1]}, 400, "text_2.0"),
    ("a picture", "/v1/score", {"text_1": "a", "text_2": [{"image": "x"}]}, 400, "text_2.0"),
    ("too many", "/v1/score", {"text_1": "a", "text_2": MANY}, 400, "text_2"),
    ("too long", "/v1/score", {"text_1": "a", "text_2": "b" * 257}, 400, "text_2"),
    ("no query", "/v1/rerank", {"documents": ["a"]}, 400, "query"),
    ("a query of another type", "/v1/rerank", {"query": ["a"], "documents": ["a"]}, 400, "query"),
    ("an empty query", "/v1/rerank", {"query": "", "documents": ["a"]}, 400, "query"),
    ("no documents", "/v1/rerank", {"query": "a"}, 400, "documents"),
    ("documents null", "/v1/rerank", {"query": "a", "documents": None}, 400, "documents"),
    ("an empty list of documents", "/v1/rerank", {"query": "a", "documents": []}, 400, "documents"),
    ("a document without text", "/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, 400, "documents.0"),
    ("too many documents", "/v1/rerank", {"query": "a", "documents": MANY}, 400, "documents"),
    ("a negative top_n", "/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, 400, "top_n"),
    ("fields of documents", "/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, 400, "rank_fields"),
    (
        "cut to nothing",
        "/rerank",
        {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0},
        400,
        "truncate_prompt_tokens",
    ),
]


async def test_bad_input_gets_4xx_naming_field(client: httpx2.AsyncClient, engine: Any) -> None:
    for what, path, fields, status, param in BAD:
        response = await client.post(path, json={"model": "sql", **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), what
    assert engine.seen == []
