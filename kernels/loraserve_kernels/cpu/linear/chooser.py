"""Choice of the kernel that computes a CPU's linears.

Every candidate of a format is tried on this processor, for exactness and for speed, and the fastest
exact one is taken. A load tries them on one thread and counts the processor time of that thread, so
that neither other processes nor threads that wait for each other make a kernel look slow.

The clock chooses among candidates of one *rank*, which give the same bits. A lower rank is taken
only where every candidate above it is inexact, missing, or `MUCH_SLOWER`, which noise never makes
of equals; otherwise two starts on one machine could answer differently. A rank isn't even timed
while one before it is within `MUCH_SLOWER` of float32.

A library's product cuts the step's program, which our own doesn't: among candidates of one rank its
time counts with what a cut takes (`cuts`) for the engine's threads.

float32 of the dequantized weight is the yardstick and never taken: it would need four to eight
times the bytes that the memory's plan counts.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from loraserve_kernels.common.arithmetic import Arithmetic
from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.linear import cuts, gemm
from loraserve_kernels.cpu.linear.candidates import FORMATS, Candidate, compile_candidate, example
from loraserve_kernels.cpu.linear.widen import widen

ROWS = (1, 8, 64, 256)
"""The numbers of rows that are timed: what decode steps have, and pieces of prompts."""

BUDGET_S = 0.3
"""Time of probing after which further classes of shapes take what the nearest class of the format
took.

A class takes 20 to 60 ms.
"""

SLOWER = 1.2
"""A format that takes that many times as long as float32 is slower; less may be another process's
doing.
"""

HOPELESS = 20.0
"""A candidate that takes, or would take for more rows, that many times as long as float32 isn't
tried on, nor on other classes.
"""

MUCH_SLOWER = 4.0
"""A rank whose best candidate takes that many times as long as the best of all ranks gives way."""

_HOPELESS_S = 0.03
_SCREEN_CHANNELS = 256
_SCREEN_S = 1e-3
_MAX_CHANNELS, _MAX_INPUTS = 1024, 1024
"""Larger weights are of the class of these: what a kernel lacks, it lacks for them too."""
_RUNS, _RUN_S = 5, 2e-3
_COARSEST_S, _FINE_S = 2e-3, 20e-6
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement of a candidate on a class of shapes.

    Attributes:
        seconds: of one product, by number of rows; empty where it wasn't timed.
        verdict: ``""`` where it may be taken, else why not: ``missing``, ``inexact`` or
            ``hopeless``.
    """

    arithmetic: Arithmetic
    seconds: dict[int, float]
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """Kernel that was taken for a class of shapes, and the candidates that it was taken from.

    Attributes:
        format: one of `FORMATS`.
        out_features, in_features: of the weight that was timed.
        arithmetic: of the kernel that was taken.
        measured: the candidates that were looked at, in order of rank; none where the choice was
            adopted.
        float_s: float32's seconds of one product, by number of rows; empty likewise.
    """

    format: str
    out_features: int
    in_features: int
    arithmetic: Arithmetic
    measured: tuple[Measured, ...]
    float_s: dict[int, float]

    @property
    def kernel(self) -> str:
        return self.arithmetic.kernel

    def seconds(self, num_rows: int) -> float:
        """Look up the taken kernel's time of one product.

        NaN where nothing could be taken but what wasn't timed.
        """
        of = next((m.seconds for m in self.measured if m.arithmetic == self.arithmetic and m.seconds), {})
        return of.get(num_rows, math.nan)

    def ratio(self, num_rows: int) -> float:
        """Compute the taken kernel's time as a multiple of float32's."""
        return self.seconds(num_rows) / self.float_s[num_rows]

    @property
    def is_slower(self) -> bool:
        """Whether float32 would be faster: what the format saves is memory alone."""
        return bool(self.float_s) and self.mean_ratio > SLOWER

    @property
    def mean_ratio(self) -> float:
        """The geometric mean over the numbers of rows."""
        return _mean(self.ratio(num_rows) for num_rows in self.float_s)


