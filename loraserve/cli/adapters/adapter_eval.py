"""``loraserve adapter eval``: compare versions and the base on a file of data."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve.cli.adapters.completion import adapter_names
from loraserve.cli.adapters.evaluation_view import in_order, in_words, shown_metric
from loraserve.cli.adapters.version_view import check_served
from loraserve.cli.arguments import split_versions
from loraserve.cli.evaluation.metrics import LOG_LIKELIHOOD, METRICS
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Format, Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loraserve.cli.evaluation.data_file import DataFile, DataLine
    from loraserve.cli.evaluation.evaluator import EvaluationPlan, ModelOutcomes
    from loraserve.errors import LoraserveError
    from loraserve.sdk import Client

MAX_VERSIONS = 8
MAX_CONCURRENCY = 256
MAX_SHOWN = 100
MAX_STOPS = 4
MAX_STOP_LENGTH = 48
"""Bounds of a kept setting's length."""
DEFAULT_MAX_TOKENS = 256
MAX_RETRIES = 8
"""Further tries of a request that is refused for now: a rate's limit isn't the version's fault."""
_NOTE_EVERY_S = 5.0
_MAX_TEXT = 240
"""Characters of a text that people are shown."""


def register(app: typer.Typer) -> None:
    """Add the command of this file to `app`."""
    app.command("eval")(evaluate)


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION,…]",
            help="Adapter (the version that `live` points to), or versions of it.",
            autocompletion=adapter_names,
        ),
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="File of JSON lines: prompt or messages, and answer; optionally choices, regex or json_fields.",
            show_default=False,
        ),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="METRIC",
            help=f"Metric to compute; may be repeated (default: all that the lines have): {', '.join(METRICS)}.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = DEFAULT_MAX_TOKENS,
    stop: Annotated[list[str] | None, typer.Option(help="Text to end an answer before; may be repeated.")] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, max=MAX_CONCURRENCY, help="Requests in flight at once.")
    ] = 8,
    show: Annotated[
        int, typer.Option(min=0, max=MAX_SHOWN, help="Lines to show of those that the versions answer differently.")
    ] = 3,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep the result with each version on the server.")
    ] = True,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Compare versions with each other and with the base, on lines whose answers are known.

    Every line is checked before the first request. Answers are greedy. The result is kept with each
    version: `adapter show` shows it, and `adapter alias --if-better` promotes by it.
    """
    name, numbers = split_versions(target)
    if len(numbers) > MAX_VERSIONS:
        raise typer.BadParameter(f"{len(numbers)} versions are named; at most {MAX_VERSIONS} are compared at once.")
    stops = tuple(stop or ())
    if len(stops) > MAX_STOPS or any(not 1 <= len(text) <= MAX_STOP_LENGTH for text in stops):
        raise typer.BadParameter(f"--stop takes up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters.")
    if unknown := [one for one in metric or () if one not in METRICS]:
        raise typer.BadParameter(f"--metric {unknown[0]} is unknown; there are {', '.join(METRICS)}.")
    with connected(format, url, tenant, {"NAME": name}) as (output, client):
        from loraserve.cli.evaluation.data_file import named, read_data
        from loraserve.cli.evaluation.evaluator import EvaluationPlan

        lines = read_data(data)
        metrics = _chosen(metric, lines)
        if lines.ignored:
            output.note(f"Fields of the lines that no metric reads: {named(lines.ignored)}.")
        versions = [client.adapters.version(name, number) for number in numbers or (_live(client, name),)]
        for version in versions:
            check_served(output, version)
        plan = EvaluationPlan(
            models=(client.base().id, *(version.model for version in versions)),
            data=lines,
            metrics=metrics,
            max_tokens=max_tokens,
            stop=stops,
            concurrency=concurrency,
        )
        outcomes = _run(output, client.url, tenant, plan)
        _show(output, plan, outcomes, show)
        if keep:
            _keep(output, client, plan, outcomes)


def _live(client: Client, name: str) -> int:
    return client.adapters.alias(name, "live").version


def _chosen(named: Sequence[str] | None, data: DataFile) -> tuple[str, ...]:
    """Choose the metrics to compute.

    Raises:
        typer.BadParameter: no line has what a named one needs.
    """
    if not named:
        return data.metrics
    if missing := [name for name in named if name not in data.metrics]:
        raise typer.BadParameter(
            f"--metric {missing[0]}: no line of {data.name} has what it needs. "
            f"Its lines have {', '.join(data.metrics)}."
        )
    return tuple(dict.fromkeys(named))


def _run(output: Output, url: str, tenant: str | None, plan: EvaluationPlan) -> list[ModelOutcomes]:
    import anyio

    from loraserve.cli.evaluation.evaluator import evaluate as send
    from loraserve.sdk import AsyncClient

    noted_at = -_NOTE_EVERY_S

    def wait(delay_s: float, error: LoraserveError) -> None:
        nonlocal noted_at
        # requests in flight together are refused together
        if time.monotonic() - noted_at >= _NOTE_EVERY_S:
            noted_at = time.monotonic()
            output.wait(delay_s, error)

    async def run() -> list[ModelOutcomes]:
        async with AsyncClient(url, tenant=tenant, max_retries=MAX_RETRIES, on_wait=wait) as client:
            with output.stages() as tell:
                title = f"{plan.num_answers:,} answers"
                return await send(client, plan, lambda done: tell(title, done, plan.num_answers))

    return anyio.run(run)


def _show(output: Output, plan: EvaluationPlan, outcomes: list[ModelOutcomes], num_shown: int) -> None:
    differing = _differing(plan, outcomes)
    shown = differing[:num_shown]
    match output.format:
        case Format.JSON:
            output.json(_as_json(plan, outcomes, shown, len(differing)))
        case Format.QUIET | Format.HUMAN:
            output.records([_row(one, plan) for one in outcomes], name="model")
    if output.format is Format.HUMAN:
        for index in shown:
            _show_line(output, plan.data.lines[index], {one.model: one.lines[index].answer.text for one in outcomes})
        if len(differing) > len(shown):
            output.note(f"{len(differing) - len(shown)} more lines are answered differently. See: --show {MAX_SHOWN}")
    for one in outcomes:
        if one.num_cut and set(plan.metrics) != {LOG_LIKELIHOOD}:
            output.note(
                f"{one.model}: {one.num_cut} of {len(one.lines)} answers were cut at {plan.max_tokens} tokens. "
                "Allow more: --max-tokens"
            )


def _differing(plan: EvaluationPlan, outcomes: list[ModelOutcomes]) -> list[int]:
    """List the lines that the versions answer differently; a single one differs from the base."""
    compared = outcomes[1:] if len(outcomes) > 2 else outcomes
    return [
        index
        for index in range(len(plan.data.lines))
        if len({one.lines[index].answer.text.strip() for one in compared}) > 1
    ]


def _row(one: ModelOutcomes, plan: EvaluationPlan) -> dict[str, object]:
    found = one.metrics()
    return {
        "model": one.model,
        "lines": len(one.lines),
        **{in_words(name): shown_metric(name, found.get(name)) for name in in_order(plan.metrics)},
    }


def _show_line(output: Output, line: DataLine, answers: dict[str, str]) -> None:
    texts = {"question": line.question, "expected": line.answer} | answers
    output.line("")
    output.line(f"line {line.number}")
    output.pairs({f"  {title}": _short(text) for title, text in texts.items()})


def _short(text: str) -> str:
    """Write a text in one line, and no longer than a glance."""
    text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _as_json(
    plan: EvaluationPlan, outcomes: list[ModelOutcomes], shown: list[int], num_differing: int
) -> dict[str, object]:
    lines = plan.data.lines
    return {
        "data": {"name": plan.data.name, "sha256": plan.data.sha256, "num_lines": len(lines)},
        "settings": plan.settings,
        "models": [{"model": one.model, "metrics": one.metrics(), "num_cut": one.num_cut} for one in outcomes],
        "num_differing": num_differing,
        "differences": [
            {
                "line": lines[index].number,
                "question": lines[index].question,
                "expected": lines[index].answer,
                "answers": {one.model: one.lines[index].answer.text for one in outcomes},
            }
            for index in shown
        ],
    }


def _keep(output: Output, client: Client, plan: EvaluationPlan, outcomes: list[ModelOutcomes]) -> None:
    """Send the result of each version to the server."""
    base, *versions = outcomes
    for one in versions:
        name, _, number = one.model.rpartition("@")
        client.evaluations.put(
            name,
            int(number),
            plan.data.sha256,
            data_name=plan.data.name,
            num_lines=len(plan.data.lines),
            metrics=one.metrics(),
            base_metrics=base.metrics(),
            settings=plan.settings,
        )
    last = versions[-1].model
    output.note(f"Kept with {', '.join(one.model for one in versions)}. See: loraserve adapter show {last}")
    if len(versions) > 1:
        name, _, number = last.rpartition("@")
        output.note(
            f"Promote it if it is better: loraserve adapter alias {name} live {number} --if-better {plan.metrics[0]}"
        )
