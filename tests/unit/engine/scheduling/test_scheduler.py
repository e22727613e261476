import random

import pytest

from loraserve.engine.request import RequestStatus
from loraserve.engine.scheduling.step import MIN_PROBE_ROWS, PROBE_PATIENCE
from loraserve.types import FinishReason, Residency

from ..conftest import EOS, Harness, as_probe, make_ref, make_request


def part(scheduled, request):
    return next((entry.num_tokens for entry in scheduled if entry.request is request), 0)


def test_prompt_is_computed_in_chunks_of_token_budget():
    harness = Harness(token_budget=8)
    request = make_request(20)
    harness.add(request)
    assert [harness.step()[0][0].num_tokens for _ in range(4)] == [8, 8, 4, 1]


def test_decoding_requests_come_before_a_long_prompt():
    harness = Harness(token_budget=8)
    short = make_request(4, max_tokens=9)
    harness.add(short)
    harness.step()
    long = make_request(30)
    harness.add(long)
    scheduled, _ = harness.step()
    assert (part(scheduled, short), part(scheduled, long)) == (1, 7)
    scheduled, _ = harness.step()
    assert (part(scheduled, short), part(scheduled, long)) == (1, 7)


def test_no_more_than_max_num_seqs_run():
    harness = Harness(max_num_seqs=2)
    harness.add(*[make_request() for _ in range(3)])
    assert len(harness.schedule()) == 2
    assert harness.scheduler.num_waiting == 1


def test_lower_priority_numbers_run_first():
    harness = Harness(max_num_seqs=1)
    late, early = make_request(priority=5), make_request(priority=-5)
    harness.add(late, early)
    assert harness.schedule()[0].request is early


def test_request_waits_for_adapter_while_rest_runs(harness):
    cold, base = make_request(adapter="cold"), make_request()
    harness.add(cold, base)
    scheduled, _ = harness.step()
    assert [entry.request for entry in scheduled] == [base]
    assert harness.scheduler.num_waiting_for_adapter == 1
    harness.now = 2.0
    harness.adapters.set("cold", Residency.RESIDENT)
    _, outputs = harness.step()
    first = next(output for output in outputs if output.request_id == cold.request_id)
    assert first.adapter_s == 2.0
    assert harness.scheduler.num_waiting_for_adapter == 0


@pytest.mark.parametrize(("tier", "read_s", "told_s"), [("disk", 1.5, 1.5), ("disk", 9.0, 2.0), ("host", 1.5, 0.0)])
def test_first_token_reports_adapter_tier_and_read_time(harness, tier, read_s, told_s):
    # a load that another request began may have run before this one came
    cold = make_request(adapter="cold")
    cold.adapter_tier = tier
    harness.adapters.read_s = read_s
    harness.add(cold)
    harness.step()
    harness.now = 2.0
    harness.adapters.set("cold", Residency.RESIDENT)
    _, [first] = harness.step()
    assert (first.adapter_tier, first.adapter_s, first.adapter_read_s) == (tier, 2.0, told_s)


def test_first_requested_adapter_is_renewed_without_free_slot():
    # the pager forgets an adapter that isn't asked for, and evicts a resident one that isn't used
    harness = Harness(max_num_seqs=1)
    harness.adapters.set("hot", Residency.RESIDENT)
    cold, colder, hot = (make_request(adapter=name, max_tokens=4) for name in ("cold", "colder", "hot"))
    harness.add(cold, colder, hot)
    harness.step()
    assert hot.status is RequestStatus.RUNNING
    harness.adapters.asked.clear()
    harness.step()
    assert harness.adapters.asked == ["cold"]


def test_running_request_pins_adapter_until_end(harness):
    harness.adapters.set("a", Residency.RESIDENT)
    harness.add(make_request(adapter="a", max_tokens=2))
    harness.step()
    assert harness.adapters.pins[make_ref("a").digest] == 1
    harness.step()
    assert harness.adapters.pins[make_ref("a").digest] == 0


def test_probe_counts_as_no_use_of_adapter(harness):
    harness.adapters.set("a", Residency.RESIDENT)
    probed, asked = as_probe(make_request(adapter="a", max_tokens=1)), make_request(adapter="a", max_tokens=1)
    harness.add(probed, asked)
    harness.schedule()
    assert (sum(harness.adapters.pins.values()), harness.adapters.num_uses) == (2, 1)


def test_probes_yield_to_prompts_for_bounded_time(harness):
    def rows(scheduled):
        return sum(entry.num_tokens for entry in scheduled if entry.request.probe is not None)

    harness = Harness(token_budget=8)
    harness.add(make_request(4, max_tokens=100))
    harness.step()
    probe = as_probe(make_request(4 * MIN_PROBE_ROWS, max_tokens=1))
    harness.add(probe)
    found = []
    for _ in range(2 * PROBE_PATIENCE + 2):
        harness.add(make_request(2, max_tokens=1))
        found.append(rows(harness.step()[0]))
    assert found == 2 * [*PROBE_PATIENCE * [0], MIN_PROBE_ROWS]
    # a long prompt takes a few steps, and so does one whose adapter has just come
    harness.add(make_request(12, max_tokens=1))
    assert [rows(harness.step()[0]) for _ in range(3)] == [0, 0, MIN_PROBE_ROWS]
    harness.add(make_request(2, max_tokens=1, adapter="a"))
    assert [rows(harness.step()[0])] == [0]
    harness.adapters.set("a", Residency.RESIDENT)
    assert [rows(harness.step()[0]) for _ in range(2)] == [0, MIN_PROBE_ROWS]


