"""The running server: its health, and its agreement with the settings here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loraserve.config import EngineConfig
from loraserve.doctor.checks import Check, fail, ok, warn
from loraserve.errors import ClientError, ConfigError, LoraserveError
from loraserve.limits import LIMITS
from loraserve.planning.adapters import plan_ranks
from loraserve.planning.base import BasePlan
from loraserve.planning.memory import ArenaPlan

if TYPE_CHECKING:
    from loraserve.contract.residency import AdapterResidency
    from loraserve.sdk import Client

TIMEOUT_S = 10.0
MAX_COMPARED = 5
"""Resident adapters that are compared with what they were planned to take."""
TOLERANCE = 0.02
_RESTART = "Restart the server with the settings that you expect, or run doctor with the settings of the server."


@dataclass(frozen=True, slots=True)
class Expected:
    """The plan of the settings here; `arena` is None if the budget is unknown."""

    config: EngineConfig
    base: BasePlan
    arena: ArenaPlan | None


def is_there(url: str) -> bool:
    """Check whether anything answers at the URL."""
    import httpx2

    try:
        httpx2.get(f"{url}/livez", timeout=TIMEOUT_S)
    except (httpx2.TransportError, httpx2.InvalidURL):
        return False
    return True


def _detail_of(body: bytes) -> str:
    """Read what a probe waits for; empty where it doesn't name it."""
    try:
        content = json.loads(body)
    except ValueError:
        return ""
    detail = content.get("detail") if isinstance(content, dict) else None
    return f": {detail}" if isinstance(detail, str) else ""


def check_probes(url: str) -> Iterator[Check]:
    """Check the probes, which need no key."""
    import httpx2

    codes, said = {}, {}
    for name in ("livez", "readyz"):
        try:
            answer = httpx2.get(f"{url}/{name}", timeout=TIMEOUT_S)
            codes[name], said[name] = answer.status_code, _detail_of(answer.content)
        except httpx2.TransportError as error:
            yield fail(
                "server",
                f"{url}/{name}: {type(error).__name__}",
                "an answer",
                "Check the server's log, then restart it.",
            )
            return
    if codes["livez"] != 200:
        yield fail(
            "server",
            f"/livez says {codes['livez']}{said['livez']}",
            "200: the engine makes progress",
            "Check the server's log, then restart it.",
        )
    elif codes["readyz"] != 200:
        yield warn(
            "server",
            f"/readyz says {codes['readyz']}{said['readyz']}",
            "200",
            "Wait: the server is loading its base, or draining.",
        )
    else:
        yield ok("server", f"{url} is live and ready")


def check_server(url: str, api_key: str | None, expected: Expected | None) -> Iterator[Check]:
    """Compare what the key may see of the server with the plan.

    Args:
        api_key: None: the server requires none.

    Raises:
        AuthenticationError, ClientError: the key isn't one, or the server stopped answering.
    """
    from loraserve.sdk import Client

    with Client(url, api_key=api_key, timeout=TIMEOUT_S, max_retries=0) as client:
        yield from _check(client, api_key, expected)


def base_digest(url: str, api_key: str | None) -> str:
    """Request the digest of the base that it serves.

    Raises:
        AuthenticationError, ClientError, EngineError: as `check_server`, or the base isn't loaded
            yet.
    """
    from loraserve.sdk import Client

    with Client(url, api_key=api_key, timeout=TIMEOUT_S, max_retries=0) as client:
        return client.base().digest


def _check(client: Client, api_key: str | None, expected: Expected | None) -> Iterator[Check]:
    yield from _check_base(client, expected)
    yield from _check_limits(client)
    try:
        from loraserve.sdk.types.samples import parse_metrics

        samples = parse_metrics(client.metrics())
    except LoraserveError as error:
        if isinstance(error, ClientError):
            raise
        yield warn("budget", "not shown to this key", "an admin key", "export LORASERVE_API_KEY=… with an admin key.")
        return
    yield from check_counters(samples)
    if expected is not None and expected.arena is not None and _is_same_base(client, expected):
        yield from check_budget(samples, expected.arena)
        yield from _check_adapters(client, api_key, expected, expected.arena)


def _is_same_base(client: Client, expected: Expected) -> bool:
    base, planned = client.base(), expected.base.spec
    return (base.architecture, base.num_layers, base.hidden_size) == (
        planned.architecture,
        planned.num_layers,
        planned.hidden_size,
    )


def _check_base(client: Client, expected: Expected | None) -> Iterator[Check]:
    base = client.base()
    how = f" ({base.arithmetic} by {base.kernels})" if base.arithmetic else ""
    words = (
        f"{base.id}: {base.architecture}, {base.dtype}, {base.quantization}{how}, "
        f"{base.max_model_len:,} tokens, {base.size_bytes:,} bytes"
    )
    if expected is None:
        yield ok("base", words)
        return
    planned = expected.base.spec
    if not _is_same_base(client, expected):
        wanted = f"{planned.architecture} of {planned.num_layers} layers × {planned.hidden_size}"
        yield warn("base", words, wanted, _RESTART)
        return
    wrong = [
        f"{name} {wanted}"
        for name, found, wanted in (
            ("dtype", base.dtype, planned.dtype),
            ("quantization", base.quantization, planned.quantization),
            ("max_model_len", base.max_model_len, planned.max_model_len),
        )
        if found != wanted
    ]
    if not wrong and abs(base.size_bytes - planned.size_bytes) > TOLERANCE * planned.size_bytes:
        wrong.append(f"{planned.size_bytes:,} bytes")
    yield warn("base", words, ", ".join(wrong), _RESTART) if wrong else ok("base", words, "as planned")


