"""Each refusal becomes its class of `loraserve.errors`."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.responses import HTMLResponse

from loraserve import Client, errors


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "context_length_exceeded", errors.ContextLengthExceeded),
        (400, "invalid_value", errors.InvalidRequest),
        (401, "invalid_api_key", errors.AuthenticationError),
        (403, "permission_denied", errors.PermissionDenied),
        (404, "model_not_found", errors.ModelNotFound),
        (409, "already_exists", errors.AlreadyExists),
        (412, "precondition_failed", errors.PreconditionFailed),
        (500, "engine_crashed", errors.EngineCrashed),
        (503, "adapter_corrupt", errors.AdapterCorrupt),
    ],
)
def test_code_decides_the_class(
    server: Any, client: Client, status: int, code: str, kind: type[errors.LoraserveError]
) -> None:
    server.refuse(status, code, x_should_retry="false", x_request_id="req-1")
    with pytest.raises(errors.LoraserveError) as caught:
        client.models.list()
    assert type(caught.value) is kind
    assert (caught.value.status_code, caught.value.code, caught.value.request_id) == (status, code, "req-1")


def test_unknown_error_code_falls_back_to_status(server: Any, client: Client) -> None:
    server.refuse(404, "planet_not_found", "No such planet.")
    with pytest.raises(errors.NotFound, match="No such planet") as caught:
        client.models.list()
    assert caught.value.code == "planet_not_found"
    assert errors.NotFound.code == "not_found"


def test_problem_document_gives_every_reason(server: Any, client: Client) -> None:
    reasons = [{"detail": "rank 0", "field": None}, {"detail": "shape [3, 4]", "field": "q_proj.lora_A"}]
    body = {"title": "Unprocessable", "detail": "2 problems", "code": "adapter_base_mismatch", "errors": reasons}
    server.answer(body, 422, content_type="application/problem+json")
    with pytest.raises(errors.AdapterBaseMismatch, match="2 problems") as caught:
        client.adapters.get("sql")
    assert caught.value.problems == ("rank 0", "q_proj.lora_A: shape [3, 4]")


def test_wrong_field_is_named_in_each_envelope(server: Any, client: Client) -> None:
    server.answer({"error": {"message": "too hot", "param": "temperature", "code": "invalid_value"}}, 400)
    server.answer({"detail": "bad", "code": "invalid_value", "errors": [{"detail": "bad", "field": "name"}]}, 400)
    with pytest.raises(errors.InvalidRequest) as caught:
        client.completions.create(model="sql", prompt="x", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(errors.InvalidRequest) as caught:
        client.tenants.create("No")
    assert caught.value.param == "name"


def test_page_from_foreign_server_is_reported_as_such(server: Any, client: Client) -> None:
    server.answers.append(HTMLResponse("<h1>It works!</h1>", 404))
    with pytest.raises(errors.UnexpectedAnswer, match=r"404 .*text/html.*URL of a loraserve server"):
        client.adapters.get("sql")


def test_success_with_foreign_body_is_reported_as_such(server: Any, client: Client) -> None:
    server.answers.append(HTMLResponse("<h1>It works!</h1>"))
    with pytest.raises(errors.UnexpectedAnswer, match="isn't a Adapter"):
        client.adapters.get("sql")


def test_refusal_reports_retry_time(server: Any, client: Client) -> None:
    server.refuse(429, "rate_limit_exceeded", retry_after="7", retry_after_ms="6500", x_should_retry="false")
    with pytest.raises(errors.RateLimited) as caught:
        client.completions.create(model="sql", prompt="x")
    assert caught.value.retry_after_s == 6.5


def test_redirect_is_not_followed_with_the_key(server: Any, client: Client) -> None:
    server.answer(None, 307, location="http://127.0.0.1:1/")
    with pytest.raises(errors.UnexpectedAnswer, match="307"):
        client.models.list()


@pytest.mark.parametrize("name", ["", "..", "a/../b", "a//b"])
def test_name_leading_elsewhere_is_never_sent(server: Any, client: Client, name: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        client.adapters.get(name)
    assert server.asked == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), "\ud800"])
def test_value_outside_json_is_never_sent(server: Any, client: Client, value: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="JSON"):
        client.completions.create(model="sql", prompt="x", extra_body={"x": value})
    assert server.asked == []
