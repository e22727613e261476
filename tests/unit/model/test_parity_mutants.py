"""What test_parity would say of a server that is silently wrong: each of the ways in which others
are is found within a few draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from loraserve.adapters.tuners import compilation, lora
from loraserve.memory.devices import cpu
from loraserve.memory.kv.prefix_cache import Activation
from loraserve.memory.loading import lowering
from loraserve_kernels.cpu.lora.layout import LoraModule

from . import conftest, test_parity
from .test_parity import TOLERANCE, Drawn, differences, own_error

Patch = Callable[[pytest.MonkeyPatch], None]


def lowers(change: Callable[[LoraModule], LoraModule]) -> Patch:
    """Change each module after it was lowered."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        lower = lowering._lower
        monkeypatch.setattr(lowering, "_lower", lambda *arguments: change(lower(*arguments)))

    return patch


def ignore_alpha_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lora, compilation):
        read = module.first_matches
        # alphas are numbers that agree with nothing in the file; ranks would be found wrong
        calls: list[int] = []

        def first_matches(*arguments: Any, read: Any = read, calls: list[int] = calls) -> dict[str, int]:
            calls.append(1)
            return {} if len(calls) % 2 == 0 else read(*arguments)

        monkeypatch.setattr(module, "first_matches", first_matches)


def drop_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = cpu.pack_adapter
    monkeypatch.setattr(cpu, "pack_adapter", lambda modules, **more: pack([m for m in modules if m.layer != 1], **more))


def swap_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    make = conftest.make_plan

    def swapped(segments: Any, num_tokens: int) -> Any:
        adapters = [adapter for adapter, _, _ in segments]
        return make(
            [(a, *rows) for a, (_, *rows) in zip(adapters[1:] + adapters[:1], segments, strict=True)], num_tokens
        )

    monkeypatch.setattr(conftest, "make_plan", swapped)


def act_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_parity, "find_activation", lambda digest, *_: Activation(digest, 0))


def forget_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = cpu.pack_adapter
    monkeypatch.setattr(cpu, "pack_adapter", lambda modules, **more: pack(modules, **{**more, "norms": ()}))


MUTANTS: dict[str, Patch] = {
    "scale ignored": lowers(lambda m: replace(m, scaling=1.0)),
    "pattern ignored": ignore_alpha_patterns,
    "layer dropped": drop_a_layer,
    "slot swapped": swap_slots,
    "magnitude ignored": lowers(lambda m: replace(m, dora_delta=None)),
    "bias ignored": lowers(lambda m: replace(m, bias_delta=None)),
    "saved rows ignored": lowers(lambda m: replace(m, row_overrides=None)),
    "saved norms ignored": forget_norms,
    "invocation ignored": act_everywhere,
    "rank dropped": lowers(
        lambda m: replace(m, lora_a=m.lora_a[1:], lora_b=m.lora_b[:, 1:]) if m.lora_a.shape[0] > 1 else m
    ),
    "transposed rows of A": lowers(lambda m: replace(m, lora_a=m.lora_a.flip(0))),
}  # fmt: skip


@pytest.fixture(scope="module")
def draws(tmp_path_factory: pytest.TempPathFactory) -> list[Drawn]:
    """Bases with adapters of all kinds between them."""
    return [Drawn(seed, tmp_path_factory.mktemp("drawn")) for seed in (1, 13, 19)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant: str, draws: list[Drawn], monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    assert any(
        difference > 100 * TOLERANCE and difference > 3 * own_error(row)
        for drawn in draws
        for rows in [drawn.rows()]
        for row, difference in zip(rows, differences(drawn, rows), strict=True)
    )


def test_unmutated_decoder_shows_no_difference(draws: list[Drawn]) -> None:
    torch.manual_seed(0)
    for drawn in draws:
        rows = drawn.rows()
        for row, difference in zip(rows, differences(drawn, rows), strict=True):
            assert difference < TOLERANCE or difference < 3 * own_error(row), row.what
