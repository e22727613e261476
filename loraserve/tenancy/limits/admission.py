"""Admission of requests within a tenant's limits.

The limits are on concurrent requests, and on requests and tokens per minute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from loraserve.errors import QuotaExceeded, RateLimited
from loraserve.tenancy.billing.meter import CollectedUsage
from loraserve.tenancy.identity.auth import Caller
from loraserve.tenancy.identity.policy import TenantLimits
from loraserve.types import TenantId

MINUTE_S = 60.0
REASONS = ("requests", "tokens", "concurrency", "management")
"""Reasons of refusals."""

_MIN_WAIT_S, _MAX_WAIT_S = 0.05, 60.0
_SLACK_S = 1e-6
"""A wait shorter than this is rounding, not a rate."""
_NEW_DURATION_WEIGHT = 0.2
_MIN_SWEEP = 1024
_IN_USE_S = 10.0
"""Seconds after a tenant's last request for which a server keeps its part of the tenant's rates."""
_MAX_USES = 1000
"""Tenants whose use a heartbeat carries: of others the servers don't hear."""
_KEY_PART = 0.75
"""Part of a tenant's management requests that one key may make."""
_LEFT_BY_BACKGROUND = 0.5
"""Part of a tenant's rates that requests in the background leave to its others."""


@dataclass(slots=True)
class LeakyBucket:
    """Recent use of a rate: a bucket that is filled by use and drains by `per_minute` in a minute.

    A minute's worth may be used at once, and no more than the rate in the long run. An empty bucket
    admits more than a minute's worth, which has to drain before anything else passes. The rate is
    an argument of each call because it may change.

    Args:
        at: time at which `used` was valid, in seconds of a monotonic clock.
    """

    at: float
    used: float = 0.0

    def drain(self, per_minute: float, now: float) -> float:
        """Drain the bucket up to now, and return its content."""
        # `now` may be before `at` if another caller read the clock a moment later
        elapsed_s = max(0.0, now - self.at)
        self.used = max(0.0, self.used - per_minute / MINUTE_S * elapsed_s)
        self.at = max(self.at, now)
        return self.used

    def wait_s(self, amount: float, per_minute: float, now: float) -> float:
        """Compute the seconds until `amount` passes if nothing else is used.

        They are infinite if it never does.
        """
        if per_minute <= 0:
            return math.inf
        room = max(0.0, per_minute - amount)
        return max(0.0, (self.drain(per_minute, now) - room) * MINUTE_S / per_minute)

    def take(self, amount: float, per_minute: float, now: float) -> None:
        """Use `amount`, or return it if negative. Never refuses: check `wait_s` before."""
        self.used = max(0.0, self.drain(per_minute, now) + amount)

    def remaining(self, per_minute: float, now: float) -> int:
        """Compute the whole amount that passes now."""
        # tolerate rounding errors just below a whole number
        return max(0, math.floor(per_minute - self.drain(per_minute, now) + 1e-9))

    def reset_s(self, per_minute: float, now: float) -> float:
        """Compute the seconds until the bucket is empty."""
        return self.drain(per_minute, now) * MINUTE_S / per_minute if per_minute > 0 else MINUTE_S


class RateUse(NamedTuple):
    """Parts of a server's requests and tokens per minute that a tenant has used, 1 being all."""

    requests: float
    tokens: float


@dataclass(slots=True)
class _TenantUsage:
    """Usage of one tenant on this server."""

    requests: LeakyBucket
    tokens: LeakyBucket
    management: dict[str, LeakyBucket] = field(default_factory=dict)
    """Management requests of each key, and under the empty key of all."""
    last_used_at: float = -math.inf
    """Time of its last request here."""
    began_at: float = -math.inf
    """Time of the first of the requests of which none was more than `_IN_USE_S` after another."""
    num_running: int = 0
    num_in_background: int = 0
    duration_s: float | None = None
    """Moving average of its requests' durations in seconds; None if none has ended."""

    def is_idle(self, limits: TenantLimits, share: float, now: float) -> bool:
        """Check whether it can be forgotten without loss."""
        if self.num_running or self.num_in_background or not self._forget_idle_keys(now):
            return False
        rates = ((self.requests, limits.requests_per_minute), (self.tokens, limits.tokens_per_minute))
        return not any(limit is not None and bucket.drain(limit * share, now) for bucket, limit in rates)

    def _forget_idle_keys(self, now: float) -> bool:
        """Forget idle keys; return whether no management requests are left to remember."""
        for key in [key for key, bucket in self.management.items() if now - bucket.at > MINUTE_S]:
            del self.management[key]
        return not self.management


