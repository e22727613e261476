"""The arithmetic of limits, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.gpu.limits import (
    Rates,
    SiteShape,
    Work,
    attention_work,
    decode_work,
    geometric_mean,
    linear_work,
    lora_work,
    quantile,
    share,
)

QKV = SiteShape(4096, (4096, 1024, 1024))
RATES = Rates(copy_bytes_per_s=4e12, operations_per_s=8e14, load_bytes_per_s=5e10)


def test_rank_needs_row_per_slice_and_per_output() -> None:
    assert QKV.weights_per_rank == 3 * 4096 + 6144


def test_lora_reads_each_adapter_once_for_all_rows() -> None:
    one_row_each = lora_work(QKV, [16, 16], [16, 16])
    many_rows = lora_work(QKV, [16, 16], [16] * 10)
    weights = 2 * 16 * (3 * 4096 + 6144) * 2
    row = (4096 + 2 * 6144) * 2
    assert one_row_each.num_bytes == weights + 2 * row
    assert many_rows.num_bytes == weights + 10 * row


def test_lora_in_int8_reads_half_the_weights() -> None:
    assert lora_work(QKV, [8], [], 1).num_bytes == lora_work(QKV, [8], []).num_bytes / 2


def test_lora_operations_depend_on_rank_of_each_row() -> None:
    assert lora_work(QKV, [8, 64], [8, 64, 64]).operations == 2 * (8 + 64 + 64) * (3 * 4096 + 6144)


def test_linear_reads_weight_and_input_and_writes_output() -> None:
    work = linear_work(SiteShape(100, (30,)), 7, 3000)
    assert work == Work(3000 + 7 * 130 * 2, 2 * 7 * 3000)


def test_row_attends_only_to_context_before_row() -> None:
    assert attention_work([1], [50], 4, 2, 8).operations == 4 * 50 * 4 * 8
    # rows at positions 0, 1 and 2
    assert attention_work([3], [3], 4, 2, 8).operations == 4 * (1 + 2 + 3) * 4 * 8
    # at positions 7, 8 and 9
    assert attention_work([3], [10], 4, 2, 8).operations == 4 * (8 + 9 + 10) * 4 * 8


def test_attention_reads_keys_and_values_once_per_sequence() -> None:
    assert attention_work([1, 1], [50, 30], 4, 2, 8).num_bytes == 2 * 80 * 2 * 8 * 2 + 2 * 2 * 4 * 8 * 2


def test_decode_step_reads_base_adapters_and_cache() -> None:
    work = decode_work(
        base_bytes=1000, base_weights=500, num_rows=3, adapter_bytes=200, row_adapter_weights=30, kv_bytes=70
    )
    assert work == Work(1270, 2 * (3 * 500 + 30))


def test_limit_is_bytes_or_operations_whichever_takes_longer() -> None:
    assert RATES.seconds(Work(4e12, 8e13)) == 1.0
    assert RATES.seconds(Work(4e11, 8e14)) == 1.0


def test_share_of_unmeasured_time_is_absent() -> None:
    assert share(1.0, None) is None
    assert share(1.0, 2.0) == 0.5


def test_geometric_mean_skips_unmeasured_values() -> None:
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([None]) is None


def test_quantile_is_value_not_exceeded_by_given_share() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert quantile(values, 0.5) == 50.0
    assert quantile(values, 0.99) == 99.0
    assert quantile([3.0], 0.99) == 3.0
