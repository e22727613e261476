"""Verification of adapters beside serving: probes in steps, compared with a reference.

`comparison` decides whether an adapter has failed. Its probes are requests like any other: they pin
the adapter and have rows in steps, first in one without other rows, then mixed with rows of the
base, of another adapter and of whatever is running. They neither use nor fill the prefix cache.

While requests run, no step is computed for probes alone: their rows are added to others' steps a
few at a time. The base's logits of a sequence don't change, so they are computed once, in the
engine and in the reference. Waiting verifications are evaluated together, in one pass over the
base's weights.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec
from cachetools import LRUCache
from torch import Tensor

from adapters_store import BlobStore
from loraserve.background import BACKGROUND_NICENESS, Throttle, lower_thread_priority
from loraserve.engine.engine import Engine
from loraserve.engine.probe import Probe
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.step_hooks import StepListener
from loraserve.engine.verification.comparison import Answers, judge, unanswered
from loraserve.engine.verification.reference_evaluator import Reference, ReferenceEvaluator, Sequences
from loraserve.engine_client import messages as m
from loraserve.errors import (
    AdapterCorrupt,
    AdapterNumerics,
    AdapterRejected,
    AdapterUnservable,
    EngineError,
    InvariantViolation,
    LoraserveError,
    Overloaded,
    error_from_code,
)
from loraserve.limits import LIMITS
from loraserve.memory.loading.base_weights import background_compute
from loraserve.model.reference_model import Evaluation, ReferenceBase
from loraserve.types import AdapterRef, Certificate, FinishReason, RequestId, TokenOutput

logger = logging.getLogger(__name__)

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

EXACT_BASE = 1e-3
"""Bound on the difference of a float32 base's logits to their reference.

Ours are within 1e-4 of transformers'.
"""

MAX_KNOWN_SEQUENCES = 2
"""Sets of probe sequences with cached base logits, twice 30 tokens' each.

Adapters without trained tokens share one set.
"""

BESIDE_END = 6
"""End of the token range of probes that only fill the batch and aren't compared."""

MAX_PROBING = 2
"""Adapters probed at a time: while one waits to be loaded, another goes on."""

MAX_TOGETHER = 4
"""Adapters evaluated in one pass over the base's weights.

Four take half of the time that they take one by one, eight 0.43 (110M parameters in float32, one
core).
"""

MAX_ACTIVE = 2 * MAX_TOGETHER
"""Verifications in progress, being evaluated or probed; each holds 30 tokens' logits."""


@dataclass(frozen=True, slots=True)
class _BaseAnswers:
    """Logits of a set of sequences by the base alone: the engine's, and the reference's."""

    engine: tuple[Tensor, ...]
    reference: tuple[Tensor, ...]


@dataclass(slots=True, eq=False)
class _Verification:
    """A verification between its call and its certificate.

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
    known_base: _BaseAnswers | None = None

    @property
    def ref(self) -> AdapterRef:
        return self.reference.ref

    @property
    def probes(self) -> list[Probe]:
        return [*self.alone, *self.mixed, *self.base, *self.beside]

    @property
    def is_probing(self) -> bool:
        """Whether its probes have begun and aren't over."""
        probes = self.probes
        return bool(probes) and (self.precision_loss is None or any(probe.output is None for probe in probes))

    @property
    def is_probed(self) -> bool:
        """Whether its probes have begun and are over."""
        return bool(self.probes) and not self.is_probing


