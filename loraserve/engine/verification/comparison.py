"""Whether an adapter's answers are those of its plain evaluation: what is asked, and what is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from loraserve.adapters.ir import AdapterIR
from loraserve.errors import EngineError
from loraserve.model.reference_model import Evaluation
from loraserve.types import BaseSpec, Certificate

SumsT = TypeVar("SumsT", "_TokenSums", "_RoundSums")

_LENGTHS = (13, 17)
_MAX_SPECIAL = 4

_EPSILONS: Mapping[str, float] = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
_LOSS_FACTOR = 10.0
"""What a module loses, others may make larger: 1 to 2 times where an adapter is weaker than its base, up to 10 times where it's so strong that little is left of that."""
_FLOORS: Mapping[str, float] = {"float32": 1e-5, "float16": 2.5e-4, "bfloat16": 1e-3}
"""Of the largest logit: what rounding may make of a weight that an adapter leaves almost as it was; of float32, what it makes of a sum through all layers."""
_MAX_BASE_NOISE = 0.35
"""Of the logits' standard deviation."""
_CHUNK_LOGITS = 1 << 17
"""Compared at a time: half a MiB of each."""


def probe_sequences(base: BaseSpec, adapters: Sequence[AdapterIR]) -> list[tuple[int, ...]]:
    """Return the token ids that an adapter is probed with, the same ones each time: arbitrary tokens, and among them those that it has rows of its own for.

    An activated adapter's hold its invocation: once, and twice where it's short. None of it is in the last few, which stand for an answer.
    """
    invocation = next((ir.invocation_token_ids for ir in adapters if ir.invocation_token_ids), ())
    own = [token for ir in adapters for module in ir.modules for token in module.token_ids]
    own = [token for token in dict.fromkeys(own) if token not in invocation]
    sequences = []
    for number, length in enumerate(_LENGTHS):
        # from both ends of those that it has
        special = own[:_MAX_SPECIAL] if number == 0 else own[-_MAX_SPECIAL:]
        filler = _filler(base.vocab_size, number, length - len(special), invocation)
        tokens = [*filler[:2], *special, *filler[2:]]
        if number == 1 and len(invocation) < length:
            tokens[1:1] = invocation
        tokens[4:4] = invocation
        sequences.append(tuple(tokens[: base.max_model_len - 1]))
    return sequences


def _filler(vocab_size: int, seed: int, count: int, avoided: Sequence[int]) -> list[int]:
    """Token ids that look like any, from SplitMix64."""
    tokens: list[int] = []
    state = seed
    while len(tokens) < count:
        state += 1
        z = (state * 0x9E3779B97F4A7C15 + (seed + 1) * 0xD1342543DE82EF95) & (1 << 64) - 1
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & (1 << 64) - 1
        token = (z ^ (z >> 31)) % vocab_size
        # an invocation may take all of a tiny vocabulary
        if token not in avoided or state > 64 * count:
            tokens.append(token)
    return tokens


@dataclass(frozen=True, slots=True)
class Answers:
    """The engine's logits: for each sequence [num_tokens, vocab_size] float32.

    Attributes:
        base: the base's own.
        adapted: the adapter's, in each round: alone, and in a mixed batch.
    """

    base: Sequence[Tensor]
    adapted: Sequence[Sequence[Tensor]]


