"""Verification between its call and its certificate."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from loraserve.engine.probe import Probe
from loraserve.engine.verification.comparison import Noise
from loraserve.engine.verification.reference_evaluator import Reference
from loraserve.types import AdapterRef, Certificate, FinishReason
from loraserve_kernels.common.packed import PackedAdapter


@dataclass(frozen=True, slots=True)
class BaseLogits:
    """Logits of a set of sequences by the base alone: the engine's, and the reference's.

    Attributes:
        spread: change of the reference's logits by other codes for numbers next to the middle
            between two, where activations are rounded; else none.
    """

    engine: tuple[Tensor, ...]
    reference: tuple[Tensor, ...]
    spread: Noise


@dataclass(slots=True, eq=False)
class Verification:
    """The reference, the probes and the verdict of one adapter or composition.

    Attributes:
        verdict: set once the comparison has begun, of the engine with its reference.
        packed: adapter as it is on the device, where that is a CPU, until its modules are compared.
        answers: probes of the adapter's answers to prompts.
        base_answers: probes of the base's logits of the same texts.
        float_reference: the texts by the checkpoint's own weights, once its evaluation is queued.
        loss: set once the comparison with those has begun.
        alone: probes in steps without other rows.
        mixed: probes in mixed batches.
        base: probes of the base's logits, unless those are known.
        own: probes of tokens that the base lacks, in mixed batches.
        beside: probes that only fill the batch.
        precision_loss: loss of serving the adapter's weights; known once it is on the device, when
            the mixed round begins.
        known_base: base logits that were known when the probes began.
    """

    call_id: int
    reference: Reference
    started_s: float
    verdict: Future[Certificate] | None = None
    alone: list[Probe] = field(default_factory=list)
    mixed: list[Probe] = field(default_factory=list)
    base: list[Probe] = field(default_factory=list)
    own: list[Probe] = field(default_factory=list)
    beside: list[Probe] = field(default_factory=list)
    packed: PackedAdapter | None = None
    answers: list[Probe] = field(default_factory=list)
    base_answers: list[Probe] = field(default_factory=list)
    float_reference: Reference | None = None
    loss: Future[Certificate] | None = None
    precision_loss: float | None = None
    known_base: BaseLogits | None = None

    @property
    def ref(self) -> AdapterRef:
        return self.reference.ref

    @property
    def probes(self) -> list[Probe]:
        return [*self.alone, *self.mixed, *self.base, *self.own, *self.beside, *self.answers, *self.base_answers]

    @property
    def failed_probe(self) -> Probe | None:
        """First probe that failed; None if there is none or it only filled the batch."""
        failed = next((p for p in self.probes if p.output and p.output.finish_reason is FinishReason.ERROR), None)
        return None if failed in self.beside else failed

    @property
    def is_mixed(self) -> bool:
        """Whether the mixed round has begun."""
        return self.precision_loss is not None

    @property
    def is_probing(self) -> bool:
        """Whether its probes have begun and aren't over."""
        probes, is_between = self.probes, bool(self.answers) and not self.base_answers
        is_loading = self.precision_loss is None
        return bool(probes) and (is_loading or is_between or any(probe.output is None for probe in probes))

    @property
    def is_answered(self) -> bool:
        """Whether the adapter's answers are there, and no probe of the base repeats them yet."""
        is_over = all(probe.output is not None for probe in self.answers)
        return bool(self.answers) and not self.base_answers and is_over

    def drop_logits(self) -> None:
        """Free the logits that the first comparison was about."""
        for probe in (*self.alone, *self.mixed, *self.base, *self.own, *self.beside):
            probe.drop()

    @property
    def is_probed(self) -> bool:
        """Whether its probes have begun and are over."""
        return bool(self.probes) and not self.is_probing
