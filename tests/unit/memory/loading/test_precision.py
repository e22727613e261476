"""What an operator lets an adapter lose is measured as it is defined: on the whole products,
which only tests make.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapters_store import LocalStore
from loraserve.errors import AdapterUnservable
from loraserve.memory.devices.copies import DirectCopies
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.devices.gpu import GpuDevice
from loraserve.memory.loading.load import load_adapter
from loraserve.memory.loading.precision import Precision, loss, round_to_held, truncate
from loraserve_kernels.cpu.lora.layout import LoraModule, ReplacedRows


def product(m: LoraModule) -> torch.Tensor:
    return (
        m.lora_b.double()
        @ torch.diag(torch.as_tensor(m.scaling).double().expand(m.lora_a.shape[0]))
        @ m.lora_a.double()
    )


def relative(m: LoraModule, other: LoraModule) -> float:
    return float((product(m) - product(other)).norm() / product(m).norm())


def decaying(*, rank: int = 8, scaling: float | torch.Tensor = 1.5, rows: int = 40, width: int = 33) -> LoraModule:
    """Ranks of which each is a third as strong as the one before, mixed."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(rank, width, generator=generator), torch.randn(rows, rank, generator=generator)
    mix = torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0]
    weaker = 3.0 ** -torch.arange(float(rank))
    return LoraModule(0, "q_proj", mix @ a, (b * weaker) @ mix.T, scaling)


@pytest.mark.parametrize("scaling", [1.5, torch.arange(1.0, 9.0)], ids=["one", "of each rank"])
@pytest.mark.parametrize("error", [0.2, 0.02, 1e-3])
def test_the_fewest_ranks_within_the_error_are_kept(error: float, scaling: float | torch.Tensor) -> None:
    m = decaying(scaling=scaling)
    strengths = torch.linalg.svdvals(product(m))[:8]
    fewest = next(k for k in range(1, 9) if float(strengths[k:].norm() / strengths.norm()) <= error)
    cut = truncate(m, error)
    assert 1 < fewest < 8
    assert cut.lora_a.shape[0] == fewest
    assert relative(m, cut) <= error * 1.0001
    torch.testing.assert_close(cut.lora_a.norm(dim=1), cut.lora_b.norm(dim=0))


def test_error_requiring_every_rank_leaves_module_unchanged() -> None:
    m = decaying()
    assert truncate(m, 1e-6) is m


def test_zero_update_keeps_single_rank() -> None:
    m = truncate(LoraModule(0, "q_proj", torch.randn(4, 8), torch.zeros(9, 4), 1.0), 0.01)
    assert m.lora_a.shape == (1, 8)
    assert not product(m).any()


def test_rank_wider_than_matrix_is_cut_without_loss() -> None:
    m = LoraModule(0, "q_proj", torch.randn(9, 4), torch.randn(5, 9), 1.0)
    cut = truncate(m, 1e-9)
    assert cut.lora_a.shape[0] == 4
    assert relative(m, cut) < 1e-6


