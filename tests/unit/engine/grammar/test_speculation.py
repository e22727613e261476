"""Speculation in answers with a grammar: every answer has the tokens and the logprobs of plain
steps, whatever is proposed, and whoever the tokens are from.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from loraserve.config import EngineConfig
from loraserve.demo.pack import base_dir
from loraserve.engine.engine import Engine
from loraserve.engine.grammar.constraints import Constraints
from loraserve.engine.grammar.cursor import GrammarCursor, MatcherFailed
from loraserve.engine.speculation.speculation import Speculation
from loraserve.engine.step_costs import StepCosts
from loraserve.engine.worker.startup import build_engine
from loraserve.engine_client.messages import AddRequest
from loraserve.limits import MIB
from loraserve.text.grammar import GrammarCompiler
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import RequestId, SamplingParams, TenantId, TokenOutput

from .conftest import make_grammar

# the first and the third name are spelled letter by letter: a base says them as the grammar does
RECORD = {
    "type": "object",
    "properties": {
        "qxzjkvwq": {"type": "integer", "minimum": 0, "maximum": 9},
        "description": {"enum": ["short", "a longer one"]},
        "zzqxjw": {"type": "boolean"},
    },
    "required": ["qxzjkvwq", "description", "zzqxjw"],
    "additionalProperties": False,
}
GRAMMARS = [
    make_grammar("json_schema", {"type": "array", "items": RECORD, "minItems": 1, "maxItems": 3}),
    make_grammar("regex", "(ab|ba){2,30}"),
    make_grammar("choice", ["the one answer", "the other answer"]),
    "",
]
WAYS: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.1, "min_tokens": 12},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "logit_bias": {70: 4.0}, "frequency_penalty": 0.2},
]

Work = tuple[str, list[int], dict[str, object]]
_ids = itertools.count()


class FlatCosts(StepCosts):
    """Steps that cost the same however many rows they have: all that is found is proposed."""

    def of(self, num_rows: int) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def no_mask_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Propose whatever the processor does beside: grammars that once took long get no proposals."""
    monkeypatch.setattr("loraserve.engine.grammar.constraint.SLOW_MASK_S", math.inf)


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Engine]]:
    engines: list[Engine] = []
    config = EngineConfig(
        model_dir=str(base_dir()),
        model_id="demo",
        store_url=f"file://{tmp_path_factory.mktemp('store')}",
        memory_budget_bytes=32 * MIB,
        host_cache_bytes=8 * MIB,
        num_threads=1,
        speculation="off",
    )

    def make(does_speculate: bool, **changes: object) -> Engine:
        settings = msgspec.structs.replace(config, **changes)
        plain = build_engine(settings).engine
        engines.append(plain)
        speculation = None
        if does_speculate:
            speculation = Speculation()
            speculation.costs = FlatCosts()
        tokenizer = Tokenizer(base_dir())
        compiler = GrammarCompiler(base_dir(), tokenizer.vocab_size, [tokenizer.eos_token_id])
        engines.append(
            Engine(
                settings,
                plain.base,
                plain._pipeline._runner,
                plain.pager,
                overlap=False,
                speculation=speculation,
                constraints=Constraints(compiler, are_beside_steps=False),
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def answer(engine: Engine, work: Sequence[Work]) -> list[tuple[object, ...]]:
    """Return all that clients can see of the answers but times."""
    outputs: dict[RequestId, list[TokenOutput]] = {}
    for grammar, prompt, params in work:
        request_id = RequestId(f"q{next(_ids)}")
        outputs[request_id] = []
        engine.add(
            AddRequest(
                request_id=request_id,
                tenant=TenantId("t"),
                adapter=None,
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(grammar=grammar, **params),  # type: ignore[arg-type]
            )
        )
    while engine.has_requests:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert engine.check() == []
    return [
        (
            [token_id for output in said for token_id in output.token_ids],
            [score for output in said for score in output.logprobs or ()],
            said[-1].finish_reason,
        )
        for said in outputs.values()
    ]


def random_work(seed: int, count: int, tokenizer: Tokenizer) -> list[Work]:
    draw = random.Random(seed)
    prompts = ["list the tickets", "say it", "a", "the one answer"]
    return [
        (
            draw.choice(GRAMMARS),
            list(tokenizer.encode(draw.choice(prompts))),
            {"max_tokens": draw.randint(2, 70), "seed": number, **draw.choice(WAYS)},
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 3 else pytest.mark.campaign) for n in range(40)])
def test_grammar_answers_equal_without_speculation_bit_for_bit(make_engine, tokenizer: Tokenizer, seed: int) -> None:
    work = random_work(seed, 40, tokenizer)
    proposing = make_engine(True, max_num_seqs=4)
    assert answer(proposing, work) == answer(make_engine(False, max_num_seqs=4), work)
    stats = proposing.stats()
    assert stats.accepted_grammar_tokens > 20
    # the same texts may have other tokens
    assert stats.proposed_grammar_tokens > stats.accepted_grammar_tokens
    assert stats.accepted_own_tokens + stats.accepted_history_tokens > 20


def test_keys_of_a_schema_take_few_steps(make_engine, tokenizer: Tokenizer) -> None:
    work = [(GRAMMARS[0], list(tokenizer.encode("list the tickets")), {"max_tokens": 120, "temperature": 0.0})]
    plain, proposing = make_engine(False), make_engine(True)
    assert answer(proposing, work) == answer(plain, work)
    assert proposing.stats().num_steps < 0.7 * plain.stats().num_steps


def test_grammar_with_past_delay_gets_no_proposals(make_engine, tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("loraserve.engine.grammar.constraint.SLOW_MASK_S", 0.0)
    engine = make_engine(True)
    answer(engine, [(GRAMMARS[0], list(tokenizer.encode("a")), {"max_tokens": 40, "temperature": 0.0})])
    assert engine.stats().num_drafts == 0


def test_matcher_failing_ahead_of_request_is_rebuilt(make_engine, tokenizer: Tokenizer, monkeypatch, caplog) -> None:
    work = [(GRAMMARS[0], list(tokenizer.encode("list the tickets")), {"max_tokens": 60, "temperature": 0.0})]
    expected = answer(make_engine(False), work)
    go_to, calls = GrammarCursor.go_to, itertools.count()

    def failing(self: GrammarCursor, ahead: Sequence[int]) -> None:
        if ahead and next(calls) % 2 == 1:
            raise MatcherFailed("on purpose")
        go_to(self, ahead)

    monkeypatch.setattr(GrammarCursor, "go_to", failing)
    engine = make_engine(True)
    assert answer(engine, work) == expected
    assert "failed ahead of its request" in caplog.text
    assert engine.stats().grammar_failures == 0


def test_lost_step_leaves_grammar_state_unchanged(make_engine, tokenizer: Tokenizer, monkeypatch) -> None:
    work = [
        (GRAMMARS[0], list(tokenizer.encode("list the tickets")), {"max_tokens": 60, "temperature": 1.0, "seed": 3})
    ]
    expected = answer(make_engine(False), work)
    engine = make_engine(True)
    sampler = engine._pipeline._runner._sampler
    sample, calls = sampler.sample, itertools.count()

    def lost(logits: object, batch: object) -> object:
        results = sample(logits, batch)
        if next(calls) % 4 == 3:
            raise RuntimeError("on purpose")
        return results

    monkeypatch.setattr(sampler, "sample", lost)
    assert answer(engine, work) == expected
    assert next(calls) > 4
