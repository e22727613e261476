"""Verification of adapters beside serving: probes in steps, compared with a reference.

`reference_evaluator` evaluates the sequences that `prober` has the engine compute, and `certifier`
compares the logits. While requests run, no step is computed for probes alone: their rows are added
to others' steps a few at a time. The base's logits of a sequence don't change, so they are computed
once, in the engine and in the reference. Waiting verifications are evaluated together, in one pass
over the base's weights.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from cachetools import LRUCache

from adapters_store import BlobStore
from loraserve.background import BACKGROUND_NICENESS, Throttle, lower_thread_priority
from loraserve.engine.engine import Engine
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.step_hooks import StepListener
from loraserve.engine.verification.certifier import Certifier
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
"""Adapters probed at a time: while one waits to be loaded, another goes on."""

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
        self._waiting: deque[Verification] = deque()
        self._active: list[Verification] = []
        self._evaluating: Future[None] | None = None
        self._prober = Prober(engine)
        self._certifier = Certifier(engine.base, base.device, clock)
        self._replies: list[m.VerifyReply] = []
        self._known: LRUCache[Sequences, BaseLogits] = LRUCache(MAX_KNOWN_SEQUENCES)
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
            error = Overloaded(f"{LIMITS.max_verifications} verifications are running or in the queue, the maximum.")
            self._replies.append(_refused(call_id, error))
            return
        self._waiting.append(Verification(call_id, Reference(ref), self._clock()))

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
        """Let evaluations go on at once."""
        self.throttle.note(is_serving=False)

    def take_outputs(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Take the outputs of probes; return the others."""
        return self._prober.take_outputs(outputs)

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
        if v.precision_loss is None:
            self._prober.mix(v, sequences)
            return None
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
        return certificate

    def _end(self, v: Verification) -> None:
        """Free what a verification holds."""
        v.reference.is_wanted = False
        if v.verdict is not None:
            v.verdict.cancel()
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
