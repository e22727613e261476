"""Other projects' clients, unchanged, against a real server: what their READMEs do first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx2
import jsonschema
import pytest

from loraserve.demo.frames import Compare

from .conftest import ADAPTERS, ServedPack
from .table import ROWS, Row

pytestmark = pytest.mark.clients

FRAME = Compare("list", "tickets", "age", "over", 81)
TEXTS = [FRAME.prompt, "greet Anna"]
RESULT = '{"rows": 3}'
QUERY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "table": {"enum": ["tickets", "users", "orders"]},
        "field": {"enum": ["age", "size"]},
        "op": {"enum": [">", "<", "="]},
        "value": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["table", "field", "op", "value"],
    "additionalProperties": False,
}


def check_call(answer: Any) -> None:
    assert answer["name"] == "query"
    jsonschema.validate(answer["arguments"], QUERY)


def check_agent(answer: Any) -> None:
    """Check that the tool was called once, its result sent back, and a text written last."""
    (arguments,) = answer["calls"]
    jsonschema.validate(arguments, QUERY)
    assert answer["results"] == [RESULT]
    assert answer["text"] == FRAME.render("json")


def check_logprobs(answer: Any, text: str) -> None:
    tokens = "".join(token for token, _ in answer)
    assert tokens.removesuffix("<|end|>") == text
    assert all(logprob <= 0 for _, logprob in answer)
    # the pack's answers are sure ones
    assert math.fsum(logprob for _, logprob in answer) > -1


def check_embeddings(answer: Any, served: ServedPack) -> None:
    """Check the vectors against those of a plain request."""
    headers = {"Authorization": f"Bearer {served.key}"}
    body = {"model": "sql", "input": TEXTS}
    plain = httpx2.post(f"{served.url}/v1/embeddings", json=body, headers=headers, timeout=60).raise_for_status().json()
    expected = [item["embedding"] for item in plain["data"]]
    assert [len(vector) for vector in answer] == [len(vector) for vector in expected]
    for vector, right in zip(answer, expected, strict=True):
        assert vector == pytest.approx(right, abs=1e-6)


def check_ignored(answer: Any) -> None:
    """Check that what the server can't do was answered all the same, and named."""
    assert answer["status"] == 200
    named = answer["ignored"].split(", ")
    # an agent's tools that its maker's servers run
    hosted = {"web_search", "image_generation", "local_shell", "mcp"} & set(answer["sent"])
    assert {f"tools.{kind}" for kind in hosted} <= set(named)
    fields = {"context_management", "thinking"} & set(answer["sent"])
    assert fields <= set(named)
    assert hosted or fields, answer["sent"]


def check(row: Row, feature: str, answer: Any, served: ServedPack) -> None:
    text = FRAME.render("sql" if row.has_adapter else "plain")
    match feature:
        case "models":
            # a trainer's policies come and go
            assert {"base", *ADAPTERS} <= set(answer)
        case "chat" | "completion" | "result":
            # a share of right answers, where the client evaluates them itself
            assert answer == (1.0 if row.package == "lm-eval" else text)
        case "stream":
            assert "".join(answer) == text
            assert len(answer) > 1
        case "call" | "stream_call":
            check_call(answer)
        case "agent" | "stream_agent":
            check_agent(answer)
        case "parse" | "stream_parse":
            jsonschema.validate(answer, QUERY)
            assert answer == json.loads(FRAME.render("json"))
        case "predict":
            # the prompt is the framework's own, which the pack's adapter doesn't know
            jsonschema.validate(answer, QUERY)
        case "embeddings":
            check_embeddings(answer, served)
        case "logprobs":
            check_logprobs(answer, text)
        case "count_tokens":
            # the question's seven words and two digits, and two marks around them
            assert answer == 11
        case "batch":
            assert answer == {"status": "completed", "texts": [FRAME.render("sql")]}
        case "loglikelihood":
            assert answer == 1.0
        case "bench":
            assert answer["requests"] == {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
            assert answer["tokens"] > 5
            assert answer["ttft_ms"] > 0
        case "load":
            assert answer["max_model_len"] == 512
            assert answer["texts"] == [FRAME.render("french")] * 2
            assert "policy-v2" in answer["models"]
            assert "policy-v1" not in answer["models"]
        case "sent_and_ignored":
            check_ignored(answer)
        case "unknown_model":
            assert "absent" in answer
        case "context_window":
            assert "maximum context length is 512 tokens" in answer
        case "rate_limit":
            assert "1 requests per minute" in answer["message"]
            assert 1 <= answer["retry_after_s"] <= 60
        case _:
            raise AssertionError(f"no check for {feature}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}-{row}")
def test_a_client_works(
    row: Row, answers_of: Callable[[Row], tuple[ServedPack, dict[str, Any]]], subtests: pytest.Subtests
) -> None:
    served, answers = answers_of(row)
    for feature in row.tested:
        with subtests.test(feature):
            line = answers[feature]
            assert "error" not in line, line["error"]
            check(row, feature, line["answer"], served)
