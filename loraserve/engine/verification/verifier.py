"""Verifications: probes of an adapter go through the engine beside everything else, while a thread of their own evaluates the same in plain float32.

What is compared, and when an adapter has failed, is `parity`'s. Here an adapter is asked of the pager like any request's; its probes' rows take their part in steps,
first in one that has no other rows, then mixed with the base's, with another adapter's and with whatever is running. Nothing of them is kept in the prefix cache, and nothing found there.

A step of their own would hold up everybody: where requests run, there is none, and the probes' rows trickle into theirs. What the base alone answers, in the engine and in the plain
evaluation, doesn't change: the same sequences of it are computed once. Verifications that wait are evaluated together, in one pass over the base's weights.
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
from loraserve.model.reference_model import Evaluation, PlainBase
from loraserve.types import AdapterRef, Certificate, FinishReason, RequestId, TokenOutput

logger = logging.getLogger(__name__)

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

EXACT_BASE = 1e-3
"""Logits of a base in float32 are nearer than this to its plain evaluation's: ours to transformers' are within 1e-4."""

MAX_KNOWN_SEQUENCES = 2
"""Sets of probe sequences whose answers by the base are kept: all adapters have the same ones but those with tokens of their own. Each takes two times 30 tokens' logits."""

BESIDE_END = 6
"""Probes that aren't judged, and are there to be in the batch, are the tokens before this one."""

MAX_PROBING = 2
"""Adapters that are brought in for their probes at a time: while one waits for its place, another goes on."""

MAX_TOGETHER = 4
"""Adapters that are evaluated in one pass over the base's weights: half of what they take one by one; of eight, 0.43. (110M parameters in float32, one core.)"""

MAX_ACTIVE = 2 * MAX_TOGETHER
"""Verifications that are read: those that are evaluated, and those whose probes aren't done yet. Each has 30 tokens' logits."""


@dataclass(frozen=True, slots=True)
class _BaseAnswers:
    """The logits of some sequences by the base alone: the engine's, and the plain evaluation's."""

    engine: tuple[Tensor, ...]
    plain: tuple[Tensor, ...]