@dataclass(slots=True)
class Chooser:
    """Choices of one process, each made once.

    Attributes:
        clock: seconds, of which probing may take `BUDGET_S`.
        work_clock: seconds that this thread has worked, by which kernels are compared; None:
            `work_clock()`.
        spent_s: what probing has taken so far, but for compiling, which happens once on a machine.
        cut_s: seconds of all threads that a cut of the step takes, by their number.
        around: entered around each probe, with the format's name: for a load that reports what it
            is at.
        ask: called for a choice that another process of a group makes; None, or where it returns
            None: this one makes it.
        on_choice: notified of each choice that is made here; None: nothing is.
    """

    clock: Callable[[], float] = time.perf_counter
    work_clock: Callable[[], float] | None = None
    spent_s: float = 0.0
    around: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
    cut_s: Callable[[int], float] = cuts.cut_s
    ask: Callable[[tuple[str, int, int]], Arithmetic | None] | None = None
    on_choice: Callable[[tuple[str, int, int], Arithmetic], None] | None = None
    _choices: dict[tuple[str, int, int], Choice] = field(default_factory=dict)
    _hopeless: set[tuple[str, str]] = field(default_factory=set)

    def choose(self, format: str, out_features: int, in_features: int) -> Choice:
        """Choose what computes weights of this format and about this shape.

        Args:
            format: one of `FORMATS`.
        """
        key = format, min(_power(out_features), _MAX_CHANNELS), min(_power(in_features), _MAX_INPUTS)
        if key not in self._choices:
            asked = None if self.ask is None else self.ask(key)
            if asked is not None:
                self.adopt(*key, asked)
            else:
                choice = self._choices[key] = self._nearest(key) or self._probed(key)
                if self.on_choice is not None:
                    self.on_choice(key, choice.arithmetic)
        return self._choices[key]

    def adopt(self, format: str, out_features: int, in_features: int, arithmetic: Arithmetic) -> None:
        """Take for a class of shapes what another process of this machine took.

        Both are as `taken` gives them; no clock is read again.
        """
        choice = Choice(format, out_features, in_features, arithmetic, (), {})
        self._choices[format, out_features, in_features] = choice

    def taken(self) -> list[tuple[str, int, int, Arithmetic]]:
        """List each class so far with what was taken for it.

        A class is a format, out_features and in_features.
        """
        return [(*key, choice.arithmetic) for key, choice in self._choices.items()]

    def choices(self) -> list[Choice]:
        """List the choices made so far, each once."""
        return list({id(choice): choice for choice in self._choices.values()}.values())

    def _nearest(self, key: tuple[str, int, int]) -> Choice | None:
        """Find the format's choice that is nearest in size once probing has taken its time.

        None without one.
        """
        if self.spent_s < BUDGET_S:
            return None
        others = [other for other in self._choices if other[0] == key[0]]
        if not others:
            return None
        return self._choices[min(others, key=lambda other: abs(math.log(other[1] * other[2] / (key[1] * key[2]))))]

    def _probed(self, key: tuple[str, int, int]) -> Choice:
        with self.around(key[0]):
            for candidate in FORMATS[key[0]]:
                if candidate.is_there():
                    compile_candidate(candidate, key[0])
            clock = self.work_clock or work_clock()
            began, num_threads = self.clock(), threads.num_threads()
            with threads.alone():
                cut_s = functools.partial(self.cut_s, num_threads)
                choice = probe(*key, clock=clock, hopeless=self._hopeless, times_all=False, cut_s=cut_s)
            self.spent_s += self.clock() - began
            return choice


@functools.cache
def chooser() -> Chooser:
    return Chooser()


@functools.cache
def work_clock() -> Callable[[], float]:
    """Choose a clock of the processor's time that the calling thread has taken.

    It is a clock of all time where the system counts the former too coarsely.
    """
    began_s = work_s = time.thread_time()
    deadline_s = time.perf_counter() + _COARSEST_S
    while True:
        previous_s, work_s = work_s, time.thread_time()
        if 0 < work_s - previous_s < _FINE_S:
            return time.thread_time
        # by its own time where it moves: a thread that waits for a core has all of its readings yet
        is_still = work_s == began_s
        if (is_still and time.perf_counter() >= deadline_s) or work_s - began_s >= _COARSEST_S:
            return time.perf_counter


def probe(
    format: str,
    out_features: int,
    in_features: int,
    *,
    rows: tuple[int, ...] = ROWS,
    runs: int = _RUNS,
    run_s: float = _RUN_S,
    clock: Callable[[], float] = time.perf_counter,
    hopeless: set[tuple[str, str]] | None = None,
    times_all: bool = True,
    cut_s: Callable[[], float] = lambda: 0.0,
) -> Choice:
    """Time every candidate of a format on weights of this shape.

    Args:
        runs, run_s: each number of rows is timed that often at most, and no longer than about that
            many seconds.
        hopeless: (format, kernel) of candidates that aren't tried; those that turn out to be so are
            added.
        times_all: also candidates of a rank that isn't looked at, since one before it is fast.
        cut_s: what a library's product takes in addition; measured where there is one of our own as
        well.
    """
    hopeless = set() if hopeless is None else hopeless
    weight = example(format, out_features, in_features)
    wide = weight if isinstance(weight, Tensor) else widen(weight)
    packed = gemm.pack_float(wide.float())
    inputs = {n: _activations(n, in_features) for n in rows}

    def float32(x: Tensor) -> Tensor:
        return gemm.float_linear(x, packed)

    float_s = {n: _best(functools.partial(float32, x), runs, run_s, clock) for n, x in inputs.items()}
    measured: list[Measured] = []
    for _, group in groupby(FORMATS[format], key=lambda candidate: candidate.rank):
        for candidate in group:
            verdict = _verdict(candidate, format, in_features, clock, hopeless)
            seconds: dict[int, float] = {}
            if not verdict:
                product = candidate.make(weight)
                # another process may have had the processor all the while: what looks slow is timed
                # again
                for _ in range(_TRIES):
                    again = _times(product, inputs, float_s, runs, run_s, clock)
                    if len(again) < len(rows):
                        hopeless.add((format, candidate.kernel))
                        verdict, seconds = "hopeless", {}
                        break
                    seconds = {n: min(seconds.get(n, math.inf), again[n]) for n in rows}
                    if _score(seconds, float_s) <= MUCH_SLOWER:
                        break
            measured.append(Measured(candidate.arithmetic, seconds, verdict))
        if not times_all and any(not m.verdict and _score(m.seconds, float_s) <= MUCH_SLOWER for m in measured):
            break
    arithmetic = _taken(FORMATS[format], measured, float_s, cut_s)
    return Choice(format, out_features, in_features, arithmetic, tuple(measured), float_s)


