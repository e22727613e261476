import pytest
import torch

pytest.importorskip("triton")

import numpy as np
import triton
import triton.language as tl

from loraserve.engine.execution.sampler import uniform
from loraserve.types import SamplingParams
from loraserve_kernels.errors import InvalidPlan, TensorMismatch
from loraserve_kernels.gpu.sampling import sampling as gpu_sampling
from loraserve_kernels.gpu.sampling import sampling_rows
from loraserve_kernels.gpu.sampling.probabilities import BY_ID, BY_LOGIT, BY_SEARCH, GREEDY, random_bits, share_of
from loraserve_kernels.gpu.sampling.sampling import SamplingRows, sample, top_logprobs

from .sampling_steps import (
    KINDS,
    by_engine,
    by_rule,
    equals_engine,
    equals_rule,
    make_params,
    make_rows,
    poisoned_logits,
    run,
)

pytestmark = pytest.mark.interpreted

CPU = torch.device("cpu")
# more groups than candidates that top-p asks for, and three chunks, of which the last is short
LARGE = 9001


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@triton.jit
def _bits_kernel(seed_ptr, position_ptr, mass_ptr, bits_ptr, shares_ptr):
    i = tl.program_id(0)
    bits = random_bits(tl.load(seed_ptr + i), tl.load(position_ptr + i))
    tl.store(bits_ptr + i, bits.to(tl.int64, bitcast=True))
    tl.store(shares_ptr + i, share_of(bits, tl.load(mass_ptr + i)))


def test_random_numbers_are_the_engines_bit_for_bit() -> None:
    seeds = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 0xD1342543DE82EF95, *range(10**15, 10**15 + 8)]
    positions = [0, 1, 2, 131_071, 2**31, 2**32 + 5]
    pairs = [(seed, position) for seed in seeds for position in positions]
    masses = [(1 << 62) - 1 - i * 2**50 if i % 3 else 1 + i for i in range(len(pairs))]
    seed = torch.from_numpy(np.array([s for s, _ in pairs], dtype=np.uint64).view(np.int64))
    bits, shares = torch.zeros(len(pairs), dtype=torch.int64), torch.zeros(len(pairs), dtype=torch.int64)
    _bits_kernel[(len(pairs),)](seed, torch.tensor([p for _, p in pairs]), torch.tensor(masses), bits, shares)
    digits = [(b % 2**64) >> 11 for b in bits.tolist()]
    assert [d * 2.0**-53 for d in digits] == [uniform(s, p) for s, p in pairs]
    # the number's share of a mass is rounded down, never up to the whole of it
    assert shares.tolist() == [d * mass >> 53 for d, mass in zip(digits, masses, strict=True)]


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(50, 6), (1000, 48), (LARGE, 12)])
def test_tokens_equal_engine_for_every_cut(vocab_size: int, num_rows: int) -> None:
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(num_rows)]
    logits, params = torch.randn(num_rows, vocab_size) * 3, make_params(kinds)
    # no random number is so near to a boundary that rounding decides
    assert min(by_rule(row, p, i)[1] for i, (row, p) in enumerate(zip(logits, params, strict=True))) > 1e-6
    assert equals_engine(logits, params)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.999999, temperature=2.0, min_p=0.02, seed=2),
        SamplingParams(top_k=6000, top_p=0.6, temperature=1.5, min_p=0.1, seed=4),
    ],
)
def test_a_flat_rows_token_is_searched_among_all(params: SamplingParams) -> None:
    logits, rows = torch.randn(1, LARGE), make_rows(1, LARGE)
    assert run(logits, [params], rows=rows)[0] == [by_engine(logits[0], params, 0)]
    assert rows.scratch(LARGE).ways.tolist() == [BY_SEARCH.value]


def test_candidates_are_enough_for_the_usual_row() -> None:
    rows = make_rows(len(KINDS), LARGE)
    run(torch.randn(len(KINDS), LARGE) * 4, make_params(list(KINDS)), rows=rows)
    assert rows.scratch(LARGE).ways.tolist() == [
        way.value for way in (GREEDY, BY_ID, BY_LOGIT, BY_LOGIT, BY_ID, BY_LOGIT)
    ]
    assert int(rows.scratch(LARGE).counts[[2, 3, 5]].max()) < sampling_rows.NUM_CANDIDATES


def test_extreme_parameters_are_treated_as_in_engine() -> None:
    params = [
        SamplingParams(temperature=1e-4, top_p=0.5, seed=1),
        SamplingParams(temperature=100.0, top_p=0.5, seed=1),
        SamplingParams(temperature=0.01, top_k=100, seed=1),
        SamplingParams(top_k=1, seed=1),
        SamplingParams(top_k=1000, seed=1),
        SamplingParams(top_k=10**6, seed=1),
        SamplingParams(top_k=-1, seed=1),
        SamplingParams(top_p=1e-9, seed=1),
        SamplingParams(min_p=1.0, seed=1),
        SamplingParams(min_p=1.0, top_p=0.99, seed=1),
        SamplingParams(min_p=1e-30, seed=2**64 - 1),
        SamplingParams(seed=-5, top_k=999),
    ]
    logits = torch.randn(len(params), 1000) * 3
    # all below zero
    logits[::2] -= 100
    assert equals_engine(logits, params)