@dataclass(slots=True, eq=False)
class _Verification:
    call_id: int
    reference: Reference
    started_s: float
    verdict: Future[Certificate] | None = None
    alone: list[Probe] = field(default_factory=list)
    mixed: list[Probe] = field(default_factory=list)
    base: list[Probe] = field(default_factory=list)
    beside: list[Probe] = field(default_factory=list)
    precision_loss: float | None = None
    """What serving its weights loses; known once it's on the device, which is when the mixed round begins."""
    known_base: _BaseAnswers | None = None
    """What was known of the base when its probes began."""

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
    """The engine's verifications, a few at a time and the others in line. The step's thread calls everything here, between steps; nothing of it waits."""

    def __init__(
        self,
        engine: Engine,
        base: PlainBase,
        store: BlobStore,
        *,
        throttle: Throttle | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            throttle: pauses evaluations on the processors that steps compute on; None: they compute elsewhere.
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
        # Two, of which one mostly waits for the thread that evaluates: what is beside the steps shall take one core, and of that what they leave. Done between the steps, a piece
        # at a time in a twentieth of theirs, a certificate (0.7 s) took 15 s instead of 3, and 0.65 s from the steps instead of about 0.2: measured on two cores, 32 sequences,
        # a base of 110M parameters in float32.
        self._executor = ThreadPoolExecutor(
            2, thread_name_prefix="verification", initializer=lower_thread_priority, initargs=(BACKGROUND_NICENESS,)
        )

    @property
    def base(self) -> PlainBase:
        """The resident base, whose weights the plain evaluation reads."""
        return self._base

    @property
    def is_active(self) -> bool:
        """Whether `poll` will have something to say, sooner or later."""
        return bool(self._active or self._waiting or self._replies)

    def start(self, call_id: int, ref: AdapterRef) -> None:
        """Queue a verification; `poll` returns its answer. Of too many, it's that there are too many."""
        if len(self._waiting) + len(self._active) >= LIMITS.max_verifications:
            error = Overloaded(f"{LIMITS.max_verifications} verifications are running or waiting; no more are taken.")
            self._replies.append(_refused(call_id, error))
            return
        self._waiting.append(_Verification(call_id, Reference(ref), self._clock()))

    def abort(self, call_id: int) -> None:
        """End a verification that nobody waits for any more, and free what it holds; nothing if it's over."""
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
        """Go on with each verification as far as it can go now; return, once, the answers of those that are over."""
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
        # after the verdicts of those before them
        self._begin()
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """No verification goes on, and the threads are gone."""
        for verification in [*self._waiting, *self._active]:
            self._end(verification)
        # who rests needn't
        self.throttle.note(is_serving=False)
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._evaluator.close()

    def _begin(self) -> None:
        """Those that wait are read and evaluated, some together, as soon as the ones before them were."""
        count = min(MAX_TOGETHER, MAX_ACTIVE - len(self._active), len(self._waiting))
        if count <= 0 or (self._evaluating is not None and not self._evaluating.done()):
            return
        if (
            count < MAX_TOGETHER
            and self.throttle.is_needed
            and self._engine.is_serving
            and sum(not v.is_probed for v in self._active) >= MAX_PROBING
        ):
            # their probes would have to wait anyway: meanwhile others may come, to share a pass with
            return
        together = [self._waiting.popleft() for _ in range(count)]
        self._active += together
        known = {sequences: answers.plain for sequences, answers in self._known.items()}
        self._evaluating = self._beside(self._evaluator.make, [v.reference for v in together], known)

    # one verification

    def _advance(self, v: _Verification) -> Certificate | None:
        """Return the certificate once it's there.

        Raises:
            LoraserveError: why there will be none.
        """
        if not v.reference.sequences.done():
            return None
        sequences = v.reference.sequences.result()
        if not v.probes:
            if sum(other.is_probing for other in self._active) >= MAX_PROBING:
                return None
            # just read and found whole: that an earlier load failed says nothing any more
            self._engine.pager.forget_failure(v.ref.digest)
            v.known_base = self._known.get(sequences)
            if self._engine.is_serving:
                # the first of the mixed ones brings the adapter in
                v.mixed = [self._probe(sequences[0], v.ref)]
            else:
                v.alone = [self._probe(sequence, v.ref, has_own_step=True) for sequence in sequences]
        failed = next((p for p in v.probes if p.output and p.output.finish_reason is FinishReason.ERROR), None)
        if failed is not None and failed not in v.beside:
            return self._end_failed(v, failed)
        if v.precision_loss is None:
            first = v.alone or v.mixed
            if all(probe.num_captured >= probe.num_prompt_tokens for probe in first):
                # their adapter is there, and pinned by them
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
        """Queue the mixed round: the adapter's sequences, the base's (a short one where their answers are known), and a short one of another adapter, if there is any.

        The short ones only where no request of their kind is in the steps now: those are company enough, and each row costs them time.
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
        # after those, so that they are in its batches also where only a few rows are let in
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
        """An adapter whose logits aren't finite has failed; anything else isn't known to be its fault."""
        output = probe.output
        code, message = (output.error_code, output.error_message) if output is not None else (None, None)
        error = error_from_code(code or "", message or "The adapter could not be verified.")
        if isinstance(error, AdapterNumerics):
            return self._signed(
                unanswered(error.message, precision_loss=v.precision_loss or 0.0, seconds=self._clock() - v.started_s)
            )
        raise error

    def _signed(self, certificate: Certificate) -> Certificate:
        """Return the certificate with what it holds for: the base, and how this engine computes it."""
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

    # on the thread beside the steps

    def _beside(
        self, work: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> Future[ResultT]:
        future = self._executor.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _judge(self, v: _Verification, reference: Evaluation) -> Certificate:
        """
        Raises:
            EngineError: the base alone answers otherwise than it should: that is no adapter's fault, and no verdict on one can be had.
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
            found = f"logits are off by up to {certificate.base_difference:.3g}; float32 is expected to stay below {EXACT_BASE:g}"
            logger.error("the base alone answers otherwise than its plain evaluation: %s", found)
            raise EngineError(
                f"The base alone answers otherwise than its plain evaluation: {found}.", hint="Restart the server."
            )
        return certificate


def _logits(probes: Sequence[Probe]) -> list[Tensor]:
    """Every probe's; all have ended well."""
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
