"""``loraserve ps``: where the adapters are, and what runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve import errors
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Column, Format, Output, size

if TYPE_CHECKING:
    from loraserve.contract.residency import AdapterResidency, Memory
    from loraserve.contract.server import Base
    from loraserve.sdk import Client

COLUMNS = (
    Column("ADAPTER", "model"),
    Column("TENANT", "tenant"),
    Column("TIER", "tier", is_state=True),
    Column("DEVICE", lambda row: _bytes(row.device_bytes)),
    Column("HOST", lambda row: _bytes(row.host_bytes)),
    Column("DISK", lambda row: _bytes(row.size_bytes)),
    Column("DTYPE", "dtype"),
    Column("LOSS", lambda row: None if row.precision_loss is None else f"{row.precision_loss:.1g}"),
    Column("RUNNING", "num_pins"),
    Column("PINNED", "is_pinned"),
    Column("LAST USE", lambda row: None if row.last_used_s is None else f"{row.last_used_s:.0f} s ago"),
    Column("USES", lambda row: None if row.uses_per_s is None else f"{row.uses_per_s * 60:.1f}/min"),
)
_BASE_FIELDS = (
    *("id", "digest", "implementation", "dtype", "quantization", "arithmetic", "kernels", "instructions", "device"),
    *("precision", "precision_note", "generation_defaults", "chat_template_file", "chat_template_kwargs"),
)
_BYTES = ("device_bytes", "host_bytes", "size_bytes")
_TIERS = ("device", "loading", "host", "disk")


def ps(
    all_versions: Annotated[bool, typer.Option("--all", help="Show versions that are only on disk, too.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two refreshes.")] = 1.0,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Show the adapters in memory and the base's arithmetic.

    With an admin key, show the engine's load and memory too.
    """
    with connected(format, url, tenant) as (output, client), output.frames() as show:
        while True:
            look = _look(client, all_versions=all_versions)
            show(lambda look=look: _print(output, look, is_line=watch))  # type: ignore[misc]
            if not watch:
                return
            time.sleep(interval)


@dataclass(frozen=True, slots=True)
class _Look:
    """State of a server at one time.

    `memory` and `stats` are None for a key that may not see them.
    """

    base: Base
    rows: list[AdapterResidency]
    memory: Memory | None
    stats: Mapping[str, float] | None


def _look(client: Client, *, all_versions: bool) -> _Look:
    rows = sorted(client.residency(resident=not all_versions), key=_hotness)
    memory = client.memory()
    return _Look(client.base(), rows, memory, None if memory is None else _stats(client))


def _hotness(row: AdapterResidency) -> tuple[int, float]:
    """Build the sort key: the nearest tier first, in it the last used."""
    tier = _TIERS.index(row.tier) if row.tier in _TIERS else len(_TIERS)
    return tier, float("inf") if row.last_used_s is None else row.last_used_s


def _stats(client: Client) -> dict[str, float] | None:
    """Read the engine's counters; None for a key that may not see them."""
    from loraserve.sdk.types.samples import parse_metrics

    try:
        return parse_metrics(client.metrics())
    except errors.PermissionDenied:
        return None


def _print(output: Output, look: _Look, *, is_line: bool) -> None:
    if output.format is Format.JSON:
        value = {
            "base": look.base.model_dump(mode="json", include=set(_BASE_FIELDS)),
            "adapters": [row.model_dump(mode="json") for row in look.rows],
            "memory": None if look.memory is None else look.memory.model_dump(mode="json"),
            "engine": None if look.stats is None else summary(look.stats),
        }
        output.json(value, is_line=is_line)
        return
    if look.stats is None or look.memory is None:
        output.note("The engine's numbers are shown only to admin keys.")
    if output.format is Format.HUMAN:
        known = {"base": base_in_words(look.base), "rounding": precision_in_words(look.base)}
        if look.base.generation_defaults:
            known["defaults"] = defaults_in_words(look.base)
        variables = json.dumps(look.base.chat_template_kwargs) if look.base.chat_template_kwargs else ""
        if template := " ".join(filter(None, (look.base.chat_template_file, variables))):
            known["template"] = template
        if look.stats is not None and look.memory is not None:
            known |= _in_words(summary(look.stats), look.memory)
        output.pairs(known)
        output.line("")
    rows = _once_by_weights(look.rows)
    output.rows(rows, COLUMNS, name="model", empty="No adapters in memory. Those on disk: loraserve ps --all")


def _once_by_weights(rows: Iterable[AdapterResidency]) -> list[AdapterResidency]:
    """Count the bytes of weights in the first of the versions that share them alone."""
    seen: set[str] = set()
    shown = []
    for row in rows:
        is_shared = row.digest in seen
        seen.add(row.digest)
        shown.append(row.model_copy(update=dict.fromkeys(_BYTES)) if is_shared else row)
    return shown


def _bytes(num_bytes: int | None) -> str:
    return "shared" if num_bytes is None else size(num_bytes)