def add_probe(harness):
    """Beside a request that decodes; its adapter isn't there."""
    harness.add(make_request(4, max_tokens=100))
    harness.step()
    probe = as_probe(make_request(8, max_tokens=1, adapter="probed"))
    harness.add(probe)
    return probe


def add_probe_whose_adapter_has_come(harness):
    """It hasn't been scheduled since."""
    probe = add_probe(harness)
    harness.step()
    harness.adapters.set("probed", Residency.RESIDENT)
    return probe


def test_adapter_for_probe_alone_wakes_no_prompt(harness):
    probe = add_probe_whose_adapter_has_come(harness)
    # in the step in which it arrives: in the next one another may have its memory
    assert sum(entry.num_tokens for entry in harness.step()[0] if entry.request is probe) == MIN_PROBE_ROWS


def test_adapter_for_probe_is_kept_while_prompts_run(harness):
    probe = add_probe_whose_adapter_has_come(harness)
    harness.add(make_request(4, max_tokens=1))
    assert all(entry.request is not probe for entry in harness.step()[0])
    assert harness.adapters.pins[make_ref("probed").digest] == 1
    harness.scheduler.abort(probe.request_id)
    assert harness.adapters.pins[make_ref("probed").digest] == 0


def test_probe_requests_no_adapter_while_prompts_fill_step(harness):
    """It would be loaded beside these, and a load makes a step longer too."""
    add_probe(harness)
    harness.add(make_request(4, max_tokens=1))
    harness.step()
    assert harness.scheduler.num_waiting_for_adapter == 0
    assert "probed" not in harness.adapters.ahead
    harness.step()
    assert harness.scheduler.num_waiting_for_adapter == 1


def test_prefix_cache_lookup_counts_at_request_start(harness):
    harness = Harness(num_blocks=4, block_size=4)
    harness.add(make_request(12, max_tokens=4))
    harness.step()
    blocked = make_request(8, max_tokens=1)
    harness.add(blocked)
    harness.step()
    harness.step()
    assert (blocked.status, harness.kv.prefix_cache.num_tokens_queried) == (RequestStatus.WAITING, 12)
    harness.run()
    assert harness.kv.prefix_cache.num_tokens_queried == 12 + 8


def test_a_request_with_a_failed_adapter_ends_alone(harness):
    harness.adapters.set("bad", Residency.FAILED)
    bad, good = make_request(adapter="bad"), make_request(max_tokens=1)
    harness.add(bad, good)
    outputs = {output.request_id: output for output in harness.run()}
    assert outputs[bad.request_id].error_code == "adapter_corrupt"
    assert outputs[good.request_id].finish_reason is FinishReason.LENGTH


def test_youngest_restarts_when_blocks_run_out():
    harness = Harness(num_blocks=6, block_size=4, token_budget=16)
    requests = [make_request(7, max_tokens=8) for _ in range(3)]
    harness.add(*requests)
    outputs = harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert requests[0].num_preemptions == 0
    for request in requests:
        tokens = [t for output in outputs if output.request_id == request.request_id for t in output.token_ids]
        assert len(tokens) == 8
    assert harness.kv.num_held == 0


def test_preempted_request_keeps_adapter(harness):
    harness = Harness(num_blocks=4, block_size=4, token_budget=16)
    harness.adapters.set("a", Residency.RESIDENT)
    first, second = make_request(7, max_tokens=6), make_request(7, adapter="a", max_tokens=6)
    harness.add(first, second)
    while second.num_preemptions == 0:
        harness.step()
    assert harness.adapters.pins[make_ref("a").digest] == 1
    harness.run()
    assert harness.adapters.pins[make_ref("a").digest] == 0


def test_repeated_prompt_computes_only_tokens_after_full_blocks(harness):
    tokens = list(range(50, 60))
    harness.add(make_request(tokens=tokens, max_tokens=1))
    harness.run()
    again = make_request(tokens=tokens, max_tokens=1)
    harness.add(again)
    scheduled, outputs = harness.step()
    assert (scheduled[0].start, scheduled[0].num_tokens) == (8, 2)
    assert outputs[0].num_cached_tokens == 8


def test_kv_behind_bad_logits_is_never_offered(harness):
    tokens = list(range(50, 60))
    harness.add(make_request(tokens=tokens))
    _, outputs = harness.step(is_finite=False)
    assert outputs[0].finish_reason is FinishReason.ERROR
    harness.add(make_request(tokens=tokens))
    scheduled, _ = harness.step()
    assert scheduled[0].start == 0