@pytest.mark.parametrize(
    ("vocab_size", "kinds"), [(1000, ["top_k", "top_p", "all", "min_p", "greedy", "top_p"]), (LARGE, ["top_p"] * 2)]
)
def test_equal_logits_are_ordered_by_id(vocab_size: int, kinds: list[str]) -> None:
    logits = (torch.randn(len(kinds), vocab_size) * 3).round() / 2
    logits[-1] = -0.0
    logits[-1, ::3] = 0.0
    assert equals_rule(logits, make_params(kinds))


def test_non_finite_row_is_reported_alone() -> None:
    logits = torch.randn(6, LARGE) * 3
    params = make_params(list(KINDS))
    right, _ = run(logits, params)
    spoilt = logits.clone()
    for row, bad in ((1, float("nan")), (2, float("inf")), (3, -float("inf"))):
        spoilt[row, 4096] = bad
    tokens, finite = run(spoilt, params)
    assert finite == [True, False, False, False, True, True]
    assert [tokens[i] for i in (0, 4, 5)] == [right[i] for i in (0, 4, 5)]
    assert all(0 <= token < LARGE for token in tokens)


def test_padding_rows_get_some_token() -> None:
    logits = torch.randn(2, 1000)
    padded = poisoned_logits(logits, num_padding=3)
    padded[3] = 0.0
    rows = make_rows(5, 1000)
    # a step of draws, of which nothing may be left
    run(poisoned_logits(torch.randn(5, 1000)), make_params(["all"] * 5), rows=rows)
    tokens, finite = run(padded, make_params(["top_k", "temperature"]), rows=rows)
    assert tokens[:2] == run(logits, make_params(["top_k", "temperature"]))[0]
    assert finite == [True, True, False, True, False]
    assert all(0 <= token < 1000 for token in tokens)
    assert tokens[3] == 0


def test_token_of_row_does_not_depend_on_step() -> None:
    kinds = ["top_p", "temperature", "greedy", "all"]
    logits, params = torch.randn(4, LARGE) * 2, make_params(kinds)
    logits[0] *= 0.3
    together, _ = run(logits, params)
    for row in range(4):
        assert run(logits[row : row + 1], params[row : row + 1], [row])[0] == [together[row]]


def test_greedy_step_reads_logits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("weigh_kernel", "draw_kernel", "search_kernel"):
        monkeypatch.setattr(gpu_sampling, kernel, None)
    logits = torch.randn(3, LARGE)
    rows = make_rows(3, LARGE)
    assert run(logits, make_params(["greedy"] * 3), rows=rows)[0] == logits.argmax(1).tolist()
    assert rows.is_greedy
    with pytest.raises(TypeError):
        run(logits, make_params(["greedy", "greedy", "top_k"]), rows=rows)
    assert not rows.is_greedy


def test_second_fill_keeps_staging_of_first_fill() -> None:
    rows = SamplingRows(2, CPU)
    address = rows.seed.data_ptr()
    rows.fill([SamplingParams(seed=5)], [1])
    rows.fill([SamplingParams(seed=6)], [2])
    assert [int(staged[0, 0]) for staged in rows._staged] == [5, 6]
    assert (rows.seed.data_ptr(), int(rows.seed[0]), int(rows.position[0])) == (address, 6, 2)


def test_too_many_rows_are_refused() -> None:
    rows = SamplingRows(2, CPU)
    rows.fill(make_params(["top_k"]), [4])
    with pytest.raises(InvalidPlan, match="room for 2"):
        rows.fill(make_params(["greedy"] * 3), [0, 1, 2])
    with pytest.raises(InvalidPlan, match="1 rows with 2 positions"):
        rows.fill(make_params(["greedy"]), [0, 1])
    assert (rows.num_rows, rows.is_greedy, int(rows.position[0])) == (1, False, 4)


def test_tensors_mismatching_rows_are_refused() -> None:
    rows = SamplingRows(2, CPU)
    rows.fill(make_params(["greedy"] * 2), [0, 1])
    logits, tokens, finite = torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
    for bad in (logits[:1], torch.zeros(3, 9), torch.zeros(2, gpu_sampling.MAX_VOCAB_SIZE + 1, device="meta")):
        with pytest.raises(TensorMismatch, match="2 rows were filled in"):
            sample(bad, rows, tokens, finite)
    for bad in (logits.half(), logits[0], torch.zeros(9, 2).T, torch.zeros(2, 0)):
        with pytest.raises(TensorMismatch, match=r"expected torch\.float32 \[num_rows, vocab_size\]"):
            sample(bad, rows, tokens, finite)
    with pytest.raises(TensorMismatch, match=r"tokens_out is torch\.int32"):
        sample(logits, rows, tokens.int(), finite)
    with pytest.raises(TensorMismatch, match=r"finite_out is torch\.bool \(1,\)"):
        sample(logits, rows, tokens, finite[:1])


def test_log_probabilities_come_from_raw_distribution() -> None:
    logits, tokens = torch.randn(5, 1000) * 5, torch.tensor([0, 999, 3, 3, 500])
    expected = torch.log_softmax(logits.double(), dim=1)
    chosen, values, ids = top_logprobs(logits, tokens, 7)
    assert torch.allclose(chosen.double(), expected.gather(1, tokens[:, None])[:, 0], atol=2e-6)
    best = expected.topk(7, dim=1)
    assert torch.equal(ids, best.indices)
    assert torch.allclose(values.double(), best.values, atol=2e-6)
    for bad in (0, 1001):
        with pytest.raises(TensorMismatch, match=f"k is {bad}"):
            top_logprobs(logits, tokens, bad)
