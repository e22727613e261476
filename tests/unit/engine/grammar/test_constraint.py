"""One request's grammar: masks after its tokens, slow ones apart, failed lexers made anew."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from loraserve.engine.grammar.constraint import Constraint
from loraserve.engine.grammar.matchers import LEAST_BYTES, MatcherCache
from loraserve.engine.grammar.threads import Lane, MaskThreads
from loraserve.errors import EngineError, GrammarDeadEnd, GrammarTooComplex
from loraserve.text.grammar import GrammarCompiler
from loraserve.text.tokenizer import Tokenizer

from .conftest import VOCAB, FakeLexer, Gate, make_grammar


def next_of(tokens) -> set[int]:
    """After n tokens, the tokens n and n + 40 may come."""
    return {len(tokens), len(tokens) + 40}


def lexer(_: str = "") -> FakeLexer:
    return FakeLexer(next_of)


def allowed(constraint: Constraint) -> set[int]:
    return set(np.flatnonzero(constraint.allowed()).tolist())


def test_mask_follows_each_token(make_bench) -> None:
    bench = make_bench(lexer)
    constraint = bench.begin()
    for number in range(5):
        bench.settle(constraint)
        assert constraint.error is None
        assert constraint.num_output_tokens == number
        assert allowed(constraint) == {number, number + 40}
        assert [token for token in range(VOCAB) if constraint.allows(token)] == [number, number + 40]
        constraint.advance([number])


def test_existing_output_is_followed_first(make_bench) -> None:
    bench = make_bench(lexer)
    constraint = bench.begin(tokens=range(25))
    bench.settle(constraint)
    assert constraint.num_output_tokens == 25
    assert allowed(constraint) == {25, 65}
    assert bench.num_wakes == 1


@pytest.mark.parametrize("tokenizer_size", [VOCAB, 200])
def test_tokens_missing_in_logits_are_never_allowed(make_bench, tokenizer_size: int) -> None:
    bench = make_bench(lambda _: FakeLexer(lambda tokens: {0, VOCAB - 1, VOCAB, 95}), tokenizer_size=tokenizer_size)
    constraint = bench.begin()
    bench.settle(constraint)
    assert len(constraint.words) == 3
    assert constraint.words[2] == 1 << (VOCAB - 1 - 64)
    assert allowed(constraint) == {0, VOCAB - 1}


def test_unwanted_tokens_are_excluded_unless_alone(make_bench) -> None:
    bench = make_bench(lexer)
    constraint = bench.begin()
    bench.settle(constraint)
    assert set(np.flatnonzero(constraint.allowed([40, 41])).tolist()) == {0}
    assert set(np.flatnonzero(constraint.allowed([0, 40])).tolist()) == {0, 40}
    assert allowed(constraint) == {0, 40}


def test_grammar_allowing_no_token_ends_request(make_bench) -> None:
    bench = make_bench(lambda _: FakeLexer(lambda tokens: set() if tokens else {1}))
    constraint = bench.begin()
    bench.settle(constraint)
    constraint.advance([1])
    bench.settle(constraint)
    assert isinstance(constraint.error, GrammarDeadEnd)


def test_lexer_failed_under_earlier_request_is_rebuilt(make_bench) -> None:
    """All matchers of a compiled grammar share its lexer, and its failure."""
    bench = make_bench(lambda _: FakeLexer(next_of, fails=lambda tokens: list(tokens) == [40]))
    culprit, other = bench.begin(), bench.begin()
    bench.settle(culprit, other)
    other.advance([0])
    bench.settle(other)
    culprit.advance([40])
    bench.settle(culprit)
    assert isinstance(culprit.error, GrammarTooComplex)
    other.advance([1])
    bench.settle(other)
    assert other.error is None
    assert allowed(other) == {2, 42}
    # the first, one of the culprit's own, which failed after the same token, and one for the other
    assert len(bench.compiler.compiled) == 3
    later = bench.begin()
    bench.settle(later)
    assert later.error is None


def test_full_lexer_is_emptied_and_answer_continues(make_bench) -> None:
    """Each lexer takes three masks: an answer of ten tokens needs several."""

    def limited(_: str) -> FakeLexer:
        masks = []
        return FakeLexer(next_of, fails=lambda tokens: bool(masks.append(1)) or len(masks) > 3)

    bench = make_bench(limited)
    constraint = bench.begin()
    for number in range(10):
        bench.settle(constraint)
        assert allowed(constraint) == {number, number + 40}
        constraint.advance([number])


def test_lexers_are_not_made_without_end(make_bench) -> None:
    def one_mask(_: str) -> FakeLexer:
        masks = []
        return FakeLexer(next_of, fails=lambda tokens: bool(masks.append(1)) or len(masks) > 1)

    bench = make_bench(one_mask)
    constraint = bench.begin()
    for number in range(40):
        bench.settle(constraint)
        if constraint.error is not None:
            break
        constraint.advance([number])
    assert isinstance(constraint.error, GrammarTooComplex)
    assert len(bench.compiler.compiled) < 12


def test_panic_of_matcher_is_error_of_own_request(make_bench, caplog) -> None:
    class Panic(BaseException):
        """As pyo3 reports Rust's."""

    def panic(tokens) -> None:
        if tokens:
            raise Panic("at the disco")

    bench = make_bench(lambda _: FakeLexer(next_of, gate=panic))
    constraint = bench.begin()
    bench.settle(constraint)
    constraint.advance([0])
    bench.settle(constraint)
    assert isinstance(constraint.error, EngineError)
    assert "disco" not in str(constraint.error)
    other = bench.begin()
    bench.settle(other)
    assert other.error is None


