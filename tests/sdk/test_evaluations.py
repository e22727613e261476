from __future__ import annotations

from typing import Any

import pytest

from loraserve import AsyncClient, Client, errors

SHA256 = "a" * 64
EVALUATION = {
    "version": 3,
    "data_sha256": SHA256,
    "data_name": "held-out.jsonl",
    "num_lines": 40,
    "metrics": {"exact_match": 0.5},
    "base_metrics": {},
    "settings": {"max_tokens": "64"},
    "base_digest": "b" * 64,
    "arithmetic": "fp32",
    "created_at": "2026-01-02T03:04:05Z",
    "created_by": "01J",
}


def test_evaluation_is_kept_under_digest_of_data(server: Any, client: Client) -> None:
    server.answer(EVALUATION, 201)
    kept = client.evaluations.put(
        "sql", 3, SHA256, data_name="held-out.jsonl", num_lines=40, metrics={"exact_match": 0.5}
    )
    assert (kept.version, kept.metrics, kept.created_by) == (3, {"exact_match": 0.5}, "01J")
    asked = server.asked[0]
    assert (asked.method, asked.path) == ("PUT", f"/api/v1/adapters/sql/versions/3/evaluations/{SHA256}")
    assert asked.json == {
        "data_name": "held-out.jsonl",
        "num_lines": 40,
        "metrics": {"exact_match": 0.5},
        "base_metrics": {},
        "settings": {},
    }


async def test_async_list_of_evaluations_follows_cursor(server: Any, async_client: AsyncClient) -> None:
    server.answer({"data": [EVALUATION], "next_cursor": "x"})
    server.answer({"data": [EVALUATION | {"num_lines": 2}], "next_cursor": None})
    assert [one.num_lines async for one in async_client.evaluations.list("Qwen/My", 3)] == [40, 2]
    assert server.asked[0].path == "/api/v1/adapters/Qwen%2FMy/versions/3/evaluations"


def test_version_has_newest_evaluation(server: Any, client: Client) -> None:
    server.answer_with_version(evaluation=EVALUATION)
    server.answer_with_version()
    found = client.adapters.version("sql", 1).evaluation
    assert found is not None
    assert found.settings == {"max_tokens": "64"}
    # an older server has none
    assert client.adapters.version("sql", 1).evaluation is None


def test_alias_moves_if_better_by_metric(server: Any, client: Client) -> None:
    server.answer_with_alias(version=3)
    server.refuse(412, "not_better", "It isn't.")
    server.refuse(412, "not_evaluated", "There is none.")
    client.adapters.set_alias("sql", "live", 3, if_better="accuracy")
    assert server.asked[0].json == {"version": 3, "if_better": "accuracy"}
    with pytest.raises(errors.NotBetter):
        client.adapters.set_alias("sql", "live", 3, if_better="accuracy")
    with pytest.raises(errors.NotEvaluated):
        client.adapters.set_alias("sql", "live", 3, if_better="accuracy")


def test_text_is_tokenized_by_named_model(server: Any, client: Client) -> None:
    server.answer({"count": 2, "max_model_len": 64, "tokens": [5, 6], "token_strs": None})
    assert client.tokenize("hi", model="sql@3", add_special_tokens=False).tokens == [5, 6]
    asked = server.asked[0]
    assert (asked.method, asked.path) == ("POST", "/tokenize")
    assert asked.json == {"model": "sql@3", "prompt": "hi", "add_special_tokens": False}


def test_tokenize_is_repeated_after_broken_connection(server: Any, client: Client, waits: list[float]) -> None:
    server.break_connection()
    server.answer({"count": 0, "max_model_len": 64, "tokens": [], "token_strs": None})
    assert client.tokenize("").tokens == []
    assert len(waits) == 1
