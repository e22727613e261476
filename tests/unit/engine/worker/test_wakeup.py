"""Whoever waits for messages is woken by threads beside it, and doesn't look for what they did."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from loraserve.engine.worker import main as worker_module
from loraserve.engine.worker.main import Wakeup, Worker
from loraserve.engine.worker.startup import build_engine
from loraserve.engine_client import messages as m
from loraserve.types import EngineStats, FinishReason, RequestId, SamplingParams, TenantId

from ..conftest import World

PATIENCE_MS = 60_000


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    made = Wakeup()
    yield made
    made.close()


def is_rung(wakeup: Wakeup, timeout_s: float = 0.0) -> bool:
    # select() knows the first thousand descriptors alone
    poller = select.poll()
    poller.register(wakeup, select.POLLIN)
    return bool(poller.poll(1000 * timeout_s))


def test_ring_ends_wait_and_is_heard_once(wakeup: Wakeup) -> None:
    assert not is_rung(wakeup)
    thread = threading.Thread(target=wakeup.ring)
    thread.start()
    assert is_rung(wakeup, 10)
    thread.join()
    wakeup.clear()
    assert not is_rung(wakeup)


def test_unheard_rings_never_fill_wakeup(wakeup: Wakeup) -> None:
    for _ in range(100_000):
        wakeup.ring()
    while is_rung(wakeup):
        wakeup.clear()
    wakeup.clear()
    wakeup.ring()
    assert is_rung(wakeup)


@pytest.mark.parametrize("message", ["request", "warm", "verify"])
def test_step_thread_waits_for_messages_without_polling(
    message: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it not woken, it would wait for a minute."""
    for name in ("_IDLE_POLL_MS", "_EXPECTING_POLL_MS"):
        monkeypatch.setattr(worker_module, name, PATIENCE_MS)
    ref = world.refs["r8"]
    sent: dict[str, m.EngineInput] = {
        "request": m.AddRequest(
            request_id=RequestId("r"),
            tenant=TenantId("t"),
            adapter=ref,
            prompt_token_ids=(5, 6, 7),
            params=SamplingParams(max_tokens=2, temperature=0.0),
        ),
        "warm": m.WarmAdapter(call_id=1, adapter=ref),
        "verify": m.VerifyAdapter(call_id=1, adapter=ref),
    }

    def is_answer(answer: m.EngineOutput) -> bool:
        match answer:
            case m.StepOutputs(outputs=outputs):
                return outputs[-1].finish_reason is FinishReason.LENGTH
            case m.CallReply(error_code=code):
                return code is None
            case m.VerifyReply(certificate=certificate):
                return certificate is not None and certificate.verdict == "passed"
        return False

    with_worker(world, sent[message], is_answer)


def with_worker(world: World, message: m.EngineInput, is_answer: Callable[[m.EngineOutput], bool]) -> None:
    """A worker on a thread is sent the message, and answers it."""
    wakeup, context = Wakeup(), zmq.Context()
    parts = build_engine(world.config(), wakeup.ring)
    inputs, outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    inputs.bind("inproc://inputs")
    outputs.bind("inproc://outputs")

    def work() -> None:
        ends = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        ends[0].connect("inproc://inputs")
        ends[1].connect("inproc://outputs")
        Worker(world.config(), parts.engine, parts.verifier, *ends, wakeup, server_pid=os.getppid()).run()
        for end in ends:
            end.close(0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        inputs.send(m.encode_input(message))
        answer: m.EngineOutput = m.Heartbeat(stats=EngineStats())
        while not is_answer(answer):
            assert outputs.poll(20_000), "nobody woke it"
            answer = m.decode_output(outputs.recv())
    finally:
        inputs.send(m.encode_input(m.Shutdown()))
        thread.join(30)
        parts.close()
        wakeup.close()
        for socket in (inputs, outputs):
            socket.close(0)
        context.term()
