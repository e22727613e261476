from collections import Counter
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from loraserve.engine.execution.sampler import Place, Sampler, _apply_penalties, _restrict, uniform
from loraserve.engine.greedy import has_penalties
from loraserve.engine.scheduled import ScheduledRequest, StepResult
from loraserve.types import SamplingParams
from loraserve_kernels.cpu.sampling.drawing import Draw, draw, draw_torch

from ..conftest import make_request

INF = float("inf")


def token_of(row: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """Draw a token by the kernel, whose rows are wider, and by torch, which agree."""
    of_row = Draw(params.temperature, params.top_k, params.top_p, params.min_p, uniform)
    wide = torch.cat([row, torch.full((16,), -INF)])
    (token,) = draw(wide[None], (0,), (of_row,))
    # torch's order of equal logits isn't defined
    assert row[draw_torch(row, of_row)] == row[token]
    return token


def shares(logits: list[float], params: SamplingParams, count: int = 4000) -> dict[int, float]:
    row = torch.tensor(logits)
    drawn = Counter(token_of(row, params, uniform(1, position)) for position in range(count))
    return {token: n / count for token, n in sorted(drawn.items())}


def test_uniform_numbers_fill_the_unit_interval_evenly():
    numbers = torch.tensor([uniform(seed, position) for seed in range(40) for position in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    assert (counts - 200).abs().max() < 60
    # neighbours don't follow each other
    assert abs(torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]) < 0.05


def test_uniform_numbers_depend_on_seed_and_position_alone():
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(3, 5), uniform(4, 5), uniform(3, 6)}) == 3


def test_draws_follow_the_softmax():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    assert shares(logits, SamplingParams()) == pytest.approx({0: 0.5, 1: 0.3, 2: 0.2}, abs=0.03)


def test_temperature_sharpens():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    expected = torch.tensor([0.25, 0.09, 0.04]) / 0.38
    assert shares(logits, SamplingParams(temperature=0.5)) == pytest.approx(
        dict(enumerate(expected.tolist())), abs=0.03
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(top_k=2), {0: 0.625, 1: 0.375}),
        (SamplingParams(top_k=1), {0: 1.0}),
        (SamplingParams(top_p=0.6), {0: 0.625, 1: 0.375}),
        (SamplingParams(top_p=0.5), {0: 1.0}),
        (SamplingParams(top_p=0.95), {0: 0.5, 1: 0.3, 2: 0.2}),
        (SamplingParams(min_p=0.5), {0: 0.625, 1: 0.375}),
        (SamplingParams(top_k=2, top_p=0.63), {0: 0.625, 1: 0.375}),
        (SamplingParams(top_k=2, top_p=0.62), {0: 1.0}),
    ],
)
def test_cuts_keep_the_likeliest_tokens(params, expected):
    logits = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    assert shares(logits, params) == pytest.approx(expected, abs=0.03)


def test_top_p_over_flat_vocabulary_keeps_share():
    row = torch.zeros(4000)
    params = SamplingParams(top_p=0.5)
    assert max(token_of(row, params, u / 100) for u in range(100)) in range(1900, 2001)


def test_draw_at_very_end_is_allowed_token():
    row = torch.tensor([0.0, 0.0, -float("inf"), -float("inf")])
    assert token_of(row, SamplingParams(), 1 - 2**-53) == 1
    assert token_of(row, SamplingParams(top_p=0.999), 1 - 2**-53) in (0, 1)


