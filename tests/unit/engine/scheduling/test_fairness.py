"""Fairness: tenants share the engine by weight, however much each sends;
so do a tenant's adapters.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loraserve.engine.request import Request, RequestStatus
from loraserve.engine.scheduling.fair_queue import OUTPUT_COST, PROMPT_COST
from loraserve.engine.scheduling.preemption import MAX_FAIR_PREEMPTIONS
from loraserve.engine.scheduling.prompt_admission import MAX_DEFICIT_STEPS, OVER_SHARE_DIVISOR
from loraserve.engine.scheduling.scheduler import MAX_CREDIT_STEPS
from loraserve.types import FinishReason, Residency, TenantId

from ..conftest import Harness, as_probe, make_ref, make_request


def cost(request: Request) -> float:
    """Of all of it."""
    return request.num_prompt_tokens * PROMPT_COST + request.params.max_tokens * OUTPUT_COST


def served(harness: Harness, num_steps: int, by: str = "tenant") -> Counter[str]:
    """What each tenant, or adapter, has been computed in so many steps, by cost."""
    total: Counter[str] = Counter()
    for _ in range(num_steps):
        harness.now += 0.2
        for entry in harness.step()[0]:
            request = entry.request
            name = request.tenant if by == "tenant" or request.adapter is None else request.adapter.name
            prompt = max(0, min(entry.end, request.num_prompt_tokens) - entry.start)
            total[name] += int(prompt * PROMPT_COST + entry.num_sampled_tokens * OUTPUT_COST)
    return total


def check(harness: Harness) -> None:
    assert harness.scheduler.check() == []


def test_tenants_are_served_equally() -> None:
    harness = Harness(max_num_seqs=4)
    harness.add(*[make_request(16, tenant="noisy") for _ in range(200)])
    harness.add(*[make_request(16, tenant="quiet") for _ in range(60)])
    total = served(harness, 60)
    assert total["quiet"] == pytest.approx(total["noisy"], rel=0.15)


def test_tenant_with_triple_weight_is_served_threefold() -> None:
    harness = Harness(max_num_seqs=4)
    for _ in range(100):
        harness.add(make_request(16, tenant="light"), make_request(16, tenant="heavy", weight=3.0))
    total = served(harness, 80)
    assert total["heavy"] / total["light"] == pytest.approx(3.0, rel=0.2)


def test_ten_adapters_have_share_of_single_tenant() -> None:
    harness = Harness(max_num_seqs=4)
    names = [f"a{number}" for number in range(10)]
    for name in [*names, "only"]:
        harness.adapters.set(name, Residency.RESIDENT)
    for number in range(200):
        harness.add(make_request(16, tenant="ten", adapter=names[number % 10]))
        harness.add(make_request(16, tenant="one", adapter="only"))
    total = served(harness, 80)
    assert total["ten"] == pytest.approx(total["one"], rel=0.15)


def test_adapters_of_tenant_are_served_equally() -> None:
    harness = Harness(max_num_seqs=4)
    for name in ("busy", "rare"):
        harness.adapters.set(name, Residency.RESIDENT)
    harness.add(*[make_request(16, adapter="busy") for _ in range(200)])
    harness.add(*[make_request(16, adapter="rare") for _ in range(60)])
    total = served(harness, 60, by="adapter")
    assert total["rare"] == pytest.approx(total["busy"], rel=0.15)


def test_priority_orders_only_requests_of_same_tenant() -> None:
    harness = Harness(max_num_seqs=1)
    running = make_request(4, tenant="a", max_tokens=30)
    harness.add(running)
    harness.step()
    late, early = make_request(tenant="a", priority=5), make_request(tenant="a", priority=1)
    other = make_request(tenant="b", priority=9, max_tokens=1)
    harness.add(late, early, other)
    begun: list[Request] = []
    while len(begun) < 3:
        begun += [entry.request for entry in harness.step()[0] if entry.start == 0]
    assert begun == [other, early, late]


def test_a_priority_below_zero_is_before_every_tenant() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(*[make_request(30, tenant="a") for _ in range(3)])
    served(harness, 2)
    behind, first = make_request(tenant="b"), make_request(tenant="a", priority=-1)
    harness.add(behind, first)
    while first.status is RequestStatus.WAITING:
        harness.step()
    assert behind.status is RequestStatus.WAITING


def test_idle_time_earns_tenant_bounded_credit() -> None:
    # with one slot, no quota of slots makes up for it
    harness = Harness(max_num_seqs=1)
    harness.add(*[make_request(16, tenant="steady") for _ in range(200)])
    served(harness, 200)
    harness.add(*[make_request(16, tenant="back") for _ in range(100)])
    total = served(harness, 150)
    assert total["steady"] > 300
    assert 0 <= total["back"] - total["steady"] <= MAX_CREDIT_STEPS * 32 * PROMPT_COST + 2 * 22


def test_idle_time_earns_adapter_no_credit() -> None:
    harness = Harness(max_num_seqs=1)
    for name in ("steady", "back"):
        harness.adapters.set(name, Residency.RESIDENT)
    harness.add(*[make_request(16, adapter="steady") for _ in range(200)])
    served(harness, 150)
    harness.add(*[make_request(16, adapter="back") for _ in range(60)])
    total = served(harness, 80, by="adapter")
    assert total["back"] == pytest.approx(total["steady"], abs=2 * 22)


def test_prefix_cache_hits_are_not_charged(harness: Harness) -> None:
    tokens = list(range(50, 66))
    harness.add(make_request(tokens=tokens, max_tokens=1))
    harness.run()
    keeping, again = make_request(4, tenant="other", max_tokens=50), make_request(tokens=tokens, max_tokens=1)
    harness.add(keeping, again)
    harness.step()
    assert harness.flow(again).virtual_counter == 4 * PROMPT_COST + OUTPUT_COST


def test_recomputed_tokens_are_charged_once() -> None:
    harness = Harness(num_blocks=6, block_size=4, token_budget=16)
    requests = [make_request(7, max_tokens=8) for _ in range(3)]
    keeping = make_request(1, tenant="other", max_tokens=40)
    harness.add(*requests, keeping)
    flow = None
    while any(request.status is not RequestStatus.FINISHED for request in requests):
        harness.step()
        flow = flow or harness.flow(requests[0])
    assert harness.scheduler.num_preemptions > 0
    assert flow is not None
    assert flow.virtual_counter == sum(map(cost, requests))


def test_first_request_for_cold_adapter_pays_for_load() -> None:
    harness = Harness()
    harness.adapters.mean_load_s = 0.02
    first, second = make_request(tenant="a", adapter="cold"), make_request(tenant="b", adapter="cold")
    harness.add(first, second)
    harness.step()
    assert harness.flow(first).virtual_counter == pytest.approx(
        0.02 / harness.kv.prefix_cache.prefill_cost.seconds_per_unit * PROMPT_COST
    )
    assert harness.flow(second).virtual_counter == 0.0


def test_a_tenant_without_resident_adapters_earns_no_credit() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(*[make_request(16, tenant="cold", adapter="cold") for _ in range(50)])
    harness.add(*[make_request(16, tenant="hot") for _ in range(300)])
    served(harness, 120)
    harness.adapters.set("cold", Residency.RESIDENT)
    total = served(harness, 60)
    assert total["hot"] >= 0.6 * total["cold"]


def test_absent_adapter_earns_no_credit() -> None:
    harness = Harness(max_num_seqs=2)
    harness.adapters.set("hot", Residency.RESIDENT)
    harness.add(*[make_request(16, adapter="cold") for _ in range(50)])
    harness.add(*[make_request(16, adapter="hot") for _ in range(300)])
    served(harness, 60)
    harness.adapters.set("cold", Residency.RESIDENT)
    total = served(harness, 30, by="adapter")
    assert total["hot"] >= 0.6 * total["cold"]


# prompts


def test_prompt_of_least_served_tenant_precedes_begun_prompt() -> None:
    harness = Harness(token_budget=8)
    long, short = make_request(60, tenant="noisy"), make_request(6, tenant="quiet")
    harness.add(long)
    harness.step()
    harness.add(short)
    entries, _ = harness.step()
    assert [(entry.request, entry.num_tokens) for entry in entries] == [(short, 6)]


def test_prompts_over_share_fill_part_of_step() -> None:
    harness = Harness(token_budget=32)
    long = make_request(100, tenant="noisy")
    harness.add(long)
    assert harness.step()[0][0].num_tokens == 32
    harness.add(make_request(4, tenant="quiet", max_tokens=1))
    harness.step()
    harness.now += 1.0
    # the other has gone, and may come again
    assert [entry.num_tokens for entry in harness.step()[0]] == [32 // OVER_SHARE_DIVISOR]
    for _ in range(3):
        harness.now += 20.0
        entries, _ = harness.step()
    assert entries[0].num_tokens > 32 // OVER_SHARE_DIVISOR


# slots and blocks


def test_tenant_below_slot_quota_takes_slot_above_quota() -> None:
    harness = Harness(max_num_seqs=4)
    noisy = [make_request(4, tenant="noisy", max_tokens=30) for _ in range(10)]
    harness.add(*noisy)
    harness.step()
    quiet = make_request(4, tenant="quiet", max_tokens=1)
    harness.add(quiet)
    entries, outputs = harness.step()
    assert quiet.status is RequestStatus.FINISHED
    assert len(entries) == 4
    assert [request.num_preemptions for request in noisy[:4]] == [0, 0, 0, 1]
    check(harness)
    del outputs
    harness.run()
    assert all(request.num_output_tokens == 30 for request in noisy)


def test_tenant_takes_no_slot_from_lower_counter() -> None:
    harness = Harness(max_num_seqs=4)
    harness.add(make_request(1, tenant="steady", weight=2.0, max_tokens=100))
    harness.add(make_request(16, tenant="light", weight=0.5, max_tokens=1))
    harness.step()
    harness.add(*[make_request(4, tenant="heavy", weight=2.0, max_tokens=60) for _ in range(6)])
    harness.step()
    # its quota is a slot, and the other has one more than its own
    again = make_request(4, tenant="light", weight=0.5, max_tokens=1)
    harness.add(again)
    light, heavy = (harness.scheduler._fair_queue._tenants[TenantId(name)] for name in ("light", "heavy"))
    while again.status is RequestStatus.WAITING:
        before = light.virtual_counter, heavy.virtual_counter
        assert light.num_running == 0
        assert heavy.num_running == 3
        harness.step()
        check(harness)
    assert before[0] > heavy.virtual_counter - 3.0
    assert before[1] < before[0] <= before[1] + 3.0
    assert harness.scheduler.num_fair_preemptions == 1


def test_tenant_waiting_for_slot_keeps_deficit() -> None:
    harness = Harness(max_num_seqs=5, token_budget=8)
    harness.add(make_request(60, tenant="long"))
    harness.step()
    harness.add(*[make_request(1, tenant="many", max_tokens=60) for _ in range(3)])
    harness.add(make_request(1, tenant="waits", max_tokens=60))
    harness.step()
    harness.add(*[make_request(1, tenant="waits") for _ in range(2)])
    tenants = harness.scheduler._fair_queue._tenants
    long, many, waits = (tenants[TenantId(name)] for name in ("long", "many", "waits"))
    for _ in range(4):
        entries, _ = harness.step()
        # one has a slot to give, but not to a tenant with its quota; and a prompt is visited
        assert (long.num_running, many.num_running, waits.num_running, waits.num_waiting) == (1, 3, 1, 2)
        assert entries[-1].request.tenant == "long"
        assert waits.virtual_counter == waits.total_service < long.virtual_counter


def test_deficit_of_tenant_with_slot_quota_is_capped() -> None:
    """Long prompts of one are computed while another waits for more than its part; then they have
    ended, and the one has a request again.
    """
    harness = Harness(max_num_seqs=4, token_budget=16, num_blocks=1024)
    harness.add(*[make_request(1, tenant="many", max_tokens=2000) for _ in range(2)])
    long = [make_request(1500, tenant="long", max_tokens=1) for _ in range(2)]
    harness.add(*long)
    harness.step()
    harness.add(*[make_request(1, tenant="many", max_tokens=2000) for _ in range(3)])
    while any(request.status is not RequestStatus.FINISHED for request in long):
        harness.step()
    again = make_request(4, tenant="long", max_tokens=1)
    harness.add(again)
    many = harness.scheduler._fair_queue._tenants[TenantId("many")]
    num_steps = 0
    while again.status is RequestStatus.WAITING:
        harness.step()
        num_steps += 1
        check(harness)
        assert num_steps <= MAX_DEFICIT_STEPS * 16 / (4 * OUTPUT_COST) + 8
    assert many.num_running == 3


def test_fair_preemptions_of_request_are_bounded() -> None:
    harness = Harness(max_num_seqs=2)
    noisy = [make_request(4, tenant="noisy", max_tokens=200) for _ in range(2)]
    harness.add(*noisy)
    harness.step()
    for _ in range(20):
        harness.add(make_request(4, tenant="quiet", max_tokens=2))
        harness.step()
        harness.step()
        check(harness)
    assert [request.num_preemptions for request in noisy] == [MAX_FAIR_PREEMPTIONS] * 2


def test_lone_tenant_preempts_no_own_request() -> None:
    harness = Harness(max_num_seqs=2)
    harness.add(*[make_request(4, max_tokens=10) for _ in range(10)])
    harness.run()
    assert harness.scheduler.num_preemptions == 0


def test_tenant_below_block_quota_takes_blocks_above_quota() -> None:
    harness = Harness(num_blocks=16, block_size=4, token_budget=64)
    noisy = [make_request(14, tenant="noisy", max_tokens=40) for _ in range(4)]
    harness.add(*noisy)
    harness.step()
    quiet = make_request(8, tenant="quiet", max_tokens=1)
    harness.add(quiet)
    harness.step()
    assert quiet.status is RequestStatus.FINISHED
    check(harness)


def test_requests_of_tenant_hold_blocks_within_share() -> None:
    harness = Harness(num_blocks=40, block_size=4)
    capped = [make_request(12, tenant="capped", kv_share=0.2, max_tokens=12) for _ in range(6)]
    harness.add(*capped)
    others = [make_request(12, tenant="other", max_tokens=4) for _ in range(4)]
    harness.add(*others)
    most = 0
    while harness.scheduler.has_requests:
        harness.step()
        check(harness)
        held = sum(len(request.blocks) for request in capped)
        most = max(most, held)
        assert held <= 8
    assert most > 4
    assert all(request.num_output_tokens == 12 for request in capped)


def test_only_running_request_of_tenant_may_exceed_share() -> None:
    harness = Harness(num_blocks=40, block_size=4)
    request = make_request(30, kv_share=0.01, max_tokens=10)
    harness.add(request, make_request(8, kv_share=0.01, max_tokens=2))
    harness.run()
    assert request.num_output_tokens == 10
    assert request.num_preemptions == 0


def serve_adapters(kv_share: float, shares: dict[str, float], num_each: int = 2) -> tuple[int, int]:
    """Return the most adapters, and the most requests, of one tenant that held anything at once."""
    harness = Harness(num_blocks=80, block_size=4)
    for name, share in shares.items():
        harness.adapters.set(name, Residency.RESIDENT)
        harness.adapters.shares[make_ref(name).digest] = share
    requests = [
        make_request(8, tenant="a", adapter=name, kv_share=kv_share, max_tokens=6)
        for _ in range(num_each)
        for name in shares
    ]
    harness.add(*requests)
    most_pinned = most_running = 0
    while harness.scheduler.has_requests:
        harness.step()
        check(harness)
        most_pinned = max(most_pinned, sum(count > 0 for count in harness.adapters.pins.values()))
        most_running = max(most_running, harness.scheduler.num_running)
    assert all(request.num_output_tokens == 6 for request in requests)
    return most_pinned, most_running


@pytest.mark.parametrize(("kv_share", "num_adapters"), [(1.0, 4), (0.75, 3), (0.55, 2), (0.1, 1)])
def test_tenant_pins_adapters_within_share(kv_share: float, num_adapters: int) -> None:
    most_pinned, _ = serve_adapters(kv_share, dict.fromkeys("bcde", 0.2))
    assert most_pinned == num_adapters


def test_requests_share_bytes_of_same_adapter() -> None:
    _, most_running = serve_adapters(0.5, {"b": 0.2}, num_each=4)
    assert most_running == 4


def test_adapter_beyond_the_share_is_not_asked_for(harness: Harness) -> None:
    for name in "bc":
        harness.adapters.set(name, Residency.RESIDENT)
        harness.adapters.shares[make_ref(name).digest] = 0.3
    harness.add(*(make_request(8, tenant="a", adapter=name, kv_share=0.5, max_tokens=4) for name in "bc"))
    harness.step()
    harness.step()
    assert harness.adapters.asked == ["b"]
    harness.run()
    assert harness.adapters.asked[-1] == "c"


# a request's own time


def test_timeout_before_first_token_ends_with_error(harness: Harness) -> None:
    request = make_request(adapter="cold", timeout_s=2.0, arrival_s=1.0)
    harness.add(request, make_request(max_tokens=9))
    harness.step()
    harness.now = 2.9
    assert harness.step()[1][0].finish_reason is None
    harness.now = 3.0
    output = next(one for one in harness.step()[1] if one.request_id == request.request_id)
    assert (output.finish_reason, output.error_code) == (FinishReason.ERROR, "deadline_exceeded")
    assert "2 s" in str(output.error_message)
    check(harness)


def test_timeout_after_tokens_ends_with_partial_answer(harness: Harness) -> None:
    harness.adapters.set("a", Residency.RESIDENT)
    request = make_request(adapter="a", max_tokens=50, timeout_s=2.0)
    harness.add(request)
    harness.step()
    harness.now = 2.0
    _, (output,) = harness.step()
    assert (output.finish_reason, output.stop_reason, output.token_ids) == (FinishReason.LENGTH, "timeout", ())
    assert request.num_output_tokens == 1
    assert (harness.kv.num_held, sum(harness.adapters.pins.values())) == (0, 0)


def test_deadlines_of_ended_requests_are_forgotten(harness: Harness) -> None:
    for _ in range(500):
        harness.add(make_request(1, max_tokens=1, timeout_s=3600.0))
        harness.step()
    assert len(harness.scheduler._deadlines) < 100


# bounds


def random_request(rng: random.Random, tenant: str, weight: float) -> Request:
    return make_request(
        rng.randint(1, 16),
        tenant=tenant,
        weight=weight,
        adapter=rng.choice([None, f"{tenant}1", f"{tenant}2"]),
        max_tokens=rng.randint(1, 8),
    )


MAX_COST = 16 * PROMPT_COST + 8 * OUTPUT_COST
MAX_COST_AFTER_PROMPT = 7 * OUTPUT_COST
"""Of one whose first token is sampled."""


def lead(num_places: int, weight: float) -> float:
    """By how much a tenant is at most charged for what runs, once the last of it has begun: all of
    that one, and what the others have left after their prompts, since a tenant's prompts that have
    begun come before its requests that wait.
    """
    return (MAX_COST + (num_places - 1) * MAX_COST_AFTER_PROMPT) / weight


@given(
    seed=st.integers(0, 1 << 30),
    num_backlogs=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4),
    num_blocks=st.sampled_from([24, 256]),
)
# they went apart without end
@example(seed=82812, num_backlogs=[1, 11, 1], weights=[2.0, 0.5, 2.0, 0.5], num_blocks=256)
@settings(max_examples=25, deadline=None)
def test_waiting_tenants_differ_at_most_by_running_work(
    seed: int, num_backlogs: list[int], weights: list[float], num_blocks: int
) -> None:
    """Say f had more than g, and look at the last request of f that began.

    - It began in a place that was free. Then f had no more than g, which waited too. Since then f
      was charged for what ran by then alone, in P places at most: ``lead(P, f)``.
    - It took a place, of a tenant v with more than its part; so f had no more than v, and now has
      no more than its own part of the places, d: ``lead(d, f)`` beyond what v had. Whoever takes a
      place has no more than its part by that, so the last request of v that began didn't take one,
      and v had no more than ``lead(P, v)`` beyond g. That g had less and took none itself was since
      it had its part.

    A token that is taken back from g, with its place, lowers what it had; but f has the fewer
    places then. Blocks never run short here. All of them begin with nothing: between any two
    moments, a difference changes by twice as much at most.
    """
    rng = random.Random(seed)
    num_places = 4
    harness = Harness(max_num_seqs=num_places, num_blocks=num_blocks, token_budget=16)
    total: Counter[str] = Counter()
    tenants = [f"t{number}" for number in range(len(num_backlogs))]
    waiting: dict[str, list[Request]] = {tenant: [] for tenant in tenants}
    for name in tenants:
        for number in (1, 2):
            harness.adapters.set(f"{name}{number}", Residency.RESIDENT)
    by_weight = dict(zip(tenants, weights, strict=False))
    bounds = {
        (more, less): max_difference(num_places, by_weight, more, less) for more, less in permutations(tenants, 2)
    }
    for _ in range(150):
        for tenant, count in zip(tenants, num_backlogs, strict=True):
            waiting[tenant] = [one for one in waiting[tenant] if one.status is RequestStatus.WAITING]
            while len(waiting[tenant]) < count + 4:
                waiting[tenant].append(random_request(rng, tenant, by_weight[tenant]))
                harness.add(waiting[tenant][-1])
        total.update(charged(harness))
        had = {tenant: total[tenant] / by_weight[tenant] for tenant in tenants}
        assert all(had[more] - had[less] <= bound for (more, less), bound in bounds.items())
        check(harness)


def max_difference(num_places: int, weights: dict[str, float], more: str, less: str) -> float:
    """By how much the one may have had more than the other, by weight."""
    part = max(1, int(num_places * weights[more] / sum(weights.values())))
    taken = [
        lead(num_places, weight) + lead(part, weights[more])
        for tenant, weight in weights.items()
        if tenant not in (more, less)
    ]
    return max([lead(num_places, weights[more]), *taken])


def charged(harness: Harness) -> dict[str, float]:
    """What each tenant is charged in a step."""
    tenants = harness.scheduler._fair_queue._tenants
    before = {tenant: flow.total_service * flow.weight for tenant, flow in tenants.items()}
    harness.step()
    return {tenant: flow.total_service * flow.weight - before.get(tenant, 0.0) for tenant, flow in tenants.items()}


@given(
    seed=st.integers(0, 1 << 30), num_tenants=st.integers(1, 4), max_num_seqs=st.integers(1, 6), load=st.integers(1, 3)
)
@settings(max_examples=20, deadline=None)
def test_request_waits_behind_bounded_later_work(seed: int, num_tenants: int, max_num_seqs: int, load: int) -> None:
    rng = random.Random(seed)
    harness = Harness(max_num_seqs=max_num_seqs, num_blocks=128, token_budget=16)
    weights = {f"t{number}": rng.choice([0.5, 1.0, 2.0]) for number in range(num_tenants)}
    for tenant in weights:
        for number in (1, 2):
            harness.adapters.set(f"{tenant}{number}", Residency.RESIDENT)
    requests: list[Request] = []
    # of each request, what its tenant had to be done when it came, itself included; and what later
    # ones got until it began
    ahead: dict[int, float] = {}
    behind: Counter[int] = Counter()
    for step in range(100):
        for _ in range(rng.randint(0, load) if step < 60 else 0):
            tenant = rng.choice(list(weights))
            request = random_request(rng, tenant, weights[tenant])
            unfinished = [
                one for one in requests if one.tenant == TenantId(tenant) and one.status is not RequestStatus.FINISHED
            ]
            ahead[id(request)] = sum(map(cost, unfinished)) + cost(request)
            requests.append(request)
            harness.add(request)
        unbegun = [one for one in requests if one.first_scheduled_s is None]
        for entry in harness.step()[0]:
            spent = entry.num_tokens * PROMPT_COST + entry.num_sampled_tokens * OUTPUT_COST
            for one in unbegun:
                if one.sequence_number < entry.request.sequence_number:
                    behind[id(one)] += int(spent)
        check(harness)
    for request in requests:
        # of its tenant's three adapters, too
        parts = 3 * sum(weights.values()) / weights[request.tenant]
        in_places = 2 * max_num_seqs * MAX_COST
        assert behind[id(request)] <= parts * (ahead[id(request)] + in_places)
        later = [one for one in requests if is_alike(one, request) and one.sequence_number > request.sequence_number]
        if request.status is RequestStatus.WAITING and request.first_scheduled_s is None:
            assert all(one.first_scheduled_s is None for one in later)


def is_alike(one: Request, other: Request) -> bool:
    return (one.tenant, one.adapter) == (other.tenant, other.adapter)


def test_random_tenant_traffic_ends_with_no_resources_held() -> None:
    rng = random.Random(1)
    num_preemptions = 0
    for _ in range(25):
        harness = Harness(num_blocks=rng.randint(8, 20), block_size=4, max_num_seqs=rng.randint(1, 6), token_budget=8)
        for name in "ab":
            harness.adapters.set(name, Residency.RESIDENT)
            harness.adapters.shares[make_ref(name).digest] = rng.choice([0.0, 0.15, 0.5])
        requests = [
            make_request(
                tokens=[rng.randint(0, 1) for _ in range(rng.randint(1, 16))],
                tenant=rng.choice("xyz"),
                adapter=rng.choice([None, "a", "b", "cold"]),
                max_tokens=rng.randint(1, 10),
                priority=rng.randint(-1, 2),
                kv_share=rng.choice([0.2, 1.0]),
                weight=rng.choice([0.5, 2.0]),
                timeout_s=rng.choice([None, 5.0]),
            )
            for _ in range(30)
        ]
        for request in requests:
            harness.add(request)
            harness.now += 0.1
            if rng.random() < 0.5:
                harness.step()
            if rng.random() < 0.2:
                harness.scheduler.abort(rng.choice(requests).request_id)
            check(harness)
        harness.adapters.states[make_ref("cold").digest] = Residency.RESIDENT
        harness.run()
        check(harness)
        num_preemptions += harness.scheduler.num_preemptions
        assert all(request.status is RequestStatus.FINISHED for request in requests)
        assert harness.kv.num_held == 0
        assert not any(harness.adapters.pins.values())
    assert num_preemptions > 0


def make_probe(tenant: str = "", **options: object) -> Request:
    return as_probe(make_request(27, tenant=tenant, max_tokens=4, **options), [1] * 30)  # type: ignore[arg-type]


def test_certificate_probe_puts_no_tenant_over_share() -> None:
    def num_tokens(has_probe: bool) -> int:
        harness, total = Harness(num_blocks=4096, block_size=16, max_num_seqs=64, token_budget=512), 0
        for number in range(60):
            harness.now += 0.1
            while harness.scheduler.num_waiting < 20:
                harness.add(make_request(400, tenant="a", max_tokens=2))
            if has_probe and number == 20:
                harness.add(make_probe())
            total += sum(entry.num_tokens for entry in harness.step()[0])
        check(harness)
        return total

    assert num_tokens(has_probe=True) == num_tokens(has_probe=False)


def test_probes_in_every_slot_wait_for_peers() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(make_probe(), make_probe())
    harness.run()
    check(harness)
    assert harness.scheduler.num_preemptions == 0


def test_no_request_is_preempted_for_a_probe() -> None:
    harness = Harness(max_num_seqs=4)
    running = [make_request(4, tenant="a", max_tokens=40) for _ in range(4)]
    harness.add(*running)
    harness.step()
    harness.add(make_probe())
    for _ in range(6):
        harness.step()
    assert [request.num_preemptions for request in running] == [0] * 4
    check(harness)


def test_long_capped_prompt_survives_short_prompts() -> None:
    harness = Harness(num_blocks=64, block_size=4, max_num_seqs=8, token_budget=32)
    long = make_request(112, tenant="a", kv_share=0.5, max_tokens=2)
    for number in range(200):
        harness.now += 0.05
        if number % 3 == 0 and harness.scheduler.num_waiting < 12:
            harness.add(make_request(16, tenant="a", kv_share=0.5, max_tokens=12))
        if number == 20:
            harness.add(long)
        harness.step()
        if long.status is RequestStatus.FINISHED:
            break
    assert long.status is RequestStatus.FINISHED
    assert long.num_preemptions <= 1
    check(harness)


def test_urgent_requests_keep_deadlines_of_same_flow() -> None:
    harness = Harness()
    harness.adapters.set("cold", Residency.LOADING)
    harness.add(make_request(adapter="cold", priority=-1), *[make_request(adapter="cold") for _ in range(5)])
    harness.step()
    assert harness.scheduler.num_waiting_for_adapter == 6