def judge(answers: Answers, reference: Evaluation, *, dtype: str, precision_loss: float, seconds: float) -> Certificate:
    """Return the certificate of an adapter whose answers are these.

    The engine's own rounding is what the base alone shows, so that a bound is as tight as the base allows. Three things are compared, in each round:

    - every logit: |difference| ≤ floor + 5 · (base's largest difference) + ε · (largest effect);
    - the effect, which is what the adapter adds to the base's logits, over all tokens and at each token: rms error ≤ floor + 4 · (base's rms difference) + ε · (rms effect);
    - how large the effect is as a multiple of what it should be: |multiple - 1| ≤ ε + 8 standard errors, which its scatter over the tokens gives, + floor / (rms
      effect). Rounding averages out in it, so that it speaks of effects too that single logits don't show.

    ε is 0.001 for float32, 0.01 for float16 and 0.03 for bfloat16, plus ten times the adapter's precision loss; the floor 0.00001, 0.00025 and 0.001 of the largest logit.

    Measured with the demo's base and adapters (logits up to 15) and with random ones on three architectures, in float32, bfloat16, float16, int8, int4 and NF4: of what
    was served right no comparison came to more than 0.7 of its bound. What fails of three of the demo's adapters that are packed wrong, by the rms of their effect:

    =============== ============ =================================================== ============================
    base            rms 2.5      rms 0.4 (B times 0.1)                               rms 0.05 and less
    =============== ============ =================================================== ============================
    float32         all          all                                                 all, down to 0.005
    bfloat16        all          missing, half a scale; a few of the others          missing, down to 0.02
    NF4             all          all but one rank of eight of one adapter            missing
    int8            all          missing, half a scale of two                        missing
    =============== ============ =================================================== ============================

    All: the adapter missing, its scale halved or a fifth too large, one layer of four, one of seven modules or the last of eight ranks left out. int8 rounds
    activations too. int4 rounds as NF4 does; only what is served right was measured on it.

    Raises:
        EngineError: the base alone is too far from its plain evaluation for anything to be said.
    """
    tokens = _joined(_TokenSums, [_TokenSums.of(*some) for some in _chunks(answers.base, reference)])
    if not bool(tokens.is_finite.all()):
        return unanswered(
            "Its plain evaluation in float32 isn't finite.", precision_loss=precision_loss, seconds=seconds
        )
    vocab_size = reference.base[0].shape[1]
    noise = _Noise.of(tokens, vocab_size)
    if not noise.rms <= _MAX_BASE_NOISE * float(tokens.deviation.mean()):
        raise EngineError(
            f"The base's own answers are {noise.largest:.3g} from its plain evaluation: nothing can be said of an adapter."
        )
    epsilon = _EPSILONS[dtype] + _LOSS_FACTOR * precision_loss
    floor = _FLOORS[dtype] * float(tokens.largest.max())
    bounds = _Bounds(floor, noise, epsilon, tokens, vocab_size)
    rounds = [
        _joined(_RoundSums, [_RoundSums.of(*some) for some in _chunks(answers.base, reference, rows)])
        for rows in answers.adapted
    ]
    problems = [problem for one in rounds if (problem := bounds.broken_by(one))]
    every = _joined(_RoundSums, rounds)
    return Certificate(
        verdict="failed" if problems else "passed",
        max_difference=float(every.largest.max()),
        mean_difference=float(every.total.mean() / vocab_size),
        base_difference=noise.largest,
        tolerance=bounds.largest,
        max_effect=float(tokens.largest_effect.max()),
        top1_agreement=float(every.is_agreed.double().mean()),
        precision_loss=precision_loss,
        num_probe_tokens=tokens.largest.shape[0],
        seconds=seconds,
        reason=problems[0] if problems else "",
    )