def _check_limits(client: Client) -> Iterator[Check]:
    found, here = client.limits().model_dump(), LIMITS.as_dict()
    different = sorted(name for name, value in here.items() if found.get(name) != value)
    if different:
        words = ", ".join(f"{name} {found.get(name)}" for name in different[:4])
        wanted = ", ".join(f"{name} {here[name]}" for name in different[:4])
        yield warn("limits", words, wanted, "The server runs another version than this program: restart it.")
    else:
        yield ok("limits", f"{len(here)} limits, equal to this version's")


def check_counters(samples: Mapping[str, float]) -> Iterator[Check]:
    violations = samples.get("loraserve_invariant_violations_total", 0)
    failures = samples.get("loraserve_adapter_load_failures_total", 0)
    if violations:
        yield fail(
            "invariants",
            f"{violations:.0f} violations",
            "none",
            "Keep the server's log, restart the server, and report the log.",
        )
    else:
        yield ok("invariants", "no violations")
    if failures:
        yield warn(
            "loads",
            f"{failures:.0f} loads failed",
            "none",
            "Check the server's log: the bytes are damaged, or the disk can't be read.",
        )


def check_budget(samples: Mapping[str, float], arena: ArenaPlan) -> Iterator[Check]:
    """Compare budgets loosely if none was given: a GPU's engine measures it, the plan estimates."""
    tolerance = TOLERANCE if arena.source == "--memory-budget" else 0.15
    blocks = sum(samples.get(f'loraserve_kv_blocks{{state="{state}"}}', 0) for state in ("used", "cached", "free"))
    pairs = (
        ("budget", "bytes", samples.get("loraserve_device_memory_budget_bytes"), arena.budget_bytes),
        ("kv_blocks", "blocks", blocks, arena.num_blocks),
        (
            "adapter_budget",
            "bytes",
            samples.get('loraserve_adapter_budget_bytes{tier="device"}'),
            arena.max_adapter_pages * arena.page_bytes,
        ),
    )
    for name, unit, found, planned in pairs:
        if not found:
            yield warn(
                name,
                "not reported yet",
                f"{planned:,} {unit}",
                "Run doctor again after the engine has computed a step.",
            )
        elif abs(found - planned) > tolerance * planned:
            yield warn(name, f"{found:,.0f} {unit}", f"{planned:,} {unit}", _RESTART)
        else:
            yield ok(name, f"{found:,.0f} {unit}", f"{planned:,} {unit}")


def _check_adapters(client: Client, api_key: str | None, expected: Expected, arena: ArenaPlan) -> Iterator[Check]:
    rows = [row for row in client.residency(resident=True) if row.device_bytes]
    if not rows:
        yield ok("adapters", "none on the device")
        return
    different, num_compared = [], 0
    for row in rows[:MAX_COMPARED]:
        planned = _planned_bytes(client.url, api_key, row, expected, arena)
        if planned is None:
            continue
        num_compared += 1
        # a page is what both count in
        if abs(row.device_bytes - planned) > max(arena.page_bytes, TOLERANCE * planned):
            different.append(f"{row.model} takes {row.device_bytes:,} bytes instead of {planned:,}")
    if different:
        yield warn(
            "adapters",
            "; ".join(different),
            "the planned bytes",
            "Run doctor with the server's --adapter-dtype and --adapter-rank-error.",
        )
    else:
        yield ok("adapters", f"{len(rows)} on the device; {num_compared} compared, as planned")


def _planned_bytes(
    url: str, api_key: str | None, row: AdapterResidency, expected: Expected, arena: ArenaPlan
) -> int | None:
    """Plan the bytes from its rank and modules.

    None unless it is plain LoRA of one rank, by the registry.
    """
    from loraserve.sdk import Client

    with Client(url, api_key=api_key, tenant=row.tenant, timeout=TIMEOUT_S, max_retries=0) as owner:
        version = owner.adapters.version(row.name, row.version)
    if version.dtype is None or not (version.detail_of("format") or "").startswith("LORA:"):
        return None
    try:
        (planned,) = plan_ranks(
            [version.rank], version.target_modules, 1, version.dtype, expected.base, expected.config, arena
        )
    except ConfigError:
        return None
    # its file shows whether it has that rank in all of these modules, and nothing else
    is_uniform = abs(planned.file_bytes - version.size_bytes) <= 0.05 * version.size_bytes
    return planned.num_pages * arena.page_bytes if is_uniform else None
