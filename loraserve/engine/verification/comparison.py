"""Probe sequences, and the comparison of the engine's logits with a reference evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from loraserve.adapters.ir import AdapterIR
from loraserve.model.reference_pass import Evaluation
from loraserve.types import BaseSpec, Certificate

SumsT = TypeVar("SumsT", "_TokenSums", "_RoundSums")

PASSED, DEGRADED, FAILED, NOT_POSSIBLE = "passed", "degraded", "failed", "not_possible"
"""Verdicts of certificates."""

_LENGTHS = (13, 17)
_MAX_SPECIAL = 4

_EPSILONS: Mapping[str, float] = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
_LOSS_FACTOR = 10.0
"""Factor by which later modules may amplify a precision loss.

Measured: 1 to 2 where an adapter is weaker than its base, up to 10 where it overwhelms the base.
"""
_FLOORS: Mapping[str, float] = {"float32": 1e-5, "float16": 2.5e-4, "bfloat16": 1e-3}
"""Allowed difference as a part of the largest logit.

It covers the rounding of weights that an adapter hardly changes and, in float32, of sums through
all layers.
"""
_MAX_BASE_NOISE = 0.35
"""Cap on the rms difference of a base in half precision, of the logits' standard deviation."""
_EXACT_BASE = 1e-3
"""Cap on the difference of a logit of a base whose weights are float32.

Ours are within 1e-4 of transformers'.
"""
_ROUNDED_BASE = 1e-4
"""Cap on the rms difference of a base with rounded weights in float32, of its largest logit."""
_CHUNK_LOGITS = 1 << 17
"""Logits compared at a time: half a MiB of each tensor."""


def probe_sequences(base: BaseSpec, adapters: Sequence[AdapterIR]) -> list[tuple[int, ...]]:
    """Choose the token ids of an adapter's probes: fixed arbitrary ones and its trained ones.

    Sequences of an activated adapter contain its invocation, the second one twice if it is short.
    The last few tokens, which stand for an answer, contain none of it.
    """
    invocation = next((ir.invocation_token_ids for ir in adapters if ir.invocation_token_ids), ())
    own = [token for ir in adapters for module in ir.modules for token in module.token_ids]
    own = [token for token in dict.fromkeys(own) if token not in invocation]
    sequences = []
    for number, length in enumerate(_LENGTHS):
        # from both ends of the trained tokens
        special = own[:_MAX_SPECIAL] if number == 0 else own[-_MAX_SPECIAL:]
        arbitrary = filler(base.vocab_size, number, length - len(special), invocation)
        tokens = [*arbitrary[:2], *special, *arbitrary[2:]]
        if number == 1 and len(invocation) < length:
            tokens[1:1] = invocation
        tokens[4:4] = invocation
        sequences.append(tuple(tokens[: base.max_model_len - 1]))
    return sequences


def extra_sequences(base: BaseSpec, adapters: Sequence[AdapterIR]) -> list[tuple[int, ...]]:
    """Choose the token ids of probes of rows beyond the base's; none where an adapter has none.

    Each row but the first and the last few is seen in its logits alone.
    """
    num_rows = max((ir.extra_rows.num_rows for ir in adapters if ir.extra_rows is not None), default=0)
    if not num_rows:
        return []
    ids = range(base.vocab_size, base.vocab_size + num_rows)
    own = dict.fromkeys([*ids[:_MAX_SPECIAL], *ids[-_MAX_SPECIAL:]])
    arbitrary = filler(base.vocab_size, len(_LENGTHS), len(own) + 2, ())
    tokens = [token for pair in zip(own, arbitrary, strict=False) for token in pair]
    return [tuple([*arbitrary[len(own) :], *tokens][: base.max_model_len - 1])]


