"""``loraserve bench``: how fast a running server answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loraserve import errors
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Format, Output

if TYPE_CHECKING:
    from loraserve.cli.load import Asked, Figures, Spread, TrafficPlan
    from loraserve.sdk import Client


def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...", help="Models to send requests to, in turn (default: the base).", show_default=False
        ),
    ] = None,
    all_adapters: Annotated[
        bool, typer.Option("--all", help="Send requests to every adapter of the tenant, in turn.")
    ] = False,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, max=1_000_000)] = 64,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, max=10_000, help="Requests in flight at once.")
    ] = 8,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Send this many per second at random times instead, whether or not earlier ones are answered.",
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens in each prompt.")] = 128,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Leading tokens that all prompts share.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer; the end of text is ignored.")] = 64,
    warmup: Annotated[
        bool, typer.Option("--warmup/--no-warmup", help="Send each model one request first that isn't measured.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and the order of models.")] = 0,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Send load to a running server, and print its throughput and latencies.

    The latencies are time to first token (TTFT) and time per token (TPOT). Exit 1 if a request
    wasn't answered to its end. What is measured is what a client sees: this machine's part
    included.
    """
    if shared_tokens > prompt_tokens:
        raise typer.BadParameter(
            f"--shared-tokens is {shared_tokens}; it should be at most --prompt-tokens, {prompt_tokens}."
        )
    if models and all_adapters:
        raise typer.BadParameter("Give either models or --all, not both.")
    with connected(format, url, tenant) as (output, client):
        from loraserve.cli.load import Figures, TrafficPlan

        base = client.base()
        plan = TrafficPlan(
            models=_models(client, models, base.id, all_adapters=all_adapters),
            num_requests=requests,
            concurrency=concurrency,
            rate=rate,
            prompt_tokens=prompt_tokens,
            shared_tokens=shared_tokens,
            max_tokens=max_tokens,
            seed=seed,
        )
        figures = Figures.of(_run(output, client.url, tenant, plan, base.vocab_size, has_warmup=warmup))
        _show(output, plan, figures)
        if figures.failures:
            output.note("What the server does meanwhile: loraserve ps --watch")
            raise typer.Exit(1)


def _models(client: Client, named: list[str] | None, base: str, *, all_adapters: bool) -> tuple[str, ...]:
    """Choose the models to send load to.

    Raises:
        AdapterNotFound: all are requested, and there is none.
    """
    if not all_adapters:
        return tuple(named or (base,))
    found = tuple(adapter.name for adapter in client.adapters.list() if "live" in adapter.aliases)
    if not found:
        raise errors.AdapterNotFound("The tenant has no adapters.", hint="Run: loraserve adapter push DIR --name NAME")
    return found


def _run(
    output: Output, url: str, tenant: str | None, plan: TrafficPlan, vocab_size: int, *, has_warmup: bool
) -> list[Asked]:
    import anyio

    from loraserve.cli.load import ask, measure
    from loraserve.sdk import AsyncClient

    async def run() -> list[Asked]:
        # A refusal is a result: nothing is tried again.
        async with AsyncClient(url, tenant=tenant, max_retries=0) as client:
            with output.stages() as tell:
                if has_warmup:
                    for number, model in enumerate(plan.models, 1):
                        await ask(client, model, plan.prompts(vocab_size)[0], 1, 0.0)
                        tell("warm-up", number, len(plan.models))
                return await measure(
                    client, plan, vocab_size, lambda number: tell("requests", number, plan.num_requests)
                )

    return anyio.run(run)


def _show(output: Output, plan: TrafficPlan, figures: Figures) -> None:
    match output.format:
        case Format.JSON:
            output.json(figures.as_json())
        case Format.QUIET:
            output.line(f"{figures.output_tokens_per_s:g}")
        case Format.HUMAN:
            load = f"{plan.concurrency} at a time" if plan.rate is None else f"{plan.rate:g} a second"
            models = plan.models[0] if len(plan.models) == 1 else f"{len(plan.models)} models in turn"
            output.pairs(
                {
                    "load": (
                        f"{plan.num_requests} requests, {load}, {plan.prompt_tokens} + {plan.max_tokens} "
                        f"tokens, {models}"
                    ),
                    "answered": f"{figures.num_complete} in {figures.wall_s:.2f} s",
                    "failed": ", ".join(f"{count} {code}" for code, count in figures.failures.items()),
                    "requests": f"{figures.requests_per_s:.2f} a second",
                    "tokens": f"{figures.output_tokens_per_s:.1f} a second, {figures.output_tokens:,} in all",
                    "prompts": f"{figures.prompt_tokens:,} tokens, {figures.cached_tokens:,} of them cached",
                }
            )
            output.line("")
            spreads = {
                "TTFT": figures.ttft_ms,
                "TPOT": figures.tpot_ms,
                "whole answer": figures.latency_ms,
                "queue": figures.queue_ms,
                "adapter": figures.adapter_ms,
            }
            output.records([_record(name, spread) for name, spread in spreads.items()], name="ms")


def _record(name: str, spread: Spread) -> dict[str, object]:
    parts = {"mean": spread.mean, "p50": spread.p50, "p90": spread.p90, "p99": spread.p99}
    return {"ms": name, **{part: None if value is None else f"{value:.1f}" for part, value in parts.items()}}