def test_slow_mask_ends_request(make_bench) -> None:
    bench = make_bench(lambda _: FakeLexer(next_of, work_s=0.3))
    constraint = bench.begin()
    bench.settle(constraint)
    assert isinstance(constraint.error, GrammarTooComplex)


def test_masks_after_slow_mask_leave_fast_threads_free(make_bench) -> None:
    slow_gate = Gate()
    bench = make_bench(
        lambda name: (
            FakeLexer(next_of, work_s=0.02, gate=lambda tokens: tokens[2:] and slow_gate())
            if name == "slow"
            else lexer()
        )
    )
    slow = [bench.begin("slow") for _ in range(4)]
    bench.settle(*slow)
    for number in range(2):
        for one in slow:
            one.advance([number])
        bench.settle(*slow)
    for one in slow:
        one.advance([2])
    slow_gate.until_begun()
    fast = bench.begin("fast")
    bench.settle(fast)
    for number in range(5):
        fast.advance([number])
        bench.settle(fast)
    assert not any(one.is_ready for one in slow)
    slow_gate.open()
    bench.settle(*slow)


def test_late_mask_holds_request_until_ready(make_bench) -> None:
    gate = Gate()
    bench = make_bench(lambda _: FakeLexer(next_of, gate=lambda tokens: tokens and gate()))
    constraint = bench.begin()
    bench.settle(constraint)
    constraint.advance([0])
    assert not constraint.is_held
    bench.threads.wait([constraint], 0.01)
    assert constraint.is_held
    gate.open()
    bench.settle(constraint)
    assert not constraint.is_held
    assert allowed(constraint) == {1, 41}


def test_ended_request_leaves_no_matcher(make_bench) -> None:
    bench = make_bench(lexer)
    constraint = bench.begin()
    bench.settle(constraint)
    constraint.advance([0])
    bench.settle(constraint)
    matcher = weakref.ref(constraint._cursor.matcher)
    bench.settle(bench.begin())
    del constraint
    gc.collect()
    assert matcher() is None


# compiled grammars


def test_ended_request_holds_no_compiled_grammar(make_bench) -> None:
    bench, gate = make_bench(lexer), Gate()
    for _ in range(2):
        bench.threads.submit(gate, Lane.COMPILE)
    gate.until_begun()
    left, stays = bench.begin("left"), bench.begin("stays")
    left.end()
    gate.open()
    bench.settle(stays)
    bench.threads.close()
    assert bench.compiler.compiled == ["stays"]


def test_grammar_is_compiled_once_and_oldest_is_evicted(make_bench) -> None:
    bench = make_bench(lexer, max_bytes=6 * LEAST_BYTES)
    bench.settle(*(bench.begin("a") for _ in range(5)))
    assert bench.compiler.compiled == ["a"]
    for name in "bcad":
        bench.settle(bench.begin(name))
    assert bench.cache.num_grammars == 3
    assert bench.cache.num_bytes <= 3 * LEAST_BYTES
    bench.settle(bench.begin("a"), bench.begin("b"))
    assert bench.compiler.compiled == ["a", "b", "c", "d", "b"]
    assert bench.cache.compile_s.num == bench.cache.num_compiled == 5


def test_grammar_counts_measured_bytes(make_bench) -> None:
    bench = make_bench(lexer, max_bytes=16 * LEAST_BYTES)
    bench.cache.get("a", "large", 8 * LEAST_BYTES)
    assert bench.cache.num_bytes == 8 * LEAST_BYTES
    bench.cache.get("b", "larger than a tenant's share", 9 * LEAST_BYTES)
    assert bench.cache.num_bytes == 8 * LEAST_BYTES