class Admissions:
    """Usage of tenants on this server against their limits, in memory only.

    Each of several servers grants its part of a limit on concurrent requests, and at least one. Of
    rates it grants its part at once, and the parts of servers on which the tenant is idle from the
    first heartbeat on that notified the others of the tenant's requests here. A server that begins
    to be used starts with what is used elsewhere. So a burst gets no more than the rate on all
    servers together, and at most one other part of each server on which it begins before that
    server heard of what others lent.

    Args:
        num_servers: returns the present number of servers, this one included.
        uses_elsewhere: returns what a tenant has lately used on each of the others; None: nothing
            is known, and each has its part of every rate.
        told_at: returns the time as of which the others know of the use here, and this server of
            theirs, in seconds of `monotonic`.
    """

    def __init__(
        self,
        *,
        num_servers: Callable[[], int] = lambda: 1,
        uses_elsewhere: Callable[[TenantId], Sequence[RateUse]] | None = None,
        told_at: Callable[[], float] = lambda: math.inf,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count_servers, self._uses_elsewhere, self._told_at = num_servers, uses_elsewhere, told_at
        self._clock = monotonic
        # limits are stored with the usage to decide when it can be forgotten
        self._usages: dict[TenantId, tuple[_TenantUsage, TenantLimits]] = {}
        self._sweep_at = _MIN_SWEEP
        self.num_refused = dict.fromkeys(REASONS, 0)
        """Refusals since the start, by reason."""

    def enter(self, caller: Caller) -> Admitted:
        """Admit a request of the caller's tenant, counted until it is released.

        One in the background isn't counted as concurrent, and leaves half of the rates to others.

        Raises:
            RateLimited: the tenant has its maximum of concurrent requests or has used its rate;
                `retry_after_s` estimates when the request would pass.
            QuotaExceeded: the tenant may make no requests.
        """
        limits, now = caller.policy.limits, self._clock()
        standing = self._usage_of(caller.tenant, limits, now)
        if not caller.is_background or limits.max_concurrent_requests == 0:
            self._check_concurrency(standing, limits.max_concurrent_requests)
        self._begin_use(caller.tenant, standing, limits, now)
        if limits.requests_per_minute is not None:
            rate = limits.requests_per_minute * self._share_of(caller.tenant)
            wait_s = standing.requests.wait_s(1 + _left_by(caller, rate), rate, now)
            if math.isinf(wait_s):
                raise self._refuse(
                    "requests", QuotaExceeded("The tenant's limit is 0 requests.", retry_after_s=MINUTE_S)
                )
            if wait_s > _SLACK_S:
                text = f"The tenant has used its limit of {limits.requests_per_minute} requests per minute."
                raise self._refuse("requests", RateLimited(text, retry_after_s=wait_s))
            standing.requests.take(1, rate, now)
        standing.num_running += not caller.is_background
        standing.num_in_background += caller.is_background
        return Admitted(self, caller, standing, now)

    def enter_management(self, caller: Caller, per_minute: int | None) -> None:
        """Count a management request of the caller's tenant and key.

        Args:
            per_minute: requests of a tenant; one key has three quarters of them. None: any number.

        Raises:
            RateLimited: the tenant or the key has used its rate.
        """
        if per_minute is None:
            return
        now, rate = self._clock(), per_minute * self.share
        buckets = self._usage_of(caller.tenant, caller.policy.limits, now).management
        taken = []
        for key, part, whose in (("", 1.0, "tenant"), (caller.key_id, _KEY_PART, "key")):
            bucket = buckets.get(key)
            if bucket is None:
                bucket = buckets[key] = LeakyBucket(now)
            wait_s = bucket.wait_s(1, max(1.0, rate * part), now)
            if wait_s > _SLACK_S:
                text = f"The {whose} has used its limit of {per_minute * part:g} management requests per minute."
                raise self._refuse("management", RateLimited(text, retry_after_s=wait_s))
            taken.append((bucket, max(1.0, rate * part)))
        for bucket, key_rate in taken:
            bucket.take(1, key_rate, now)

    def headers(self, caller: Caller) -> dict[str, str]:
        """Build the tenant's rate limit headers as OpenAI's API defines them.

        They are for limited rates only. ``limit`` is this server's part of the tenant's limit,
        ``remaining`` the amount that passes here now, and ``reset`` the time until the part is
        unused again.
        """
        now = self._clock()
        standing, limits = self._usages.get(caller.tenant) or (
            _TenantUsage(LeakyBucket(now), LeakyBucket(now)),
            caller.policy.limits,
        )
        headers = {}
        for kind, limit, bucket in (
            ("requests", limits.requests_per_minute, standing.requests),
            ("tokens", limits.tokens_per_minute, standing.tokens),
        ):
            if limit is None:
                continue
            rate = limit * self._share_of(caller.tenant)
            headers[f"x-ratelimit-limit-{kind}"] = str(math.floor(rate + 1e-9))
            headers[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining(rate, now))
            headers[f"x-ratelimit-reset-{kind}"] = format_duration(bucket.reset_s(rate, now))
        return headers

    @property
    def share(self) -> float:
        """Part of each limit that this server grants where no other lends its own."""
        return 1 / self.num_servers

    def uses(self) -> dict[TenantId, RateUse]:
        """Compute the parts of their rates that tenants have used here lately."""
        now = self._clock()
        found = [
            (standing.last_used_at, tenant, limits, standing)
            for tenant, (standing, limits) in self._usages.items()
            if now - standing.last_used_at <= _IN_USE_S
            and (limits.requests_per_minute is not None or limits.tokens_per_minute is not None)
        ]
        found.sort(key=lambda one: one[0], reverse=True)
        uses = {}
        for _, tenant, limits, standing in found[:_MAX_USES]:
            share = self._share_of(tenant)
            uses[tenant] = RateUse(
                _part_used(standing.requests, limits.requests_per_minute, share, now),
                _part_used(standing.tokens, limits.tokens_per_minute, share, now),
            )
        return uses

    def _share_of(self, tenant: TenantId) -> float:
        """Compute the part of the tenant's rates that this server grants now."""
        entry = self._usages.get(tenant)
        if self._uses_elsewhere is None or entry is None or entry[0].began_at >= self._told_at():
            return self.share
        return 1 / (1 + len(self._uses_elsewhere(tenant)))

    def _begin_use(self, tenant: TenantId, standing: _TenantUsage, limits: TenantLimits, now: float) -> None:
        """Take over what the tenant has used elsewhere where it hasn't used this server lately."""
        is_new, standing.last_used_at = now - standing.last_used_at > _IN_USE_S, now
        if is_new:
            standing.began_at = now
        uses = self._uses_elsewhere(tenant) if is_new and self._uses_elsewhere is not None else ()
        if not uses:
            return
        share = self._share_of(tenant)
        for bucket, limit, part in (
            (standing.requests, limits.requests_per_minute, max(use.requests for use in uses)),
            (standing.tokens, limits.tokens_per_minute, max(use.tokens for use in uses)),
        ):
            if limit:
                rate = limit * share
                bucket.take(max(0.0, min(1.0, part) * rate - bucket.drain(rate, now)), rate, now)

    @property
    def num_servers(self) -> int:
        """Number of servers that share the tenants, this one included."""
        return max(1, self._count_servers())

    def part_of(self, limit: int | None) -> int | None:
        """Compute this server's part of a limit on indivisible things.

        It is at least one, unless the limit is 0.
        """
        return limit and max(1, math.floor(limit * self.share + 1e-9))

    def num_running(self, tenant: TenantId) -> int:
        """Count the tenant's requests that aren't released."""
        entry = self._usages.get(tenant)
        return 0 if entry is None else entry[0].num_running

    def __len__(self) -> int:
        return len(self._usages)

    def _check_concurrency(self, standing: _TenantUsage, limit: int | None) -> None:
        part = self.part_of(limit)
        if limit is None or part is None or standing.num_running < part:
            return
        if not limit:
            raise self._refuse(
                "concurrency", QuotaExceeded("The tenant's limit is 0 requests.", retry_after_s=MINUTE_S)
            )
        # on average, each running request ends once per duration
        wait_s = 1.0 if standing.duration_s is None else standing.duration_s / standing.num_running
        error = RateLimited(
            f"The tenant has {standing.num_running} requests running on this server; "
            f"its limit on all servers together is {limit}.",
            retry_after_s=min(max(wait_s, _MIN_WAIT_S), _MAX_WAIT_S),
            hint="Send the next request when one of them has ended.",
        )
        raise self._refuse("concurrency", error)

    def _refuse(self, reason: str, error: RateLimited) -> RateLimited:
        self.num_refused[reason] += 1
        return error

    def _newest_limits(self, caller: Caller) -> TenantLimits:
        """Look up the limits of the tenant's latest request.

        Those of a long request may be outdated.
        """
        entry = self._usages.get(caller.tenant)
        return caller.policy.limits if entry is None else entry[1]

    def _reserve(self, caller: Caller, standing: _TenantUsage, num_tokens: int) -> int:
        """Reserve the tokens, and return their number; 0 if the tenant has no limit."""
        limit = self._newest_limits(caller).tokens_per_minute
        if limit is None:
            return 0
        if num_tokens > limit:
            error = QuotaExceeded(
                f"The request may use {num_tokens} tokens, prompt and answer together; "
                f"the tenant's limit is {limit} per minute.",
                retry_after_s=MINUTE_S,
                kind="tokens",
                hint="Lower max_tokens, or send a shorter prompt.",
            )
            raise self._refuse("tokens", error)
        now = self._clock()
        rate = limit * self._share_of(caller.tenant)
        wait_s = standing.tokens.wait_s(num_tokens + _left_by(caller, rate), rate, now)
        if wait_s > _SLACK_S:
            text = f"The tenant has used its limit of {limit} tokens per minute; the request may use {num_tokens}."
            raise self._refuse("tokens", RateLimited(text, retry_after_s=wait_s, kind="tokens"))
        standing.tokens.take(num_tokens, rate, now)
        return num_tokens

    def _charge(self, caller: Caller, standing: _TenantUsage, num_tokens: int) -> None:
        """Charge tokens beyond those reserved, or return them if negative."""
        limit = self._newest_limits(caller).tokens_per_minute
        if limit is not None and num_tokens:
            standing.tokens.take(num_tokens, limit * self._share_of(caller.tenant), self._clock())

    def _uncount(self, caller: Caller, standing: _TenantUsage) -> None:
        """Take a counted request back from the tenant's rate."""
        limit = self._newest_limits(caller).requests_per_minute
        if limit is not None:
            standing.requests.take(-1, limit * self._share_of(caller.tenant), self._clock())

    def _leave(self, caller: Caller, standing: _TenantUsage, entered_at: float) -> None:
        if caller.is_background:
            standing.num_in_background -= 1
            return
        standing.num_running -= 1
        duration_s = self._clock() - entered_at
        old = duration_s if standing.duration_s is None else standing.duration_s
        standing.duration_s = old + _NEW_DURATION_WEIGHT * (duration_s - old)

    def _usage_of(self, tenant: TenantId, limits: TenantLimits, now: float) -> _TenantUsage:
        entry = self._usages.get(tenant)
        if entry is None:
            if len(self._usages) >= self._sweep_at:
                self._sweep(now)
            entry = _TenantUsage(LeakyBucket(now), LeakyBucket(now)), limits
        self._usages[tenant] = entry[0], limits
        return entry[0]

    def _sweep(self, now: float) -> None:
        for tenant in list(self._idle(now)):
            del self._usages[tenant]
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._usages))

    def _idle(self, now: float) -> Iterator[TenantId]:
        share = self.share
        for tenant, (standing, limits) in self._usages.items():
            if standing.is_idle(limits, share, now):
                yield tenant


