"""Probes of verifications in the engine's steps.

A probe is a request like any other: it pins its adapter and has rows in steps. An adapter's probes
run first in steps without other rows, then mixed with rows of the base, of another adapter and of
whatever is running. They neither use nor fill the prefix cache. Where the base is rounded the
adapter then answers a few prompts, and the base computes the same texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from loraserve.engine.engine import Engine
from loraserve.engine.probe import Probe
from loraserve.engine.verification.reference_evaluator import Sequences
from loraserve.engine.verification.verification import Verification
from loraserve.types import AdapterRef, RequestId, TokenOutput
from loraserve_kernels.common.packed import PackedAdapter

BESIDE_END = 6
"""End of the token range of probes that only fill the batch and aren't compared."""


class Prober:
    """Add a verification's probes to the engine and take their outputs, on the steps' thread."""

    def __init__(self, engine: Engine, max_answer_tokens: int = 0) -> None:
        """Add nothing yet.

        Args:
            max_answer_tokens: cap on the tokens of each answer to a prompt.
        """
        self._engine = engine
        self._probes: dict[RequestId, Probe] = {}
        self._numbers = itertools.count()
        self._max_answer_tokens = max_answer_tokens

    def begin(self, v: Verification, sequences: Sequences) -> None:
        """Queue the first round's probes, or while requests run one in a mixed batch."""
        # its files were just read and are whole: an earlier failed load doesn't count any more
        self._engine.pager.forget_failure(v.ref.digest)
        if self._engine.is_serving:
            # the first mixed probe has the adapter loaded
            v.mixed = [self._probe(sequences[0], v.ref)]
        else:
            v.alone = [self._probe(sequence, v.ref, has_own_step=True) for sequence in sequences]

    def mix(self, v: Verification, sequences: Sequences) -> None:
        """Queue the mixed round: sequences of the adapter, the base, and another resident adapter.

        The adapter's answers to its prompts are queued with it.

        No-op until the prompts of the first probes are computed. Where the base's logits are known,
        a short sequence of it will do. Short ones are left out if requests of their kind are in the
        steps anyway, since each row costs those time.
        """
        if any(probe.num_captured < probe.num_prompt_tokens for probe in v.alone or v.mixed):
            return
        # the adapter is resident, and the first probes pin it
        v.precision_loss = self._engine.pager.metadata(v.ref.digest).precision_loss
        served = self._engine.adapters_served
        if v.known_base is None:
            v.base = [self._probe(sequence, None) for sequence in sequences]
        elif None not in served:
            v.beside.append(self._probe(sequences[-1][1:BESIDE_END], None))
        has_other = bool(served - {None, v.ref.digest})
        other = None if has_other else self._engine.pager.other_resident(v.ref.digest)
        if other is not None:
            probe = Probe(self._next_id(), list(sequences[-1][1:BESIDE_END]))
            self._probes[probe.request_id] = probe
            self._engine.add_probe_of_resident(probe, other)
            v.beside.append(probe)
        # last, so that the others are in its batches even if a step takes only a few rows
        v.mixed += [self._probe(sequence, v.ref) for sequence in sequences[len(v.mixed) :]]
        v.own = [self._add(Probe(self._next_id(), list(one), is_wide=True), v.ref) for one in v.reference.own_sequences]
        handle = self._engine.pager.handle(v.ref.digest)
        v.packed = handle if isinstance(handle, PackedAdapter) else None
        v.answers = [
            self._add(Probe.of_answer(self._next_id(), prompt, self._max_answer_tokens), v.ref)
            for prompt in v.reference.prompts
        ]

    def repeat_by_base(self, v: Verification) -> None:
        """Queue the adapter's prompts and answers for the base, whose logits of them are needed."""
        v.base_answers = [
            self._add(Probe.of_text(self._next_id(), probe.token_ids[:-1], probe.start), None) for probe in v.answers
        ]

    def probe_base(self, texts: Sequences) -> list[Probe]:
        """Queue texts for the base, whose logits of them are needed."""
        return [self._add(Probe(self._next_id(), list(text)), None) for text in texts]

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

    def abort(self, v: Verification) -> None:
        """Abort those of its probes that run."""
        self.abort_probes(v.probes)

    def abort_probes(self, probes: Iterable[Probe]) -> None:
        """Abort those that run."""
        for probe in probes:
            if probe.output is None:
                self._probes.pop(probe.request_id, None)
                self._engine.abort(probe.request_id)

    def _probe(self, sequence: Sequence[int], ref: AdapterRef | None, *, has_own_step: bool = False) -> Probe:
        return self._add(Probe(self._next_id(), list(sequence), has_own_step), ref)

    def _add(self, probe: Probe, ref: AdapterRef | None) -> Probe:
        self._probes[probe.request_id] = probe
        self._engine.add_probe(probe, ref)
        return probe

    def _next_id(self) -> RequestId:
        return RequestId(f"verification-{next(self._numbers)}")