@pytest.mark.parametrize("scaling", [0.5, torch.arange(1.0, 9.0)], ids=["one", "of each rank"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("error", [None, 0.05])
def test_loss_is_measured_on_whole_product(
    error: float | None, dtype: torch.dtype, scaling: float | torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.memory.loading.precision._CHUNK_ELEMENTS", 100)
    m = decaying(scaling=scaling)
    held = round_to_held(m if error is None else truncate(m, error), dtype)
    lost = loss(m, held, dtype)
    assert lost == pytest.approx(relative(m, held), rel=1e-5)
    assert lost > {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.int8: 1e-3}[dtype]


def test_wider_dtype_loses_no_precision() -> None:
    m = decaying()
    m = LoraModule(0, "q_proj", m.lora_a.half(), m.lora_b.half(), 1.0)
    for dtype in (torch.float16, torch.float32):
        assert loss(m, round_to_held(m, dtype), dtype) == 0
    assert loss(m, round_to_held(m, torch.bfloat16), torch.bfloat16) > 0


def test_replaced_rows_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.memory.loading.precision._CHUNK_ELEMENTS", 100)
    rows = ReplacedRows(torch.arange(7, dtype=torch.int32), torch.randn(7, 33))
    m = LoraModule(0, "lm_head", torch.empty(0, 33), torch.empty(40, 0), 1.0, row_overrides=rows)
    expected = float((rows.weight.bfloat16().float() - rows.weight).norm() / rows.weight.norm())
    assert loss(m, round_to_held(m, torch.bfloat16), torch.bfloat16) == pytest.approx(expected)
    assert loss(m, round_to_held(m, torch.int8), torch.int8) > 2e-3


def test_module_loss_is_larger_of_two_losses() -> None:
    a, b = torch.ones(1, 33, dtype=torch.bfloat16), torch.ones(40, 1)
    b[0] = 1.001
    rows = ReplacedRows(torch.arange(7, dtype=torch.int32), torch.full((7, 33), 1.002))
    update = LoraModule(0, "lm_head", a, b, 1.0)
    both = LoraModule(0, "lm_head", a, b, 1.0, row_overrides=rows)
    of_update, of_both = (loss(m, round_to_held(m, torch.bfloat16), torch.bfloat16) for m in (update, both))
    assert 1e-4 < of_update < 2e-4
    assert of_both == pytest.approx(2e-3, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_cpu_holds_weights_used_for_loss(make: Any, store: LocalStore, dtype: torch.dtype) -> None:
    ref = make.publish(store, rank=3)
    device = CpuDevice(make.base, 1 << 20, dtype)
    uploaded = load_adapter(store, ref, make.base, make.cpu).host
    loaded = load_adapter(store, ref, make.base, device)
    worst = 0.0
    for layer in range(2):
        of_file, packed = (
            p.lora_b(layer, "q_proj").T.double() * p.scaling(layer, "q_proj") @ p.lora_a(layer, "q_proj").double()
            for p in (uploaded, loaded.host)
        )
        worst = max(worst, float((of_file - packed).norm() / of_file.norm()))
    assert loaded.metadata.precision_loss == pytest.approx(worst, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_gpu_loss_equals_cpu_loss(make: Any, store: LocalStore, dtype: torch.dtype) -> None:
    ref = make.publish(store, rank=3)
    devices = CpuDevice(make.base, 1 << 20, dtype), GpuDevice(make.base, make.pool(), DirectCopies(), dtype)
    of_cpu, of_gpu = (load_adapter(store, ref, make.base, device).metadata.precision_loss for device in devices)
    assert of_cpu == of_gpu > 1e-3


def test_adapter_over_loss_limit_names_worst_module(make: Any, store: LocalStore) -> None:
    ref = make.publish(store, rank=3)
    device = CpuDevice(make.base, 1 << 20, torch.bfloat16)
    lost = load_adapter(store, ref, make.base, device).metadata.precision_loss
    load_adapter(store, ref, make.base, device, None, Precision(max_loss=lost))
    with pytest.raises(
        AdapterUnservable, match=r"Layer \d q_proj has a precision loss of 0.00\d+ .*in bf16; at most 0.0001 "
    ):
        load_adapter(store, ref, make.base, device, None, Precision(max_loss=1e-4))


def test_an_adapter_of_fewer_ranks_takes_less_room(make: Any, store: LocalStore) -> None:
    ref = make.publish(store, rank=4)
    whole = load_adapter(store, ref, make.base, make.cpu)
    cut = load_adapter(store, ref, make.base, make.cpu, None, Precision(rank_error=0.8))
    assert cut.host.max_rank < 4
    assert cut.num_bytes < whole.num_bytes
    assert 0.1 < cut.metadata.precision_loss <= 0.8
    small = CpuDevice(make.base, cut.num_bytes)
    assert load_adapter(store, ref, make.base, small, None, Precision(rank_error=0.8)).num_bytes == cut.num_bytes
