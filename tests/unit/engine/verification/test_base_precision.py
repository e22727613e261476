"""What rounding costs a base, measured by a running engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from loraserve.config import EngineConfig
from loraserve.demo.pack import base_dir
from loraserve.engine.verification.base_precision import MAX_POSITIONS, MIN_POSITIONS, texts_of
from loraserve.engine.worker.rounding import measure
from loraserve.engine.worker.startup import EngineParts, build_engine, resolve
from loraserve.engine_client import messages as m
from loraserve.errors import EngineError
from loraserve.limits import MIB
from loraserve.types import RequestId, SamplingParams, TenantId

CONFIG = EngineConfig(model_dir=str(base_dir()), model_id="demo", store_url="", memory_budget_bytes=64 * MIB)


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., EngineParts]]:
    built: list[EngineParts] = []

    def build(**options: object) -> EngineParts:
        config = msgspec.structs.replace(resolve(CONFIG), store_url=tmp_path.as_uri(), **options)
        built.append(build_engine(config))
        return built[-1]

    yield build
    for parts in built:
        parts.close()


def replies_of(parts: EngineParts, num: int = 1) -> list[m.BaseMeasured]:
    """Step until the measurement is over, as the worker does."""
    replies: list[m.BaseMeasured] = []
    deadline = time.monotonic() + 120
    while len(replies) < num:
        assert time.monotonic() < deadline
        if parts.engine.has_requests:
            parts.engine.step()
        replies += [one for one in parts.verifier.poll() if isinstance(one, m.BaseMeasured)]
    return replies


def test_running_engine_reports_same_precision_as_doctor(build: Callable[..., EngineParts]) -> None:
    parts = build(quantize="int8")
    prompt = tuple(range(5, 25))
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    parts.engine.add(
        m.AddRequest(
            request_id=RequestId("stream"),
            tenant=TenantId("t"),
            adapter=None,
            prompt_token_ids=prompt,
            output_token_ids=(),
            params=params,
            priority=0,
        )
    )
    for call_id in (3, 4):
        parts.verifier.measure_base(call_id)
    replies = replies_of(parts, 2)
    assert [one.call_id for one in replies] == [3, 4]
    found = replies[0].precision
    assert found is not None
    assert found == replies[1].precision
    expected = measure(msgspec.structs.replace(CONFIG, quantize="int8"))
    assert found.num_positions == expected.num_positions == MAX_POSITIONS
    assert found.top1_agreement == expected.total.top1_agreement
    assert found.mean_divergence == pytest.approx(expected.total.mean_divergence, rel=1e-6)
    assert (found.loss, found.served_loss) == pytest.approx((expected.loss, expected.served_loss), abs=1e-9)
    assert found.mean_divergence > 1e-4
    while parts.engine.has_requests:
        parts.engine.step()
    assert parts.engine.check() == []
    assert not parts.verifier.is_active


def test_unrounded_base_has_no_loss_to_measure(build: Callable[..., EngineParts]) -> None:
    parts = build(quantize="none")
    parts.verifier.measure_base(1)
    (reply,) = replies_of(parts)
    assert (reply.precision, reply.error_code) == (None, None)
    assert "nothing is rounded" in reply.note
    assert not parts.engine.has_requests


def test_failed_measurement_is_answered_and_leaves_no_state(
    build: Callable[..., EngineParts], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = build(quantize="int8")
    monkeypatch.setattr("loraserve.engine.verification.base_precision.PASSAGE", "too short")
    parts.verifier.measure_base(1)
    (reply,) = replies_of(parts)
    assert reply.precision is None
    assert reply.error_code == EngineError.code
    assert f"{MIN_POSITIONS} tokens in a row" in (reply.error_message or "")
    monkeypatch.undo()
    parts.verifier.measure_base(2)
    assert replies_of(parts)[0].precision is not None


def test_large_vocabularies_and_short_contexts_have_fewer_positions(build: Callable[..., EngineParts]) -> None:
    base = build(quantize="int8").engine.base
    tokens = list(range(600))
    assert [len(text) for text in texts_of(tokens, base)] == [257]
    large = msgspec.structs.replace(base, vocab_size=262_144)
    assert [len(text) for text in texts_of(tokens, large)] == [65]
    short = msgspec.structs.replace(base, max_model_len=100)
    assert [len(text) for text in texts_of(tokens, short)] == [99, 99]
    with pytest.raises(EngineError):
        texts_of(tokens, msgspec.structs.replace(base, max_model_len=20))


def test_base_too_large_to_measure_is_noted_once(
    build: Callable[..., EngineParts], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = build(quantize="int8")
    monkeypatch.setattr("loraserve.engine.verification.reference_evaluator.MAX_FLOAT_S", 0.0)
    parts.verifier.measure_base(1)
    (reply,) = replies_of(parts)
    assert (reply.precision, reply.error_code) == (None, None)
    assert "takes over 0 s of a core" in reply.note
