"""Adapters by the thousand."""

from __future__ import annotations

from pathlib import Path

from benchmarks.make_model import SIZES
from benchmarks.synthetic import Adapters, bytes_per_rank
from loraserve.adapters.digest import adapter_digest
from loraserve.adapters.format.peft_format import read_adapter
from loraserve.sdk.files.peft_directory import find_files

TINY = SIZES["tiny"]


def test_each_adapter_has_own_rank_and_unique_digest() -> None:
    adapters = Adapters(TINY, targets=("q_proj",))
    read = [read_adapter(*adapters.files(number)) for number in range(12)]
    assert [one.config["r"] for one in read] == [8, 16, 32, 64] * 3
    assert len({adapter_digest(one.config, one.tensors) for one in read}) == 12


def test_the_same_number_gives_the_same_bytes() -> None:
    first, second = (Adapters(TINY, targets=("q_proj", "v_proj")).files(5) for _ in range(2))
    assert first == second


def test_adapters_of_same_rank_differ_in_single_row() -> None:
    adapters = Adapters(TINY, targets=("q_proj",))
    (_, first), (_, second) = adapters.files(0), adapters.files(4)
    differing = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    assert 0 < differing[-1] - differing[0] < 2 * TINY.hidden


def test_size_is_as_announced() -> None:
    adapters = Adapters(TINY, ranks=(8,), targets=("q_proj", "v_proj"))
    tensors = 8 * bytes_per_rank(TINY, ("q_proj", "v_proj"))
    assert 0 < adapters.num_bytes(3) - tensors < 4096
    assert len(adapters.files(3)[1]) == adapters.num_bytes(3)


def test_written_directory_is_accepted_by_client(tmp_path: Path) -> None:
    folder = Adapters(TINY, targets=("q_proj",)).write(7, tmp_path)
    assert folder.name == "lora-00007"
    files = find_files(folder)
    assert (files.config.parent, [path.parent for path in files.weights]) == (folder, [folder])
