"""``loraserve ps``: where the adapters are, and what runs."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve import errors
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Column, Format, Output, size

if TYPE_CHECKING:
    from loraserve.sdk import Client
    from loraserve.sdk.resources import AdapterResidency

COLUMNS = (
    Column("ADAPTER", "model"),
    Column("TENANT", "tenant"),
    Column("TIER", "tier"),
    Column("DEVICE", lambda row: size(row.device_bytes)),
    Column("HOST", lambda row: size(row.host_bytes)),
    Column("RUNNING", "num_pins"),
    Column("PINNED", "is_pinned"),
    Column("LAST USE", lambda row: "-" if row.last_used_s is None else f"{row.last_used_s:.0f} s ago"),
)
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? ([0-9.eE+-]+|NaN|[+-]Inf)")


def ps(
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Where each adapter's weights are, and (for an admin key) what the engine does."""
    with connected(format, url, tenant) as (output, client), output.screen() as clear:
        while True:
            rows, stats = list(client.residency()), _stats(client)
            clear()
            _show(output, rows, stats, is_line=watch)
            if not watch:
                return
            time.sleep(interval)


def _stats(client: Client) -> dict[str, float] | None:
    """The engine's counters; None for a key that may not see them."""
    try:
        return parse_metrics(client.metrics())
    except errors.PermissionDenied:
        return None


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of Prometheus' text format, keyed by name and labels as they are written there."""
    samples = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None:
            samples[match[1] + (match[2] or "")] = float(match[3])
    return samples


def _show(output: Output, rows: list[AdapterResidency], stats: Mapping[str, float] | None, *, is_line: bool) -> None:
    if output.format is Format.JSON:
        adapters = [row.model_dump(mode="json") for row in rows]
        output.json({"adapters": adapters, "engine": None if stats is None else summary(stats)}, is_line=is_line)
        return
    if stats is None:
        output.note("What the engine does is shown to admin keys alone.")
    elif output.format is Format.HUMAN:
        output.pairs(_in_words(summary(stats)))
        output.line("")
    output.rows(rows, COLUMNS, name="model", empty="No adapters.")


def summary(stats: Mapping[str, float]) -> dict[str, int]:
    """What the engine does now, by plain names."""

    def of(name: str) -> int:
        return int(stats.get(name, 0))

    used, cached, free = (of(f'loraserve_kv_blocks{{state="{state}"}}') for state in ("used", "cached", "free"))
    return {
        "requests_running": of("loraserve_requests_running"),
        "requests_waiting": of("loraserve_requests_waiting"),
        "requests_waiting_for_adapter": of("loraserve_requests_waiting_for_adapter"),
        "kv_blocks_used": used,
        "kv_blocks": used + cached + free,
        "adapters_on_device": of('loraserve_adapters_resident{tier="device"}'),
        "adapter_bytes_on_device": of('loraserve_adapter_bytes{tier="device"}'),
        "adapter_budget_bytes": of('loraserve_adapter_budget_bytes{tier="device"}'),
        "generation_tokens": of("loraserve_engine_generation_tokens_total"),
    }


def _in_words(engine: Mapping[str, int]) -> dict[str, str]:
    waiting = f"{engine['requests_waiting']} waiting ({engine['requests_waiting_for_adapter']} for their adapter)"
    on_device, budget = size(engine["adapter_bytes_on_device"]), size(engine["adapter_budget_bytes"])
    return {
        "requests": f"{engine['requests_running']} running, {waiting}",
        "kv blocks": f"{engine['kv_blocks_used']} of {engine['kv_blocks']} in use",
        "adapters": f"{engine['adapters_on_device']} on the device, {on_device} of {budget}",
        "tokens": f"{engine['generation_tokens']} generated",
    }
