"""Load for a running server, and what is made of what came of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraserve import Client
from loraserve.cli.load import Asked, Figures, Spread, TrafficPlan

Run = Callable[..., Any]


def make_plan(**fields: Any) -> TrafficPlan:
    values = {"models": ("sql",), "num_requests": 50, "concurrency": 4, "rate": None, "prompt_tokens": 12}
    return TrafficPlan(**(values | {"shared_tokens": 0, "max_tokens": 4, "seed": 0} | fields))


def test_prompts_share_prefix_and_repeat_for_same_seed() -> None:
    plan = make_plan(shared_tokens=5)
    prompts = plan.prompts(100)
    assert {len(prompt) for prompt in prompts} == {12}
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1
    assert len({tuple(prompt[5:]) for prompt in prompts}) == 50
    assert all(3 <= token < 100 for prompt in prompts for token in prompt)
    assert plan.prompts(100) == prompts != make_plan(shared_tokens=5, seed=1).prompts(100)


def test_request_times_have_requested_mean_rate() -> None:
    times = make_plan(rate=10.0, num_requests=2000).delays_s()
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 180 < times[-1] < 220
    assert set(make_plan().delays_s()) == {0.0}


def test_figures_are_of_whole_answers_alone() -> None:
    good = Asked("sql", due_s=10.0, first_s=10.5, last_s=12.5, num_tokens=5, waits_ms={"queue": 3.0})
    late = Asked("sql", due_s=11.0, first_s=12.0, last_s=12.0, num_tokens=1)
    broken = Asked("sql", due_s=11.0, first_s=11.1, last_s=99.0, num_tokens=7, failure="overloaded")
    figures = Figures.of([good, late, broken])
    assert (figures.num_requests, figures.num_complete, figures.failures) == (3, 2, {"overloaded": 1})
    assert (figures.output_tokens, figures.wall_s, figures.output_tokens_per_s) == (6, 2.5, 2.4)
    assert (figures.ttft_ms.p50, figures.ttft_ms.p99) == (500, 1000)
    assert (figures.tpot_ms.p50, figures.queue_ms.p99, figures.adapter_ms.p50) == (500, 3.0, None)


def test_percentile_is_the_nearest_rank() -> None:
    spread = Spread.of([float(value) for value in range(1, 101)])
    assert (spread.mean, spread.p50, spread.p90, spread.p99) == (50.5, 50, 90, 99)


def test_bench_asks_every_model_and_counts_every_token(here: Run, client: Client, sql_dir: Path) -> None:
    client.tenants.create("bench")
    key = client.keys.create("bench", name="ci").key
    with Client(client.url, api_key=key) as tenant:
        for name in ("one", "two"):
            tenant.adapters.push(sql_dir, name=name)
    load = ("-n", "6", "-c", "3", "--prompt-tokens", "8", "--max-tokens", "5")
    done = here("bench", "--all", *load, "--format", "json", LORASERVE_API_KEY=key)
    assert done.code == 0
    assert (done.json["num_complete"], done.json["failures"]) == (6, {})
    assert (done.json["output_tokens"], done.json["prompt_tokens"]) == (30, 48)
    assert 0 < done.json["ttft_ms"]["p50"] <= done.json["latency_ms"]["p50"]
    human = here("bench", "one", *load, "--rate", "50", LORASERVE_API_KEY=key)
    assert human.code == 0
    assert "6 in" in human.stdout
    assert human.stdout.splitlines()[-4].split()[0] == "TPOT"


def test_bench_of_absent_model_fails_with_reason(here: Run) -> None:
    done = here("bench", "nobody", "-n", "2", "--max-tokens", "1", "--format", "json")
    assert done.code == 1
    assert done.json["failures"] == {"model_not_found": 2}
