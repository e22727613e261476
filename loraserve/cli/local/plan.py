"""``loraserve plan``: the memory that a server would need, and what fits, before it is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraserve.cli.local.serve_flags import takes_settings
from loraserve.cli.options import FormatOption, reporting
from loraserve.cli.output import Format, Output, size

if TYPE_CHECKING:
    from loraserve.planning.capacity_plan import CapacityPlan

LOAD = "Load to plan for"
SETTINGS = (
    "model",
    "device",
    "dtype",
    "quantize",
    "activation_dtype",
    "memory_budget",
    "memory_utilization",
    "host_cache",
    "adapter_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "speculation",
    "draft_model",
    "draft_quantize",
    "tensor_parallel",
    "pipeline_parallel",
    "loader_threads",
    "data_dir",
    "config",
)
_TIED = " (the embedding again, in the order that products read)"
_SHOWN = 20
"""Adapters that a table lists; JSON has all."""


@takes_settings(SETTINGS)
def plan(
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="The GPU's memory, e.g. 24GiB (default: from nvidia-smi).", rich_help_panel=LOAD
        ),
    ] = None,
    adapters: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="A PEFT directory, or a directory of several; may be repeated.", rich_help_panel=LOAD
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="RANK,…", help="Plan LoRA of these ranks instead, e.g. 8,16.", rich_help_panel=LOAD),
    ] = None,
    targets: Annotated[
        str, typer.Option(metavar="MODULE,…", help="Modules of every layer to adapt, or all.", rich_help_panel=LOAD)
    ] = "all",
    count: Annotated[int, typer.Option(min=1, help="Number of adapters.", rich_help_panel=LOAD)] = 1,
    stored: Annotated[
        str,
        typer.Option(
            metavar="float32|float16|bfloat16", help="Data type of the adapters' files.", rich_help_panel=LOAD
        ),
    ] = "float32",
    running: Annotated[
        int | None, typer.Option(min=1, help="Sequences running at once, for the memory left.", rich_help_panel=LOAD)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each sequence (default: the longest).", rich_help_panel=LOAD)
    ] = None,
    disk_rate: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Bytes read and hashed per second, e.g. 500MB (default: measured).",
            rich_help_panel=LOAD,
        ),
    ] = None,
    format: FormatOption = None,
    **settings: str | None,
) -> None:
    """Show what a server would need and what fits, without starting one.

    Only files' headers are read. The exit code is 1 if part of it can't be served. BYTES are
    written as 8GiB, 500MB or a plain number.
    """
    with reporting(format) as output:
        made = _make(
            settings,
            device_memory=device_memory,
            directories=adapters or [],
            ranks=ranks,
            targets=targets,
            count=count,
            stored=stored,
            running=running,
            tokens=tokens,
            disk_rate=disk_rate,
        )
        _show(output, made)
    if made.is_refused:
        raise typer.Exit(1)


def _make(
    flags: dict[str, Any],
    *,
    device_memory: str | None,
    directories: list[Path],
    ranks: str | None,
    targets: str,
    count: int,
    stored: str,
    running: int | None,
    tokens: int | None,
    disk_rate: str | None,
) -> CapacityPlan:
    from loraserve.errors import ConfigError
    from loraserve.model.checkpoint.source import local_draft_dir, local_model_dir
    from loraserve.planning import adapters as a
    from loraserve.planning.base import plan_base
    from loraserve.planning.base_formats import plan_formats
    from loraserve.planning.capacity_plan import make_plan
    from loraserve.planning.draft import plan_draft
    from loraserve.planning.machine import available_memory, gpu_memory, nearest_folder
    from loraserve.planning.machine import disk_rate as measured_rate
    from loraserve.planning.memory import plan_arena, plan_step
    from loraserve.settings import Settings

    if directories and ranks is not None:
        raise ConfigError("--adapters and --ranks both describe the adapters; give only one of them.")
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    if stored not in kinds:
        raise ConfigError(f"--stored {stored}: expected one of {', '.join(kinds)}.")
    settings = Settings.load(**flags)
    model_dir = local_model_dir(Path(settings.model).expanduser())
    config = settings.engine_config(model_dir, local_draft_dir(settings.draft_model))
    device_bytes = None if device_memory is None else _size("--device-memory", device_memory)
    device = config.device
    if device_bytes is None and device != "cpu":
        device_bytes = gpu_memory()
    if device == "auto":
        device = "cpu" if device_bytes is None else "cuda"
    base = plan_base(config, device)
    if tokens is not None and tokens > base.max_model_len:
        raise ConfigError(f"--tokens {tokens}: expected at most {base.max_model_len}, this model's longest sequence.")
    step = plan_step(base, config)
    draft = plan_draft(config, base)
    arena = plan_arena(base, config, step, device_bytes, draft_kv_bytes=0 if draft is None else draft.kv_bytes)
    if ranks is not None:
        wanted = [_rank(text) for text in ranks.split(",")]
        planned = a.plan_ranks(wanted, targets.split(","), count, kinds[stored], base, config, arena)
    else:
        planned = [a.plan_directory(path, base, config, arena) for path in a.find_adapters(directories)]
    rate = None
    if planned:
        rate = (
            measured_rate(nearest_folder(settings.data_dir)) if disk_rate is None else _size("--disk-rate", disk_rate)
        )
    looked_at = (
        [] if running is None and tokens is None else [(running or config.max_num_seqs, tokens or base.max_model_len)]
    )
    return make_plan(
        base,
        step,
        arena,
        config,
        planned,
        running=looked_at,
        disk_bytes_per_s=rate,
        available_bytes=available_memory(),
        draft=draft,
        formats=plan_formats(config, base),
    )


def _size(flag: str, text: str) -> int:
    from loraserve.errors import ConfigError
    from loraserve.settings import parse_size

    try:
        found = parse_size(text.removesuffix("/s"))
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}.") from error
    if found <= 0:
        raise ConfigError(f"{flag} {text}: expected a number above 0.")
    return found


def _rank(text: str) -> int:
    from loraserve.errors import ConfigError

    if not text.strip().isdecimal():
        raise ConfigError(f"--ranks {text!r}: expected whole numbers, such as 8,16.")
    return int(text)


def _show(output: Output, made: CapacityPlan) -> None:
    facts = made.as_dict()
    if output.format is Format.JSON:
        output.json(facts)
        return
    if output.format is Format.QUIET:
        for notice in made.notices:
            if notice.level != "note":
                output.line(notice.code)
        return
    output.pairs(_in_words(made, facts))
    if made.ranks:
        output.line("")
        output.records(_of_ranks(made), name="rank")
    if made.adapters:
        output.line("")
        output.records(_fits(made), name="running")
        if len(made.adapters) > 1 or made.adapters[0].refusal:
            output.line("")
            output.records(_each(made), name="adapter")
            if len(made.adapters) > _SHOWN:
                output.note(f"… and {len(made.adapters) - _SHOWN} more; --format json lists all.")
    if made.formats:
        from loraserve.planning.base_formats import MEASURED_ON

        output.line("")
        output.records(_formats(made), name="format")
        output.note(f"KL and same top-1 are {MEASURED_ON}'s; a server measures its own base's: loraserve ps.")
    for notice in made.notices:
        output.note(f"{notice.level}: {notice.message}" + (f" {notice.hint}" if notice.hint else ""))


def _in_words(made: CapacityPlan, facts: dict[str, Any]) -> dict[str, str]:
    base, arena, kv, of_adapters = made.base, made.arena, facts["kv"], facts["adapters"]
    is_kept_twice = base.spec.is_head_tied and any(part.name == "embedding" and part.num_bytes for part in base.parts)
    parts = ", ".join(
        f"{part.name} {part.format} {size(part.num_bytes)}" + (_TIED if is_kept_twice and part.name == "head" else "")
        for part in base.parts
    )
    draft = {}
    if made.draft is not None:
        of_draft = made.draft.as_dict()
        draft["draft base"] = (
            f"{of_draft['architecture']}, {of_draft['num_parameters']:,} parameters, "
            f"{size(of_draft['size_bytes'])} resident, and {size(of_draft['kv_bytes'])} of the budget for "
            f"{of_draft['max_sequences']} sequences of {of_draft['max_tokens']:,}"
        )
    words = {
        "device": base.device,
        "base": f"{base.spec.architecture}, {base.spec.num_parameters:,} parameters, {size(base.num_bytes)} resident",
        "": parts,
        **draft,
        "step": f"about {size(made.step.reserved_bytes)} set aside (estimated)",
        "budget": f"{size(arena.budget_bytes)} for KV and adapters together: {arena.source}",
        "kv": (
            f"{kv['bytes_per_token']:,} bytes a token, {size(kv['bytes_per_sequence'])} a sequence of "
            f"{base.max_model_len:,}"
        ),
        "kv alone": f"{kv['max_tokens']:,} tokens, {kv['max_sequences']} sequences of full length",
    }
    if made.adapters:
        words["adapters"] = f"{of_adapters['count']:,}, {size(of_adapters['total_bytes'])} if all are resident"
        words["kv beside all"] = f"{kv['tokens_beside_all_adapters']:,} tokens (one sequence at least)"
        words["host cache"] = f"{size(made.host_cache_bytes)}: {made.num_in_host_cache:,} adapters"
        words["loads"] = f"up to {size(made.load_bytes)} of the host's memory while adapters are loaded"
    if made.loads is not None:
        loads = made.loads
        words["load"] = (
            f"{loads.disk_s * 1e3:.1f} ms from disk ({size(int(loads.disk_bytes_per_s))}/s read and hashed), "
            f"{loads.host_s * 1e3:.1f} ms from host memory; up to {loads.max_loads_per_s:,.0f} a second"
        )
    return words


def _of_ranks(made: CapacityPlan) -> list[dict[str, object]]:
    return [
        {
            "rank": rank.rank,
            "layers": f"{rank.layers[0]} to {rank.layers[1] - 1}",
            "weights": size(rank.weights_bytes),
            "kv a sequence": size(rank.kv_bytes_per_sequence),
            "adapters": size(rank.adapter_bytes),
        }
        for rank in made.ranks
    ]


def _formats(made: CapacityPlan) -> list[dict[str, object]]:
    return [
        {
            "format": one.name,
            "resident": size(one.num_bytes),
            "read a token": size(one.token_bytes),
            "KL": f"{one.divergence:.4f}",
            "same top-1": f"{one.agreement:.1%}",
            "set by": one.flags or "the default",
            "note": ", ".join(
                word for word, holds in (("recommended", one.is_recommended), ("this plan", one.is_planned)) if holds
            ),
        }
        for one in made.formats
    ]


def _fits(made: CapacityPlan) -> list[dict[str, object]]:
    return [
        {
            "running": f"{fit.num_sequences} × {fit.num_tokens:,} tokens",
            "left for adapters": "they don't fit at once" if fit.adapter_bytes is None else size(fit.adapter_bytes),
            "adapters": fit.num_adapters,
        }
        for fit in made.fits
    ]


def _each(made: CapacityPlan) -> list[dict[str, object]]:
    return [
        {
            "adapter": adapter.name,
            "count": adapter.count,
            "held": adapter.held,
            "each": size(adapter.num_pages * made.arena.page_bytes),
            "file": size(adapter.file_bytes),
            "refused": adapter.refusal is not None,
        }
        for adapter in made.adapters[:_SHOWN]
    ]