class Verifier(StepListener):
    """Verify adapters, a few at a time. Only the steps' thread calls this, between steps.

    Nothing here blocks it.
    """

    def __init__(
        self,
        engine: Engine,
        base: ReferenceBase,
        store: BlobStore,
        *,
        throttle: Throttle | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a verifier without work.

        Args:
            throttle: pauses evaluations on the processors that steps compute on; None: they compute
                elsewhere.
            wake: called on another thread when there is something for `poll`.
            clock: monotonic seconds.
        """
        self._engine, self._base, self._wake, self._clock = engine, base, wake, clock
        self.throttle = throttle or Throttle.beside_steps(math.inf)
        self._evaluator = ReferenceEvaluator(base, engine.base, store, wake, self.throttle)
        self._waiting: deque[_Verification] = deque()
        self._active: list[_Verification] = []
        self._evaluating: Future[None] | None = None
        self._probes: dict[RequestId, Probe] = {}
        self._replies: list[m.VerifyReply] = []
        self._numbers = itertools.count()
        self._known: LRUCache[Sequences, _BaseAnswers] = LRUCache(MAX_KNOWN_SEQUENCES)
        # Two, of which one mostly waits for the thread that evaluates. Evaluating between steps
        # instead, in a twentieth of their time, a certificate took 15 s instead of 3, and 0.65 s of
        # the steps instead of about 0.2 (two cores, 32 sequences, 110M parameters in float32).
        self._executor = ThreadPoolExecutor(
            2, thread_name_prefix="verification", initializer=lower_thread_priority, initargs=(BACKGROUND_NICENESS,)
        )

    @property
    def base(self) -> ReferenceBase:
        """Resident base; the reference evaluation reads its weights."""
        return self._base

    @property
    def is_active(self) -> bool:
        """Whether `poll` will return anything, sooner or later."""
        return bool(self._active or self._waiting or self._replies)

    def start(self, call_id: int, ref: AdapterRef) -> None:
        """Queue a verification.

        `poll` returns its reply, which is an error if too many are queued.
        """
        if len(self._waiting) + len(self._active) >= LIMITS.max_verifications:
            error = Overloaded(f"{LIMITS.max_verifications} verifications are running or waiting; no more are taken.")
            self._replies.append(_refused(call_id, error))
            return
        self._waiting.append(_Verification(call_id, Reference(ref), self._clock()))

    def abort(self, call_id: int) -> None:
        """End a verification and free what it holds; no-op if it is over."""
        for verification in [v for v in (*self._waiting, *self._active) if v.call_id == call_id]:
            self._end(verification)

    def before_launch(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Throttle evaluations as the step needs it."""
        lengths = [entry.num_tokens for entry in scheduled if entry.request.probe is None]
        is_long = self._engine.pager.num_loading > 0 or any(length > 1 for length in lengths)
        self.throttle.note(is_serving=bool(lengths), is_long=is_long)

    def on_idle(self) -> None:
        """Let evaluations go on at once."""
        self.throttle.note(is_serving=False)

    def take_outputs(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Take the outputs of probes; return the others."""
        if not self._probes:
            return outputs
        others = []
        for output in outputs:
            probe = self._probes.get(output.request_id)
            if probe is None:
                others.append(output)
            elif output.finish_reason is not None:
                probe.output = output
                del self._probes[output.request_id]
        return others

    def poll(self) -> list[m.VerifyReply]:
        """Advance each verification as far as it can go now.

        Return the replies of those that ended.
        """
        for verification in list(self._active):
            try:
                certificate = self._advance(verification)
            except LoraserveError as error:
                if isinstance(error, AdapterCorrupt):
                    self._engine.pager.note_corruption(error)
                self._end(verification)
                self._replies.append(_refused(verification.call_id, error))
            except Exception as error:
                logger.exception("verifying adapter %s failed", verification.ref.digest)
                self._end(verification)
                reason = EngineError(f"The adapter could not be verified: {type(error).__name__}.")
                self._replies.append(_refused(verification.call_id, reason))
            else:
                if certificate is not None:
                    self._end(verification)
                    self._replies.append(m.VerifyReply(call_id=verification.call_id, certificate=certificate))
        # after the verdicts, which make room
        self._begin()
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """End all verifications and their threads."""
        for verification in [*self._waiting, *self._active]:
            self._end(verification)
        # end pauses at once
        self.throttle.note(is_serving=False)
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._evaluator.close()

    def _begin(self) -> None:
        """Begin evaluating waiting verifications together, once those before are evaluated."""
        count = min(MAX_TOGETHER, MAX_ACTIVE - len(self._active), len(self._waiting))
        if count <= 0 or (self._evaluating is not None and not self._evaluating.done()):
            return
        if (
            count < MAX_TOGETHER
            and self.throttle.is_needed
            and self._engine.is_serving
            and sum(not v.is_probed for v in self._active) >= MAX_PROBING
        ):
            # their probes would have to wait anyway: more may arrive meanwhile and share the pass
            return
        together = [self._waiting.popleft() for _ in range(count)]
        self._active += together
        known = {sequences: answers.reference for sequences, answers in self._known.items()}
        self._evaluating = self._beside(self._evaluator.make, [v.reference for v in together], known)

    # one verification

    def _advance(self, v: _Verification) -> Certificate | None:
        """Advance a verification; return the certificate once it is there.

        Raises:
            LoraserveError: there will be none.
        """
        if not v.reference.sequences.done():
            return None
        sequences = v.reference.sequences.result()
        if not v.probes:
            if sum(other.is_probing for other in self._active) >= MAX_PROBING:
                return None
            # its files were just read and are whole: an earlier failed load says nothing any more
            self._engine.pager.forget_failure(v.ref.digest)
            v.known_base = self._known.get(sequences)
            if self._engine.is_serving:
                # the first mixed probe has the adapter loaded
                v.mixed = [self._probe(sequences[0], v.ref)]
            else:
                v.alone = [self._probe(sequence, v.ref, has_own_step=True) for sequence in sequences]
        failed = next((p for p in v.probes if p.output and p.output.finish_reason is FinishReason.ERROR), None)
        if failed is not None and failed not in v.beside:
            return self._end_failed(v, failed)
        if v.precision_loss is None:
            first = v.alone or v.mixed
            if all(probe.num_captured >= probe.num_prompt_tokens for probe in first):
                # the adapter is resident, and these probes pin it
                v.precision_loss = self._engine.pager.metadata(v.ref.digest).precision_loss
                self._mix(v, sequences)
            return None
        if v.is_probing or not v.reference.evaluation.done():
            return None
        if v.verdict is None:
            judge_it = partial(self._judge, v, v.reference.evaluation.result())
            v.verdict = self._beside(self._evaluator.in_idle_time, judge_it)
        if not v.verdict.done():
            return None
        certificate = self._signed(v.verdict.result())
        if v.known_base is not None:
            self._known[sequences] = v.known_base
        return certificate

    def _mix(self, v: _Verification, sequences: Sequences) -> None:
        """Queue the mixed round: sequences of the adapter, the base, and another resident adapter.

        Where the base's logits are known, a short sequence of it will do. Short ones are left out
        if requests of their kind are in the steps anyway, since each row costs those time.
        """
        served = self._engine.adapters_served
        if v.known_base is None:
            v.base = [self._probe(sequence, None) for sequence in sequences]
        elif None not in served:
            v.beside.append(self._probe(sequences[-1][1:BESIDE_END], None))
        has_other = bool(served - {None, v.ref.digest})
        other = None if has_other else self._engine.pager.other_resident(v.ref.digest)
        if other is not None:
            probe = self._new_probe(sequences[-1][1:BESIDE_END])
            self._engine.add_probe_of_resident(probe, other)
            v.beside.append(probe)
        # last, so that the others are in its batches even if a step takes only a few rows
        v.mixed += [self._probe(sequence, v.ref) for sequence in sequences[len(v.mixed) :]]

    def _probe(self, sequence: Sequence[int], ref: AdapterRef | None, *, has_own_step: bool = False) -> Probe:
        probe = self._new_probe(sequence, has_own_step=has_own_step)
        self._engine.add_probe(probe, ref)
        return probe

    def _new_probe(self, sequence: Sequence[int], *, has_own_step: bool = False) -> Probe:
        probe = Probe(RequestId(f"verification-{next(self._numbers)}"), sequence, has_own_step)
        self._probes[probe.request_id] = probe
        return probe

    def _end_failed(self, v: _Verification, probe: Probe) -> Certificate:
        """Return a failed certificate if the adapter's logits aren't finite.

        Raise other errors, which may not be its fault.
        """
        output = probe.output
        code, message = (output.error_code, output.error_message) if output is not None else (None, None)
        error = error_from_code(code or "", message or "The adapter could not be verified.")
        if isinstance(error, AdapterNumerics):
            return self._signed(
                unanswered(error.message, precision_loss=v.precision_loss or 0.0, seconds=self._clock() - v.started_s)
            )
        raise error

    def _signed(self, certificate: Certificate) -> Certificate:
        """Return the certificate with the base and the arithmetic that it holds for."""
        base = self._engine.base
        return msgspec.structs.replace(
            certificate,
            base_digest=base.digest,
            quantization=base.quantization,
            arithmetic=base.arithmetic,
            instructions=base.instructions,
            device=base.device,
        )

    def _end(self, v: _Verification) -> None:
        """Free what a verification holds."""
        v.reference.is_wanted = False
        if v.verdict is not None:
            v.verdict.cancel()
        for probe in v.probes:
            if probe.output is None:
                self._probes.pop(probe.request_id, None)
                self._engine.abort(probe.request_id)
        if v in self._active:
            self._active.remove(v)
        else:
            self._waiting.remove(v)

    # on background threads

    def _beside(
        self, work: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> Future[ResultT]:
        """Run work on a background thread; wake the steps' thread when it is done."""
        future = self._executor.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _judge(self, v: _Verification, reference: Evaluation) -> Certificate:
        """Compare the probes' logits with their reference.

        Raises:
            EngineError: the base alone is too far from its reference, which is no adapter's fault.
        """
        with background_compute(self._base.device):
            if v.known_base is None:
                v.known_base = _BaseAnswers(tuple(_logits(v.base)), reference.base)
            rounds = [_logits(probes) for probes in (v.alone, v.mixed) if probes]
            certificate = judge(
                Answers(v.known_base.engine, rounds),
                reference,
                dtype=self._engine.base.dtype,
                precision_loss=v.precision_loss or 0.0,
                seconds=self._clock() - v.started_s,
            )
        base = self._engine.base
        if (base.dtype, base.quantization) == ("float32", "none") and not certificate.base_difference <= EXACT_BASE:
            found = (
                f"logits are off by up to {certificate.base_difference:.3g};"
                f" float32 is expected to stay below {EXACT_BASE:g}"
            )
            logger.error("the base alone answers otherwise than its plain evaluation: %s", found)
            raise EngineError(
                f"The base alone answers otherwise than its plain evaluation: {found}.", hint="Restart the server."
            )
        return certificate


def _logits(probes: Sequence[Probe]) -> list[Tensor]:
    """Return the logits of probes that all ended well."""
    logits = [probe.logits() for probe in probes]
    if any(rows is None for rows in logits):
        raise InvariantViolation("A probe ended, and not all of its rows were computed.")
    return [rows for rows in logits if rows is not None]


def _refused(call_id: int, error: LoraserveError) -> m.VerifyReply:
    return m.VerifyReply(
        call_id=call_id,
        error_code=error.code,
        error_message=str(error),
        is_permanent=isinstance(error, AdapterRejected | AdapterUnservable),
    )