def _chunks(base: Sequence[Tensor], reference: Evaluation, *more: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same few tokens' logits of each: the engine's of the base, the plain evaluation's of the base and of the adapter, and more. What is computed of them
    stays in a processor's cache."""
    for sequence in zip(base, reference.base, reference.adapted, *more, strict=True):
        step = max(1, _CHUNK_LOGITS // sequence[0].shape[1])
        for start in range(0, sequence[0].shape[0], step):
            yield tuple(logits[start : start + step] for logits in sequence)


def _joined(kind: type[SumsT], parts: Sequence[SumsT]) -> SumsT:
    return kind(*(torch.cat(column) for column in zip(*parts, strict=True)))


class _TokenSums(NamedTuple):
    """Over the vocabulary, of each token, [num_tokens]; sums in float64, to be added up."""

    is_finite: Tensor
    """Of the plain evaluation with the adapter."""
    deviation: Tensor
    """The standard deviation of the base's logits, by the plain evaluation."""
    largest: Tensor
    """Of those."""
    largest_noise: Tensor
    noise: Tensor
    """The sum of squares of what the engine's rounding makes of the base's logits."""
    largest_effect: Tensor
    effect: Tensor
    """The sum of its squares."""

    @classmethod
    def of(cls, base: Tensor, plain_base: Tensor, plain: Tensor) -> _TokenSums:
        noise, effect = base - plain_base, plain - plain_base
        return cls(
            plain.isfinite().all(1),
            plain_base.std(1),
            plain_base.abs().amax(1),
            noise.abs().amax(1),
            _squares(noise),
            effect.abs().amax(1),
            _squares(effect),
        )


class _RoundSums(NamedTuple):
    """The same of a round."""

    largest: Tensor
    """Of a logit's difference to the plain evaluation."""
    total: Tensor
    """Of all such differences."""
    error: Tensor
    """The sum of squares of what is wrong with the effect."""
    product: Tensor
    """Of what was added to the base's logits and what should have been: the sum."""
    is_agreed: Tensor
    """Whether the largest logit is the plain evaluation's."""

    @classmethod
    def of(cls, base: Tensor, plain_base: Tensor, plain: Tensor, rows: Tensor) -> _RoundSums:
        difference, effect, added = (rows - plain).abs(), plain - plain_base, rows - base
        return cls(
            difference.amax(1),
            difference.sum(1).double(),
            _squares(added - effect),
            (added * effect).sum(1).double(),
            rows.argmax(1) == plain.argmax(1),
        )


def _squares(x: Tensor) -> Tensor:
    return x.square().sum(1).double()


@dataclass(frozen=True, slots=True)
class _Noise:
    """What the engine's rounding makes of the base's logits: the largest difference, their rms, and the rms of the token where it's largest."""

    largest: float
    rms: float
    token_rms: float

    @classmethod
    def of(cls, tokens: _TokenSums, vocab_size: int) -> _Noise:
        squares = tokens.noise / vocab_size
        return cls(float(tokens.largest_noise.max()), float(squares.mean().sqrt()), float(squares.max().sqrt()))


class _Bounds:
    """What the differences of a round must not pass; `judge` says why.

    Attributes:
        largest: of any logit's.
    """

    def __init__(self, floor: float, noise: _Noise, epsilon: float, tokens: _TokenSums, vocab_size: int) -> None:
        self._floor, self._noise, self._epsilon = floor, noise, epsilon
        self._effect, self._vocab_size = tokens.effect, vocab_size
        self.largest = floor + 5 * noise.largest + epsilon * float(tokens.largest_effect.max())

    def broken_by(self, one: _RoundSums) -> str:
        """Return which of the bounds a round breaks, in words; empty if none."""
        largest = float(one.largest.max())
        if not largest <= self.largest:
            return f"A logit is {largest:.4g} from its plain evaluation; {self.largest:.4g} is allowed."
        effect_rms, error_rms = self._rms(self._effect), self._rms(one.error)
        allowed = self._floor + 4 * self._noise.rms + self._epsilon * effect_rms
        if not error_rms <= allowed:
            return f"What it changes of the base's logits is off by {error_rms:.4g} (rms), of {effect_rms:.4g}; {allowed:.4g} is allowed."
        own, errors = ((squares / self._vocab_size).sqrt() for squares in (self._effect, one.error))
        own = own.clamp(min=effect_rms)
        excess = errors - (self._floor + 4 * self._noise.token_rms + self._epsilon * own)
        if not float(excess.max()) <= 0:
            token = int(excess.argmax())
            return f"What it changes of the base's logits at probe token {token} is off by {float(errors[token]):.4g} (rms), of {float(own[token]):.4g}."
        return self._wrong_size(one)

    def _wrong_size(self, one: _RoundSums) -> str:
        squares = self._effect
        if not float(squares.sum()) > 0:
            return ""
        multiple = float(one.product.sum() / squares.sum())
        error = float((one.product - multiple * squares).square().sum().sqrt() / squares.sum())
        # of a small effect, rounding may leave nothing
        if abs(multiple - 1) <= self._epsilon + 8 * error + self._floor / self._rms(self._effect):
            return ""
        return f"What it changes of the base's logits is {multiple:.4g} of what it should be (with a standard error of {error:.2g})."

    def _rms(self, squares: Tensor) -> float:
        """Over all tokens, of each one's sum of squares."""
        return float((squares.mean() / self._vocab_size).sqrt())


def unanswered(reason: str, *, precision_loss: float, seconds: float) -> Certificate:
    """Return the certificate of an adapter that has failed before anything could be compared."""
    return Certificate(
        verdict="failed",
        max_difference=0.0,
        mean_difference=0.0,
        base_difference=0.0,
        tolerance=0.0,
        max_effect=0.0,
        top1_agreement=0.0,
        precision_loss=precision_loss,
        num_probe_tokens=0,
        seconds=seconds,
        reason=reason,
    )
