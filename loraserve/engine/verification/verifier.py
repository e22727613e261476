"""Verification of adapters while serving: probes in steps, compared with a reference.

`reference_evaluator` evaluates the sequences that `prober` has the engine compute, and `certifier`
compares the logits. While requests run, no step is computed for probes alone: their rows are added
to others' steps a few at a time. The base's logits of a sequence don't change, so they are computed
once, in the engine and in the reference. Waiting verifications are evaluated together, in one pass
over the base's weights. Those that pass are then compared with the weights as they were before they
were rounded (`float_base`), on the adapter's own answers: a second pass, over the checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from cachetools import LRUCache

from adapters_store import BlobStore
from loraserve.background import BACKGROUND_NICENESS, Throttle, lower_thread_priority
from loraserve.engine.engine import Engine
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.step_hooks import StepListener
from loraserve.engine.verification.answer_prompts import AnswerPrompts
from loraserve.engine.verification.base_precision import BaseMeasurements
from loraserve.engine.verification.certifier import Certifier
from loraserve.engine.verification.comparison import PASSED
from loraserve.engine.verification.float_base import FloatBase
from loraserve.engine.verification.prober import Prober
from loraserve.engine.verification.reference_evaluator import Reference, ReferenceEvaluator, Sequences
from loraserve.engine.verification.verification import BaseLogits, Verification
from loraserve.engine_client import messages as m
from loraserve.errors import (
    AdapterCorrupt,
    AdapterRejected,
    AdapterUnservable,
    EngineError,
    LoraserveError,
    Overloaded,
)
from loraserve.limits import LIMITS
from loraserve.model.reference_model import ReferenceBase
from loraserve.types import AdapterRef, Certificate, TokenOutput

logger = logging.getLogger(__name__)

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

MAX_KNOWN_SEQUENCES = 2
"""Sets of probe sequences with cached base logits, twice 30 tokens' each.

Adapters without trained tokens share one set.
"""

MAX_PROBING = 2
"""Adapters probed at a time: while one waits to be loaded, another continues."""

MAX_TOGETHER = 4
"""Adapters evaluated in one pass over the base's weights.