def test_penalties_follow_definitions():
    request = make_request(tokens=[0, 1], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    request.token_ids += [2, 2]
    row = torch.tensor([4.0, -4.0, 1.0, 1.0])
    _apply_penalties(row, Place(request, len(request.token_ids)))
    # repetition over all of 0, 1, 2; presence and frequency (twice) over the output's 2 alone
    assert row.tolist() == [2.0, -8.0, 0.5 - 0.5 - 2 * 0.25, 1.0]


def test_tiny_repetition_penalty_leaves_a_distribution():
    rows = [[float(token) for token in range(32)]] * 2
    asked: list[dict[str, object]] = [{"top_p": 0.9}, {}]
    requests = [make_request(tokens=[5, 6], temperature=1.0, repetition_penalty=1e-40, **params) for params in asked]
    last = [ScheduledRequest(request, 1, 1, is_sampled=True, is_scored=False, epoch=0) for request in requests]
    assert all(set(result.token_ids) <= {5, 6} for result in sampled_together(rows, last))


def sampled_together(rows: list[list[float]], entries: list[ScheduledRequest]) -> list[StepResult]:
    """Results of a step that keeps all rows of its entries."""
    ends = list(accumulate(entry.num_tokens for entry in entries))
    batch = SimpleNamespace(entries=entries, logits_ranges=list(zip([0, *ends], ends, strict=False)))
    return Sampler(eos_token_ids=[0], vocab_size=len(rows[0])).sample(torch.tensor(rows), batch)


def test_step_rows_give_likeliest_token_unless_requested_otherwise():
    row, tokens = [4.0, 3.0, 2.0, 1.0], [1, 2]
    asked: list[dict[str, object]] = [
        {},
        {"min_tokens": 1},
        {"min_tokens": 1, "stop_token_ids": (1,)},
        {"logit_bias": {3: 9.0}},
        {"allowed_token_ids": (2, 3)},
        {"bad_words": ((0,),)},
        {"presence_penalty": 2.0, "repetition_penalty": 1.5},
        {"logprobs": 1},
        {"max_tokens": 0},
        {},
    ]
    rows = [row] * (len(asked) - 1) + [[float("nan"), 1.0, 1.0, 1.0]]
    requests = [make_request(tokens=tokens, **params) for params in asked]
    last = [ScheduledRequest(request, 1, 1, is_sampled=True, is_scored=False, epoch=0) for request in requests]
    results = sampled_together(rows, last)
    assert [result.token_ids for result in results] == [(0,), (1,), (2,), (3,), (2,), (1,), (0,), (0,), (), ()]
    assert [result.is_finite for result in results] == [True] * 9 + [False]
    assert [i for i, result in enumerate(results) if result.logprobs] == [7]


def test_named_tokens_replace_likeliest():
    request = make_request(tokens=[1, 2], logprobs=1, logprob_token_ids=(3, 1))
    last = ScheduledRequest(request, 1, 1, is_sampled=True, is_scored=False, epoch=0)
    (result,) = sampled_together([[4.0, 3.0, 2.0, 1.0]], [last])
    (entry,) = result.logprobs or ()
    scores = torch.log_softmax(torch.tensor([4.0, 3.0, 2.0, 1.0]), dim=0)
    assert [token for token, _ in entry.top] == [3, 1]
    assert [value for _, value in entry.top] == pytest.approx([float(scores[3]), float(scores[1])])
    assert (entry.token_id, entry.logprob) == (0, pytest.approx(float(scores[0])))


def test_prompt_pieces_are_scored_and_last_is_sampled():
    request = make_request(tokens=[1, 0, 1], prompt_logprobs=0)
    piece = ScheduledRequest(request, 0, 1, is_sampled=False, is_scored=True, epoch=0)
    last = ScheduledRequest(request, 1, 2, is_sampled=True, is_scored=True, epoch=0)
    first, second = sampled_together([[4.0, 3.0], [4.0, 3.0], [3.0, 4.0]], [piece, last])
    assert (first.token_ids, second.token_ids) == ((), (1,))
    scores = [*first.prompt_logprobs, *second.prompt_logprobs]
    assert [score.token_id for score in scores] == [0, 1]
    assert [score.logprob for score in scores] == pytest.approx([-0.3133, -1.3133], abs=1e-4)


def restricted(logits: list[float], output: list[int], **params: object) -> list[float]:
    request = make_request(tokens=[7, 8], **params)
    request.token_ids += output
    row = torch.tensor(logits)
    found = _restrict(row, Place(request, len(request.token_ids))).tolist()
    assert row.tolist() == logits
    return found


def test_only_allowed_tokens_keep_logits():
    assert restricted([4.0, 3.0, 2.0, 1.0], [], allowed_token_ids=(3, 1)) == [-INF, 3.0, -INF, 1.0]
    # what mustn't end the answer yet is taken where nothing else is allowed
    assert restricted([-INF, 3.0, 2.0, 1.0], [], allowed_token_ids=(0,)) == [0.0, -INF, -INF, -INF]


def test_bad_word_is_not_completed():
    words = ((2,), (0, 1, 3), (1, 0))
    logits = [4.0, 3.0, 2.0, 1.0]
    for output, banned in (
        ([], {2}),
        ([0], {2}),
        ([0, 1], {2, 3, 0}),
        ([3, 0, 1], {2, 3, 0}),
        ([0, 1, 3], {2}),
        ([1], {2, 0}),
    ):
        expected = [-INF if token in banned else logit for token, logit in enumerate(logits)]
        assert restricted(logits, output, bad_words=words) == expected, output
    # the prompt is no part of what was said
    assert restricted(logits, [], bad_words=((7, 8, 1), (8, 1))) == logits
    assert has_penalties(SamplingParams(bad_words=words))


def test_bad_words_yield_where_no_token_remains():
    logits = [4.0, 3.0, 2.0, 1.0]
    assert restricted(logits, [], bad_words=((0,), (1,), (2,), (3,))) == logits
    assert restricted(logits, [], allowed_token_ids=(1,), bad_words=((1,),)) == [-INF, 3.0, -INF, -INF]


def with_extra(num_rows: int, **params: object) -> ScheduledRequest:
    """Return the last row of a request whose adapter has that many tokens beyond the base's."""
    request = make_request(tokens=[1, 2], **params)
    request.num_extra_rows = num_rows
    return ScheduledRequest(request, 1, 1, is_sampled=True, is_scored=False, epoch=0)


def sampled_wide(rows: list[list[float]], entries: list[ScheduledRequest], vocab_size: int) -> list[StepResult]:
    batch = SimpleNamespace(entries=entries, logits_ranges=[(i, i + 1) for i in range(len(entries))])
    return Sampler(eos_token_ids=[0], vocab_size=vocab_size).sample(torch.tensor(rows), batch)


def test_tokens_beyond_own_rows_are_never_sampled():
    # the largest number is behind each row's own columns
    row = [4.0, 3.0, 5.0, 6.0, 9.0]
    asked = [{}, {"min_tokens": 9}, {"temperature": 50.0}, {"presence_penalty": 1.0}, {"logprobs": 2}]
    for num_extra, best in ((0, 0), (1, 2), (2, 3), (3, 4)):
        entries = [with_extra(num_extra, **params) for params in asked]
        results = sampled_wide([row] * len(entries), entries, 2)
        greedy, early, drawn, penal, scored = (result.token_ids[0] for result in results)
        assert (greedy, penal, scored) == (best, best, best)
        assert early == (best or 1)
        assert drawn < 2 + num_extra
        (logprobs,) = results[-1].logprobs or ()
        expected = torch.log_softmax(torch.tensor(row[: 2 + num_extra]), 0)
        assert logprobs.logprob == pytest.approx(float(expected[best]))
        assert {token for token, _ in logprobs.top} <= set(range(2 + num_extra))


def test_row_of_base_ignores_columns_beyond():
    alone = sampled_together([[4.0, 3.0]], [with_extra(0, temperature=2.0, logprobs=2)])
    for beyond in (INF, -INF, float("nan"), 99.0):
        entries = [with_extra(0, temperature=2.0, logprobs=2), with_extra(1)]
        assert sampled_wide([[4.0, 3.0, beyond], [1.0, 2.0, 3.0]], entries, 2)[:1] == alone


def test_numbers_of_own_rows_must_be_finite():
    entries = [with_extra(1), with_extra(0)]
    results = sampled_wide([[4.0, 3.0, float("nan")], [4.0, 3.0, float("nan")]], entries, 2)
    assert [result.is_finite for result in results] == [False, True]
