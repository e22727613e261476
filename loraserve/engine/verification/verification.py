"""One verification between its call and its certificate."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from loraserve.engine.probe import Probe
from loraserve.engine.verification.reference_evaluator import Reference
from loraserve.types import AdapterRef, Certificate, FinishReason


@dataclass(frozen=True, slots=True)
class BaseLogits:
    """Logits of a set of sequences by the base alone: the engine's, and the reference's."""

    engine: tuple[Tensor, ...]
    reference: tuple[Tensor, ...]


@dataclass(slots=True, eq=False)
class Verification:
    """The reference, the probes and the verdict of one adapter or composition.

    Attributes:
        verdict: set once the comparison has begun.
        alone: probes in steps without other rows.
        mixed: probes in mixed batches.
        base: probes of the base's logits, unless those are known.
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
    beside: list[Probe] = field(default_factory=list)
    precision_loss: float | None = None
    known_base: BaseLogits | None = None

    @property
    def ref(self) -> AdapterRef:
        return self.reference.ref

    @property
    def probes(self) -> list[Probe]:
        return [*self.alone, *self.mixed, *self.base, *self.beside]

    @property
    def failed_probe(self) -> Probe | None:
        """First probe that failed; None if there is none or it only filled the batch."""
        failed = next((p for p in self.probes if p.output and p.output.finish_reason is FinishReason.ERROR), None)
        return None if failed in self.beside else failed

    @property
    def is_probing(self) -> bool:
        """Whether its probes have begun and aren't over."""
        probes = self.probes
        return bool(probes) and (self.precision_loss is None or any(probe.output is None for probe in probes))

    @property
    def is_probed(self) -> bool:
        """Whether its probes have begun and are over."""
        return bool(self.probes) and not self.is_probing
