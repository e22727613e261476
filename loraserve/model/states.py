"""Recurrent states of sequences: what a layer that doesn't attend keeps of all tokens before.

Keys and values of a token can be written twice; a state advances once per token. So each slot holds
two: of a step that fails, or whose results are dropped, the same tokens are computed again from the
one before.
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
    """Return the bytes of a slot: two states of all layers."""
    return 2 * sum(_layer_bytes(every) for every in shapes.values())


def _layer_bytes(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(4 * torch.Size(shape).numel() for shape in shapes)


class RecurrentStates:
    """States of as many sequences as there are slots, in memory that isn't written before its use.

    A sequence's first token begins with none, whatever its slot holds of another.

    Attributes:
        num_slots: sequences.
        num_bytes: of all tensors.
        group_size: sequences whose states are computed together, at most.
    """

    def __init__(self, shapes: StateShapes, num_slots: int) -> None:
        self.num_slots, self.num_bytes = num_slots, num_slots * state_bytes(shapes)
        self.group_size = max(1, GROUP_BYTES // max(map(_layer_bytes, shapes.values())))
        # all slots' first states, then their second
        self._tensors = {
            layer: tuple(torch.empty(2 * num_slots, *shape) for shape in every) for layer, every in shapes.items()
        }
        # by slot: which of the two is newer, and the tokens that each of them has seen
        self._newer = [0] * num_slots
        self._num_seen: list[list[int | None]] = [[None, None] for _ in range(num_slots)]

    def step(self, slots: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> StepStates:
        """Return the states of a step's sequences.

        Args:
            slots: a slot for each; none twice.
            starts, ends: the tokens that the step computes of each.

        Raises:
            InvariantViolation: a slot holds neither of these states.
        """
        return StepStates(self._tensors, [self._turn(*one) for one in zip(slots, starts, ends, strict=True)], self)

    def _turn(self, slot: int, start: int, end: int) -> _Turn:
        newer, seen = self._newer[slot], self._num_seen[slot]
        if start == 0:
            read = None
        elif seen[newer] == start:
            read = newer
        elif seen[1 - newer] == start:
            read = 1 - newer
        else:
            raise InvariantViolation(
                f"State slot {slot} has seen {seen[newer]} tokens, and a step computes tokens {start} to {end}."
            )
        write = 1 - (newer if read is None else read)
        return _Turn(slot, read, write, end)

    def begin(self, turn: _Turn) -> None:
        """Note that the state that a step writes isn't whole until it ends."""
        self._num_seen[turn.slot][turn.write] = None

    def end(self, turn: _Turn) -> None:
        """Note that a step has written a sequence's state at every layer."""
        self._newer[turn.slot], self._num_seen[turn.slot][turn.write] = turn.write, turn.num_seen


@dataclass(frozen=True, slots=True)
class _Turn:
    """Part of a slot in a step.

    Attributes:
        read: which of its two states the step reads; None: none, at a sequence's first token.
        write: which it writes.
        num_seen: tokens that the written one has seen.
    """

    slot: int
    read: int | None
    write: int
    num_seen: int


class StepStates:
    """States of a step's sequences, numbered in its order. `RecurrentStates.step` makes it."""

    def __init__(
        self, tensors: Mapping[int, tuple[Tensor, ...]], turns: Sequence[_Turn], states: RecurrentStates
    ) -> None:
        self._tensors, self._turns, self._states = tensors, turns, states
        for turn in turns:
            states.begin(turn)

    def group(self, numbers: Sequence[int]) -> GroupStates:
        """Return the states of some sequences, which are computed together.

        Raises:
            InvariantViolation: only some of them have a state before the step.
        """
        turns, num_slots = [self._turns[number] for number in numbers], self._states.num_slots
        read = [turn.read * num_slots + turn.slot for turn in turns if turn.read is not None]
        if len(read) not in (0, len(turns)):
            raise InvariantViolation(f"{len(read)} of {len(turns)} sequences in a group have a state before the step.")
        written = [turn.write * num_slots + turn.slot for turn in turns]
        return GroupStates(self._tensors, torch.tensor(read) if read else None, torch.tensor(written))

    def commit(self) -> None:
        """End the step, once all layers are computed."""
        for turn in self._turns:
            self._states.end(turn)


class GroupStates:
    """States of sequences that are computed together.

    Args:
        read: [num_sequences] int64, the states that the step reads; None: each begins without one.
        written: [num_sequences] int64, those that it writes.
    """

    def __init__(self, tensors: Mapping[int, tuple[Tensor, ...]], read: Tensor | None, written: Tensor) -> None:
        self._tensors, self._read, self._written = tensors, read, written

    def read(self, layer: int) -> tuple[Tensor, ...] | None:
        """Return copies of a layer's states, [num_sequences, …] each; None before a first token."""
        if self._read is None:
            return None
        return tuple(tensor.index_select(0, self._read) for tensor in self._tensors[layer])

    def write(self, layer: int, state: Sequence[Tensor]) -> None:
        """Keep what the tokens of this step leave, [num_sequences, …] each."""
        for tensor, part in zip(self._tensors[layer], state, strict=True):
            tensor[self._written] = part
