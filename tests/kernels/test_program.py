"""Kernels that run one after the other in one region of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from loraserve_kernels.cpu.program import gather_kernel, norm_kernel
from loraserve_kernels.cpu.program.program import Program, kernel


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def gathering(program: Program, x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> int:
    k = gather_kernel
    words = {
        k.NUM_ROWS: len(rows),
        k.ROWS: rows.data_ptr(),
        k.X: x.data_ptr(),
        k.OUT: out.data_ptr(),
        k.WIDTH: x.shape[1],
    }
    return program.add(kernel("gather"), words)


def make_turning() -> tuple[Program, list[torch.Tensor], torch.Tensor]:
    """Return a program that turns 7 rows around 400 times, its buffers and the rows' order."""
    buffers, rows = [torch.randn(7, 19), torch.zeros(7, 19)], torch.tensor([1, 2, 3, 4, 5, 6, 0])
    program = Program()
    for number in range(400):
        gathering(program, buffers[number % 2], buffers[1 - number % 2], rows)
    program.freeze()
    return program, buffers, rows


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.usefixtures("two_threads")
def test_each_kernel_sees_all_writes_of_previous_kernel(num_threads: int) -> None:
    """Rows are turned around 400 times: one that was read too early would stay where it was."""
    program, buffers, _rows = make_turning()
    expected = buffers[0].clone()
    for _ in range(5):
        program.reset()
        program.run(0, 400, num_threads)
        expected = expected.roll(-400 % 7, 0)
        assert torch.equal(buffers[0], expected)


def test_range_runs_exactly_and_skips_slots_without_kernel() -> None:
    first, second, third = torch.randn(2, 16), torch.zeros(2, 16), torch.zeros(2, 16)
    program, rows = Program(), torch.tensor([0, 1])
    gathering(program, first, second, rows)
    place = program.add(None, {gather_kernel.NUM_ROWS: 2})
    gathering(program, second, third, rows)
    program.freeze()
    program.reset()
    program.run(0, 2, 1)
    assert torch.equal(second, first)
    assert not third.any()
    program.reset()
    program.run(0, 3, 2)
    assert torch.equal(third, first)
    program.blocks[place] = program.blocks[0]
    program.blocks[place, gather_kernel.X], program.blocks[place, gather_kernel.ROWS] = 0, 0
    program.blocks[place, gather_kernel.NUM_ROWS] = 0
    program.put([place], kernel("gather"))
    program.reset()
    program.run(0, 3, 2)


@pytest.mark.usefixtures("two_threads")
def test_program_waits_for_descheduled_threads() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            torch.ones(64).sum()

    others = [threading.Thread(target=spin) for _ in range(4)]
    for thread in others:
        thread.start()
    try:
        test_each_kernel_sees_all_writes_of_previous_kernel(2)
    finally:
        stop.set()
        for thread in others:
            thread.join()


@pytest.mark.parametrize("width", [16, 48, 61])
@pytest.mark.parametrize("num_rows", [1, 5, 130])
@pytest.mark.parametrize("delta", ["none", "plain", "normed"])
def test_sums_and_norms_equal_definition(width: int, num_rows: int, delta: str) -> None:
    k = norm_kernel
    hidden, added = torch.randn(num_rows, width) * 3, torch.randn(num_rows, width)
    weight, own = torch.randn(width), torch.randn(width)
    out, eps, scale = torch.zeros(num_rows, width), 1e-5, 0.22
    table = torch.tensor([(own if row % 3 == 1 else weight).data_ptr() for row in range(num_rows)])
    numbers = torch.tensor([eps, 0, scale, 0]).view(torch.int64)
    expected = hidden.double()
    if delta != "none":
        term = added.double()
        if delta == "normed":
            term = term / (term.square().mean(1, keepdim=True) + eps).sqrt() * own.double()
        expected = expected + scale * term
    words = {
        k.NUM_ROWS: num_rows,
        k.WIDTH: width,
        k.HIDDEN: hidden.data_ptr(),
        k.DELTA: added.data_ptr() if delta != "none" else 0,
        k.DELTA_STRIDE: width,
        k.DELTA_WEIGHT: own.data_ptr() if delta == "normed" else 0,
        k.WEIGHT: weight.data_ptr(),
        k.WEIGHTS: table.data_ptr(),
        k.OUT: out.data_ptr(),
        k.EPS: int(numbers[0]),
        k.DELTA_SCALE: int(numbers[1]),
    }
    program = Program()
    program.add(kernel("norm"), words)
    program.freeze()
    program.reset()
    program.run(0, 1, 2)
    torch.testing.assert_close(hidden.double(), expected, rtol=0, atol=1e-5)
    weights = torch.stack([own if row % 3 == 1 else weight for row in range(num_rows)]).double()
    normed = expected / (expected.square().mean(1, keepdim=True) + eps).sqrt() * weights
    torch.testing.assert_close(out.double(), normed, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("two_threads")
def test_late_threads_join_or_find_no_work() -> None:
    program, buffers, _rows = make_turning()
    expected = buffers[0].clone()
    program.reset()
    program.run(0, 400, 1)
    expected = expected.roll(-400 % 7, 0)
    assert torch.equal(buffers[0], expected)

    def enter(delay_s: float) -> None:
        # as a thread of OpenMP's does, once the system lets it
        time.sleep(delay_s)
        program._call(program._args_address)

    for delay_s in (0.0, 0.0001, 0.0003, 0.001, 0.05) * 4:
        # all have left before the next run, as OpenMP's have
        others = [threading.Thread(target=enter, args=(delay_s,)) for _ in range(3)]
        program.reset()
        for other in others:
            other.start()
        program.run(0, 400, 1)
        for other in others:
            other.join(20)
            assert not other.is_alive()
        expected = expected.roll(-400 % 7, 0)
        assert torch.equal(buffers[0], expected)