def test_scored_prompt_takes_no_prefix_hits(harness):
    tokens = list(range(50, 60))
    harness.add(make_request(tokens=tokens, max_tokens=1))
    harness.run()
    harness.add(make_request(tokens=tokens, max_tokens=1, prompt_logprobs=0))
    assert harness.schedule()[0].start == 0


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_aborted_request_leaves_no_resources(when):
    harness = Harness(token_budget=4)
    harness.adapters.set("a", Residency.RESIDENT)
    request = make_request(10, adapter="a", max_tokens=50)
    harness.add(request)
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 5}[when]):
        harness.step()
    assert harness.scheduler.abort(request.request_id)
    assert not harness.scheduler.abort(request.request_id)
    assert harness.kv.num_held == 0
    assert sum(harness.adapters.pins.values()) == 0
    assert not harness.scheduler.has_requests


def test_eos_ends_unless_ignored_or_too_early(harness):
    plain, ignoring, early = (
        make_request(max_tokens=4),
        make_request(max_tokens=4, ignore_eos=True),
        make_request(max_tokens=4, min_tokens=2),
    )
    harness.add(plain, ignoring, early)
    _, outputs = harness.step(EOS)
    reasons = {output.request_id: output.finish_reason for output in outputs}
    assert reasons == {
        plain.request_id: FinishReason.STOP,
        ignoring.request_id: None,
        early.request_id: None,
    }
    _, outputs = harness.step(EOS)
    assert {o.request_id: o.finish_reason for o in outputs}[early.request_id] is FinishReason.STOP


def test_a_stop_token_is_named_as_the_reason(harness):
    harness.add(make_request(stop_token_ids=(5,)))
    _, outputs = harness.step(5)
    assert (outputs[0].finish_reason, outputs[0].stop_reason) == (FinishReason.STOP, 5)


def test_max_tokens_of_zero_only_computes_the_prompt(harness):
    harness.add(make_request(max_tokens=0, prompt_logprobs=0))
    outputs = harness.run()
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [((), FinishReason.LENGTH)]
    assert outputs[0].prompt_logprobs == (None,)


def test_only_pinned_requests_continue_while_admission_is_paused():
    harness = Harness(num_blocks=6, block_size=4, token_budget=64)
    harness.adapters.set("a", Residency.RESIDENT)
    older = make_request(8, adapter="a", max_tokens=6)
    younger = make_request(11, adapter="a", max_tokens=4)
    harness.add(older, younger)
    while younger.num_preemptions == 0:
        harness.step()
    assert younger.status is RequestStatus.WAITING
    late = [make_request(4, adapter="a"), make_request(4), make_request(4, adapter="b")]
    harness.step()
    harness.adapters.is_admission_paused = True
    harness.add(*late)
    for _ in range(20):
        harness.step()
    # it holds a pin on what others wait for
    assert younger.status is RequestStatus.FINISHED
    assert [request.status for request in late] == [RequestStatus.WAITING] * 3
    assert [request.pin for request in late] == [None] * 3
    harness.adapters.set("b", Residency.RESIDENT)
    harness.adapters.is_admission_paused = False
    harness.run()
    assert [request.status for request in late] == [RequestStatus.FINISHED] * 3


def test_adapter_pausing_admission_is_requested_again():
    harness = Harness()
    request = make_request(4, adapter="b")
    harness.add(request)
    harness.step()
    harness.adapters.is_admission_paused = True
    harness.adapters.asked.clear()
    harness.step()
    assert "b" in harness.adapters.asked
    harness.adapters.set("b", Residency.FAILED)
    _, outputs = harness.step()
    assert outputs[0].error_code == "adapter_corrupt"


def test_request_with_arrived_adapter_starts_despite_paused_admission():
    harness = Harness()
    waited, late = make_request(4, adapter="b"), make_request(4, adapter="b")
    harness.add(waited)
    harness.step()
    harness.adapters.set("b", Residency.RESIDENT)
    harness.adapters.is_admission_paused = True
    harness.add(late)
    harness.step()
    assert (waited.status, late.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)


def test_random_traffic_ends_with_no_resources_held():
    rng = random.Random(0)
    for _ in range(30):
        harness = Harness(num_blocks=rng.randint(8, 20), block_size=4, max_num_seqs=rng.randint(1, 6), token_budget=8)
        for name in "ab":
            harness.adapters.set(name, Residency.RESIDENT)
        requests = [
            make_request(
                tokens=[rng.randint(0, 1) for _ in range(rng.randint(1, 16))],
                adapter=rng.choice([None, "a", "b"]),
                max_tokens=rng.randint(1, 10),
                priority=rng.randint(0, 2),
            )
            for _ in range(20)
        ]
        for request in requests:
            harness.add(request)
            if rng.random() < 0.5:
                harness.step()
            if rng.random() < 0.2:
                harness.scheduler.abort(rng.choice(requests).request_id)
        harness.run()
        assert all(request.status is RequestStatus.FINISHED for request in requests)
        assert harness.kv.num_held == 0
        assert not any(harness.adapters.pins.values())
