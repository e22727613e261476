"""Cost of rounding for the base: its answers to a text, compared with the float base's.

Measured while serving, when the server requests it, once for a base and its arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from loraserve.engine.probe import Probe
from loraserve.engine.verification.float_base import FloatsUnavailable
from loraserve.engine.verification.prober import Prober
from loraserve.engine.verification.reference_evaluator import Reference, ReferenceEvaluator, Sequences
from loraserve.engine_client import messages as m
from loraserve.errors import EngineError, InvariantViolation, LoraserveError
from loraserve.limits import MIB
from loraserve.memory.loading.base_weights import background_compute
from loraserve.text.passage import PASSAGE
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import AdapterRef, BasePrecision, BaseSpec, Digest, Rounding, TenantId

logger = logging.getLogger(__name__)

MAX_POSITIONS, MIN_POSITIONS = 256, 32
MAX_LOGITS_BYTES = 64 * MIB
"""Bytes of all positions' logits, which are held twice; fewer positions of a large vocabulary."""
_ROWS_AT_A_TIME = 16


@dataclass(slots=True, eq=False)
class _Measurement:
    """A measurement between its first call and its reply."""

    call_ids: list[int]
    reference: Future[Reference]
    probes: list[Probe] = field(default_factory=list)
    found: Future[BasePrecision] | None = None


class BaseMeasurements:
    """Measure the base's precision, once at a time. Only the steps' thread calls this.

    Args:
        evaluator: evaluates the float base, in idle time.
        note: reason why there is nothing to measure; empty if there is.
        beside: runs work on a background thread.
    """

    def __init__(
        self,
        model_dir: Path,
        base: BaseSpec,
        device: torch.device,
        evaluator: ReferenceEvaluator,
        prober: Prober,
        note: str,
        beside: Callable[..., Future[object]],
    ) -> None:
        self._model_dir, self._base, self._device = model_dir, base, device
        self._evaluator, self._prober, self._note, self._beside = evaluator, prober, note, beside
        self._current: _Measurement | None = None
        self._replies: list[m.BaseMeasured] = []

    @property
    def is_active(self) -> bool:
        """Whether `poll` will return anything, sooner or later."""
        return self._current is not None or bool(self._replies)

    def start(self, call_id: int) -> None:
        """Begin a measurement, or join the one that runs; `poll` returns its reply."""
        if self._note:
            self._replies.append(m.BaseMeasured(call_id=call_id, note=self._note))
        elif self._current is not None:
            self._current.call_ids.append(call_id)
        else:
            self._current = _Measurement([call_id], Future())
            self._beside(self._prepare, self._current)

    def close(self) -> None:
        """Let what runs stop, and free what it holds."""
        current, self._current = self._current, None
        if current is None:
            return
        if current.reference.done() and current.reference.exception() is None:
            current.reference.result().is_wanted = False
        self._prober.abort_probes(current.probes)

    def poll(self) -> list[m.BaseMeasured]:
        """Advance the measurement as far as it can go now; return replies."""
        current = self._current
        if current is not None:
            try:
                found = self._advance(current)
            except FloatsUnavailable as error:
                # a base too large to be measured while serving stays so
                self._end(current, m.BaseMeasured(call_id=0, note=error.message))
            except LoraserveError as error:
                self._end(current, m.BaseMeasured(call_id=0, error_code=error.code, error_message=error.message))
            except Exception as error:
                logger.exception("the base's precision could not be measured")
                text = f"The base's precision could not be measured: {type(error).__name__}."
                self._end(current, m.BaseMeasured(call_id=0, error_code=EngineError.code, error_message=text))
            else:
                if found is not None:
                    self._end(current, m.BaseMeasured(call_id=0, precision=found))
        replies, self._replies = self._replies, []
        return replies

    def _end(self, current: _Measurement, reply: m.BaseMeasured) -> None:
        self.close()
        self._replies += [
            m.BaseMeasured(
                call_id=call_id,
                precision=reply.precision,
                note=reply.note,
                error_code=reply.error_code,
                error_message=reply.error_message,
            )
            for call_id in current.call_ids
        ]

    def _prepare(self, current: _Measurement) -> None:
        """Make the texts and evaluate them by the float base, on a background thread."""
        reference = current.reference
        try:
            texts = texts_of(Tokenizer(self._model_dir).encode(PASSAGE), self._base)
        except Exception as error:
            reference.set_exception(error)
            return
        made = Reference(_NOBODY, [(text, 0) for text in texts])
        made.sequences.set_result(texts)
        reference.set_result(made)
        # `close` may have come before it could report it
        made.is_wanted = made.is_wanted and self._current is current
        self._evaluator.make_base(made)

    def _advance(self, current: _Measurement) -> BasePrecision | None:
        """Advance a measurement; return what was found once it is there.

        Raises:
            LoraserveError: there will be nothing.
        """
        if not current.reference.done():
            return None
        reference = current.reference.result()
        if not current.probes:
            current.probes = self._prober.probe_base(reference.sequences.result())
        failed = next((one.output for one in current.probes if one.output is not None and one.output.error_code), None)
        if failed is not None:
            raise EngineError(failed.error_message or "The base doesn't answer.")
        if not reference.evaluation.done() or any(probe.output is None for probe in current.probes):
            return None
        if current.found is None:
            floats = reference.evaluation.result().adapted
            compare = partial(self._evaluator.in_idle_time, partial(self._compare, current.probes, floats))
            current.found = self._beside(compare)  # type: ignore[assignment]
        return current.found.result() if current.found is not None and current.found.done() else None

    def _compare(self, probes: Sequence[Probe], floats: Sequence[Tensor]) -> BasePrecision:
        served = [probe.logits() for probe in probes]
        if any(logits is None for logits in served):
            raise InvariantViolation("A probe ended before all of its rows were computed.")
        with background_compute(self._device):
            found = torch.cat([logits[:-1] for logits in served if logits is not None])
            expected = torch.cat([logits[:-1] for logits in floats])
            targets = torch.tensor([token for probe in probes for token in probe.token_ids[1:]])
            rounding = compare(found, expected, targets)
            return BasePrecision(
                num_positions=len(targets),
                top1_agreement=rounding.top1_agreement,
                mean_divergence=rounding.mean_divergence,
                loss=loss_of(expected, targets),
                served_loss=loss_of(found, targets),
            )