def test_tenants_share_no_compiled_grammar(make_bench) -> None:
    bench = make_bench(lexer)
    bench.settle(*(bench.begin("g", tenant="a") for _ in range(3)))
    assert bench.compiler.compiled == ["g"]
    bench.settle(*(bench.begin("g", tenant="b") for _ in range(3)))
    assert bench.compiler.compiled == ["g", "g"]
    # so that a lexer that fails, or grows, does so for one tenant alone
    first, second = (bench.cache.get(tenant, "g") for tenant in "ab")
    assert first is not second
    bench.cache.discard("a", "g", first)
    assert bench.cache.get("b", "g") is second
    assert bench.cache.get("a", "g") is not first


# llguidance


def test_real_matcher_allows_grammar_tokens(
    compiler: GrammarCompiler, tokenizer: Tokenizer, threads: MaskThreads
) -> None:
    bench_cache = MatcherCache(compiler, 1 << 26)
    constraint = Constraint(make_grammar("choice", ["no", "nice"]), (), bench_cache, threads)
    said = []
    while True:
        threads.wait([constraint], 10)
        assert constraint.error is None
        token_id = min(allowed(constraint))
        if token_id == tokenizer.eos_token_id:
            break
        said.append(token_id)
        constraint.advance([token_id])
    assert tokenizer.decode(said) in ("no", "nice")
    assert allowed(constraint) == {tokenizer.eos_token_id}
    assert constraint.mask_s > 0


def test_copies_of_real_matcher_diverge_independently(
    compiler: GrammarCompiler, tokenizer: Tokenizer, threads: MaskThreads
) -> None:
    cache = MatcherCache(compiler, 1 << 26)
    grammar = make_grammar("regex", "[ab]{4}")
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    many = [Constraint(grammar, [a] * (i % 4), cache, threads) for i in range(16)]
    threads.wait(many, 10)
    # as many threads compile, so many may compile it at once
    assert cache.num_compiled <= 2
    for i, one in enumerate(many):
        one.advance([b])
        threads.wait([one], 10)
        is_over = i % 4 == 3
        assert one.allows(tokenizer.eos_token_id) is is_over
        assert one.allows(a) is not is_over


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}}}


@pytest.fixture
def unhurried(monkeypatch) -> None:
    """No mask counts as slow, however busy the machine is."""
    for name in ("SLOW_MASK_S", "TOGETHER_S", "MAX_MASK_S"):
        monkeypatch.setattr(f"loraserve.engine.grammar.constraint.{name}", 60.0)


@pytest.fixture
def between_steps():
    made = MaskThreads(2, are_beside_steps=False)
    yield made
    made.close()


@pytest.fixture
def begin(compiler: GrammarCompiler):
    """Begin so many constraints of one tenant and wait for their first masks."""
    cache = MatcherCache(compiler, 1 << 30)

    def make(threads: MaskThreads, count: int) -> list[Constraint]:
        grammar = make_grammar("json_schema", SCHEMA)
        made = [Constraint(grammar, [], cache, threads) for _ in range(count)]
        threads.wait(made, 10)
        return made

    return make


def test_masks_computed_together_equal_masks_computed_alone(begin, threads, between_steps, unhurried) -> None:
    alone, together = begin(threads, 6), begin(between_steps, 6)
    draw = np.random.default_rng(0)
    num_permitted = 0
    for _ in range(40):
        tokens = [int(draw.choice(sorted(allowed(one)))) for one in alone]
        for one, other, token in zip(alone, together, tokens, strict=True):
            one.advance([token])
            other.advance([token])
        threads.wait(alone, 10)
        for one, other in zip(alone, together, strict=True):
            # it may be allowed, and then there is no mask; it may be the answer's end
            likely = int(draw.choice(sorted(allowed(one))))
            other.wanted = likely if draw.random() < 0.5 else int(draw.integers(other.vocab_size))
        between_steps.wait(together, 10)
        for one, other in zip(alone, together, strict=True):
            assert one.error is None
            assert other.error is None
            num_permitted += other.permitted is not None
            assert other.allows(other.wanted) == one.allows(other.wanted)
            # also where a step that wanted another token was dropped
            if draw.random() < 0.5:
                assert other.start_over()
                assert np.array_equal(other.words, one.words)
    # most of them aren't what is said next
    assert num_permitted > 100


