"""Whether a tenant's request is within what the tenant may use now: requests at once, requests and tokens per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from loraserve.errors import QuotaExceeded, RateLimited
from loraserve.tenancy.identity.auth import Caller
from loraserve.tenancy.identity.policy import TenantLimits
from loraserve.types import TenantId

MINUTE_S = 60.0
REASONS = ("requests", "tokens", "concurrency")
"""What a refusal is for."""

_MIN_WAIT_S, _MAX_WAIT_S = 0.05, 60.0
_SLACK_S = 1e-6
"""A wait shorter than this is rounding, not a rate."""
_NEW_DURATION_WEIGHT = 0.2
_MIN_SWEEP = 1024


@dataclass(slots=True)
class LeakyBucket:
    """How much of a rate was used of late: what is taken fills it, and it drains by `per_minute` in a minute.

    So a minute's worth may be taken at once, and never more than the rate in the long run. More than a minute's worth passes when
    the bucket is empty, and is paid off before anything else passes. The rate is told with each call: it may change.

    Args:
        at: when `used` was true, in seconds of a monotonic clock.
    """

    at: float
    used: float = 0.0

    def drain(self, per_minute: float, now: float) -> float:
        """How much counts as used now."""
        # `now` never runs backwards; `at` may be of a caller that read the clock a moment later
        elapsed_s = max(0.0, now - self.at)
        self.used = max(0.0, self.used - per_minute / MINUTE_S * elapsed_s)
        self.at = max(self.at, now)
        return self.used

    def wait_s(self, amount: float, per_minute: float, now: float) -> float:
        """How long until `amount` passes if nothing else is taken: 0, it does now; infinite, it never does."""
        if per_minute <= 0:
            return math.inf
        room = max(0.0, per_minute - amount)
        return max(0.0, (self.drain(per_minute, now) - room) * MINUTE_S / per_minute)

    def take(self, amount: float, per_minute: float, now: float) -> None:
        """`amount` is used; negative, it is given back. Never refuses: ask `wait_s` before."""
        self.used = max(0.0, self.drain(per_minute, now) + amount)

    def remaining(self, per_minute: float, now: float) -> int:
        """How much of it passes now."""
        # what is missing to a whole one by rounding alone counts as there
        return max(0, math.floor(per_minute - self.drain(per_minute, now) + 1e-9))

    def reset_s(self, per_minute: float, now: float) -> float:
        """How long until nothing counts as used any more."""
        return self.drain(per_minute, now) * MINUTE_S / per_minute if per_minute > 0 else MINUTE_S


@dataclass(slots=True)
class _Standing:
    """What one tenant uses on this server."""

    requests: LeakyBucket
    tokens: LeakyBucket
    num_running: int = 0
    duration_s: float | None = None
    """Of its requests, on the average, later ones counting more; None: none has ended."""

    def is_idle(self, limits: TenantLimits, share: float, now: float) -> bool:
        """Whether to forget it loses nothing."""
        if self.num_running:
            return False
        rates = ((self.requests, limits.requests_per_minute), (self.tokens, limits.tokens_per_minute))
        return not any(limit is not None and bucket.drain(limit * share, now) for bucket, limit in rates)


class Admissions:
    """What tenants use on this server, against what they may. In memory alone: nothing here waits or asks anyone.

    Where several servers share the tenants, each grants its part, the limit divided by the number of servers; of requests at
    once at least one.

    Args:
        num_servers: how many there are now, this one among them.
    """

    def __init__(
        self, *, num_servers: Callable[[], int] = lambda: 1, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._count_servers = num_servers
        self._clock = monotonic
        # a tenant's limits are kept to know when its standing says nothing any more
        self._standings: dict[TenantId, tuple[_Standing, TenantLimits]] = {}
        self._sweep_at = _MIN_SWEEP
        self.num_refused = dict.fromkeys(REASONS, 0)
        """By what for, since the start."""

    def enter(self, caller: Caller) -> Admitted:
        """One more request of the caller's tenant, counted until it is released.

        Raises:
            RateLimited: it would be more than the tenant may have at once, or more than its rate; `retry_after_s` is when it would
                pass, by what is known now.
            QuotaExceeded: the tenant may have none at all.
        """
        limits, now = caller.policy.limits, self._clock()
        standing = self._standing(caller.tenant, limits, now)
        self._check_concurrency(standing, limits.max_concurrent_requests)
        if limits.requests_per_minute is not None:
            rate = limits.requests_per_minute * self.share
            wait_s = standing.requests.wait_s(1, rate, now)
            if math.isinf(wait_s):
                raise self._refuse(
                    "requests", QuotaExceeded("The tenant may make no requests.", retry_after_s=MINUTE_S)
                )
            if wait_s > _SLACK_S:
                text = f"The tenant has made its {limits.requests_per_minute} requests a minute."
                raise self._refuse("requests", RateLimited(text, retry_after_s=wait_s))
            standing.requests.take(1, rate, now)
        standing.num_running += 1
        return Admitted(self, caller, standing, now)

    def headers(self, caller: Caller) -> dict[str, str]:
        """How the caller's tenant stands, as OpenAI's servers say it: nothing for a rate that has no limit.

        ``limit`` is the tenant's, on all servers together; ``remaining`` is what passes on this one now, and ``reset`` how long it
        takes until that is all of its part again.
        """
        now = self._clock()
        standing, limits = self._standings.get(caller.tenant) or (
            _Standing(LeakyBucket(now), LeakyBucket(now)),
            caller.policy.limits,
        )
        headers = {}
        for kind, limit, bucket in (
            ("requests", limits.requests_per_minute, standing.requests),
            ("tokens", limits.tokens_per_minute, standing.tokens),
        ):
            if limit is None:
                continue
            rate = limit * self.share
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining(rate, now))
            headers[f"x-ratelimit-reset-{kind}"] = format_duration(bucket.reset_s(rate, now))
        return headers

    @property
    def share(self) -> float:
        """This server's part of every limit."""
        return 1 / self.num_servers

    @property
    def num_servers(self) -> int:
        """How many servers share the tenants, this one among them."""
        return max(1, self._count_servers())

    def part_of(self, limit: int | None) -> int | None:
        """What this server grants of a limit on something that can't be divided: at least one, unless the limit is 0."""
        return limit and max(1, math.floor(limit * self.share + 1e-9))

    def num_running(self, tenant: TenantId) -> int:
        """The tenant's requests that were entered and aren't released."""
        entry = self._standings.get(tenant)
        return 0 if entry is None else entry[0].num_running

    def __len__(self) -> int:
        """Of how many tenants something is kept."""
        return len(self._standings)

    def _check_concurrency(self, standing: _Standing, limit: int | None) -> None:
        part = self.part_of(limit)
        if limit is None or part is None or standing.num_running < part:
            return
        if not limit:
            raise self._refuse("concurrency", QuotaExceeded("The tenant may make no requests.", retry_after_s=MINUTE_S))
        # each of those that run ends once per duration, on the average
        wait_s = 1.0 if standing.duration_s is None else standing.duration_s / standing.num_running
        error = RateLimited(
            f"The tenant has {standing.num_running} requests under way; it may have {limit} at once on all servers together.",
            retry_after_s=min(max(wait_s, _MIN_WAIT_S), _MAX_WAIT_S),
            hint="Send the next one when one of them has ended.",
        )
        raise self._refuse("concurrency", error)

    def _refuse(self, reason: str, error: RateLimited) -> RateLimited:
        self.num_refused[reason] += 1
        return error

    def _newest_limits(self, caller: Caller) -> TenantLimits:
        """As the tenant's last request had them: a long one's own may be of long ago."""
        entry = self._standings.get(caller.tenant)
        return caller.policy.limits if entry is None else entry[1]

    def _reserve(self, caller: Caller, standing: _Standing, num_tokens: int) -> int:
        """How many are set aside: all of them, or none where nothing is limited."""
        limit = self._newest_limits(caller).tokens_per_minute
        if limit is None:
            return 0
        if num_tokens > limit:
            error = QuotaExceeded(
                f"The request may take {num_tokens} tokens, prompt and answer together; the tenant has {limit} a minute.",
                retry_after_s=MINUTE_S,
                kind="tokens",
                hint="Ask for less with max_tokens, or send a shorter prompt.",
            )
            raise self._refuse("tokens", error)
        now = self._clock()
        rate = limit * self.share
        wait_s = standing.tokens.wait_s(num_tokens, rate, now)
        if wait_s > _SLACK_S:
            text = f"The tenant has used its {limit} tokens a minute; the request may take {num_tokens}."
            raise self._refuse("tokens", RateLimited(text, retry_after_s=wait_s, kind="tokens"))
        standing.tokens.take(num_tokens, rate, now)
        return num_tokens

    def _charge(self, caller: Caller, standing: _Standing, num_tokens: int) -> None:
        """So many tokens more than were reserved; fewer, where it is negative."""
        limit = self._newest_limits(caller).tokens_per_minute
        if limit is not None and num_tokens:
            standing.tokens.take(num_tokens, limit * self.share, self._clock())

    def _leave(self, standing: _Standing, entered_at: float) -> None:
        standing.num_running -= 1
        duration_s = self._clock() - entered_at
        old = duration_s if standing.duration_s is None else standing.duration_s
        standing.duration_s = old + _NEW_DURATION_WEIGHT * (duration_s - old)

    def _standing(self, tenant: TenantId, limits: TenantLimits, now: float) -> _Standing:
        entry = self._standings.get(tenant)
        if entry is None:
            if len(self._standings) >= self._sweep_at:
                self._sweep(now)
            entry = _Standing(LeakyBucket(now), LeakyBucket(now)), limits
        self._standings[tenant] = entry[0], limits
        return entry[0]

    def _sweep(self, now: float) -> None:
        for tenant in list(self._idle(now)):
            del self._standings[tenant]
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._standings))

    def _idle(self, now: float) -> Iterator[TenantId]:
        share = self.share
        for tenant, (standing, limits) in self._standings.items():
            if standing.is_idle(limits, share, now):
                yield tenant


