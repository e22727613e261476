"""Files of measured tile sizes: what kernels take from one, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from loraserve_kernels.errors import InvalidTuning
from loraserve_kernels.gpu import tuning
from loraserve_kernels.gpu.attention import paged
from loraserve_kernels.gpu.gemm import gemm
from loraserve_kernels.gpu.lora import apply as lora

SIZES = {
    "decode_gemm": {"plain/96x256/16": {"block_n": 32, "num_stages": 3}},
    "shrink": {"256/16": {"num_warps": 8}},
    "expand": {"64+32/16/16": {"block": 64}},
    "attend_chunk": {"64/4": {"num_stages": 2}},
}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    tuning.active.cache_clear()
    yield
    tuning.active.cache_clear()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "sizes.json"
    tuning.write(path, "A GPU", SIZES, {"versions": {}})
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    return path


def test_kernels_read_sizes_of_own_shapes(file: Path) -> None:
    weight = torch.zeros(96, 256, dtype=torch.bfloat16)
    config = gemm.decode_config(3, weight)
    assert (config.block_n, config.num_stages) == (32, 3)
    assert config.num_warps == gemm.DECODE_CONFIGS[16].num_warps
    assert gemm.decode_config(17, weight) == gemm.DECODE_CONFIGS[32]
    assert lora.shrink_config(16, 256).num_warps == 8
    assert lora.expand_config(16, 8, torch.bfloat16, (64, 32, 0)).block == 64
    assert paged.chunk_config(64, 4).num_stages == 2


def test_defaults_hold_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    assert gemm.decode_config(3, torch.zeros(96, 256)) == gemm.DECODE_CONFIGS[16]


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        ({"warp_gemm": {}}, "no kernel is called"),
        ({"decode_gemm": {"a": {"split_k": 4}}}, "no field of decode_gemm"),
        ({"prefill_gemm": {"a": {"block_m": 16}}}, "one of 64, 128, 256"),
        ({"shrink": {"a": {"num_warps": "4"}}}, "num_warps is '4'"),
    ],
)
def test_sizes_unknown_to_kernels_are_refused(kernels: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    # a kernel without shapes is refused too
    document = {"kernels": kernels if kernels != {"warp_gemm": {}} else {"warp_gemm": {"a": {}}}}
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidTuning, match=words):
        tuning.read(path)


@pytest.mark.parametrize("text", ["", "[]", '{"device": "A GPU"}', '{"kernels": {"shrink": 3}}'])
def test_file_of_unknown_form_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(text)
    with pytest.raises(InvalidTuning, match="isn't a file of tile sizes"):
        tuning.read(path)


def test_refused_sizes_leave_the_old_file(file: Path) -> None:
    with pytest.raises(InvalidTuning):
        tuning.write(file, "A GPU", {"shrink": {"a": {"num_warps": 3}}}, {})
    assert tuning.read(file) == SIZES


def test_device_name_becomes_a_file_name() -> None:
    assert tuning.file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3.json"