def _times(
    product: Callable[[Tensor], Tensor],
    inputs: dict[int, Tensor],
    float_s: dict[int, float],
    runs: int,
    run_s: float,
    clock: Callable[[], float],
) -> dict[int, float]:
    """Measure seconds by number of rows, fewest first.

    Larger numbers are missing where they would take hopelessly long.
    """
    seconds: dict[int, float] = {}
    last: tuple[int, float] | None = None
    for n, x in inputs.items():
        # no kernel that is worth its name takes longer for each row than it took for fewer
        if last is not None and last[1] * n / last[0] > HOPELESS * float_s[n] + _HOPELESS_S:
            break
        seconds[n] = _best(functools.partial(product, x), runs, run_s, clock)
        last = n, seconds[n]
    return seconds


def _verdict(
    candidate: Candidate, format: str, in_features: int, clock: Callable[[], float], hopeless: set[tuple[str, str]]
) -> str:
    if (format, candidate.kernel) in hopeless:
        return "hopeless"
    try:
        if not candidate.is_there():
            return "missing"
        small = example(format, _SCREEN_CHANNELS, in_features)
        wide = small if isinstance(small, Tensor) else widen(small)
        x, packed, product = _activations(1, in_features), gemm.pack_float(wide.float()), candidate.make(small)
        float_s = _best(lambda: gemm.float_linear(x, packed), 3, _SCREEN_S, clock)
        if _best(lambda: product(x), 3, _SCREEN_S, clock) > HOPELESS * float_s + _SCREEN_S:
            hopeless.add((format, candidate.kernel))
            return "hopeless"
        return "" if candidate.is_exact(candidate, format, in_features) else "inexact"
    except (RuntimeError, AttributeError):
        # torch was built without it, or the processor lacks what it needs
        return "missing"


def _taken(
    candidates: tuple[Candidate, ...],
    measured: list[Measured],
    float_s: dict[int, float],
    cut_s: Callable[[], float],
) -> Arithmetic:
    """Choose the fastest of the first rank that isn't much slower than the best of all.

    Where none can be used, it is the last candidate, which needs nothing.
    """
    scores = {index: _score(m.seconds, float_s) for index, m in enumerate(measured) if not m.verdict}
    if not scores:
        return candidates[-1].arithmetic
    bound = MUCH_SLOWER * min(scores.values())
    rank = min(candidates[index].rank for index, score in scores.items() if score <= bound)
    equals = [index for index in scores if candidates[index].rank == rank]
    if len({candidates[index].is_own for index in equals}) > 1:
        cut = cut_s()
        for index in equals:
            if not candidates[index].is_own:
                seconds = {n: one + cut for n, one in measured[index].seconds.items()}
                scores[index] = _score(seconds, float_s)
    return measured[min(equals, key=scores.__getitem__)].arithmetic


def _score(seconds: dict[int, float], float_s: dict[int, float]) -> float:
    return _mean(seconds[n] / float_s[n] for n in float_s)


def _mean(numbers: Iterable[float]) -> float:
    logs = [math.log(number) for number in numbers]
    return math.exp(sum(logs) / len(logs))


def _best(work: Callable[[], object], runs: int, run_s: float, clock: Callable[[], float]) -> float:
    """Measure the seconds of the fastest run, after one that isn't counted.

    The first may make what later runs use again.
    """
    began = clock()
    work()
    best = clock() - began
    if best > 20 * run_s:
        runs = 1
    elapsed: list[float] = []
    end = clock() + run_s
    # three at least: another process may have had the processor for longer than all of them
    while len(elapsed) < min(3, runs) or (len(elapsed) < runs and clock() < end):
        start = clock()
        work()
        elapsed.append(clock() - start)
    return min(elapsed)


def _power(number: int) -> int:
    """Round up to the next power of two, 64 at least."""
    return 1 << max(6, (number - 1).bit_length())


def _activations(num_rows: int, in_features: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, num_rows * in_features).view(num_rows, in_features)


def lines(choices: Iterable[Choice]) -> Iterator[tuple[bool, str]]:
    """Yield log lines on choices: whether the best is slower than float32, in words too."""
    for choice in choices:
        if not choice.float_s:
            yield False, f"{choice.format} {choice.out_features}×{choice.in_features}: {choice.arithmetic}; taken over"
            continue
        ratios = ", ".join(f"{choice.ratio(n):.2f} at {n}" for n in choice.float_s)
        what = f"{choice.format} {choice.out_features}×{choice.in_features}: {choice.arithmetic}"
        yield choice.is_slower, f"{what}; time as a multiple of float32's by rows: {ratios}"
