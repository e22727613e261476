from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import default_and_campaign
from torch import Tensor

from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.cpu import instructions
from loraserve_kernels.cpu.linear import candidates, cuts, gemm
from loraserve_kernels.cpu.linear import chooser as chooser_module
from loraserve_kernels.cpu.linear.candidates import Candidate
from loraserve_kernels.cpu.linear.chooser import Chooser

from . import avx2

SCRIPT = Path(__file__).with_name("forced_kernels.py")
LADDER = ("AVX2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_AMX")
AVX512_FEATURES = "+avx512f,+avx512cd,+avx512bw,+avx512dq,+avx512vl"
MACHINES: dict[str, dict[str, str]] = {"as it is": {}}
"""Processors that this one can pass for: name → environment."""
if instructions.onednn() in map(str.lower, LADDER):
    for name in LADDER[: LADDER.index(instructions.onednn().upper()) + 1]:
        MACHINES[f"oneDNN with {name}"] = {"ONEDNN_MAX_CPU_ISA": name}
    MACHINES["everything with AVX2"] = {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        **avx2.NUMBA,
    }
    if "avx512" in instructions.onednn():
        MACHINES["numba with AVX-512 but no VNNI"] = {
            "NUMBA_CPU_NAME": "skylake-avx512",
            "NUMBA_CPU_FEATURES": f"{avx2.FEATURES},{AVX512_FEATURES}",
        }
# rounded to 16 bits by libraries that sum in an order of their own
NEARLY_EXACT = {"bf16"}
FASTER_THAN = 3.0


@functools.cache
def found(machine: str) -> dict[str, Any]:
    """Return what all kernels do on a machine, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-P", str(SCRIPT)],
        env={**os.environ, **MACHINES[machine]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    formats: dict[str, Any] = json.loads(result.stdout)["formats"]
    assert formats.keys() == candidates.FORMATS.keys()
    return formats


@pytest.mark.parametrize("machine", default_and_campaign(MACHINES, default=["as it is"]))
def test_incorrectly_summing_kernels_are_detected_and_never_chosen(machine: str) -> None:
    for format, one in found(machine).items():
        for kernel, seen in one["candidates"].items():
            assert seen["is_taken_for_right"] == seen["is_right"], (format, kernel)
        assert one["candidates"][one["kernel"]]["is_right"], format


@pytest.mark.parametrize("machine", default_and_campaign(MACHINES, default=["as it is"]))
def test_own_int8_kernel_is_exact_on_all_machines(machine: str) -> None:
    assert found(machine)["int8"]["candidates"]["numba-dot"]["is_right"]


@pytest.mark.parametrize("machine", default_and_campaign(MACHINES, default=["as it is"]))
def test_row_bits_are_independent_of_loud_neighbour_rows(machine: str) -> None:
    for format, one in found(machine).items():
        for kernel, seen in one["candidates"].items():
            # fbgemm's float16 with AVX2, too, sums some rows in another order: numba's comes before
            # it
            if seen["name"] not in NEARLY_EXACT and (format, kernel) != ("float16", "fbgemm"):
                assert not seen["loud_row_spoils"], (format, kernel)
                assert not seen["batch_changes_bits"], (format, kernel)
        assert one["kernel"] != "fbgemm", format


@pytest.mark.parametrize("machine", default_and_campaign(MACHINES, default=["as it is"]))
def test_no_format_is_far_slower_than_float32(machine: str) -> None:
    slow = {
        (format, one["kernel"], rows): ratio
        for format, one in found(machine).items()
        for rows, ratio in one["ratios"].items()
        if ratio > FASTER_THAN
    }
    assert not slow


@pytest.mark.campaign
def test_int8_gives_the_same_bits_on_every_machine() -> None:
    """All kernels that round activations to 8 bits are of one rank,
    so that the clock may choose among them.
    """
    names = {"int8": "w8a8-row", "int4-rounded": "w4a8-row", "int8-g32": "w8a8-g32", "int4-g32": "w4a8-g32"}
    for format, name in names.items():
        assert {found(machine)[format]["name"] for machine in MACHINES} == {name}
        for digest in ("digest", "rotated_digest"):
            assert len({found(machine)[format][digest] for machine in MACHINES}) == 1, (format, digest)


@pytest.mark.campaign
@pytest.mark.skipif("oneDNN with AVX2" not in MACHINES, reason="about x86 instructions")
def test_avx2_overflow_of_16_bit_pairs_is_detected() -> None:
    """Otherwise the tests above would see nothing either."""
    seen = found("oneDNN with AVX2")["int8"]["candidates"]["onednn-u8"]
    assert not seen["is_right"]


@pytest.mark.parametrize(
    ("features", "instruction"),
    [
        (avx2.FEATURES, "vpmaddwd"),
        (f"{avx2.FEATURES},+avxvnni", "vpdpbusd"),
        (f"{avx2.FEATURES},{AVX512_FEATURES}", "vpmaddwd"),
        (f"{avx2.FEATURES},{AVX512_FEATURES},+avx512vnni", "vpdpbusd"),
    ],
    ids=["AVX2", "AVX2 with VNNI", "AVX-512", "AVX-512 with VNNI"],
)
@pytest.mark.skipif(len(MACHINES) == 1, reason="about x86 instructions")
def test_int8_kernel_uses_best_instruction_of_each_processor(tmp_path: Path, features: str, instruction: str) -> None:
    """Compiled alone, anew: this processor may lack it, and cached code can't be inspected."""
    script = (
        "from loraserve_kernels.cpu.linear.tiles.dot_kernel import compiled;print(compiled()._library.get_asm_str())"
    )
    environment = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert instruction in result.stdout
    assert {"vpmaddwd", "vpdpbusd"} - {instruction} == {"vpmaddwd", "vpdpbusd"} - set(result.stdout.split())