_NOBODY = AdapterRef(
    tenant=TenantId(""), name="", version=0, digest=Digest(""), config_blob=Digest(""), weights_blob=Digest("")
)


def texts_of(token_ids: Sequence[int], base: BaseSpec) -> Sequences:
    """Cut a text into sequences, each with one token more than positions are measured.

    Raises:
        EngineError: it has too few tokens, or the base's context is too short.
    """
    wanted = max(MIN_POSITIONS, min(MAX_POSITIONS, MAX_LOGITS_BYTES // (4 * base.vocab_size)))
    # a probe requests one token beyond its last
    size = min(wanted, base.max_model_len - 2, len(token_ids) - 1)
    if size < MIN_POSITIONS:
        raise EngineError(
            f"The base's precision can't be measured: it takes {MIN_POSITIONS} tokens in a row, "
            f"the text has {len(token_ids)} and the context {base.max_model_len}."
        )
    starts = range(0, min(wanted, len(token_ids) - 1) - size + 1, size)
    return tuple(tuple(token_ids[start : start + size + 1]) for start in starts)


def compare(found: Tensor, expected: Tensor, targets: Tensor) -> Rounding:
    """Compute the differences of log probabilities to the expected ones.

    Args:
        found, expected: logits [num_positions, vocab_size].
        targets: [num_positions], the text's next token at each.
    """
    differences, divergences, num_agreed = [], [], 0
    for start in range(0, len(targets), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        ours, theirs = (logits[rows].double().log_softmax(1) for logits in (found, expected))
        column = targets[rows, None]
        differences.append((ours.gather(1, column) - theirs.gather(1, column)).abs().flatten())
        divergences.append((theirs.exp() * (theirs - ours)).sum(1))
        num_agreed += int((ours.argmax(1) == theirs.argmax(1)).sum())
    difference, divergence = torch.cat(differences), torch.cat(divergences)
    return Rounding(
        top1_agreement=num_agreed / len(targets),
        mean_difference=float(difference.mean()),
        max_difference=float(difference.max()),
        mean_divergence=max(0.0, float(divergence.mean())),
    )


def loss_of(logits: Tensor, targets: Tensor) -> float:
    """Compute the mean of -log p of the text's next token."""
    total = 0.0
    for start in range(0, len(targets), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        total -= float(logits[rows].double().log_softmax(1).gather(1, targets[rows, None]).sum())
    return total / len(targets)
