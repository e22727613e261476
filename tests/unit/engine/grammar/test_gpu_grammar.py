"""Constrained requests in a GPU's engine, its kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("triton")

from loraserve.engine.engine import Engine
from loraserve.engine.grammar import threads as mask_threads
from loraserve.engine.grammar.constraints import Constraints
from loraserve.engine.worker.startup import build_engine
from loraserve.types import FinishReason, TokenOutput

from ..conftest import World
from ..test_engine import add
from .conftest import FakeCompiler, FakeLexer

pytestmark = pytest.mark.interpreted

VOCAB = 320
PROMPT = [5, 6, 7]


def make_lexer(grammar: str) -> FakeLexer:
    """After n tokens, the tokens n and n + 40 may come; nothing, if that is the grammar."""
    return FakeLexer(lambda tokens: set() if grammar == "nothing" else {len(tokens), len(tokens) + 40})


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    gpu = world.config(device="cuda", dtype="float16", max_num_seqs=6, max_num_batched_tokens=24)
    parts = build_engine(gpu)
    compiler = FakeCompiler(make_lexer, VOCAB, VOCAB)
    parts.engine._constraints = Constraints(compiler)  # type: ignore[arg-type]
    yield parts.engine
    parts.close()


def answer(engine: Engine, world: World, *many: dict[str, object]) -> list[list[TokenOutput]]:
    """Return the outputs of each request of a batch."""
    ids = [add(engine, world, PROMPT, None, **{"max_tokens": 3, **params}) for params in many]
    outputs: dict[str, list[TokenOutput]] = {request_id: [] for request_id in ids}
    while engine.has_requests:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert engine.check() == []
    assert engine.stats().num_constrained == 0
    return list(outputs.values())


def tokens(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def follows(outputs: Sequence[TokenOutput]) -> bool:
    said = tokens(outputs)
    return len(said) == 3 and all(token_id in (n, n + 40) for n, token_id in enumerate(said))


def test_masks_are_applied_on_device_and_host(engine: Engine, world: World) -> None:
    """Penalties and biases are the host's; the others never leave the device."""
    (alone,) = answer(engine, world, {"temperature": 1.0, "seed": 3})
    greedy, drawn, on_host, unwanted, failed, free = answer(
        engine,
        world,
        {"grammar": "g", "logprobs": 2},
        {"grammar": "g", "temperature": 1.0, "seed": 4},
        {"grammar": "g", "repetition_penalty": 1.3, "logit_bias": {40: 100.0}},
        # all that its grammar allows first
        {"grammar": "g", "min_tokens": 3, "stop_token_ids": (0, 40)},
        {"grammar": "nothing"},
        {"temperature": 1.0, "seed": 3},
    )
    assert all(follows(outputs) for outputs in (greedy, drawn, on_host, unwanted))
    assert tokens(on_host)[0] == 40
    assert failed[-1].finish_reason is FinishReason.ERROR
    assert failed[-1].error_code == "grammar_dead_end"
    assert tokens(free) == tokens(alone)
    # of what the model said by itself: its likeliest token is no part of the answer
    first = greedy[0].logprobs[0]
    assert first.token_id != first.top[0][0]
    assert first.logprob < first.top[0][1]


def test_late_mask_delays_own_row_alone(engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ({"grammar": "g"}, {"max_tokens": 3})
    wanted, free = map(tokens, answer(engine, world, *ask))
    waits = []
    wait = mask_threads.MaskThreads.wait

    def sometimes(self, masks, patience_s=1.0):
        waits.append(1)
        wait(self, masks, patience_s)
        if len(waits) % 2:
            for mask in masks:
                mask.is_ready = False
                mask.note_late()

    monkeypatch.setattr(mask_threads.MaskThreads, "wait", sometimes)
    # ready again by the next step
    held = Engine._admit_prepared

    def admit(self):
        for request in self._scheduler._requests.values():
            if request.constraint is not None and request.constraint.is_held:
                request.constraint.is_ready = True
        return held(self)

    monkeypatch.setattr(Engine, "_admit_prepared", admit)
    late, beside = map(tokens, answer(engine, world, *ask))
    assert (late, beside) == (wanted, free)
    assert len(waits) == 6
