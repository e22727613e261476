"""Constrained requests in the engine, on the demo's base: valid answers, whatever happens."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator

import jsonschema
import msgspec
import pytest

from loraserve.config import EngineConfig
from loraserve.demo.pack import base_dir
from loraserve.engine.engine import Engine
from loraserve.engine.grammar import threads as mask_threads
from loraserve.engine.grammar.threads import MaskThreads
from loraserve.engine.worker.startup import build_engine
from loraserve.engine_client.messages import AddRequest
from loraserve.limits import MIB
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import FinishReason, RequestId, SamplingParams, TenantId, TokenOutput

from .conftest import Gate, make_grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "age", "tags"],
    "additionalProperties": False,
}
JSON = make_grammar("json_schema", SCHEMA)
PROMPT = "list the tickets"
_ids = itertools.count()


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    engines = []
    config = EngineConfig(
        model_dir=str(base_dir()),
        model_id="demo",
        store_url=f"file://{tmp_path_factory.mktemp('store')}",
        memory_budget_bytes=32 * MIB,
        host_cache_bytes=8 * MIB,
        num_threads=1,
    )

    def make(**changes: object) -> Engine:
        parts = build_engine(msgspec.structs.replace(config, **changes))
        engines.append(parts)
        return parts.engine

    yield make
    for parts in engines:
        parts.close()


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


class Said:
    """What an engine said to requests."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self.outputs: dict[RequestId, list[TokenOutput]] = {}

    def add(
        self,
        grammar: str = JSON,
        prompt: str = PROMPT,
        *,
        output: list[int] | None = None,
        name: str = "",
        **params: object,
    ) -> RequestId:
        request_id = RequestId(name or f"s{next(_ids)}")
        fields = {"max_tokens": 200, "temperature": 0.0, "grammar": grammar, **params}
        self._engine.add(
            AddRequest(
                request_id=request_id,
                tenant=TenantId("t"),
                adapter=None,
                prompt_token_ids=tuple(self._tokenizer.encode(prompt)),
                output_token_ids=tuple(output or ()),
                params=SamplingParams(**fields),  # type: ignore[arg-type]
            )
        )
        self.outputs[request_id] = []
        return request_id

    def step(self) -> None:
        for output in self._engine.step():
            self.outputs[output.request_id].append(output)

    def run(self) -> None:
        deadline = time.monotonic() + 60
        while self._engine.has_requests:
            assert time.monotonic() < deadline
            self.step()
        assert self._engine.check() == []
        assert self._engine.stats().num_constrained == 0
        assert self._engine.stats().num_kv_blocks_used == 0

    def tokens(self, request_id: RequestId) -> list[int]:
        return [token_id for output in self.outputs[request_id] for token_id in output.token_ids]

    def end(self, request_id: RequestId) -> TokenOutput:
        return self.outputs[request_id][-1]

    def text(self, request_id: RequestId) -> str:
        """The text of an answer that came to its end."""
        assert self.end(request_id).finish_reason is FinishReason.STOP, self.end(request_id)
        *tokens, last = self.tokens(request_id)
        assert last == self._tokenizer.eos_token_id
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.fixture
def said(engine: Engine, tokenizer: Tokenizer) -> Said:
    return Said(engine, tokenizer)


def is_valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


SAMPLINGS = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 2.0, "seed": 6, "top_p": 0.9},
    {"temperature": 1.0, "seed": 7, "top_k": 5},
    {"temperature": 1.0, "seed": 8, "min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"temperature": 0.7, "seed": 9, "presence_penalty": 2.0, "frequency_penalty": 1.0},
    {"logit_bias": {5: 100.0, 200: -100.0}},
    {"min_tokens": 150},
    {"ignore_eos": True},
    {"logprobs": 3, "prompt_logprobs": 1},
]


def test_answers_follow_schema_under_any_sampling(said: Said) -> None:
    ids = [said.add(**params) for params in SAMPLINGS]
    free = said.add("")
    said.run()
    for request_id in ids:
        assert is_valid(said.text(request_id))
    assert not said.text(free).startswith("{")


def test_free_text_in_batch_equals_solo_text(said: Said) -> None:
    alone = said.add("", max_tokens=24, temperature=1.0, seed=3)
    said.run()
    beside = said.add("", max_tokens=24, temperature=1.0, seed=3)
    for _ in range(3):
        said.add()
    said.run()
    assert said.tokens(beside) == said.tokens(alone)


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", r"[0-9]{3}-[a-f]{2,4}", r"[0-9]{3}-[a-f]{2,4}"),
        ("choice", ["yes", "no", "a long one"], "yes|no|a long one"),
        ("grammar", 'root ::= "SELECT " [a-z]+ " FROM " [a-z]{1,5}', "SELECT [a-z]+ FROM [a-z]{1,5}"),
        ("lark", 'start: "call " %json {"type": "array", "items": {"type": "integer"}, "maxItems": 2}', r"call \[.*\]"),
    ],
)
def test_answers_follow_grammar(said: Said, kind: str, value: object, pattern: str) -> None:
    ids = [said.add(make_grammar(kind, value), temperature=temperature, seed=2) for temperature in (0.0, 1.0)]
    said.run()
    for request_id in ids:
        assert re.fullmatch(pattern, said.text(request_id), re.DOTALL)


