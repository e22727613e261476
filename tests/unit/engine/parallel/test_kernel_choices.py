"""Ranks compute with one kernel for linears of a kind, whichever of them needs it first."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import FileStore

from loraserve.engine.parallel import kernel_choices
from loraserve.errors import EngineError
from loraserve.types import KernelChoice
from loraserve_kernels.cpu.linear.chooser import Chooser


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Chooser]:
    """Choosers of two ranks, as if each were its process's own."""
    choosers = []
    for _ in range(2):
        chooser = Chooser()
        monkeypatch.setattr(kernel_choices, "chooser", lambda chooser=chooser: chooser)
        kernel_choices.share_choices(FileStore(str(tmp_path / "store"), 2))
        choosers.append(chooser)
    return choosers


def test_choice_comes_from_first_rank_needing_kernel(ranks: list[Chooser]) -> None:
    for first, second, size in ((*ranks, 64), (*reversed(ranks), 128)):
        chosen = first.choose("int8", size, 64)
        assert chosen.measured
        adopted = second.choose("int8", size, 64)
        assert not adopted.measured
        assert adopted.arithmetic == chosen.arithmetic
    assert sorted(ranks[0].taken()) == sorted(ranks[1].taken())


def test_waiting_rank_is_notified_of_rank_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise EngineError("rank 1 of 2 ended with code 1.")

    chooser = Chooser()
    monkeypatch.setattr(kernel_choices, "chooser", lambda: chooser)
    store = FileStore(str(tmp_path / "store"), 2)
    kernel_choices.share_choices(store, end)
    # another rank has said that it will choose
    store.add("kernel/int8/64/64/asked", 1)
    with pytest.raises(EngineError, match="rank 1 of 2"):
        chooser.choose("int8", 64, 64)
    kernel_choices.choose_alone()
    assert chooser.choose("int8", 64, 64).measured


def test_kernels_of_running_engine_are_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = Chooser()
    monkeypatch.setattr(kernel_choices, "chooser", lambda: chooser)
    kernels = [KernelChoice("int8", 64, 64, "w8a16", "torch", "any")]
    kernel_choices.adopt_kernels(kernels)
    assert kernel_choices.chosen_kernels() == kernels
    assert chooser.choose("int8", 64, 64).kernel == "torch"
