"""Kernels of the weight-only linears with one piece of their source replaced: what `test_gpu_gemm`
compares shows each of them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")


from loraserve_kernels.common.quantized import quantize
from loraserve_kernels.gpu.gemm import decode_gemm, prefill_gemm
from loraserve_kernels.gpu.gemm import gemm as gpu_gemm
from loraserve_kernels.gpu.gemm.gemm import weight_only_linear

pytestmark = [pytest.mark.interpreted, pytest.mark.campaign]


def mutate(module: ModuleType, kernel: str, old: str, new: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{module.__name__} has {source.count(old)} times: {old}"
    path = folder / f"{kernel}_mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, path.stem, mutant)
    spec.loader.exec_module(mutant)
    patch.setattr(gpu_gemm, kernel, getattr(mutant, kernel))
    # what a mutant leaves in the counters is nobody else's
    counters = torch.zeros(64, dtype=torch.int32)
    patch.setattr(gpu_gemm, "_counters", lambda device: counters)


def is_linear_caught(patch: pytest.MonkeyPatch, kind: str, num_rows: int, in_features: int) -> bool:
    """A wrong result of the first call or of the second.

    `int4` has groups of 32 and zeros, and so has `int8-groups`.
    """
    torch.manual_seed(0)
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    has_groups = kind in ("int4", "int8-groups")
    # groups of different sizes
    weight = torch.randn(70, in_features) * 2.0 ** (torch.arange(in_features) // 32 % 3)
    weight = quantize(weight, kind.partition("-")[0], 32 if has_groups else None, has_zeros=has_groups)
    wide = torch.full((num_rows + 1, in_features + 24), float("nan"), dtype=torch.float16)
    x, bias = wide[:num_rows, :in_features], torch.randn(70).half() * 9
    x.copy_(torch.randn(x.shape))
    expected = x.double() @ weight.dequantize(torch.float64).T + bias.double()
    tolerance = 2 * torch.finfo(torch.float16).eps * expected.abs().max()
    errors = [(weight_only_linear(x, weight, bias) - expected).abs().max() for _ in range(2)]
    return not all(error <= tolerance for error in errors)


@pytest.mark.parametrize(
    ("kind", "num_rows", "in_features"),
    [("int4", 35, 608), ("int8", 3, 570), ("int4", 70, 256), ("int8-groups", 35, 608), ("int8-groups", 70, 256)],
)
def test_the_unmutated_linear_is_right(
    kind: str, num_rows: int, in_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_linear_caught(monkeypatch, kind, num_rows, in_features)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("range(1, PARTS)", "range(1, 1)", id="parts are forgotten"),
        pytest.param("tl.store(counter_ptr, 0)", "tl.store(counter_ptr, PARTS)", id="counters aren't cleared"),
        pytest.param("tl.minimum(split * part + part, K)", "K", id="parts overlap"),
        pytest.param("tl.minimum(k // GROUP + j,", "tl.minimum(k // GROUP,", id="groups have the first one's scale"),
        pytest.param("lo, hi = unpack_nibbles", "hi, lo = unpack_nibbles", id="nibbles are swapped"),
        pytest.param("at + offs_k < stride_codes", "at + offs_k < K", id="x is read past its end"),
        pytest.param("x_ptrs + BLOCK_M * stride_x + at", "x_ptrs + at", id="the second half is the first"),
        pytest.param("offs_n // 4 + group", "offs_n // 8 + group", id="zeros are the neighbours'"),
        pytest.param("planes + half * (BLOCK_M * BLOCK_N)", "planes", id="the second half's planes are the first's"),
        pytest.param("y = y + tl.load(bias_ptr", "y = y + 0 * tl.load(bias_ptr", id="the bias is forgotten"),
        pytest.param("own + BLOCK_M * BLOCK_N, acc2", "own + BLOCK_M * BLOCK_N, acc",
            id="the first half is stored twice"),
    ],
)  # fmt: skip
def test_a_mutant_for_few_rows_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutate(decode_gemm, "decode_gemm_kernel", old, new, tmp_path, monkeypatch)
    assert is_linear_caught(monkeypatch, "int4", 35, 608)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_adding_up_before_the_last_part_is_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutate(decode_gemm, "decode_gemm_kernel", "== PARTS - 1", "== PARTS - 2", tmp_path, monkeypatch)
    # of two parts each would be the last
    assert gpu_gemm.split_k(70, 1056) == 4
    assert is_linear_caught(monkeypatch, "int4", 3, 1056)


def test_forgotten_channel_scales_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutate(decode_gemm, "decode_gemm_kernel", "return y * tl.load", "return y + 0 * tl.load", tmp_path, monkeypatch)
    assert is_linear_caught(monkeypatch, "int8", 3, 570)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("tl.minimum(k // GROUP + j,", "tl.minimum(k // GROUP,", id="groups have the first one's scale"),
        pytest.param("group = tl.minimum(k // GROUP + j, K // GROUP - 1)",
            "group = tl.minimum(k // GROUP + j + 1, K // GROUP - 1)", id="groups have the next one's scale"),
        pytest.param("tl.dot(x, values) * scale[None, :]", "tl.dot(x, values)", id="scales of groups are ignored"),
        pytest.param("tl.dot(x2, values) * scale[None, :]", "tl.dot(x2, values)",
            id="scales of groups are ignored in the second half"),
        pytest.param("unpack_bytes(codes, zeros, FORMAT, HAS_ZEROS,", "unpack_bytes(codes, zeros, FORMAT, False,",
            id="zeros are ignored"),
        pytest.param('if FORMAT != "plain" and not BY_GROUP:', 'if FORMAT != "plain" and FORMAT != "int4":',
            id="the first group's scale is multiplied in again"),
    ],
)  # fmt: skip
def test_mutant_for_few_byte_group_rows_is_caught(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutate(decode_gemm, "decode_gemm_kernel", old, new, tmp_path, monkeypatch)
    assert is_linear_caught(monkeypatch, "int8-groups", 35, 608)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("tl.load(scales_ptr + scale_at + (k // GROUP)", "tl.load(scales_ptr + scale_at + 0 * (k // GROUP)",
            id="every group is the first"),
        pytest.param("tl.dot(x, values) * scale[None, :]", "tl.dot(x, values)", id="scales of groups are ignored"),
        pytest.param("if not BY_GROUP:", "if not IS_PACKED:", id="the first group's scale is multiplied in again"),
        pytest.param("offs_n // 4 + (k // GROUP) * stride_zero_g", "offs_n // 4", id="zeros are the first group's"),
    ],
)  # fmt: skip
def test_mutant_for_many_byte_group_rows_is_caught(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutate(prefill_gemm, "prefill_gemm_kernel", old, new, tmp_path, monkeypatch)
    config = gpu_gemm.PREFILL_CONFIG
    monkeypatch.setattr(gpu_gemm, "PREFILL_CONFIG", type(config)(64, 64, 64, 8, 4, 2))
    assert is_linear_caught(monkeypatch, "int8-groups", 70, 256)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(".permute(0, 2, 1)", "", id="nibbles aren't interleaved"),
        pytest.param("tl.load(scales_ptr + scale_at + (k // GROUP)", "tl.load(scales_ptr + scale_at + 0 * (k // GROUP)",
            id="every group is the first"),
        pytest.param("hi = hi.to(tl.float32) * scale[None, :]", "hi = hi.to(tl.float32)",
            id="high nibbles aren't scaled"),
        pytest.param("in_band // band_rows", "in_band % band_rows", id="column tiles are forgotten"),
    ],
)  # fmt: skip
def test_a_mutant_for_many_rows_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutate(prefill_gemm, "prefill_gemm_kernel", old, new, tmp_path, monkeypatch)
    config = gpu_gemm.PREFILL_CONFIG
    monkeypatch.setattr(gpu_gemm, "PREFILL_CONFIG", type(config)(64, 64, 64, 8, 4, 2))
    assert is_linear_caught(monkeypatch, "int4", 70, 256)
