"""Recurrent states of sequences: what a layer that doesn't attend keeps of all tokens before.

Keys and values of a token can be written twice; a state advances once per token. So each slot holds
two: of a step that fails, or whose results are dropped, the same tokens are computed again from the
one before. Snapshots are copies that a step keeps at the border of a block, for other sequences to
begin from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve.errors import InvariantViolation
from loraserve.limits import MIB

GROUP_BYTES = 2 * MIB
"""Bytes of a layer's states that are computed together, at most.

Each of a recurrence's dozen operations passes over them, so they should stay in a core's cache. On
a core with 2 MiB of it, 32 sequences of a gated delta rule with states of 256 KiB take 22 ms one by
one, 13 ms in groups of 8 and 30 ms in one group; with states of 2 MiB, 87 ms one by one and 260 ms
in one group.
"""

StateShapes = Mapping[int, tuple[tuple[int, ...], ...]]
"""Layer → the shapes of the tensors, float32, that it keeps of a sequence."""


def state_bytes(shapes: StateShapes) -> int:
    """Return the bytes of a sequence's state, of all layers; a slot has two."""
    return sum(_layer_bytes(every) for every in shapes.values())


def _layer_bytes(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(4 * torch.Size(shape).numel() for shape in shapes)


@dataclass(frozen=True, slots=True)
class StateUse:
    """Places of a sequence's state in a step.

    Attributes:
        slot: where the state advances.
        resumed: the snapshot that the step begins from; None: the slot's own state, or none at a
            sequence's first token.
        kept: (number of tokens, snapshot) that the step writes on its way, ascending.
    """

    slot: int
    resumed: int | None = None
    kept: tuple[tuple[int, int], ...] = ()


class RecurrentStates:
    """States of sequences and snapshots of them, in memory that isn't written before its use.

    A sequence's first token begins with none, whatever its slot holds of another.

    Attributes:
        num_slots: sequences.
        num_snapshots: copies that are kept.
        num_bytes: of all tensors.
        group_size: sequences whose states are computed together, at most.
    """

    def __init__(self, shapes: StateShapes, num_slots: int, num_snapshots: int = 0) -> None:
        self.num_slots, self.num_snapshots = num_slots, num_snapshots
        num_states = 2 * num_slots + num_snapshots
        self.num_bytes = num_states * state_bytes(shapes)
        self.group_size = max(1, GROUP_BYTES // max(map(_layer_bytes, shapes.values())))
        # all slots' first states, then their second, then the snapshots
        self._tensors = {
            layer: tuple(torch.empty(num_states, *shape) for shape in every) for layer, every in shapes.items()
        }
        # by slot: which of the two is newer
        self._newer = [0] * num_slots
        # by state: the tokens that it has seen
        self._num_seen: list[int | None] = [None] * num_states

    def step(self, uses: Sequence[StateUse], starts: Sequence[int], ends: Sequence[int]) -> StepStates:
        """Return the states of a step's sequences.

        Args:
            uses: one for each; no slot twice.
            starts, ends: the tokens that the step computes of each.

        Raises:
            InvariantViolation: neither a slot nor the snapshot has the state that a sequence goes
                on with, or a snapshot is kept of a token that the step doesn't compute.
        """
        return StepStates(self._tensors, [self._turn(*one) for one in zip(uses, starts, ends, strict=True)], self)

    def _turn(self, use: StateUse, start: int, end: int) -> _Turn:
        newer = self._newer[use.slot]
        candidates = [newer * self.num_slots + use.slot, (1 - newer) * self.num_slots + use.slot]
        write = candidates[1]
        read: int | None = None
        if start:
            resumed = use.resumed
            sources = candidates if resumed is None else [2 * self.num_slots + resumed]
            read = next((state for state in sources if self._num_seen[state] == start), None)
            if read is None:
                what = f"State slot {use.slot}" if resumed is None else f"State snapshot {resumed}"
                raise InvariantViolation(
                    f"{what} has seen {self._num_seen[sources[0]]} tokens, and a step computes tokens {start} to {end}."
                )
            if read == write:
                write = candidates[0]
        positions = [position for position, _ in use.kept]
        if any(not start < position <= end for position in positions):
            raise InvariantViolation(f"States after {positions} tokens are kept of a step of tokens {start} to {end}.")
        return _Turn(use.slot, read, write, end, tuple((at, 2 * self.num_slots + place) for at, place in use.kept))

    def begin(self, turn: _Turn) -> None:
        """Note that the states that a step writes aren't whole until it ends."""
        for state in (turn.write, *(kept for _, kept in turn.kept)):
            self._num_seen[state] = None

    def end(self, turn: _Turn) -> None:
        """Note that a step has written a sequence's states at every layer."""
        self._newer[turn.slot] = turn.write // self.num_slots
        for num_seen, state in ((turn.num_seen, turn.write), *turn.kept):
            self._num_seen[state] = num_seen


@dataclass(frozen=True, slots=True)
class _Turn:
    """States of a sequence in a step.

    Attributes:
        read: the one that the step reads; None: none, at a sequence's first token.
        write: the one of its slot that it writes.
        num_seen: tokens that the written one has seen.
        kept: (number of tokens, state) of the snapshots that it writes, ascending.
    """

    slot: int
    read: int | None
    write: int
    num_seen: int
    kept: tuple[tuple[int, int], ...]


class StepStates:
    """States of a step's sequences, numbered in its order. `RecurrentStates.step` makes it."""

    def __init__(
        self, tensors: Mapping[int, tuple[Tensor, ...]], turns: Sequence[_Turn], states: RecurrentStates
    ) -> None:
        self._tensors, self._turns, self._states = tensors, turns, states
        for turn in turns:
            states.begin(turn)

    def borders(self, number: int) -> list[int]:
        """Return the numbers of tokens after which a sequence's state is kept, ascending."""
        return [position for position, _ in self._turns[number].kept]

    def group(self, numbers: Sequence[int], part: int = 0) -> GroupStates:
        """Return the states of some sequences, which are computed together.

        Args:
            part: which of the parts into which its borders divide a sequence's tokens.

        Raises:
            InvariantViolation: only some of them have a state before the step.
        """
        turns = [self._turns[number] for number in numbers]
        found = [turn.write if part else turn.read for turn in turns]
        read = [state for state in found if state is not None]
        if len(read) not in (0, len(turns)):
            raise InvariantViolation(f"{len(read)} of {len(turns)} sequences in a group have a state before the step.")
        kept = [turn.kept[part][1] for turn in turns if part < len(turn.kept)]
        if len(kept) not in (0, len(turns)):
            raise InvariantViolation(f"The states of {len(kept)} of {len(turns)} sequences in a group are kept.")
        written = torch.tensor([turn.write for turn in turns])
        return GroupStates(
            self._tensors,
            torch.tensor(read) if read else None,
            (written, torch.tensor(kept)) if kept else (written,),
        )

    def commit(self) -> None:
        """End the step, once all layers are computed."""
        for turn in self._turns:
            self._states.end(turn)


class GroupStates:
    """States of sequences that are computed together.

    Args:
        read: [num_sequences] int64, the states that they begin from; None: each begins without one.
        written: those that they leave, [num_sequences] int64 each: the slots', and snapshots.
    """

    def __init__(
        self, tensors: Mapping[int, tuple[Tensor, ...]], read: Tensor | None, written: tuple[Tensor, ...]
    ) -> None:
        self._tensors, self._read, self._written = tensors, read, written

    def read(self, layer: int) -> tuple[Tensor, ...] | None:
        """Return copies of a layer's states, [num_sequences, …] each; None before a first token."""
        if self._read is None:
            return None
        return tuple(tensor.index_select(0, self._read) for tensor in self._tensors[layer])

    def write(self, layer: int, state: Sequence[Tensor]) -> None:
        """Keep what the tokens of this step leave, [num_sequences, …] each."""
        for tensor, part in zip(self._tensors[layer], state, strict=True):
            for written in self._written:
                tensor[written] = part
