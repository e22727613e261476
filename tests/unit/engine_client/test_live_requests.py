"""Requests between admission and end, whatever computes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import tokenizers

from loraserve.engine_client.admission import QueueBounds
from loraserve.engine_client.live_request import LiveRequest
from loraserve.engine_client.live_requests import LiveRequests
from loraserve.engine_client.messages import GenerateRequest
from loraserve.errors import EngineError, EngineUnavailable, LoraserveError, Overloaded
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import FinishReason, RequestId, SamplingParams, TenantId, TokenOutput


@pytest.fixture
def requests(tmp_path: Path) -> LiveRequests:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    return LiveRequests(QueueBounds(2, 4), Tokenizer(tmp_path), max_queue_wait_s=60.0)


def make_request(*, is_background: bool = False) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r"),
        tenant=TenantId("t"),
        adapter=None,
        prompt_token_ids=(1,),
        params=SamplingParams(max_tokens=9),
        is_background=is_background,
    )


class Engine:
    """Gives a request two tokens, or fails to take it; counts what was ended."""

    def __init__(self, requests: LiveRequests, failure: LoraserveError | None = None) -> None:
        self.num_ended = 0
        self._requests, self._failure = requests, failure

    def send(self, live: LiveRequest) -> Callable[[], object]:
        if self._failure is not None:
            raise self._failure
        asyncio.get_running_loop().call_soon(self._answer, live)
        return self._end

    def _answer(self, live: LiveRequest) -> None:
        self._requests.note_began(live)
        live.receive(TokenOutput(request_id=RequestId("r"), token_ids=(5,)))
        last = TokenOutput(request_id=RequestId("r"), token_ids=(6,), finish_reason=FinishReason.LENGTH)
        asyncio.get_running_loop().call_soon(live.receive, last)

    def _end(self) -> None:
        self.num_ended += 1


def check_empty(requests: LiveRequests) -> None:
    assert (requests.by_id, requests.bounds.num_alive, requests.bounds.num_waiting) == ({}, 0, 0)


@pytest.mark.parametrize("is_background", [False, True])
async def test_request_is_counted_until_last_chunk(requests: LiveRequests, is_background: bool) -> None:
    engine, found = Engine(requests), []
    async with aclosing(requests.generate(make_request(is_background=is_background), engine.send)) as chunks:
        async for chunk in chunks:
            found += chunk.token_ids
            assert requests.bounds.num_alive == (not is_background)
            assert list(requests.by_id) == [RequestId("r")]
    assert (found, engine.num_ended) == ([5, 6], 1)
    check_empty(requests)


async def test_closed_generator_ends_request_at_engine(requests: LiveRequests) -> None:
    engine = Engine(requests)
    async with aclosing(requests.generate(make_request(), engine.send)) as chunks:
        await anext(chunks)
    assert engine.num_ended == 1
    check_empty(requests)


async def test_request_refused_by_engine_leaves(requests: LiveRequests) -> None:
    engine = Engine(requests, EngineError("no"))
    with pytest.raises(EngineError):
        await anext(requests.generate(make_request(), engine.send))
    assert engine.num_ended == 0
    check_empty(requests)


async def test_stopping_fails_live_and_refuses_new(requests: LiveRequests) -> None:
    live = requests.admit(make_request())
    await requests.stop(0.0)
    with pytest.raises(EngineUnavailable):
        await live.next()
    with pytest.raises(Overloaded):
        requests.admit(make_request())
    requests.leave(live)
    check_empty(requests)


async def test_request_without_engine_is_not_counted() -> None:
    def refuse() -> None:
        raise EngineUnavailable("There is none.")

    requests = LiveRequests(QueueBounds(2, 4), None, max_queue_wait_s=60.0, check_engine=refuse)
    with pytest.raises(EngineUnavailable):
        requests.admit(make_request())
    check_empty(requests)