def test_likeliest_token_is_allowed(begin, threads) -> None:
    (constraint,) = begin(threads, 1)
    draw = np.random.default_rng(0)
    for _ in range(30):
        logits = draw.standard_normal(constraint.vocab_size).astype(np.float32)
        expected = max(sorted(allowed(constraint)), key=lambda token: logits[token])
        assert constraint.likeliest(logits) == expected
        constraint.advance([expected])
        threads.wait([constraint], 10)


def test_token_against_grammar_fails_own_request_alone(begin, between_steps) -> None:
    bad, good = begin(between_steps, 2)
    wrong = next(token for token in range(300, bad.vocab_size) if not bad.allows(token))
    right = min(allowed(good))
    bad.advance([wrong])
    good.advance([right])
    between_steps.wait([good], 10)
    assert good.is_ready
    assert good.error is None
    # made anew by itself, and then it fails
    between_steps.wait([bad], 10)
    assert bad.error is not None


def test_answer_following_grammar_unaided_needs_no_thread(
    begin, threads, between_steps, monkeypatch, unhurried
) -> None:
    (twin,) = begin(threads, 1)
    one, other = begin(between_steps, 2)
    together = []
    follow_together = Constraint.follow_together

    def note(first: Constraint, masks: list[Constraint]) -> None:
        together.append(len(masks))
        follow_together(first, masks)

    monkeypatch.setattr(Constraint, "follow_together", note)
    for number in range(8):
        token = min(allowed(twin))
        for mask in (twin, one, other):
            mask.advance([token])
        threads.wait([twin], 10)
        # of the other nothing is wanted
        wrong = next(token for token in range(one.vocab_size) if token not in allowed(twin))
        one.wanted = wrong if number == 4 else min(allowed(twin))
        between_steps.wait([one, other], 10)
        assert (one.permitted is not None) is (number != 4)
        assert one.allows(min(allowed(twin)))
    # what is wanted first, and after a wrong one, isn't known to be allowed
    assert together == [2, 1, 1, 1, 2, 2, 1, 1]


def test_forbidden_token_fails_request_on_step_thread(begin, between_steps) -> None:
    (bad,) = begin(between_steps, 1)
    right = min(allowed(bad))
    wrong = next(token for token in range(300, bad.vocab_size) if token not in allowed(bad))
    bad._has_followed = True
    bad.advance([wrong])
    bad.wanted = right
    between_steps.wait([bad], 10)
    assert bad.error is not None


def test_slow_batch_of_masks_is_computed_separately_next(begin, between_steps, monkeypatch) -> None:
    monkeypatch.setattr("loraserve.engine.grammar.constraint.SLOW_MASK_S", 0.0)
    monkeypatch.setattr("loraserve.engine.grammar.constraint.TOGETHER_S", 0.0)
    first, second = begin(between_steps, 2)
    first._num_slow = second._num_slow = 0
    for one in (first, second):
        one.advance([min(allowed(one))])
    between_steps.wait([first, second], 10)
    assert first._num_alone
    assert second._num_alone
    gathered = []
    monkeypatch.setattr(between_steps, "gather", lambda mask, tenant: gathered.append(mask))
    first.advance([min(allowed(first))])
    between_steps.wait([first], 10)
    assert not gathered


def test_forced_tokens_are_not_searched_after_lexer_failed(compiler: GrammarCompiler, threads, unhurried) -> None:
    grammar = make_grammar("choice", ["the one answer"])
    constraint = Constraint(grammar, [], MatcherCache(compiler, 1 << 30), threads)
    threads.wait([constraint], 10)
    assert constraint.forced(4)
    constraint._num_restarts = 1
    assert constraint.forced(4) == ()


def test_dead_answer_found_ahead_fails_request(compiler: GrammarCompiler, tokenizer, between_steps, unhurried) -> None:
    """The steps' thread meets the dead end first, and says nothing of it."""
    grammar = make_grammar("grammar", 'start: "ab" dead | "c"\ndead: "x" never\nnever: NEVER\nNEVER: /x+/ & /y+/')
    cache = MatcherCache(compiler, 1 << 30)
    constraint = Constraint(grammar, [], cache, between_steps)
    between_steps.wait([constraint], 10)
    said = tokenizer.encode("abx", add_special_tokens=False)
    assert constraint.start_over()
    assert not constraint.look_ahead(said, None)
    assert not constraint.look_ahead(said, tokenizer.eos_token_id)
    constraint.advance(said)
    between_steps.wait([constraint], 10)
    assert isinstance(constraint.error, GrammarDeadEnd)
    # found once with this lexer, and once by the request itself
    assert cache.num_compiled == 1