def filler(vocab_size: int, seed: int, count: int, avoided: Sequence[int]) -> list[int]:
    """Generate arbitrary token ids, from SplitMix64."""
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
    """The engine's logits, [num_tokens, vocab_size] float32 for each sequence.

    Attributes:
        base: logits of the base alone.
        adapted: logits of the adapter in each round: in a batch of its own, and in a mixed batch.
    """

    base: Sequence[Tensor]
    adapted: Sequence[Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Noise:
    """Differences of the base's logits that are no adapter's fault.

    Attributes:
        largest: largest difference.
        rms: rms over all tokens.
        token_rms: rms of the token where it is largest.
    """

    largest: float = 0.0
    rms: float = 0.0
    token_rms: float = 0.0

    @classmethod
    def of(cls, largest: Tensor, squares: Tensor, vocab_size: int) -> Noise:
        """Compute the noise of tokens.

        Args:
            largest: each token's largest difference.
            squares: its sum of squares.
        """
        means = squares / vocab_size
        return cls(float(largest.max()), float(means.mean().sqrt()), float(means.max().sqrt()))

    @property
    def halved(self) -> Noise:
        """Half of it: the spread has several next codes in each row, where an engine has few."""
        return Noise(self.largest / 2, self.rms / 2, self.token_rms / 2)

    def at_least(self, other: Noise) -> Noise:
        """Take the larger of both, number by number."""
        return Noise(max(self.largest, other.largest), max(self.rms, other.rms), max(self.token_rms, other.token_rms))


def spread_of(reference: Evaluation) -> Noise:
    """Compute the differences of the base's nudged logits; none where nothing is nudged."""
    if not reference.nudged:
        return Noise()
    differences = torch.cat([a - b for a, b in zip(reference.nudged, reference.base, strict=True)])
    return Noise.of(differences.abs().amax(1), _squares(differences), differences.shape[1])


def judge(
    answers: Answers,
    reference: Evaluation,
    *,
    dtype: str,
    precision_loss: float,
    seconds: float,
    spread: Noise = Noise(),
    is_quantized: bool = False,
) -> Certificate:
    """Compare an adapter's logits with their reference and return its certificate.

    The reference has the weights that the engine computes with, and rounds activations where the
    engine does. So the base alone must equal its reference: in float32 to 0.001 if no weight is
    rounded, else to an rms of 0.0001 of the largest logit. Where activations are rounded, four
    times the rms of `spread` is added: the change by inputs that round to the next code because
    they lie next to the middle, which is what the order of a sum costs there. In half precision it
    is 0.35 of the logits' standard deviation. A base that differs by more makes no verdict
    possible.

    What is left of the base's difference is the engine's own rounding, so bounds on adapters are as
    tight as that and `spread` allow. Each round is checked for:

    - every logit: |difference| ≤ floor + 5 · (largest difference of the base, or half the spread's)
      + ε · (largest effect);
    - the effect, which the adapter adds to the base's logits, over all tokens and at each token:
      rms error ≤ floor + 4 · (rms difference of the base, or half the spread's) + ε · (rms effect);
    - the size of the effect as a multiple of the reference's: |multiple - 1| ≤ ε + 8 standard
      errors (from its scatter over the tokens) + floor / (rms effect). Rounding averages out here,
      so effects show that single logits hide. But noise of the reference itself makes the multiple
      smaller, by its part of the effect's squares: so much less is allowed. It is no more than the
      base's noise, and than what the scatter shows: an adapter that is missing, negated or has
      another scale has an error, and no scatter.

    ε is 0.001 for float32, 0.01 for float16 and 0.03 for bfloat16, plus ten times the adapter's
    precision loss; the floor is 0.00001, 0.00025 and 0.001 of the largest logit.

    Measured with the demo's base and adapters (logits up to 15) and with random ones on three
    architectures, in float32, bfloat16, float16, int8, int4 and NF4: no comparison of correctly
    served adapters exceeded 0.7 of its bound. Faults found in three of the demo's adapters when
    packed wrongly, by the rms of their effect:

    ======== ======= =========================================== =======================
    base     rms 2.5 rms 0.4 (B times 0.1)                       rms 0.05 and less
    ======== ======= =========================================== =======================
    float32  all     all                                         all, down to 0.005
    bfloat16 all     missing, half a scale; a few of the others  missing, down to 0.02
    NF4      all     all but one rank of eight of one adapter    missing
    int8     all     missing, half a scale of two                missing
    ======== ======= =========================================== =======================

    All faults: the adapter missing, its scale halved or a fifth too large, one layer of four, one
    of seven modules or the last of eight ranks left out. int8 rounds activations too. int4 rounds
    as NF4 does; only correctly served adapters were measured on it.

    Args:
        spread: `spread_of` the base's reference.
        is_quantized: whether any of the base's weights is.
    """
    tokens = _joined(_TokenSums, [_TokenSums.of(*some) for some in _chunks(answers.base, reference)])
    if not bool(tokens.is_finite.all()):
        return unanswered(
            "Its reference logits, in float32, aren't finite.", precision_loss=precision_loss, seconds=seconds
        )
    vocab_size = reference.base[0].shape[1]
    noise = Noise.of(tokens.largest_noise, tokens.noise, vocab_size)
    base_problem = _base_problem(noise, tokens, spread, dtype, is_quantized=is_quantized)
    if base_problem:
        return unanswered(base_problem, verdict=NOT_POSSIBLE, precision_loss=precision_loss, seconds=seconds)
    epsilon = _EPSILONS[dtype] + _LOSS_FACTOR * precision_loss
    floor = _FLOORS[dtype] * float(tokens.largest.max())
    bounds = _Bounds(floor, noise.at_least(spread.halved), epsilon, tokens, vocab_size)
    rounds = [
        _joined(_RoundSums, [_RoundSums.of(*some) for some in _chunks(answers.base, reference, rows)])
        for rows in answers.adapted
    ]
    problems = [problem for one in rounds if (problem := bounds.broken_by(one))]
    every = _joined(_RoundSums, rounds)
    return Certificate(
        verdict=FAILED if problems else PASSED,
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
        base_spread=spread.rms,
    )


def judge_extra(
    certificate: Certificate, answers: Sequence[Tensor], reference: Sequence[Tensor], *, dtype: str
) -> Certificate:
    """Add the comparison of rows beyond the base's to a passed certificate.

    The base has no logits of them, and so no effect to compare: each logit is allowed the
    certificate's tolerance and ε of the largest one.

    Args:
        answers: the engine's logits of `extra_sequences`, [num_tokens, vocab_size + num_rows].
        reference: the reference's.
    """
    epsilon = _EPSILONS[dtype] + _LOSS_FACTOR * (certificate.precision_loss or 0.0)
    largest = max(float(rows.abs().max()) for rows in reference)
    allowed = (certificate.tolerance or 0.0) + epsilon * largest
    found = max(float((rows - wanted).abs().max()) for rows, wanted in zip(answers, reference, strict=True))
    num_tokens = certificate.num_probe_tokens + sum(rows.shape[0] for rows in reference)
    certificate = msgspec.structs.replace(certificate, num_probe_tokens=num_tokens)
    if found <= allowed:
        return certificate
    reason = (
        f"A logit after tokens that the base lacks differs from the reference's by {found:.4g};"
        f" {allowed:.4g} is allowed."
    )
    return msgspec.structs.replace(certificate, verdict=FAILED, reason=reason)


def _base_problem(noise: Noise, tokens: _TokenSums, spread: Noise, dtype: str, *, is_quantized: bool) -> str:
    """Describe how the base alone differs too much from its reference; empty if it doesn't."""
    found, kind = noise.rms, "rms"
    if dtype != "float32":
        allowed = _MAX_BASE_NOISE * float(tokens.deviation.mean())
    elif is_quantized:
        allowed = _ROUNDED_BASE * float(tokens.largest.max()) + 4 * spread.rms
    else:
        found, kind, allowed = noise.largest, "at most", _EXACT_BASE
    if found <= allowed:
        return ""
    return (
        f"The base's own logits differ from those of its weights in float32 by {found:.3g} ({kind});"
        f" {allowed:.3g} is allowed: on this server the base itself isn't computed as it should be."
    )


def _chunks(base: Sequence[Tensor], reference: Evaluation, *more: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield logits of a few tokens at a time, small enough for a processor's cache.

    Each is the engine's logits of the base, the reference's of the base and of the adapter, and
    `more`.
    """
    for sequence in zip(base, reference.base, reference.adapted, *more, strict=True):
        step = max(1, _CHUNK_LOGITS // sequence[0].shape[1])
        for start in range(0, sequence[0].shape[0], step):
            yield tuple(logits[start : start + step] for logits in sequence)


def _joined(kind: type[SumsT], parts: Sequence[SumsT]) -> SumsT:
    return kind(*(torch.cat(column) for column in zip(*parts, strict=True)))


class _TokenSums(NamedTuple):
    """Statistics over the vocabulary for each token, [num_tokens]; sums are float64.

    Attributes:
        is_finite: whether the adapter's reference logits are finite.
        deviation: standard deviation of the base's reference logits.
        largest: largest of their magnitudes.
        largest_noise: largest difference of the base's logits to their reference.
        noise: sum of the squares of those differences.
        largest_effect: largest change of the base's reference logits by the adapter.
        effect: sum of the squares of those changes.
    """

    is_finite: Tensor
    deviation: Tensor
    largest: Tensor
    largest_noise: Tensor
    noise: Tensor
    largest_effect: Tensor
    effect: Tensor

    @classmethod
    def of(cls, base: Tensor, reference_base: Tensor, reference: Tensor) -> _TokenSums:
        noise, effect = base - reference_base, reference - reference_base
        return cls(
            reference.isfinite().all(1),
            reference_base.std(1),
            reference_base.abs().amax(1),
            noise.abs().amax(1),
            _squares(noise),
            effect.abs().amax(1),
            _squares(effect),
        )


class _RoundSums(NamedTuple):
    """Statistics of one round over the vocabulary for each token, [num_tokens].

    Attributes:
        largest: largest difference of a logit to its reference.
        total: sum of those differences.
        error: sum of the squares of the effect's error.
        product: dot product of the effect and its reference.
        is_agreed: whether the largest logit is the same as the reference's.
    """

    largest: Tensor
    total: Tensor
    error: Tensor
    product: Tensor
    is_agreed: Tensor

    @classmethod
    def of(cls, base: Tensor, reference_base: Tensor, reference: Tensor, rows: Tensor) -> _RoundSums:
        difference, effect, added = (rows - reference).abs(), reference - reference_base, rows - base
        return cls(
            difference.amax(1),
            difference.sum(1).double(),
            _squares(added - effect),
            (added * effect).sum(1).double(),
            rows.argmax(1) == reference.argmax(1),
        )


def _squares(x: Tensor) -> Tensor:
    return x.square().sum(1).double()


class _Bounds:
    """Bounds on the differences of a round, as `judge` explains them.

    Attributes:
        largest: bound on the difference of any logit.
    """

    def __init__(self, floor: float, noise: Noise, epsilon: float, tokens: _TokenSums, vocab_size: int) -> None:
        self._floor, self._noise, self._epsilon = floor, noise, epsilon
        self._effect, self._vocab_size = tokens.effect, vocab_size
        self.largest = floor + 5 * noise.largest + epsilon * float(tokens.largest_effect.max())

    def broken_by(self, one: _RoundSums) -> str:
        """Describe the first bound that a round breaks; empty if none."""
        largest = float(one.largest.max())
        if not largest <= self.largest:
            return f"A logit differs from the reference's by {largest:.4g}; {self.largest:.4g} is allowed."
        effect_rms, error_rms = self._rms(self._effect), self._rms(one.error)
        allowed = self._floor + 4 * self._noise.rms + self._epsilon * effect_rms
        if not error_rms <= allowed:
            return (
                f"Its change of the base's logits, {effect_rms:.4g} (rms), is off by {error_rms:.4g};"
                f" {allowed:.4g} is allowed."
            )
        own, errors = ((squares / self._vocab_size).sqrt() for squares in (self._effect, one.error))
        own = own.clamp(min=effect_rms)
        excess = errors - (self._floor + 4 * self._noise.token_rms + self._epsilon * own)
        if not float(excess.max()) <= 0:
            token = int(excess.argmax())
            return (
                f"Its change of the base's logits at probe token {token}, {float(own[token]):.4g} (rms),"
                f" is off by {float(errors[token]):.4g}."
            )
        return self._wrong_size(one)

    def _wrong_size(self, one: _RoundSums) -> str:
        squares = self._effect
        if not float(squares.sum()) > 0:
            return ""
        multiple = float(one.product.sum() / squares.sum())
        error = float((one.product - multiple * squares).square().sum().sqrt() / squares.sum())
        lost, effect_rms = 1 - multiple, self._rms(squares)
        # rounding may leave nothing of a small effect
        allowed = self._epsilon + 8 * error + self._floor / effect_rms
        # The reference's effect has noise of its own, which the engine's doesn't repeat. What isn't
        # a multiple of it is twice that noise's part of its squares, less the square of that part.
        scatter = min(1.0, max(0.0, float(one.error.sum() / squares.sum()) - lost**2))
        shrinkage = min(1 - math.sqrt(1 - scatter), (self._noise.rms / effect_rms) ** 2)
        if -allowed <= lost <= allowed + shrinkage:
            return ""
        return (
            f"Its change of the base's logits is {multiple:.4g} times the reference's"
            f" (with a standard error of {error:.2g})."
        )

    def _rms(self, squares: Tensor) -> float:
        """Compute the rms over all tokens of their sums of squares."""
        return float((squares.mean() / self._vocab_size).sqrt())


def unanswered(reason: str, *, verdict: str = FAILED, precision_loss: float, seconds: float) -> Certificate:
    """Build the certificate of an adapter that was never compared."""
    return Certificate(
        verdict=verdict,
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
