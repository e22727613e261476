"""The simulator serves each request once, its bounds are bounds, and our placement reaches its
figures in short runs.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import placement, reporting
from benchmarks.placement import CENTRE, QUICK, Outcome, Result, Scenario, misses, run_scenario, simulate
from benchmarks.placement_costs import Costs, measured
from benchmarks.placement_load import SHAPES, Traffic, che_hit_share, offline_optimum
from benchmarks.placement_policies import policies
from benchmarks.simulated_cluster import Cluster, MembershipChange, SimulatedReplica, SimulatedRequest, request_of

COSTS = Costs(((1, 0.04), (8, 0.08), (32, 0.2)), 0.002, 0.03, 0.02, 1 << 20)
SHORT = replace(CENTRE, num_adapters=1_000, duration_s=300.0)


class First:
    """Chooses the first replica."""

    def choose(self, request: SimulatedRequest, replicas: list[SimulatedReplica], now_s: float) -> int:
        return 0


def make_request(number: int, at_s: float, adapter: int = 0, output_tokens: int = 5) -> SimulatedRequest:
    return SimulatedRequest(number, at_s, adapter, 0, 10, 10, output_tokens, request_of(adapter, 0, 1 << 20))


def make_cluster(device: int = 40, host: int = 10) -> Cluster:
    return Cluster(1, First(), COSTS, device_bytes=device << 20, host_bytes=host << 20)


@pytest.mark.parametrize("name", list(policies(COSTS, 1)))
@pytest.mark.parametrize("change", ["", "lost", "added"])
def test_each_request_is_served_once(name: str, change: str) -> None:
    scenario = replace(SHORT, num_replicas=4, duration_s=120.0)
    requests = scenario.traffic(COSTS).requests(COSTS)
    changes = [MembershipChange(60.0, change == "lost")] if change else []
    cluster = Cluster(4, policies(COSTS, 1)[name](), COSTS, device_bytes=64 << 20, host_bytes=64 << 20, changes=changes)
    cluster.run(requests)
    assert all(request.num_finishes == 1 for request in requests)
    assert all(request.at_s < request.first_token_s < request.finished_s for request in requests)
    assert all(replica.load == 0 and not replica.ready and not replica.loading for replica in cluster.replicas)
    for replica in cluster.present:
        assert (replica.pending_tokens, replica.context_tokens, replica.pins) == (0, 0, {})
        assert len(replica.device) <= cluster.device_slots
        assert len(replica.host) <= cluster.host_slots
        assert not replica.device.keys() & replica.host.keys()
    assert (cluster.num_resent > 0) == (change == "lost")


def test_lone_request_takes_load_prompt_and_step_time() -> None:
    cluster, request = make_cluster(), make_request(0, 1.0)
    cluster.run([request])
    assert request.first_token_s == pytest.approx(1.0 + 0.03 + 0.04 + 20 * 0.002)
    assert request.finished_s == pytest.approx(request.first_token_s + 4 * 0.04)
    assert (request.tier, len(cluster.loads)) == ("disk", 1)


def test_second_request_joins_after_step_with_warm_adapter() -> None:
    cluster, first, second = make_cluster(), make_request(0, 0.0, output_tokens=50), make_request(1, 1.0)
    cluster.run([first, second])
    assert (second.tier, second.is_prefix_hit) == ("device", True)
    boundary_s = first.first_token_s + math.ceil((1.0 - first.first_token_s) / 0.04) * 0.04
    two_s = COSTS.step_s(2)
    assert second.first_token_s == pytest.approx(boundary_s + two_s + 10 * 0.002)
    assert second.finished_s == pytest.approx(second.first_token_s + 4 * two_s)


def test_requests_for_loading_adapter_share_single_load() -> None:
    cluster, requests = make_cluster(), [make_request(number, 0.001 * number) for number in range(5)]
    cluster.run(requests)
    assert len(cluster.loads) == 1
    assert all(request.tier == "disk" for request in requests)


def test_evicted_adapter_is_found_in_host_then_gone() -> None:
    cluster = make_cluster(device=33, host=1)
    requests = [make_request(number, 2.0 * number, adapter) for number, adapter in enumerate([*range(35), 1, 0])]
    cluster.run(requests)
    assert [request.tier for request in requests[-2:]] == ["host", "disk"]


@pytest.mark.parametrize("shape", SHAPES)
def test_traffic_has_requested_rate_and_repeats_for_seed(shape: str) -> None:
    traffic = Traffic(shape, 100, 0.9, 20.0, 600.0, 7)
    requests = traffic.requests(COSTS)
    expected = 20.0 * 600.0 * (1.1 if shape == "flash" else 1.0)
    assert len(requests) == pytest.approx(expected, rel=0.2)
    assert requests == traffic.requests(COSTS)
    assert all(before.at_s <= after.at_s < 600.0 for before, after in itertools.pairwise(requests))
    crowd = [request.at_s for request in requests if request.adapter == traffic.flash_adapter]
    assert (len(crowd) > 1000) == (shape == "flash")


@given(st.lists(st.integers(0, 5), max_size=9), st.integers(1, 3))
@settings(deadline=None, max_examples=50)
def test_offline_optimum_is_the_best_of_all_choices(adapters: list[int], held: int) -> None:
    def best(place: int, memory: frozenset[int]) -> int:
        if place == len(adapters):
            return 0
        adapter = adapters[place]
        if adapter in memory:
            return 1 + best(place + 1, memory)
        kept = [memory, *(memory - {other} | {adapter} for other in memory)]
        return max(best(place + 1, choice) for choice in kept)

    expected = best(0, frozenset(range(held))) / max(1, len(adapters))
    assert offline_optimum(adapters, held, 0) == pytest.approx(expected)


def test_che_estimate_is_near_lru_hit_rate() -> None:
    traffic = Traffic("steady", 1_000, 0.8, 1.0, 1.0, 1)
    asked = np.random.default_rng(1).choice(1_000, 60_000, p=traffic.popularity()).tolist()
    memory: dict[int, None] = {}
    hits = 0
    for place, adapter in enumerate(asked):
        hits += adapter in memory and place >= 20_000
        memory.pop(adapter, None)
        memory[adapter] = None
        if len(memory) > 200:
            del memory[next(iter(memory))]
    assert che_hit_share(traffic.popularity(), 200) == pytest.approx(hits / 40_000, abs=0.01)
    assert che_hit_share(traffic.popularity(), 1_000) == 1.0


def test_costs_match_measured_results() -> None:
    costs = measured()
    assert [count for count, _ in costs.step_points] == [1, 8, 32]
    assert costs.step_s(8) < costs.step_s(20) < costs.step_s(32)
    assert 0 < costs.promote_s < costs.load_s < 1


def test_same_seed_gives_the_same_outcome() -> None:
    first, second = (simulate(SHORT, "loraserve", measured())[0] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("scenario", [QUICK[0], QUICK[2], QUICK[3], QUICK[4]], ids=lambda scenario: scenario.name)
def test_placement_reaches_target_figures(scenario: Scenario) -> None:
    result = run_scenario(scenario, measured(), ["loraserve"])
    assert misses(result) == []
    assert result.ours.in_memory <= result.optimum + 1e-9


def test_insufficient_memory_is_reported_with_bound() -> None:
    scenario = replace(SHORT, num_replicas=2, num_adapters=20_000, zipf=0.6)
    found = misses(run_scenario(scenario, measured(), ["loraserve"]))
    assert any("together hold 4,734 adapters of 20,000; at most" in line for line in found)


def test_page_and_numbers_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(placement, "QUICK", (replace(SHORT, duration_s=300.0, change="lost"),))
    write = reporting.write
    monkeypatch.setattr(reporting, "write", lambda *arguments: write(*arguments, folder=tmp_path))
    placement.main(["--quick"])
    page = capsys.readouterr().out
    assert "| loraserve |" in page
    assert "in the middle a replica is lost" in page
    (document,) = tmp_path.glob("placement-*-quick.json")
    numbers = json.loads(document.read_text())
    assert [one["policy"] for one in numbers["results"][0]["outcomes"]] == list(policies(COSTS, 1))


def test_missed_figures_are_named() -> None:
    outcome = Outcome("loraserve", 10, 1.3, 1.4, 1.5, 0.9, 2.0, 0.3, 0.1, 0.2, 0.5, 0, 0)
    found = misses(Result(replace(SHORT, change="lost"), 1.0, 100, 0.92, 0.91, [outcome]))
    assert len(found) == 5
