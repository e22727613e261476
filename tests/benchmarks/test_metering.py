"""The clients' books against the bill."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.leaving import Given, Request, Way, _parse, draw
from benchmarks.metering import Book, differences, model_of

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 1},
    # (2·0.5 + 1·0.05 + 2·1.5) ÷ 10⁶
    "cost": "0.00000405",
    "currency": "EUR",
}


def make_request(**fields: Any) -> Request:
    whole: dict[str, Any] = {"tenant": 0, "model": "base", "prompt": (1, 2, 3), "n": 1, "max_tokens": 2}
    return Request(**{**whole, "is_stream": True, "way": Way.STAYS, "leave_after": 0.5, **fields})


def make_book(*given: Given) -> Book:
    book = Book()
    for one in given:
        book.add(one)
    return book


def make_sums(**changes: int) -> dict[str, dict[str, int]]:
    item = {"num_requests": 1, "prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2}
    return {"base": {**item, **changes}}


def test_matching_bill_has_no_difference() -> None:
    book = make_book(Given(make_request(), 2, True, USAGE, None), Given(make_request(), 0, False, None, None))
    assert differences(book, make_sums(), is_exact=True) == []


@pytest.mark.parametrize("name", ["num_requests", "prompt_tokens", "completion_tokens"])
def test_a_token_more_or_less_is_a_difference(name: str) -> None:
    book = make_book(Given(make_request(), 2, True, USAGE, None))
    for step, is_exact, is_found in ((1, True, True), (-1, True, True), (1, False, False), (-1, False, True)):
        sums = make_sums(**{name: make_sums()["base"][name] + step})
        assert bool(differences(book, sums, is_exact=is_exact)) is is_found


def test_delivered_answer_without_bill_is_difference() -> None:
    assert differences(make_book(Given(make_request(), 2, True, None, None)), {}, is_exact=True)


def test_answer_reporting_wrong_cost_is_difference() -> None:
    usage = USAGE | {"cost": "0.000004"}
    book = make_book(Given(make_request(), 2, True, usage, None))
    assert differences(book, make_sums(), is_exact=True) == ["1 answers said another usage or cost than theirs"]


def test_usage_sums_are_matched_to_requested_models() -> None:
    items = [(None, None), ("lora-00001", 2), ("a@1+0.5*b@1", None)]
    models = [model_of({"adapter": adapter, "version": version}) for adapter, version in items]
    assert models == ["base", "lora-00001@2", "a@1+0.5*b@1"]


def test_only_tokens_of_complete_stream_lines_are_counted() -> None:
    line = b'data: {"choices": [{"token_ids": [5, 6]}]}\n\n'
    received = b"HTTP/1.1 200 OK\r\n\r\n2f\r\n" + line + b"\r\n2f\r\n" + line[:-9]
    assert _parse(make_request(), received).num_tokens == 2


def test_only_clients_of_chosen_tenant_break_off() -> None:
    requests = draw(200, 3, ["base"], 512, 1, breaking=2)
    assert {one.way for one in requests if one.tenant == 2} == {Way.STAYS, Way.BREAKS_OFF}
    assert {one.way for one in requests if one.tenant != 2} == {Way.STAYS, Way.CLOSES_ITS_HALF}