Four take half of the time that they take one by one, eight 0.43 (110M parameters in float32, one
core).
"""

MAX_ACTIVE = 2 * MAX_TOGETHER
"""Verifications in progress, being evaluated or probed; each holds 30 tokens' logits."""


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
        model_dir: Path = Path(),
        float_base: FloatBase | None = None,
        prompts: AnswerPrompts | None = None,
        throttle: Throttle | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a verifier without work.

        Args:
            model_dir: directory of the base, whose tokenizer the measured text needs.
            float_base: checkpoint's own weights; None: what rounding costs isn't measured.
            prompts: prompts that adapters answer for that.
            throttle: pauses evaluations on the processors that steps compute on; None: they compute
                elsewhere.
            wake: called on another thread when there is something for `poll`.
            clock: monotonic seconds.
        """
        self._engine, self._base, self._wake, self._clock = engine, base, wake, clock
        self.throttle = throttle or Throttle.beside_steps(math.inf)
        is_rounded = float_base is not None and not float_base.note
        self._evaluator = ReferenceEvaluator(
            base,
            engine.base,
            store,
            wake,
            self.throttle,
            float_base=float_base,
            prompts=prompts if is_rounded else None,
        )
        self._waiting: deque[Verification] = deque()
        self._active: list[Verification] = []
        self._evaluating: Future[None] | None = None
        self._evaluating_float: Future[None] | None = None
        self._prober = Prober(engine, 0 if prompts is None else prompts.max_answer_tokens)
        note = "this engine doesn't measure it" if float_base is None else float_base.note
        self._certifier = Certifier(engine.base, base.device, clock, note)
        self._measurements = BaseMeasurements(
            model_dir, engine.base, base.device, self._evaluator, self._prober, note, self._beside
        )
        self._replies: list[m.VerifyReply] = []
        self._known: LRUCache[Sequences, BaseLogits] = LRUCache(MAX_KNOWN_SEQUENCES)
        # Three, of which two mostly wait for the thread that evaluates. Evaluating between steps
        # instead, in a twentieth of their time, a certificate took 15 s instead of 3, and 0.65 s of
        # the steps instead of about 0.2 (two cores, 32 sequences, 110M parameters in float32).
        self._executor = ThreadPoolExecutor(
            3, thread_name_prefix="verification", initializer=lower_thread_priority, initargs=(BACKGROUND_NICENESS,)
        )

    @property
    def base(self) -> ReferenceBase:
        """Resident base; the reference evaluation reads its weights."""
        return self._base

    @property
    def is_active(self) -> bool:
        """Whether `poll` will return anything, sooner or later."""
        return bool(self._active or self._waiting or self._replies) or self._measurements.is_active

    def start(self, call_id: int, ref: AdapterRef) -> None:
        """Queue a verification.

        `poll` returns its reply, which is an error if too many are queued.
        """
        if len(self._waiting) + len(self._active) >= LIMITS.max_verifications:
            error = Overloaded(f"{LIMITS.max_verifications} verifications are running or in the queue, the maximum.")
            self._replies.append(_refused(call_id, error))
            return
        self._waiting.append(Verification(call_id, Reference(ref), self._clock()))

    def measure_base(self, call_id: int) -> None:
        """Measure what rounding costs the base; `poll` returns the reply."""
        self._measurements.start(call_id)

    def abort(self, call_id: int) -> None:
        """End a verification and free what it holds; no-op if it is over."""
        for verification in [v for v in (*self._waiting, *self._active) if v.call_id == call_id]:
            self._end(verification)

    def before_launch(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Throttle evaluations as the step needs it."""
        lengths = [entry.known_end - entry.start for entry in scheduled if entry.request.probe is None]
        is_long = self._engine.pager.num_loading > 0 or any(length > 1 for length in lengths)
        self.throttle.note(is_serving=bool(lengths), is_long=is_long)

    def on_idle(self) -> None:
        """Let evaluations continue at once."""
        self.throttle.note(is_serving=False)

    def take_outputs(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Take the outputs of probes; return the others."""
        return self._prober.take_outputs(outputs)

    def poll(self) -> list[m.VerifyReply | m.BaseMeasured]:
        """Advance each verification, and the base's measurement, as far as it can go now.

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
        self._begin_float()
        replies, self._replies = self._replies, []
        return [*replies, *self._measurements.poll()]

    def close(self) -> None:
        """End all verifications and their threads."""
        for verification in [*self._waiting, *self._active]:
            self._end(verification)
        self._measurements.close()
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

    def _begin_float(self) -> None:
        """Begin evaluating by the checkpoint's own weights what is ready for it, together.

        It waits for those that are being probed: each pass costs as much as two adapters' rows.
        """
        if self._evaluating_float is not None and not self._evaluating_float.done():
            return
        ready = [v for v in self._active if v.float_reference is not None and not v.float_reference.sequences.done()]
        is_more_coming = any(v.float_reference is None for v in self._active)
        if ready and (len(ready) >= MAX_TOGETHER or not is_more_coming):
            references = [v.float_reference for v in ready[:MAX_TOGETHER] if v.float_reference is not None]
            self._evaluating_float = self._beside(self._evaluator.make, references, {})

    def _advance(self, v: Verification) -> Certificate | None:
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
            v.known_base = self._known.get(sequences)
            self._prober.begin(v, sequences)
        if (failed := v.failed_probe) is not None:
            return self._certifier.certify_failure(v, failed)
        if not v.is_mixed:
            self._prober.mix(v, sequences)
            return None
        if v.is_answered:
            self._prober.repeat_by_base(v)
        if v.is_probing or not v.reference.evaluation.done():
            return None
        if v.verdict is None:
            compare = partial(self._certifier.compare, v, v.reference.evaluation.result())
            v.verdict = self._beside(self._evaluator.in_idle_time, compare)
        if not v.verdict.done():
            return None
        certificate = v.verdict.result()
        if v.known_base is not None:
            self._known[sequences] = v.known_base
        if certificate.verdict != PASSED or not v.answers:
            return certificate
        return self._compare_float(v, certificate)

    def _compare_float(self, v: Verification, certificate: Certificate) -> Certificate | None:
        """Advance the comparison with the checkpoint's own weights; return the whole certificate.

        Args:
            certificate: what the comparison with the weights that are served has found.
        """
        reference = v.float_reference
        if reference is None:
            v.drop_logits()
            texts = [(probe.token_ids, probe.start) for probe in v.base_answers]
            v.float_reference = Reference(v.ref, texts)
            return None
        if not (reference.sequences.done() and reference.evaluation.done()):
            error = reference.sequences.exception() if reference.sequences.done() else None
            return None if error is None else self._certifier.leave_open(v, certificate, error)
        error = reference.evaluation.exception()
        if error is not None:
            return self._certifier.leave_open(v, certificate, error)
        if v.loss is None:
            price = partial(self._certifier.price, v, certificate, reference.evaluation.result())
            v.loss = self._beside(self._evaluator.in_idle_time, price)
        return v.loss.result() if v.loss.done() else None

    def _end(self, v: Verification) -> None:
        """Free what a verification holds."""
        for reference in (v.reference, v.float_reference):
            if reference is not None:
                reference.is_wanted = False
        for comparison in (v.verdict, v.loss):
            if comparison is not None:
                comparison.cancel()
        self._prober.abort(v)
        if v in self._active:
            self._active.remove(v)
        else:
            self._waiting.remove(v)

    def _beside(
        self, work: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> Future[ResultT]:
        """Run work on a background thread; wake the steps' thread when it is done."""
        future = self._executor.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._wake())
        return future


def _refused(call_id: int, error: LoraserveError) -> m.VerifyReply:
    return m.VerifyReply(
        call_id=call_id,
        error_code=error.code,
        error_message=str(error),
        is_permanent=isinstance(error, AdapterRejected | AdapterUnservable),
    )
