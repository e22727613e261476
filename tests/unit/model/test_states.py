"""Slots of recurrent states: a step is computed again from the state before it, and no other."""

from __future__ import annotations

import pytest
import torch

from loraserve.errors import InvariantViolation
from loraserve.model.states import GROUP_BYTES, RecurrentStates, state_bytes

SHAPES = {0: ((3, 4), (2, 5)), 2: ((3, 4),)}


def advance(states: RecurrentStates, slot: int, start: int, end: int, value: float, *, commit: bool = True) -> None:
    """Write a value everywhere as a step does."""
    step = states.step([slot], [start], [end])
    for layer, shapes in SHAPES.items():
        step.group([0]).write(layer, [torch.full((1, *shape), value) for shape in shapes])
    if commit:
        step.commit()


def seen(states: RecurrentStates, slot: int, start: int) -> float | None:
    """Return the value that a step from there reads."""
    step = states.step([slot], [start], [start + 1])
    found = [step.group([0]).read(layer) for layer in SHAPES]
    if any(one is None for one in found):
        assert all(one is None for one in found)
        return None
    numbers = {float(number) for one in found for tensor in one or () for number in tensor.flatten()}
    assert len(numbers) == 1
    return numbers.pop()


def test_slot_takes_bytes_of_two_states() -> None:
    assert state_bytes(SHAPES) == 2 * 4 * (12 + 10 + 12)
    assert RecurrentStates(SHAPES, 3).num_bytes == 3 * state_bytes(SHAPES)


def test_state_continues_after_each_step() -> None:
    states = RecurrentStates(SHAPES, 2)
    for number, (start, end) in enumerate(((0, 5), (5, 6), (6, 20), (20, 21))):
        assert seen(states, 1, start) == (None if number == 0 else float(number - 1))
        advance(states, 1, start, end, float(number))


@pytest.mark.parametrize("commit", [False, True])
def test_step_computed_again_reads_state_before(commit: bool) -> None:
    states = RecurrentStates(SHAPES, 1)
    advance(states, 0, 0, 5, 1.0)
    advance(states, 0, 5, 6, 2.0)
    advance(states, 0, 6, 7, 3.0, commit=commit)
    for _ in range(2):
        assert seen(states, 0, 6) == 2.0
        advance(states, 0, 6, 9, 4.0)
    assert seen(states, 0, 9) == 4.0


def test_new_sequence_ignores_previous_slot_state() -> None:
    states = RecurrentStates(SHAPES, 1)
    advance(states, 0, 0, 5, 1.0)
    advance(states, 0, 0, 3, 2.0)
    assert seen(states, 0, 0) is None
    advance(states, 0, 0, 3, 2.0)
    assert seen(states, 0, 3) == 2.0


@pytest.mark.parametrize("start", [1, 4, 7])
def test_position_without_state_is_refused(start: int) -> None:
    states = RecurrentStates(SHAPES, 1)
    advance(states, 0, 0, 2, 1.0)
    advance(states, 0, 2, 6, 2.0)
    advance(states, 0, 6, 9, 3.0, commit=False)
    with pytest.raises(InvariantViolation, match="slot 0"):
        states.step([0], [start], [start + 1])


def test_group_reads_state_before_step_computed_again() -> None:
    states = RecurrentStates(SHAPES, 3)
    for slot, count in ((0, 1), (2, 2)):
        for number in range(count):
            advance(states, slot, 4 * number, 4 * number + 4, 10.0 * slot + number)
    # slot 2 computes its second step again, slot 0 its second for the first time
    step = states.step([2, 0], [4, 4], [5, 5])
    group = step.group([0, 1])
    for layer, shapes in SHAPES.items():
        for found, shape in zip(group.read(layer) or (), shapes, strict=True):
            assert torch.equal(found, torch.stack([torch.full(shape, 20.0), torch.full(shape, 0.0)]))
        group.write(layer, [torch.stack([torch.full(shape, 7.0), torch.full(shape, 8.0)]) for shape in shapes])
    step.commit()
    assert [seen(states, slot, 5) for slot in (2, 0)] == [7.0, 8.0]


def test_group_with_first_token_is_refused() -> None:
    states = RecurrentStates(SHAPES, 2)
    advance(states, 0, 0, 4, 1.0)
    with pytest.raises(InvariantViolation, match="1 of 2 sequences"):
        states.step([0, 1], [4, 0], [5, 1]).group([0, 1])


@pytest.mark.parametrize(("num_floats", "size"), [(1024, 512), (GROUP_BYTES // 8, 2), (GROUP_BYTES, 1)])
def test_group_size_keeps_states_within_bytes(num_floats: int, size: int) -> None:
    assert RecurrentStates({0: ((num_floats // 2,), (num_floats // 2,)), 1: ((3,),)}, 1).group_size == size
