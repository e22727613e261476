"""Recurrent states: a step is computed again from the state before it, and no other."""

from __future__ import annotations

import itertools

import pytest
import torch

from loraserve.errors import InvariantViolation
from loraserve.model.states import GROUP_BYTES, RecurrentStates, StateUse, state_bytes

SHAPES = {0: ((3, 4), (2, 5)), 2: ((3, 4),)}


def advance(states: RecurrentStates, slot: int, start: int, end: int, value: float, *, commit: bool = True) -> None:
    """Write a value everywhere as a step does."""
    step = states.step([StateUse(slot)], [start], [end])
    for layer, shapes in SHAPES.items():
        step.group([0]).write(layer, [torch.full((1, *shape), value) for shape in shapes])
    if commit:
        step.commit()


def seen(states: RecurrentStates, slot: int, start: int) -> float | None:
    """Return the value that a step from there reads."""
    step = states.step([StateUse(slot)], [start], [start + 1])
    found = [step.group([0]).read(layer) for layer in SHAPES]
    if any(one is None for one in found):
        assert all(one is None for one in found)
        return None
    numbers = {float(number) for one in found for tensor in one or () for number in tensor.flatten()}
    assert len(numbers) == 1
    return numbers.pop()


def test_slot_takes_bytes_of_two_states() -> None:
    assert state_bytes(SHAPES) == 4 * (12 + 10 + 12)
    assert RecurrentStates(SHAPES, 3).num_bytes == 3 * 2 * state_bytes(SHAPES)
    assert RecurrentStates(SHAPES, 3, 5).num_bytes == (3 * 2 + 5) * state_bytes(SHAPES)


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
        states.step([StateUse(0)], [start], [start + 1])


def test_group_reads_state_before_step_computed_again() -> None:
    states = RecurrentStates(SHAPES, 3)
    for slot, count in ((0, 1), (2, 2)):
        for number in range(count):
            advance(states, slot, 4 * number, 4 * number + 4, 10.0 * slot + number)
    # slot 2 computes its second step again, slot 0 its second for the first time
    step = states.step([StateUse(2), StateUse(0)], [4, 4], [5, 5])
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
        states.step([StateUse(0), StateUse(1)], [4, 0], [5, 1]).group([0, 1])


def write_parts(states: RecurrentStates, use: StateUse, start: int, end: int, *, commit: bool = True) -> None:
    """Add the count of its tokens to the state in each part of a step, as a recurrence does."""
    step = states.step([use], [start], [end])
    borders = sorted({start, *step.borders(0), end})
    for layer, shapes in SHAPES.items():
        for part, (first, last) in enumerate(itertools.pairwise(borders)):
            group = step.group([0], part)
            before = group.read(layer) or [torch.zeros(1, *shape) for shape in shapes]
            group.write(layer, [tensor + (last - first) for tensor in before])
    if commit:
        step.commit()


@pytest.mark.parametrize("border", [3, 8])
def test_snapshot_begins_second_sequence(border: int) -> None:
    states = RecurrentStates(SHAPES, 2, 3)
    write_parts(states, StateUse(0, kept=((border, 1),)), 0, 8)
    assert seen(states, 0, 8) == 8.0
    write_parts(states, StateUse(1), 0, 4)
    for _ in range(2):
        # again, as a step whose results are dropped
        write_parts(states, StateUse(1, resumed=1), border, 9, commit=False)
    write_parts(states, StateUse(1, resumed=1), border, 9)
    assert seen(states, 1, 9) == 9.0
    write_parts(states, StateUse(1), 9, 10)
    assert seen(states, 1, 10) == 10.0


def test_step_keeps_several_snapshots() -> None:
    states = RecurrentStates(SHAPES, 2, 3)
    write_parts(states, StateUse(0), 0, 2)
    write_parts(states, StateUse(0, kept=((4, 2), (6, 0))), 2, 7)
    assert seen(states, 0, 7) == 7.0
    for snapshot, border in ((2, 4), (0, 6)):
        write_parts(states, StateUse(1, resumed=snapshot), border, 8)
        assert seen(states, 1, 8) == 8.0


def test_unfinished_snapshot_is_refused() -> None:
    states = RecurrentStates(SHAPES, 2, 1)
    write_parts(states, StateUse(0, kept=((4, 0),)), 0, 6)
    write_parts(states, StateUse(0, kept=((8, 0),)), 6, 9, commit=False)
    for border in (4, 8):
        with pytest.raises(InvariantViolation, match="snapshot 0 has seen None tokens"):
            states.step([StateUse(1, resumed=0)], [border], [12])


def test_snapshot_of_wrong_token_is_refused() -> None:
    states = RecurrentStates(SHAPES, 2, 1)
    write_parts(states, StateUse(0, kept=((4, 0),)), 0, 6)
    with pytest.raises(InvariantViolation, match="snapshot 0 has seen 4 tokens"):
        states.step([StateUse(1, resumed=0)], [5], [6])
    for border in (6, 10):
        with pytest.raises(InvariantViolation, match="are kept of a step"):
            states.step([StateUse(0, kept=((border, 0),))], [6], [9])


@pytest.mark.parametrize(("num_floats", "size"), [(1024, 512), (GROUP_BYTES // 8, 2), (GROUP_BYTES, 1)])
def test_group_size_keeps_states_within_bytes(num_floats: int, size: int) -> None:
    assert RecurrentStates({0: ((num_floats // 2,), (num_floats // 2,)), 1: ((3,),)}, 1).group_size == size
