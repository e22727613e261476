"""What a tenant may use now, by a clock that the tests turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stopped_clock import StoppedClock

from loraserve.errors import QuotaExceeded, RateLimited
from loraserve.tenancy.identity.auth import Caller
from loraserve.tenancy.identity.policy import TenantLimits, TenantPolicy
from loraserve.tenancy.limits.admission import Admissions, RateUse, format_duration
from loraserve.types import TenantId


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock(100.0)


@pytest.fixture
def admissions(clock: StoppedClock) -> Admissions:
    return Admissions(monotonic=clock)


def make_caller(name: str = "acme", **limits: int) -> Caller:
    policy = TenantPolicy(limits=TenantLimits(**limits))  # type: ignore[arg-type]
    return Caller(TenantId(name), name, "key", frozenset({"inference"}), policy=policy)


def refused(admissions: Admissions, caller: Caller) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        admissions.enter(caller)
    return caught.value


def test_unlimited_tenant_is_admitted_without_limit_headers(admissions: Admissions) -> None:
    caller = make_caller()
    for _ in range(1000):
        admissions.enter(caller).reserve(10**6, 10**6)
    assert admissions.headers(caller) == {}


def test_rate_refusal_reports_wait_until_next_request(admissions: Admissions, clock: StoppedClock) -> None:
    caller = make_caller(requests_per_minute=2)
    for _ in range(2):
        admissions.enter(caller).release()
    wait_s = refused(admissions, caller).retry_after_s
    assert wait_s == pytest.approx(30.0)
    clock.now_s += wait_s
    admissions.enter(caller)


def test_refused_request_uses_no_rate(admissions: Admissions, clock: StoppedClock) -> None:
    caller = make_caller(requests_per_minute=2)
    for _ in range(2):
        admissions.enter(caller)
    waits = {refused(admissions, caller).retry_after_s for _ in range(5)}
    assert waits == {30.0}
    assert admissions.num_running(caller.tenant) == 2


def test_limited_tenant_does_not_delay_other_tenant(admissions: Admissions) -> None:
    acme, globex = make_caller("acme", requests_per_minute=1), make_caller("globex", requests_per_minute=1)
    admissions.enter(acme)
    refused(admissions, acme)
    admissions.enter(globex)


def test_concurrency_is_bounded_until_request_ends(admissions: Admissions) -> None:
    caller = make_caller(max_concurrent_requests=2)
    first, _ = admissions.enter(caller), admissions.enter(caller)
    assert refused(admissions, caller).retry_after_s == 1.0
    first.release()
    first.release()
    admissions.enter(caller)
    refused(admissions, caller)


def test_concurrency_wait_is_estimated_from_request_duration(admissions: Admissions, clock: StoppedClock) -> None:
    caller = make_caller(max_concurrent_requests=2)
    entered = admissions.enter(caller)
    clock.now_s += 8.0
    entered.release()
    for _ in range(2):
        admissions.enter(caller)
    assert refused(admissions, caller).retry_after_s == 4.0


def test_unused_token_reservation_is_returned(admissions: Admissions) -> None:
    caller = make_caller(tokens_per_minute=100)
    first = admissions.enter(caller)
    first.reserve(20, 60)
    second = admissions.enter(caller)
    with pytest.raises(RateLimited) as caught:
        second.reserve(10, 20)
    assert caught.value.retry_after_s == pytest.approx(6.0)
    first.count(1)
    first.count(4)
    first.release()
    second.reserve(10, 65)
    assert admissions.headers(caller)["x-ratelimit-remaining-tokens"] == "0"


def test_unanswered_request_returns_prompt_tokens(admissions: Admissions) -> None:
    caller = make_caller(tokens_per_minute=100)
    admitted = admissions.enter(caller)
    admitted.reserve(20, 60)
    admitted.release()
    assert admissions.headers(caller)["x-ratelimit-remaining-tokens"] == "100"


def test_tokens_beyond_reservation_are_charged_as_generated(admissions: Admissions) -> None:
    caller = make_caller(tokens_per_minute=100)
    admitted = admissions.enter(caller)
    admitted.reserve(20, 10)
    for _ in range(30):
        admitted.count(1)
    assert admissions.headers(caller)["x-ratelimit-remaining-tokens"] == "50"
    admitted.release()
    admitted.count(1)
    assert admissions.headers(caller)["x-ratelimit-remaining-tokens"] == "50"


def test_request_over_total_rate_is_refused_permanently(admissions: Admissions) -> None:
    admitted = admissions.enter(make_caller(tokens_per_minute=100))
    with pytest.raises(QuotaExceeded, match=r"101 tokens.*100 per minute"):
        admitted.reserve(1, 100)


@pytest.mark.parametrize("limit", ["requests_per_minute", "max_concurrent_requests"])
def test_zero_limit_is_refused_as_quota(admissions: Admissions, limit: str) -> None:
    assert isinstance(refused(admissions, make_caller(**{limit: 0})), QuotaExceeded)


def test_servers_sharing_tenant_grant_equal_parts(clock: StoppedClock) -> None:
    admissions = Admissions(num_servers=lambda: 3, monotonic=clock)
    caller = make_caller(requests_per_minute=60, tokens_per_minute=300, max_concurrent_requests=100)
    for _ in range(20):
        admissions.enter(caller)
    assert refused(admissions, caller).retry_after_s == pytest.approx(3.0)
    assert admissions.headers(caller) == {
        "x-ratelimit-limit-requests": "20",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "0ms",
    }


def test_idle_servers_lend_unused_rates(clock: StoppedClock) -> None:
    elsewhere: list[RateUse] = []
    admissions = Admissions(
        num_servers=lambda: 2, uses_elsewhere=lambda _: elsewhere, told_at=lambda: told_at, monotonic=clock
    )
    caller = make_caller(requests_per_minute=60, tokens_per_minute=600)
    told_at = clock.now_s
    for _ in range(30):
        admissions.enter(caller)
    # a burst has this server's part until the others have heard of it
    assert admissions.headers(caller)["x-ratelimit-limit-requests"] == "30"
    refused(admissions, caller)
    told_at += 0.1
    for _ in range(30):
        admissions.enter(caller)
    assert refused(admissions, caller).retry_after_s == pytest.approx(1.0)
    assert admissions.headers(caller)["x-ratelimit-limit-requests"] == "60"
    assert admissions.uses() == {caller.tenant: RateUse(1.0, 0.0)}
    # the tenant begins to use the other one
    elsewhere.append(RateUse(0.5, 0.0))
    assert admissions.headers(caller)["x-ratelimit-limit-requests"] == "30"
    clock.now_s += 121
    for _ in range(15):
        admissions.enter(caller)
    refused(admissions, caller)
    elsewhere.clear()
    clock.now_s += 11
    assert admissions.uses() == {}


def test_server_starts_with_use_elsewhere(clock: StoppedClock) -> None:
    """Else a tenant would have its whole rate again on each server that it turns to."""
    elsewhere = [RateUse(0.8, 1.0)]
    admissions = Admissions(num_servers=lambda: 2, uses_elsewhere=lambda _: elsewhere, monotonic=clock)
    caller = make_caller(requests_per_minute=100, tokens_per_minute=600)
    for _ in range(10):
        admissions.enter(caller)
    refused(admissions, caller)
    clock.now_s += 2
    with pytest.raises(RateLimited, match="600 tokens per minute"):
        admissions.enter(caller).reserve(40, 0)
    # and once only: what it uses here counts from then on
    for _ in range(12):
        clock.now_s += 6
        admissions.enter(caller)
    assert admissions.uses()[caller.tenant].requests < 0.1


def test_tenant_without_rates_is_in_no_heartbeat(clock: StoppedClock) -> None:
    admissions = Admissions(num_servers=lambda: 2, uses_elsewhere=lambda _: [], monotonic=clock)
    admissions.enter(make_caller(max_concurrent_requests=5))
    assert admissions.uses() == {}


def test_request_larger_than_server_part_passes_when_unused(clock: StoppedClock) -> None:
    admissions = Admissions(num_servers=lambda: 3, monotonic=clock)
    caller = make_caller(tokens_per_minute=300)
    admissions.enter(caller).reserve(100, 150)
    with pytest.raises(RateLimited):
        admissions.enter(caller).reserve(1, 1)


def test_each_of_many_servers_grants_single_concurrent_request(clock: StoppedClock) -> None:
    admissions = Admissions(num_servers=lambda: 3, monotonic=clock)
    caller = make_caller(max_concurrent_requests=2)
    admissions.enter(caller)
    refused(admissions, caller)


def test_changed_limit_applies_immediately(admissions: Admissions) -> None:
    admissions.enter(make_caller(requests_per_minute=1))
    refused(admissions, make_caller(requests_per_minute=1))
    admissions.enter(make_caller(requests_per_minute=10))


def test_lowered_rate_holds_during_older_request(admissions: Admissions, clock: StoppedClock) -> None:
    old, new = make_caller(tokens_per_minute=60_000), make_caller(tokens_per_minute=600)
    stream = admissions.enter(old)
    stream.reserve(0, 1)
    admissions.enter(new).reserve(0, 599)
    clock.now_s += 10
    stream.count(2)
    assert admissions.headers(old)["x-ratelimit-remaining-tokens"] == "99"
    with pytest.raises(RateLimited):
        admissions.enter(new).reserve(0, 200)


def test_new_limit_charges_running_request_without_refund(admissions: Admissions) -> None:
    stream = admissions.enter(make_caller())
    stream.reserve(10, 50)
    caller = make_caller(tokens_per_minute=100)
    admissions.enter(caller).reserve(0, 50)
    stream.count(5)
    stream.release()
    assert admissions.headers(caller)["x-ratelimit-remaining-tokens"] == "35"


def test_refusals_are_counted_by_limit(admissions: Admissions) -> None:
    caller = make_caller(requests_per_minute=1, tokens_per_minute=10)
    with pytest.raises(QuotaExceeded):
        admissions.enter(caller).reserve(1, 10)
    refused(admissions, caller)
    refused(admissions, make_caller("globex", max_concurrent_requests=0))
    assert admissions.num_refused == {"requests": 1, "tokens": 1, "concurrency": 1, "management": 0}


def test_inactive_tenants_are_forgotten(admissions: Admissions, clock: StoppedClock) -> None:
    stays = admissions.enter(make_caller("busy"))
    admissions.enter(make_caller("spent", requests_per_minute=1)).release()
    for number in range(3000):
        admissions.enter(make_caller(f"t{number}", requests_per_minute=6000)).release()
        clock.now_s += 0.0125
    assert len(admissions) < 1100
    refused(admissions, make_caller("spent", requests_per_minute=1, max_concurrent_requests=1))
    assert admissions.num_running(stays.caller.tenant) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0201, "21ms"), (1.0, "1s"), (7.66, "7.66s"), (360.0, "6m0s"), (59.9999, "1m0s")],
)
def test_durations_read_as_openais(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_background_requests_leave_half_of_rates_to_clients(admissions: Admissions, clock: StoppedClock) -> None:
    client = make_caller(requests_per_minute=4, tokens_per_minute=100)
    background = replace(client, is_background=True)
    for _ in range(2):
        admissions.enter(background).release()
    assert refused(admissions, background).retry_after_s == pytest.approx(15.0)
    for _ in range(2):
        admitted = admissions.enter(client)
    clock.now_s += 60
    admissions.enter(background).reserve(20, 30)
    with pytest.raises(RateLimited):
        admissions.enter(background).reserve(1, 0)
    admitted.reserve(20, 30)
    # what exceeds half of a rate passes when nothing else was used
    clock.now_s += 120
    admissions.enter(background).reserve(40, 40)


def test_background_requests_do_not_count_as_concurrent(admissions: Admissions) -> None:
    client = make_caller(max_concurrent_requests=1)
    background = replace(client, is_background=True)
    first, second = admissions.enter(background), admissions.enter(background)
    assert admissions.num_running(client.tenant) == 0
    running = admissions.enter(client)
    refused(admissions, client)
    admissions.enter(background).release()
    for admitted in (first, second, running):
        admitted.release()
    assert admissions.num_running(client.tenant) == 0
    with pytest.raises(QuotaExceeded):
        admissions.enter(replace(make_caller("none", max_concurrent_requests=0), is_background=True))


def test_unserved_request_is_returned_once(admissions: Admissions) -> None:
    caller = make_caller(requests_per_minute=2)
    for _ in range(20):
        admitted = admissions.enter(caller)
        admitted.uncount()
        admitted.uncount()
        admitted.release()
    assert admissions.headers(caller)["x-ratelimit-remaining-requests"] == "2"
    for _ in range(2):
        admissions.enter(caller).release()
    refused(admissions, caller)


def test_management_requests_have_rates_of_tenant_and_key(admissions: Admissions, clock: StoppedClock) -> None:
    first = make_caller(requests_per_minute=1)
    second, other = replace(first, key_id="second"), make_caller("globex")

    def fill(caller: Caller) -> tuple[int, float]:
        for count in range(100):
            try:
                admissions.enter_management(caller, 8)
            except RateLimited as error:
                return count, round(error.retry_after_s or 0.0, 3)
        return 100, 0.0

    assert (fill(first), fill(second), fill(other)) == ((6, 10.0), (2, 7.5), (6, 10.0))
    assert admissions.num_refused["management"] == 3
    # inference has its own
    admissions.enter(first)
    clock.now_s += 60
    assert fill(first) == (6, 10.0)
    admissions.enter_management(first, None)


def test_idle_management_rates_are_forgotten(admissions: Admissions, clock: StoppedClock) -> None:
    for number in range(1023):
        admissions.enter_management(make_caller(f"tenant-{number}"), 8)
    clock.now_s += 61
    for number in range(2):
        admissions.enter_management(make_caller(f"other-{number}"), 8)
    assert len(admissions) <= 2