def test_text_ends_with_grammar_despite_open_alternatives(said: Said) -> None:
    """`min_tokens` and `ignore_eos` keep it open as long as its grammar allows anything more."""
    choice, digits = make_grammar("choice", ["no"]), make_grammar("regex", "[0-9]{2,6}")
    short = [said.add(choice, **params) for params in ({"min_tokens": 100}, {"ignore_eos": True})]
    long = [said.add(digits, **params) for params in ({"min_tokens": 100}, {"ignore_eos": True})]
    said.run()
    assert [said.text(request_id) for request_id in short] == ["no", "no"]
    assert all(re.fullmatch("[0-9]{6}", said.text(request_id)) for request_id in long)


def test_answer_may_end_by_length_or_stop_token(said: Said, tokenizer: Tokenizer) -> None:
    brace = tokenizer.token_to_id('{"')
    cut = said.add(max_tokens=3)
    stopped = said.add(stop_token_ids=(brace,) if brace is not None else (tokenizer.token_to_id("{"),))
    said.run()
    assert said.end(cut).finish_reason is FinishReason.LENGTH
    assert len(said.tokens(cut)) == 3
    assert said.end(stopped).finish_reason is FinishReason.STOP
    assert len(said.tokens(stopped)) == 1


def test_logprobs_are_from_unmasked_distribution(said: Said) -> None:
    """The likeliest tokens are those of free text, though the grammar allows none of them."""
    free, bound = said.add("", max_tokens=1, logprobs=5), said.add(make_grammar("regex", "[0-9]+"), logprobs=5)
    said.run()
    first, other = said.outputs[free][0].logprobs[0], said.outputs[bound][0].logprobs[0]
    assert first.top == other.top
    assert other.token_id not in dict(other.top)
    assert other.logprob < other.top[-1][1]


# what may happen meanwhile


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.4}])
def test_answer_continues_from_any_token(said: Said, params: dict[str, object]) -> None:
    """As after a crash of the engine: the automaton's state is recomputed from the tokens."""
    whole = said.add(**params)
    said.run()
    tokens = said.tokens(whole)
    for number in range(0, len(tokens), 5):
        rest = said.add(output=tokens[:number], **params)
        said.run()
        assert tokens[:number] + said.tokens(rest) == tokens
        assert is_valid(said._tokenizer.decode((tokens[:number] + said.tokens(rest))[:-1]))


def test_preemption_chunks_and_prefix_hits_change_no_answer(
    make_engine: Callable[..., Engine], engine: Engine, tokenizer: Tokenizer, said: Said
) -> None:
    prompts = [
        f"list the tickets from {city}, please, and then all of the others" for city in ("Nice", "Oslo", "Bergen")
    ]
    prompts = prompts * 3
    wanted = [said.add(prompt=prompt, temperature=1.0, seed=i) for i, prompt in enumerate(prompts)]
    said.run()
    # room for about two of them
    per_token = 2 * 4 * 128 * 4
    small = make_engine(
        memory_budget_bytes=140 * per_token, max_model_len=128, max_num_batched_tokens=16, max_num_seqs=8
    )
    other = Said(small, tokenizer)
    ids = [other.add(prompt=prompt, temperature=1.0, seed=i, max_tokens=64) for i, prompt in enumerate(prompts)]
    other.run()
    assert small.stats().num_preemptions > 0
    assert small.stats().prefix_tokens_hit > 0
    for request_id, expected in zip(ids, wanted, strict=True):
        assert other.tokens(request_id) == said.tokens(expected)[:64]