@dataclass(slots=True)
class Admitted:
    """Admitted request. Its owner must call `release` however the request ends."""

    admissions: Admissions
    caller: Caller
    _standing: _TenantUsage
    _entered_at: float
    collected: CollectedUsage | None = None
    """Takes the usage in the meter's place; None: it is billed as it is delivered."""
    _num_reserved: int = field(default=0, init=False)
    _num_used: int = field(default=0, init=False)
    _num_prompt_tokens: int = field(default=0, init=False)
    _is_released: bool = field(default=False, init=False)
    _is_uncounted: bool = field(default=False, init=False)

    def reserve(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Reserve the tokens that the request may take; `count` replaces them by the actual number.

        Raises:
            RateLimited: they exceed the tenant's rate now; `retry_after_s` is when they would pass.
            QuotaExceeded: they exceed the tenant's limit for a minute.
        """
        num_tokens = num_prompt_tokens + num_new_tokens
        self._num_reserved += self.admissions._reserve(self.caller, self._standing, num_tokens)
        self._num_prompt_tokens += num_prompt_tokens

    def count(self, num_new_tokens: int) -> None:
        """Count the computed prompts and that many new tokens.

        Tokens beyond those reserved are charged with this call.
        """
        if self._is_released:
            return
        before = max(self._num_reserved, self._num_used)
        self._num_used += self._num_prompt_tokens + num_new_tokens
        self._num_prompt_tokens = 0
        self.admissions._charge(self.caller, self._standing, max(self._num_reserved, self._num_used) - before)

    def uncount(self) -> None:
        """Give the request, which the server can't serve, back to its tenant's rate; idempotent."""
        if not self._is_uncounted:
            self._is_uncounted = True
            self.admissions._uncount(self.caller, self._standing)

    def release(self) -> None:
        """End the request and return its unused reserved tokens; no-op if called again."""
        if self._is_released:
            return
        self._is_released = True
        self.admissions._charge(self.caller, self._standing, min(0, self._num_used - self._num_reserved))
        self.admissions._leave(self.caller, self._standing, self._entered_at)


def _part_used(bucket: LeakyBucket, limit: int | None, share: float, now: float) -> float:
    return min(1.0, bucket.drain(limit * share, now) / (limit * share)) if limit else 0.0


def _left_by(caller: Caller, rate: float) -> float:
    return _LEFT_BY_BACKGROUND * rate if caller.is_background else 0.0


def format_duration(seconds: float) -> str:
    """Format a duration as OpenAI's API does: ``20ms``, ``1.5s``, ``6m0s``; rounded up."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    shown = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{shown}" if minutes else shown
