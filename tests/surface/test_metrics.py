"""Metrics: names, kinds, labels and, where they are few and fixed, the labels' values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from fastapi import FastAPI
from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from loraserve.registry.health.base_precision import KnownPrecision, MeasuredPrecision
from loraserve.types import BasePrecision

OPEN_ENDED = frozenset(
    (
        "quantization",
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
        "adapter_name",
        "block_size",
        "num_gpu_blocks",
    )
)
"""Labels whose values are names or numbers of a deployment."""


@pytest.fixture
def families(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> list[Metric]:
    """Every family of the application; one with labels and nothing counted has a sample all the
    same.
    """
    loaded = {("<adapter_name>", level, "false"): 1.0 for level in ("cpu", "gpu")}
    monkeypatch.setattr(app.state.services.routing, "loaded", lambda: loaded)
    measured = MeasuredPrecision(BasePrecision(256, 0.95, 0.01, 3.0, 3.01), datetime.now(UTC))
    precisions = app.state.services.registry.base_precisions
    monkeypatch.setattr(type(precisions), "current", KnownPrecision("int8", measured))
    registry = app.state.services.metrics.registry
    for metric in list(registry._collector_to_names):
        if isinstance(metric, MetricWrapperBase) and metric._labelnames and not metric._metrics:
            metric.labels(*(f"<{name}>" for name in metric._labelnames))
    return sorted(registry.collect(), key=lambda family: family.name)


def samples(family: Metric) -> Iterator[str]:
    for sample in family.samples:
        labels = {name: f"<{name}>" if name in OPEN_ENDED else value for name, value in sorted(sample.labels.items())}
        yield (
            "    "
            + sample.name
            + ("{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}") * bool(labels)
        )


async def test_metrics(families: list[Metric], golden: Callable[..., None]) -> None:
    lines = []
    for family in families:
        lines.append(f"{family.name} {family.type}")
        lines += samples(family)
        assert len(list(family.samples)) > 0, f"{family.name} has no sample: its labels are unknown"
    golden("metrics.txt", lines)


async def test_metrics_texts(families: list[Metric], golden: Callable[..., None]) -> None:
    golden("metrics_texts.txt", [f"{family.name}: {family.documentation}" for family in families])