def test_failed_step_is_recomputed_with_same_masks(engine: Engine, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [said.add(temperature=1.0, seed=seed) for seed in range(3)]
    said.run()
    forward = engine._pipeline._runner.forward
    numbers = itertools.count()

    def fragile(batch):
        if next(numbers) % 7 == 3 and len(batch.entries) > 1:
            raise FloatingPointError("no")
        return forward(batch)

    monkeypatch.setattr(engine._pipeline._runner, "forward", fragile)
    again = [said.add(temperature=1.0, seed=seed) for seed in range(3)]
    said.run()
    assert [said.tokens(request_id) for request_id in again] == [said.tokens(request_id) for request_id in wanted]


def test_request_is_aborted_while_grammar_compiles(engine: Engine, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, compile = Gate(), engine._constraints._cache._compiler.compile
    monkeypatch.setattr(engine._constraints._cache._compiler, "compile", lambda text: (gate(), compile(text))[1])
    waiting = said.add(make_grammar("choice", ["never"]), name="waits")
    gate.until_begun()
    free = said.add("", max_tokens=5)
    while not said.outputs[free] or said.end(free).finish_reason is None:
        said.step()
    assert engine.stats().num_waiting == 1
    assert engine.is_waiting
    assert engine.abort(waiting)
    assert not engine.abort(waiting)
    assert not engine.has_requests
    gate.open()
    said.run()
    assert said.outputs[waiting] == []


def test_uncompilable_grammar_fails_own_request_alone(engine: Engine, said: Said) -> None:
    failures = engine.stats().grammar_failures
    bad, good = said.add("start: nothing"), said.add()
    said.run()
    assert said.end(bad).finish_reason is FinishReason.ERROR
    assert said.end(bad).error_code == "invalid_value"
    assert is_valid(said.text(good))
    assert engine.stats().grammar_failures == failures + 1


def test_overly_complex_grammar_fails_own_request_alone(said: Said) -> None:
    bad = said.add("start:" + 800 * ' "a"?', max_tokens=100, min_tokens=100)
    good, free = said.add(), said.add("")
    said.run()
    assert said.end(bad).finish_reason is FinishReason.ERROR
    assert said.end(bad).error_code == "grammar_too_complex"
    assert is_valid(said.text(good))
    assert said.end(free).finish_reason is FinishReason.STOP


# late masks


@pytest.fixture
def held_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[RequestId, int], Gate]:
    """Hold up a request's masks from its n-th token on; steps wait for them a millisecond."""
    monkeypatch.setattr(mask_threads.MaskThreads.wait, "__defaults__", (0.001,))

    def hold(request_id: RequestId, number: int) -> Gate:
        gate = Gate()
        constraint = engine._preparing[request_id].constraint
        follow = constraint._follow

        class Held(type(constraint)):
            __slots__ = ()

            def _follow(self):
                if self.num_output_tokens >= number:
                    gate()
                follow()

        constraint.__class__ = Held
        # as after a slow one: by itself, not together with others of the tenant
        constraint._num_alone = 1 << 20
        return gate

    return hold


def test_no_other_request_waits_for_a_late_mask(engine: Engine, said: Said, held_up) -> None:
    wanted = said.add(temperature=1.0, seed=4)
    said.run()
    late = said.add(temperature=1.0, seed=4)
    gate = held_up(late, 5)
    others = [said.add(), said.add("", max_tokens=30)]
    while not all(said.outputs[other] and said.end(other).finish_reason for other in others):
        said.step()
    assert len(said.tokens(late)) == 5
    assert engine.stats().late_masks > 0
    # it is in no step, and so keeps no processor busy
    assert engine._scheduler.num_running == 1
    assert engine.is_waiting
    num_steps = engine.stats().num_steps
    for _ in range(10):
        said.step()
    assert engine.stats().num_steps == num_steps
    gate.open()
    said.run()
    assert said.tokens(late) == said.tokens(wanted)
    assert is_valid(said.text(others[0]))


def test_request_ends_while_mask_is_late(engine: Engine, said: Said, held_up) -> None:
    late = said.add()
    gate = held_up(late, 3)
    while not engine.stats().late_masks or len(said.tokens(late)) < 3:
        said.step()
    said.step()
    assert engine.abort(late)
    assert not engine.has_requests
    gate.open()
    said.run()


def test_prompt_scores_come_once_despite_late_mask(engine: Engine, said: Said, monkeypatch) -> None:
    """The row is computed again, and so are the scores of the prompt."""
    wanted = said.add(prompt_logprobs=1)
    said.run()
    waited = []
    wait = mask_threads.MaskThreads.wait

    def refuse_first(self, masks, patience_s=1.0):
        wait(self, masks, patience_s)
        if not waited:
            waited.append(1)
            for mask in masks:
                mask.is_ready = False
                mask.note_late()

    monkeypatch.setattr(mask_threads.MaskThreads, "wait", refuse_first)
    again = said.add(prompt_logprobs=1)
    while not waited:
        said.step()
    engine._scheduler._requests[again].constraint.is_ready = True
    said.run()
    assert said.tokens(again) == said.tokens(wanted)
    assert said.outputs[again][0].prompt_logprobs == said.outputs[wanted][0].prompt_logprobs
    assert [output.prompt_logprobs for output in said.outputs[again][1:]] == [None] * (len(said.outputs[again]) - 1)


def test_masks_are_ready_when_steps_need_masks(engine: Engine, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed right after the forward pass: a step that waits for them gets all of them.

    How long it waits where others have the cores says nothing about that.
    """
    wait = MaskThreads.wait
    monkeypatch.setattr(MaskThreads, "wait", lambda self, masks: wait(self, masks, patience_s=60.0))
    said.add()
    said.run()  # compiles the grammar
    before = engine.stats()
    ids = [said.add(temperature=1.0, seed=seed) for seed in range(8)]
    said.run()
    assert all(is_valid(said.text(request_id)) for request_id in ids)
    after = engine.stats()
    num_masks = after.mask_s.num - before.mask_s.num
    # proposed tokens that stand have theirs within a step
    num_accepted = sum(
        getattr(after, name) - getattr(before, name)
        for name in ("accepted_own_tokens", "accepted_history_tokens", "accepted_grammar_tokens")
    )
    assert num_masks + num_accepted == sum(len(said.tokens(request_id)) for request_id in ids)
    assert after.late_masks == before.late_masks
    assert after.grammars_compiled == before.grammars_compiled
