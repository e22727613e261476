"""Reference logits: adapters read from the store, several evaluated in one float32 pass.

One pass has the weights that the base is served with, and shows whether the engine computes right;
another has the checkpoint's own, and shows what rounding them costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, thread_time
from typing import TypeVar

from torch import Tensor

from adapters_store import BlobStore
from loraserve.adapters.compiler import open_adapter
from loraserve.adapters.ir import AdapterIR
from loraserve.background import BACKGROUND_NICENESS, Pause, Throttle, lower_thread_priority
from loraserve.engine.verification.answer_prompts import AnswerPrompts
from loraserve.engine.verification.comparison import extra_sequences, probe_sequences
from loraserve.engine.verification.float_base import FloatBase, FloatsUnavailable
from loraserve.engine.verification.module_changes import Place, expected_changes
from loraserve.errors import InvariantViolation
from loraserve.limits import MIB
from loraserve.memory.loading.base_weights import background_compute
from loraserve.memory.loading.load import read_blobs
from loraserve.memory.loading.lowering import with_saved_base
from loraserve.model.reference_model import ReferenceBase, evaluate
from loraserve.model.reference_pass import Evaluation, Stopped, Subject
from loraserve.types import AdapterRef, BaseSpec

ResultT = TypeVar("ResultT")

Sequences = tuple[tuple[int, ...], ...]
"""Token ids of an adapter's probes."""

MAX_HELD_BYTES = 256 * MIB
"""Bytes of adapters held for one pass, their files' and what these unfold to; beyond this no more
are read for it.
"""

MAX_THROTTLED_S = 30.0
"""Seconds after which evaluations of one batch are no longer throttled.

Large bases on few cores would never finish otherwise.
"""

MAX_FLOAT_S = 60.0
"""Processor seconds that a pass over the checkpoint's own weights may take.

Twice what a base of 8B parameters takes on one core: without a bound, a larger one would hold up
all certificates behind it.
"""

STARVED_AFTER_S = 5.0
"""Seconds after which a thread may be found starved."""
STARVED_SHARE = 0.05
"""Share of a core below which a thread is starved.

On a core that steps never leave, a thread of niceness 19 gets a 70th, and one of idle priority a
300th.
"""


@dataclass(slots=True, eq=False)
class Reference:
    """The reference evaluation of one adapter or composition.

    Attributes:
        texts: sequences to evaluate by the checkpoint's own weights, each with its first token
            whose logits are needed; empty: its probe sequences, by the weights that are served.
        sequences: sequences, once the adapter is read; or the error: it doesn't fit this base
            (`AdapterRejected`), or its files can't be read (`AdapterCorrupt`,
            `AdapterUnavailable`).
        own_sequences: sequences with tokens that only the adapter has rows for; known likewise.
        prompts: prompts that the engine answers with the adapter; known likewise.
        changes: what its modules add to random inputs; known before the evaluation, on a CPU.
        evaluation: logits of the sequences.
        is_wanted: set to False to let the evaluation stop.
    """

    ref: AdapterRef
    texts: Sequence[tuple[Sequence[int], int]] = ()
    own_sequences: Sequences = ()
    prompts: Sequences = ()
    changes: Mapping[Place, Tensor | None] | None = None
    sequences: Future[Sequences] = field(default_factory=Future)
    evaluation: Future[Evaluation] = field(default_factory=Future)
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class _Read:
    """An adapter that was read.

    Attributes:
        num_bytes: bytes of the files, which the subject's terms are views of, and of what they
            unfold to.
    """

    reference: Reference
    base: ReferenceBase
    subject: Subject
    num_bytes: int