def base_in_words(base: Base) -> str:
    """Format the base's name and how its linears multiply, as one line."""
    kept = base.dtype if base.quantization == "none" else base.quantization
    if not base.arithmetic:
        return f"{base.id} in {kept}"
    return f"{base.id} in {kept} on {base.device}: {base.arithmetic} ({base.kernels}, {base.instructions})"


def precision_in_words(base: Base) -> str:
    """Format what rounding costs the base, as one line."""
    one = base.precision
    if one is None:
        return base.precision_note or "not measured yet"
    words = (
        f"the likeliest token of float32 at {one.top1_agreement:.1%} of positions, "
        f"{one.mean_divergence:.2g} nats from it, perplexity {one.perplexity_ratio:.3f} times as high"
    )
    return f"{words}. To keep more: {one.advice}" if one.advice else words


def defaults_in_words(base: Base) -> str:
    """Format the base's defaults of requests, as one line."""
    return ", ".join(f"{name} {value:g}" for name, value in base.generation_defaults.items())


def summary(stats: Mapping[str, float]) -> dict[str, int]:
    """Summarize the engine's load now and its work since its start, by plain names."""

    def of(name: str, **labels: str) -> int:
        shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
        return int(stats.get(f"{name}{{{shown}}}" if shown else name, 0))

    used, cached, free = (of("loraserve_kv_blocks", state=state) for state in ("used", "cached", "free"))
    evicted, blocks = "loraserve_adapter_evictions_total", "loraserve_kv_block_evictions_total"
    return {
        "requests_running": of("loraserve_requests_running"),
        "requests_waiting": of("loraserve_requests_waiting"),
        "requests_waiting_for_adapter": of("loraserve_requests_waiting_for_adapter"),
        "kv_blocks_used": used,
        "kv_blocks": used + cached + free,
        "adapters_on_device": of("loraserve_adapters_resident", tier="device"),
        "adapter_bytes_on_device": of("loraserve_adapter_bytes", tier="device"),
        "adapter_budget_bytes": of("loraserve_adapter_budget_bytes", tier="device"),
        "adapters_found_on_device": of("loraserve_adapter_lookups_total", tier="device"),
        "adapters_found_in_host": of("loraserve_adapter_lookups_total", tier="host"),
        "adapters_found_on_disk": of("loraserve_adapter_lookups_total", tier="disk"),
        "adapters_evicted_for_adapters": of(evicted, cause="adapter", tier="device"),
        "adapters_evicted_for_kv": of(evicted, cause="kv", tier="device"),
        "adapters_evicted_from_host": of(evicted, cause="adapter", tier="host"),
        "kv_blocks_evicted_for_kv": of(blocks, cause="kv"),
        "kv_blocks_evicted_for_adapters": of(blocks, cause="adapter"),
        "generation_tokens": of("loraserve_engine_generation_tokens_total"),
    }


def _in_words(engine: Mapping[str, int], memory: Memory) -> dict[str, str]:
    waiting = f"{engine['requests_waiting']} waiting ({engine['requests_waiting_for_adapter']} for their adapter)"
    adapters = f"{size(memory.adapters_used_bytes)} in use and {size(memory.adapters_idle_bytes)} idle"
    kv = f"{size(memory.kv_used_bytes)} in use and {size(memory.kv_idle_bytes)} kept"
    host_bytes = f"{size(memory.host_adapter_bytes)} of {size(memory.host_budget_bytes)}"
    return {
        "requests": f"{engine['requests_running']} running, {waiting}",
        "kv blocks": f"{engine['kv_blocks_used']} of {engine['kv_blocks']} in use",
        "device": f"{size(memory.budget_bytes)}: adapters {adapters}, KV {kv}, {size(memory.free_bytes)} free",
        "host": f"{_count(memory.num_host_adapters, 'adapter')}, {host_bytes}",
        "found": _found(engine),
        "evicted": (
            f"{_count(engine['adapters_evicted_for_adapters'], 'adapter')} for adapters, "
            f"{engine['adapters_evicted_for_kv']} for KV, "
            f"{engine['adapters_evicted_from_host']} from the host; "
            f"{_count(engine['kv_blocks_evicted_for_kv'], 'KV block')} for KV, "
            f"{engine['kv_blocks_evicted_for_adapters']} for adapters"
        ),
        "tokens": f"{engine['generation_tokens']} generated",
    }


def _found(engine: Mapping[str, int]) -> str:
    """Format the shares of requests by the tier that had their adapter."""
    found = {
        "on the device": engine["adapters_found_on_device"],
        "in the host's memory": engine["adapters_found_in_host"],
        "on disk": engine["adapters_found_on_disk"],
    }
    num = sum(found.values())
    if not num:
        return "no request was for an adapter"
    parts = ", ".join(f"{count / num:.1%} {where}" for where, count in found.items())
    return f"{parts}, of {_count(num, 'request')} for an adapter"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
