"""Steps note what they compute for the throttle of background work."""

from __future__ import annotations

import pytest
import torch

from loraserve.background import STEP_SHARE
from loraserve.engine.worker.startup import build_engine

from .conftest import World
from .test_engine import add, run


@pytest.mark.parametrize("num_loading", [0, 1])
def test_steps_record_computed_work(num_loading: int, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build_engine(world.config())
    engine, throttle = parts.engine, parts.verifier.throttle
    told: list[tuple[bool, bool]] = []
    note = throttle.note

    def noted(*, is_serving: bool, is_long: bool = False) -> None:
        told.append((is_serving, is_long))
        note(is_serving=is_serving, is_long=is_long)

    monkeypatch.setattr(throttle, "note", noted)
    monkeypatch.setattr(type(engine.pager), "num_loading", property(lambda _: num_loading))
    add(engine, world, [5, 6, 7, 8], max_tokens=3)
    run(engine)
    # the step with the prompt, two with a token, and that it's over
    beside_load = num_loading > 0
    assert told == [(True, True), (True, beside_load), (True, beside_load), (False, False)]
    assert throttle.is_needed == (STEP_SHARE * torch.get_num_threads() < 1)
    # also where no step follows
    aborted = add(engine, world, [5, 6, 7, 8], max_tokens=30)
    engine.step()
    assert told[-1][0]
    engine.abort(aborted)
    assert told[-1] == (False, False)
    parts.close()