@dataclass(slots=True)
class Admitted:
    """One request that was let in. Whoever holds it releases it, once, however the request ends."""

    admissions: Admissions
    caller: Caller
    _standing: _Standing
    _entered_at: float
    _num_reserved: int = field(default=0, init=False)
    _num_used: int = field(default=0, init=False)
    _num_prompt_tokens: int = field(default=0, init=False)
    _is_released: bool = field(default=False, init=False)

    def reserve(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Set aside the tokens that the request may take. What it takes in the end is what counts (`count`).

        Raises:
            RateLimited: they are more than the tenant's rate leaves now; `retry_after_s` is when they would pass.
            QuotaExceeded: they are more than the tenant has in a minute.
        """
        num_tokens = num_prompt_tokens + num_new_tokens
        self._num_reserved += self.admissions._reserve(self.caller, self._standing, num_tokens)
        self._num_prompt_tokens += num_prompt_tokens

    def count(self, num_new_tokens: int) -> None:
        """The engine has computed the prompts, and made so many tokens more. Beyond what was reserved they are charged at once."""
        if self._is_released:
            return
        before = max(self._num_reserved, self._num_used)
        self._num_used += self._num_prompt_tokens + num_new_tokens
        self._num_prompt_tokens = 0
        self.admissions._charge(self.caller, self._standing, max(self._num_reserved, self._num_used) - before)

    def release(self) -> None:
        """The request has ended: its place is free, and tokens that were reserved and not used are given back. Twice is as good as once."""
        if self._is_released:
            return
        self._is_released = True
        self.admissions._charge(self.caller, self._standing, min(0, self._num_used - self._num_reserved))
        self.admissions._leave(self._standing, self._entered_at)


def format_duration(seconds: float) -> str:
    """As OpenAI's servers write one: ``20ms``, ``1.5s``, ``6m0s``; rounded up."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    shown = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{shown}" if minutes else shown