GROUPS_INSTRUCTIONS = {
    "AVX2": (avx2.FEATURES, "vpmaddubsw"),
    "AVX2 with VNNI": (f"{avx2.FEATURES},+avxvnni", "vpdpbusd"),
    "AVX-512": (f"{avx2.FEATURES},{AVX512_FEATURES}", "vpmaddubsw"),
    "AVX-512 with VNNI": (f"{avx2.FEATURES},{AVX512_FEATURES},+avx512vnni", "vpdpbusd"),
}


# the default run: each processor once, each format with either instruction
@pytest.mark.parametrize(
    ("format", "processor"),
    default_and_campaign(
        [(format, processor) for format in ("int8", "int4") for processor in GROUPS_INSTRUCTIONS],
        default=[("int8", "AVX2"), ("int4", "AVX2 with VNNI"), ("int4", "AVX-512"), ("int8", "AVX-512 with VNNI")],
    ),
)
@pytest.mark.skipif(len(MACHINES) == 1, reason="about x86 instructions")
def test_groups_take_the_best_instruction_of_each_processor(tmp_path: Path, format: str, processor: str) -> None:
    features, instruction = GROUPS_INSTRUCTIONS[processor]
    script = (
        "from loraserve_kernels.cpu.linear.tiles.g32_kernel import compiled;"
        f"print(compiled('g32-{format}-float16-float32')._library.get_asm_str())"
    )
    environment = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    words = set(result.stdout.split())
    assert {"vpmaddubsw", "vpdpbusd"} & words == {instruction}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that passes in products alone: float32 takes 10 µs for each row."""
    clock = Clock()

    def float_linear(x: Tensor, weight: object, bias: Tensor | None = None) -> Tensor:
        clock.now += 1e-5 * x.shape[0]
        return x

    monkeypatch.setattr(gemm, "float_linear", float_linear)
    return clock


def fake(
    clock: Clock,
    kernel: str,
    rank: int,
    row_s: float,
    *,
    is_exact: bool = True,
    is_there: bool = True,
    calls: list[int] | None = None,
) -> Candidate:
    """Return a kernel that takes so long for each row of 1024 × 1024,
    and for fewer weights less.
    """

    def make(weight: QuantizedWeight | Tensor) -> Callable[[Tensor], Tensor]:
        channels = weight.shape[0] if isinstance(weight, Tensor) else weight.out_features

        def product(x: Tensor) -> Tensor:
            if calls is not None:
                calls.append(channels * x.shape[0])
            clock.now += row_s * x.shape[0] * channels / 1024
            return x

        return product

    return Candidate("w8a8-row", kernel, rank, lambda: "", make, lambda *_: is_exact, lambda: is_there)


def take(clock: Clock, monkeypatch: pytest.MonkeyPatch, *given: Candidate) -> chooser_module.Choice:
    monkeypatch.setitem(candidates.FORMATS, "int8", given)
    return Chooser(clock, clock).choose("int8", 1000, 1024)


def test_fastest_exact_kernel_of_rank_is_chosen(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = take(
        clock,
        monkeypatch,
        fake(clock, "slow", 0, 2e-5),
        fake(clock, "wrong", 0, 1e-6, is_exact=False),
        fake(clock, "missing", 0, 1e-6, is_there=False),
        fake(clock, "fast", 0, 5e-6),
    )
    assert choice.kernel == "fast"
    assert [measured.verdict for measured in choice.measured] == ["", "inexact", "missing", ""]
    assert choice.ratio(8) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("library_s", "cut_s", "kernel"),
    [(5e-6, 0.0, "library"), (5e-6, 2e-4, "numba-dot"), (1e-6, 2e-5, "library"), (2e-5, 0.0, "numba-dot")],
)
def test_library_product_time_includes_cost_of_cut(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, library_s: float, cut_s: float, kernel: str
) -> None:
    """As with AMX: a library may be faster by itself, and a step with it slower."""
    given = (fake(clock, "library", 0, library_s), fake(clock, "numba-dot", 0, 1e-5))
    monkeypatch.setitem(candidates.FORMATS, "int8", given)
    asked: list[int] = []

    def cut(num_threads: int) -> float:
        asked.append(num_threads)
        return cut_s

    chooser = Chooser(clock, clock, cut_s=cut)
    choice = chooser.choose("int8", 1000, 1024)
    assert choice.kernel == kernel
    assert asked == [torch.get_num_threads()], "as many threads as a step has, not the probe's one"
    # what was measured is told as it was
    assert choice.measured[0].seconds[8] == pytest.approx(8 * library_s)


def test_cut_is_not_measured_if_all_candidates_cut(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(num_threads: int) -> float:
        raise AssertionError("there is no need")

    given = (fake(clock, "slow", 0, 2e-5), fake(clock, "fast", 0, 5e-6))
    monkeypatch.setitem(candidates.FORMATS, "int8", given)
    assert Chooser(clock, clock, cut_s=cut).choose("int8", 1000, 1024).kernel == "fast"


def test_cut_costs_all_threads_twice_region_time() -> None:
    cuts.region_s.cache_clear()
    alive = threading.active_count()
    region_s = cuts.region_s(2)
    assert 0 < region_s < 0.1
    assert cuts.cut_s(2) == 4 * region_s
    assert cuts.cut_s(1) == 0.0
    assert threading.active_count() == alive


@pytest.mark.parametrize(("row_s", "kernel"), [(3e-5, "first"), (9e-5, "second")])
def test_lower_rank_wins_only_over_much_slower_kernel(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, row_s: float, kernel: str
) -> None:
    """Their bits differ: noise must not choose between them."""
    choice = take(clock, monkeypatch, fake(clock, "first", 0, row_s), fake(clock, "second", 1, 5e-6))
    assert choice.kernel == kernel


@pytest.mark.parametrize("row_s", [5e-3, 1.0])
def test_kernel_without_instructions_is_abandoned_early_and_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, row_s: float
) -> None:
    calls: list[int] = []
    monkeypatch.setitem(
        candidates.FORMATS, "int8", (fake(clock, "reference", 0, row_s, calls=calls), fake(clock, "fast", 0, 5e-6))
    )
    chooser = Chooser(clock, clock)
    assert chooser.choose("int8", 1024, 1024).measured[0].verdict == "hopeless"
    assert max(calls) <= 1024
    count = len(calls)
    assert chooser.choose("int8", 1024, 64).measured[0].verdict == "hopeless"
    assert len(calls) == count


def test_other_processes_and_threads_make_no_kernel_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others have the processor, a kernel of few instructions takes long: which kernel is
    taken, and so a stream's bits, doesn't depend on it.
    """
    threads_seen: list[int] = []

    def make(weight: QuantizedWeight | Tensor) -> Callable[[Tensor], Tensor]:
        def product(x: Tensor) -> Tensor:
            threads_seen.append(torch.get_num_threads())
            time.sleep(0.004)
            return x

        return product

    crowded = Candidate("w8a8-row", "crowded", 0, lambda: "", make, lambda *_: True, lambda: True)
    lower = Candidate("w8a7-row", "lower", 1, lambda: "", lambda _: lambda x: x, lambda *_: True, lambda: True)
    monkeypatch.setitem(candidates.FORMATS, "int8", (crowded, lower))
    num_threads = torch.get_num_threads()
    assert Chooser().choose("int8", 1024, 1024).kernel == "crowded"
    assert set(threads_seen) == {1}, "threads that wait for each other wait for other processes too"
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize(("is_coarse", "clock_name"), [(False, "thread_time"), (True, "perf_counter")])
def test_work_clock_avoids_coarse_thread_time(
    monkeypatch: pytest.MonkeyPatch, is_coarse: bool, clock_name: str
) -> None:
    if is_coarse:
        monkeypatch.setattr(time, "thread_time", lambda: time.perf_counter() // 0.01 * 0.01)
    assert chooser_module.work_clock.__wrapped__() is getattr(time, clock_name)


def test_choice_can_be_adopted_without_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(candidates.FORMATS, "int8", (fake(clock, "a", 0, 5e-6), fake(clock, "b", 0, 1e-5)))
    first, next_one = Chooser(clock, clock), Chooser(clock, clock)
    first.choose("int8", 3000, 1000)
    monkeypatch.setitem(candidates.FORMATS, "int8", (fake(clock, "a", 0, 1e-5), fake(clock, "b", 0, 5e-6)))
    for one in first.taken():
        next_one.adopt(*one)
    now = clock.now
    assert next_one.choose("int8", 3000, 1000).kernel == "a"
    assert clock.now == now
    ((is_slower, line),) = chooser_module.lines(next_one.choices())
    assert not is_slower
    assert line == "int8 1024×1024: w8a8-row (a, ); taken over"


def test_probing_ends_after_time_budget(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(candidates.FORMATS, "int8", (fake(clock, "fast", 0, 1e-5),))
    chooser = Chooser(clock, clock)
    first = chooser.choose("int8", 1024, 1024)
    assert chooser.choose("int8", 4096, 11008) is first, "larger weights are of one class"
    chooser.spent_s = chooser_module.BUDGET_S
    spent = chooser.spent_s
    assert chooser.choose("int8", 128, 128) is first
    assert chooser.spent_s == spent
    assert chooser.choices() == [first]


@pytest.mark.parametrize(("row_s", "is_slower"), [(9e-6, False), (2e-5, True)])
def test_format_slower_than_float32_is_reported(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, row_s: float, is_slower: bool
) -> None:
    choice = take(clock, monkeypatch, fake(clock, "only", 0, row_s))
    ((told, line),) = chooser_module.lines([choice])
    assert told == choice.is_slower == is_slower
    assert "int8 1024×1024: w8a8-row (only, )" in line


@pytest.mark.parametrize("format", candidates.FORMATS)
def test_examples_cover_all_codes_without_using_generator(format: str) -> None:
    before = torch.get_rng_state()
    weight = candidates.example(format, 96, 128)
    assert torch.equal(torch.get_rng_state(), before)
    wide = weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    assert wide.min() < 0 < wide.max()