class ReferenceEvaluator:
    """Evaluate references a few at a time, on an idle thread.

    On the caller's where idle threads get next to no time.
    """

    def __init__(
        self,
        base: ReferenceBase,
        spec: BaseSpec,
        store: BlobStore,
        when_read: Callable[[], None],
        throttle: Throttle,
        *,
        float_base: FloatBase | None = None,
        prompts: AnswerPrompts | None = None,
    ) -> None:
        """Make an evaluator without work.

        Args:
            when_read: called when the sequences of a reference are known.
            throttle: pauses the evaluations.
            float_base: checkpoint's own weights; None: no reference has texts.
            prompts: prompts of references; None: they have none.
        """
        self._base, self._spec, self._store, self._when_read, self._throttle = base, spec, store, when_read, throttle
        self._float_base, self._prompts = float_base, prompts
        # one for evaluations, and one for short work that needn't wait for them
        self._idle, self._briefly_idle = (
            ThreadPoolExecutor(
                1,
                thread_name_prefix=name,
                initializer=partial(lower_thread_priority, BACKGROUND_NICENESS, is_idle=True),
            )
            for name in ("evaluation", "verdict")
        )
        # made on the latter's thread
        self._pause_briefly: Pause | None = None
        self._throttled_until_s = 0.0

    def close(self) -> None:
        """End the threads; `make` isn't called any more."""
        for idle in (self._idle, self._briefly_idle):
            idle.shutdown(wait=True, cancel_futures=True)

    def in_idle_time(self, work: Callable[[], ResultT]) -> ResultT:
        """Run short work on an idle thread, or on this one if that was starved.

        It must be idempotent, since it may run twice.
        """
        future = self._briefly_idle.submit(self._after_pause, work)
        try:
            return future.result(STARVED_AFTER_S)
        except TimeoutError:
            future.cancel()
            return work()

    def _after_pause(self, work: Callable[[], ResultT]) -> ResultT:
        """Pause for earlier work first, so that no result waits for its own pause."""
        if self._pause_briefly is None:
            self._pause_briefly = self._throttle.on_thread()
        self._pause_briefly()
        return work()

    def make(self, references: Sequence[Reference], known: Mapping[Sequences, tuple[Tensor, ...]]) -> None:
        """Read references and evaluate them in one pass, or in a few if they are large.

        Either all of them have texts or none. Errors go to their own reference.

        Args:
            known: the base's logits of sequences that were evaluated before.
        """
        self._throttled_until_s = monotonic() + MAX_THROTTLED_S
        try:
            read: list[_Read] = []
            pause = self._throttle.on_thread()
            for reference in references:
                pause()
                if reference.is_wanted and (one := self._read(reference, known)) is not None:
                    read.append(one)
                if sum(one.num_bytes for one in read) > MAX_HELD_BYTES:
                    self._evaluate(read)
                    read.clear()
            pause()
            self._evaluate(read)
        except Exception as error:
            # every future must end
            for future in (future for one in references for future in (one.sequences, one.evaluation)):
                if not future.done():
                    future.set_exception(error)

    def make_base(self, reference: Reference) -> None:
        """Evaluate a reference's texts by the float base alone; an error goes to the reference."""
        self._throttled_until_s = monotonic() + MAX_THROTTLED_S
        try:
            base, (texts, starts) = self._base_of(reference), zip(*reference.texts, strict=True)
            self._evaluate([_Read(reference, base, Subject(texts, (), known_base=(), starts=starts), 0)])
        except Exception as error:
            if not reference.evaluation.done():
                reference.evaluation.set_exception(error)

    def _read(self, reference: Reference, known: Mapping[Sequences, tuple[Tensor, ...]]) -> _Read | None:
        ref, num_bytes = reference.ref, 0
        terms: list[tuple[AdapterIR, float]] = []
        try:
            base = self._base_of(reference)
            for adapter, weight in [(part.adapter, part.weight) for part in ref.parts] or [(ref, 1.0)]:
                config, weights = read_blobs(self._store, adapter)
                unfolded: list[int] = []
                ir = open_adapter(config, weights, self._spec, reserve=unfolded.append)
                num_bytes += len(weights) + sum(unfolded)
                if ir.saved_base:
                    with background_compute(base.device):
                        ir = with_saved_base(ir, self._spec, base)
                terms.append((ir, weight))
            adapters = [ir for ir, _ in terms]
            sequences: Sequences
            if reference.texts:
                sequences = tuple(tuple(text) for text, _ in reference.texts)
            else:
                sequences = tuple(probe_sequences(self._spec, adapters))
                reference.own_sequences = tuple(extra_sequences(self._spec, adapters))
                reference.prompts = () if self._prompts is None else self._prompts.of(adapters)
        except Exception as error:
            reference.sequences.set_exception(error)
            return None
        reference.sequences.set_result(sequences)
        self._when_read()
        if not reference.texts and self._base.device.type == "cpu":
            try:
                with background_compute(self._base.device):
                    reference.changes = expected_changes(terms, self._spec)
            except Exception as error:
                reference.evaluation.set_exception(error)
                return None
        starts = [start for _, start in reference.texts] or None
        subject = Subject(sequences, terms, known.get(sequences), starts, reference.own_sequences)
        return _Read(reference, base, subject, num_bytes)

    def _base_of(self, reference: Reference) -> ReferenceBase:
        """Choose the base that a reference is evaluated on.

        Raises:
            FloatsUnavailable: it is the checkpoint's own, and that can't be read.
        """
        if not reference.texts:
            return self._base
        if self._float_base is None:
            raise InvariantViolation("A reference has texts, and there is no float base.")
        return self._float_base.open()

    def _evaluate(self, read: Sequence[_Read]) -> None:
        if not read:
            return
        try:
            found = None
            # on a GPU the thread mostly waits, which looks like starvation and takes no processor
            # from the steps
            if self._base.device.type == "cpu":
                found = self._idle.submit(self._run_unless_starved, read).result()
            if found is None:
                found = self._run(read)
        except Exception as error:
            if len(read) == 1:
                read[0].reference.evaluation.set_exception(error)
                return
            # evaluated alone, only the one at fault fails
            for one in read:
                self._evaluate([one])
        else:
            for one, evaluation in zip(read, found, strict=True):
                one.reference.evaluation.set_result(evaluation)

    def _run_unless_starved(self, read: Sequence[_Read]) -> list[Evaluation] | None:
        """Evaluate on this idle thread; return None if it gets next to no time.

        Raises:
            Stopped: no reference is needed any more.
        """
        share, pause = _Share(), self._throttle.on_thread()

        def may_go_on() -> bool:
            if monotonic() < self._throttled_until_s:
                share.leave_out(pause())
            return not share.is_starved()

        try:
            return self._run(read, may_go_on)
        except Stopped:
            if share.was_starved:
                return None
            raise

    def _run(self, read: Sequence[_Read], may_go_on: Callable[[], bool] = lambda: True) -> list[Evaluation]:
        """Evaluate in one pass.

        Raises:
            Stopped: no reference is needed any more, or `may_go_on` returned False.
            FloatsUnavailable: the checkpoint's own weights take too long.
        """
        base, begun_s = read[0].base, thread_time()

        def is_wanted() -> bool:
            if read[0].reference.texts and thread_time() - begun_s > MAX_FLOAT_S:
                raise FloatsUnavailable(f"On this base it takes over {MAX_FLOAT_S:g} s of a core.")
            return any(one.reference.is_wanted for one in read) and may_go_on()

        with background_compute(base.device):
            return evaluate(base, [one.subject for one in read], is_wanted=is_wanted)


class _Share:
    """Share of a core that the thread has had since this was created on it.

    Attributes:
        was_starved: whether it was found starved the last time.
    """

    def __init__(self) -> None:
        self.was_starved = False
        self._began_s, self._worked_s = monotonic(), thread_time()

    def leave_out(self, paused_s: float) -> None:
        """Don't count seconds in which the thread paused."""
        self._began_s += paused_s

    def is_starved(self) -> bool:
        """Check whether the thread has had next to no time, for long enough to be sure."""
        elapsed_s, worked_s = monotonic() - self._began_s, thread_time() - self._worked_s
        self.was_starved = elapsed_s > STARVED_AFTER_S and worked_s < STARVED_SHARE * elapsed_s
        return self.was_starved
