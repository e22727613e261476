"""Prompt tokens of steps that also carry streams, by what steps take."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loraserve.config import EngineConfig
from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.scheduling.prompt_share import AUTO_FLOOR_S, MIN_TOKENS, PromptShare
from loraserve.limits import UNBOUNDED_S
from loraserve.settings import Settings

from ..conftest import Harness, make_request
from ..simulated import Simulation

BUDGET = 512


def entry(num_tokens: int, proposed: tuple[int, ...] = ()) -> ScheduledRequest:
    return ScheduledRequest(make_request(600), 0, num_tokens, False, False, 0, proposed)


def streams(num: int) -> list[ScheduledRequest]:
    return [entry(1)] * num


def measured(target_s: float | None = None, *, row_s: float = 0.01, token_s: float = 0.0002) -> PromptShare:
    """Return a share that has seen steps of 16 streams, and of 100 prompt tokens beside them."""
    share = PromptShare(BUDGET, target_s)
    for _ in range(8):
        share.note(streams(16), row_s)
        share.note([*streams(16), entry(100)], row_s + 100 * token_s)
    return share


def test_step_without_streams_has_the_whole_budget() -> None:
    assert PromptShare(BUDGET, None).tokens(0) == measured().tokens(0) == BUDGET


def test_share_before_any_measurement_is_small() -> None:
    assert PromptShare(BUDGET, None).tokens(1) == 64
    assert PromptShare(32, None).tokens(1) == 32


@pytest.mark.parametrize(
    ("target_s", "row_s", "token_s", "expected"),
    [
        (None, 0.02, 0.001, 48),  # 80 ms, of which 20 are the streams'
        (None, 0.002, 0.001, 16),  # the floor of 30 ms
        (None, 0.02, 0.0001, BUDGET),
        (0.05, 0.01, 0.001, 32),
        (0.05, 0.06, 0.001, MIN_TOKENS),
        (UNBOUNDED_S, 0.01, 0.001, BUDGET),
    ],
)
def test_share_fills_the_target(target_s: float | None, row_s: float, token_s: float, expected: int) -> None:
    assert measured(target_s, row_s=row_s, token_s=token_s).tokens(16) == expected
    assert AUTO_FLOOR_S == 0.03


def test_slower_steps_have_fewer_prompt_tokens() -> None:
    share = measured()
    before = share.tokens(16)
    for _ in range(3):
        share.note([*streams(16), entry(20)], 0.01 + 20 * 0.0008)
    assert share.tokens(16) < before / 1.9


def test_step_delayed_by_foreign_work_is_soon_forgotten() -> None:
    share = measured()
    before = share.tokens(16)
    share.note([*streams(16), entry(100)], 60.0)
    for _ in range(5):
        share.note([*streams(16), entry(100)], 0.03)
    assert share.tokens(16) == pytest.approx(before, abs=MIN_TOKENS)


def test_guesses_of_streams_are_no_prompt_tokens() -> None:
    share = PromptShare(BUDGET, None)
    for _ in range(8):
        share.note([entry(5, (1, 2, 3, 4))], 0.02)
    share.note([entry(1), entry(100)], 0.12)
    assert share.tokens(5) == 48


def test_long_prompt_is_spread_over_steps_beside_streams() -> None:
    harness = Harness(num_blocks=400, token_budget=BUDGET)
    share = harness.scheduler.prompt_share
    stream, long = make_request(4, max_tokens=90), make_request(400)
    harness.add(stream)
    harness.step()
    for _ in range(8):
        share.note(streams(1), 0.01)
        share.note([entry(1), entry(100)], 0.11)
    harness.add(long)
    assert [parts(harness, stream, long) for _ in range(2)] == [(1, 16), (1, 16)]
    harness.scheduler.abort(stream.request_id)
    assert parts(harness, stream, long) == (0, 368)


def parts(harness: Harness, *requests: Request) -> tuple[int, ...]:
    scheduled, _ = harness.step()
    counts = {one.request.request_id: one.num_tokens for one in scheduled}
    return tuple(counts.get(request.request_id, 0) for request in requests)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_step_is_recorded_with_own_time(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(overlap=overlap, is_lazy=True)
    noted: list[list[int]] = []
    share = simulation.engine._scheduler.prompt_share
    monkeypatch.setattr(share, "note", lambda scheduled, _: noted.append([one.num_tokens for one in scheduled]))
    simulation.add("one", list(range(20)), max_tokens=6, ignore_eos=True)
    simulation.run()
    launched = [[one.num_tokens for one in batch.entries] for batch in simulation.device.batches]
    assert noted == launched


@pytest.mark.parametrize(("written", "expected"), [("auto", None), ("off", UNBOUNDED_S), ("12.5", 0.0125)])
def test_bound_reaches_the_engines_process(written: str, expected: float | None) -> None:
    config = Settings.load(model="base", max_inter_token_ms=written).engine_config(Path("base"))
    read = msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig)
    assert read.max_inter_token_s == expected
