"""How a stream of requests is sent, and what is made of its answers,
against a server that is a function.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import httpx2
import pytest

from benchmarks.asking import Answer, Asker, Summary, prefill_s
from benchmarks.churn import stream_asks, stream_until
from benchmarks.traffic import Ask


def make_ask(at_s: float = 0.0, adapter: int = 0, num_output_tokens: int = 3) -> Ask:
    return Ask(at_s, adapter, 4, num_output_tokens, 1)


def make_answer(due_s: float = 0.0, token_times_s: tuple[float, ...] = (1.0, 1.5, 3.0), status: int = 200) -> Answer:
    return Answer(make_ask(), due_s, due_s, token_times_s=list(token_times_s), status=status)


class Service:
    """Answers each request with three tokens, or refuses adapter 9; notes who came,
    and how many at a time.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.bodies: list[dict[str, object]] = []
        self.arrivals_s: list[float] = []
        self.num_live = self.max_live = 0

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/livez":
            return httpx2.Response(200)
        body = json.loads(await request.aread())
        self.bodies.append(body)
        self.arrivals_s.append(time.perf_counter())
        if body["model"] == "lora-00009":
            return httpx2.Response(503, text="busy")
        return httpx2.Response(200, content=self._events())

    async def _events(self) -> AsyncIterator[bytes]:
        self.num_live += 1
        self.max_live = max(self.max_live, self.num_live)
        for token in range(3):
            await asyncio.sleep(self.delay_s)
            yield f"data: {json.dumps({'choices': [{'text': 'x', 'token_ids': [token]}]})}\n\n".encode()
        yield b'data: {"choices": []}\n\ndata: [DONE]\n\n'
        self.num_live -= 1


def make_asker(service: Service) -> Asker:
    return Asker("http://server", "key", 512, transport=httpx2.MockTransport(service))


async def test_each_token_of_answer_is_timed() -> None:
    async with make_asker(Service(0.01)) as asker:
        answer = await asker.ask(make_ask())
    assert answer.is_complete
    assert all(gap >= 0.009 for gap in answer.gaps_s)
    assert len(answer.gaps_s) == 2


async def test_closed_loop_bounds_concurrency_and_sends_all_requests() -> None:
    service = Service(0.002)
    async with make_asker(service) as asker:
        answers = await asker.closed_loop([make_ask(adapter=i) for i in range(7)], 3)
    assert service.max_live == 3
    assert [body["model"] for body in service.bodies] == [f"lora-{i:05d}" for i in range(7)]
    assert len(answers) == 7


async def test_open_loop_waits_for_no_answer() -> None:
    service = Service(0.1)
    async with make_asker(service) as asker:
        answers = await asker.open_loop([make_ask(at_s) for at_s in (0.0, 0.02, 0.04)])
    assert service.max_live == 3
    assert service.arrivals_s[-1] - service.arrivals_s[0] == pytest.approx(0.04, abs=0.03)
    assert answers[2].due_s - answers[0].due_s == pytest.approx(0.04)


async def test_refusal_is_an_answer_and_no_error() -> None:
    async with make_asker(Service()) as asker:
        refused, good = await asker.open_loop([make_ask(adapter=9), make_ask()])
    assert (refused.status, refused.error, refused.is_complete) == (503, "busy", False)
    assert good.is_complete


async def test_answer_is_abandoned_on_stop_signal() -> None:
    stop = asyncio.Event()
    stop.set()
    async with make_asker(Service()) as asker:
        answer = await asker.ask(make_ask(), stop=stop)
    assert len(answer.token_times_s) == 1


def test_summary_spans_first_due_request_to_last_token() -> None:
    answers = [make_answer(), make_answer(2.0, (4.0, 5.0, 6.0)), make_answer(1.0, (), 503), make_answer(1.0, (2.0,))]
    summary = Summary.of(answers)
    assert (summary.num_sent, summary.num_complete, summary.num_refused, summary.num_failed) == (4, 2, 1, 1)
    assert summary.refused_share == 0.25
    assert summary.tokens_per_s == 6 / 6.0
    assert (summary.ttft_p50_s, summary.ttft_p99_s) == (1.0, 2.0)
    assert (summary.gap_p50_s, summary.gap_p99_s) == (1.0, 1.5)
    assert summary.offered_per_s == 2.0


def test_time_to_first_token_begins_at_due_time() -> None:
    answer = make_answer(1.0, (4.0, 5.0, 6.0))
    answer.sent_s = 3.5
    assert answer.ttft_s == 3.0


def test_summary_without_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="No request was sent"):
        Summary.of([])


async def test_answer_can_be_watched_during_streaming() -> None:
    answers: list[Answer] = []
    async with make_asker(Service(0.02)) as asker:
        task = asyncio.create_task(asker.ask(make_ask(), into=answers))
        while not (answers and answers[0].token_times_s):
            await asyncio.sleep(0.001)
        assert len(answers[0].token_times_s) < 3
        assert await task is answers[0]


async def test_stream_restarts_with_new_prompt_until_stopped() -> None:
    service, stop, answers = Service(0.001), asyncio.Event(), list[Answer]()
    async with make_asker(service) as asker:
        task = asyncio.create_task(stream_until(asker, stream_asks(3, 8, 100), answers, stop))
        while len(answers) < 3:
            await asyncio.sleep(0.001)
        stop.set()
        await task
    assert len({str(body["prompt"]) for body in service.bodies}) == len(service.bodies) >= 3


async def test_stream_ends_when_refused() -> None:
    answers: list[Answer] = []
    async with make_asker(Service()) as asker:
        await stream_until(asker, stream_asks(9, 8, 100), answers, asyncio.Event())
    assert [answer.status for answer in answers] == [503]


@pytest.mark.parametrize(
    ("header", "expected"),
    [("queue;dur=1.0, adapter;dur=2.0, prefill;dur=31.5", 0.0315), ("queue;dur=1.0", 0.0), ("", 0.0)],
)
def test_prefill_time_is_read_from_server_header(header: str, expected: float) -> None:
    assert prefill_s(header) == pytest.approx(expected)
