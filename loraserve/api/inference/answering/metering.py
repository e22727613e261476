"""Meter one HTTP request: the usage in its answer, and the usage that is billed.

Both are equal once the whole answer was delivered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from loraserve.db.names import name_key
from loraserve.registry.composition import label
from loraserve.tenancy.billing.journal import Amounts
from loraserve.tenancy.billing.meter import UsageEvent, plain, price_tag
from loraserve.tenancy.prices import highest

if TYPE_CHECKING:
    from loraserve.api.http.request_record import InferenceRecord
    from loraserve.api.inference.prompts import Prompt
    from loraserve.api.inference.target import TargetSelector
    from loraserve.api.services import Services
    from loraserve.engine_client.client import Chunk
    from loraserve.tenancy.billing.meter import CollectedUsage, UsageMeter
    from loraserve.tenancy.identity.auth import Caller
    from loraserve.tenancy.limits.admission import Admitted
    from loraserve.tenancy.prices import Price, PriceTable
    from loraserve.types import AdapterRef, TenantId

EPHEMERAL = "(ephemeral)"
"""Name of all ephemeral adapters, and of sums with one, in usage."""
_MAX_LABEL = 255
"""Maximum length of a sum's name in usage."""


class MeteredBody(Protocol):
    """Body of a request.

    Attributes:
        n: answers to each prompt.
    """

    @property
    def n(self) -> int: ...


class MeteredRequest(Protocol):
    """Admitted HTTP request, as far as it is metered: one for tokens, or one for vectors."""

    @property
    def services(self) -> Services: ...

    @property
    def body(self) -> MeteredBody: ...

    @property
    def target(self) -> TargetSelector: ...

    @property
    def prompts(self) -> Sequence[Prompt]: ...

    @property
    def granted(self) -> tuple[str, ...]: ...

    @property
    def adapter(self) -> AdapterRef | None: ...


class RequestUsage:
    """Count tokens as chunks come, and bill them as they are delivered to the client's connection.

    Prompts count once each, whatever n is: with the first piece of an answer to them. A chunk that
    adds nothing that the client could see (bytes of half a character, the beginning of what may be
    a stop string) is billed with the next piece of its choice. The adapter is the one that answers
    when the first piece is handed over.
    """

    def __init__(self, context: MeteredRequest, caller: Caller, admitted: Admitted) -> None:
        self._context = context
        self._caller = caller
        self._admitted = admitted
        self._lengths = [len(prompt.token_ids) for prompt in context.prompts]
        self._n = context.body.n
        table = caller.policy.prices
        self._prices: dict[str, Price] = {}
        """Prices by digest (the base: empty) of every adapter that may answer.

        They are read before the engine is called: counting can't fail.
        """
        if table is not None:
            for adapter in context.target.candidates:
                self._prices[_digest(adapter)] = _price_of(table, caller.tenant, adapter, context.granted)
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}
        """Prompt → how many of its tokens were in the prefix cache."""
        self._is_replayed = False
        """Whether the answer was kept before; all of its choices are, or none."""
        self._last: int | None = None
        """Choice of the last chunk."""
        self._held: dict[int, int] = {}
        """Choice → tokens of it that were added and not handed over.

        A choice that ended is among them with 0 at least.
        """
        self._has_ended = False
        """Whether what is held is the end of a choice."""
        self._billed_prompts: set[int] = set()
        self._num_billed = 0
        self._num_unrecorded = [0, 0, 0, 0]
        """Billed and not recorded, as the first of `Amounts`: an event for each token would cost
        more than its way.
        """
        self._num_uncounted: int | None = None
        """Added tokens that aren't in the tenant's rate; None: no chunk was added since."""
        self._is_expected = False
        """Whether the recorder calls `record` soon."""
        self._is_closed = False

    def add(self, index: int, chunk: Chunk) -> None:
        """Add the choice's chunk to the answer.

        The tenant's rate counts its tokens with the next `record`.
        """
        num_tokens = len(chunk.token_ids)
        self._completion_tokens += num_tokens
        self._num_uncounted = num_tokens + (self._num_uncounted or 0)
        self._held[index] = self._held.get(index, 0) + num_tokens
        self._last = index
        self._is_replayed |= chunk.is_replayed
        self._has_ended |= chunk.finish_reason is not None
        # the first choice of a prompt has it: later ones find what that one computed, and the
        # prompt is billed with it
        self._cached.setdefault(index // self._n, chunk.num_cached_tokens)
        if not self._is_expected:
            self._expect()

    def bill_last(self) -> None:
        """Bill the last added chunk, which is delivered next.

        The end of an answer is in the journal first.
        """
        if self._last is not None:
            self._bill((self._last,))

    def bill_all(self) -> None:
        """Bill the whole answer, which is delivered next and in the journal first."""
        self._bill(range(len(self._lengths) * self._n))

    def close(self, num_made: int, *, has_engine_work: bool = True) -> None:
        """Stop billing: nothing is delivered any more.

        Args:
            num_made: tokens that the engine made for the request. Undelivered ones are recorded,
                and cost nothing.
            has_engine_work: whether the engine has worked for it; then the prompts count towards
                the tenant's rate, though nothing was made.
        """
        # the tenant's rate counts all tokens made for it, delivered or not
        if has_engine_work or num_made:
            self._admitted.count(max(0, num_made - self._completion_tokens))
        self.record()
        if self._recorder is not None:
            self._recorder.forget(self)
        num_left = num_made - self._num_billed
        if not self._is_closed and num_left > 0:
            self._record(Amounts(undelivered_tokens=num_left))
        self._is_closed = True

    def as_dict(self) -> dict[str, Any]:
        """Build the answer's ``usage`` so far, with its cost where the tenant has prices."""
        prompt_tokens, cached_tokens = sum(self._lengths), sum(self._cached.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        if self._is_replayed:
            usage["completion_tokens_details"] = {"cached_tokens": self._completion_tokens}
        price, table = self._price(), self._caller.policy.prices
        if price is not None and table is not None:
            cost = price.cost(
                prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, completion_tokens=self._completion_tokens
            )
            usage |= {"cost": plain(cost), "currency": table.currency}
        return usage

    def note(self, record: InferenceRecord) -> None:
        """Note the answer's tokens, as `as_dict` counts them."""
        record.num_prompt_tokens, record.num_tokens = sum(self._lengths), self._completion_tokens
        record.num_cached_tokens = sum(self._cached.values())

    def _bill(self, choices: Iterable[int]) -> None:
        """Bill the undelivered tokens of the choices, and their prompts once."""
        prompt_tokens = cached_tokens = completion_tokens = 0
        is_first = not self._billed_prompts
        has_some = False
        for index in choices:
            held = self._held.pop(index, None)
            if held is None:
                continue
            has_some = True
            completion_tokens += held
            prompt = index // self._n
            if prompt not in self._billed_prompts:
                self._billed_prompts.add(prompt)
                prompt_tokens += self._lengths[prompt]
                cached_tokens += self._cached.get(prompt, 0)
        if not has_some:
            return
        self._num_billed += completion_tokens
        unrecorded = self._num_unrecorded
        unrecorded[3] += completion_tokens
        if is_first or prompt_tokens:
            unrecorded[0] += is_first
            unrecorded[1] += prompt_tokens
            unrecorded[2] += cached_tokens
        if self._has_ended:
            self._has_ended = False
            self.record()
            if (recorder := self._recorder) is not None:
                recorder.persist()
        elif not self._is_expected:
            self._expect()

    def _expect(self) -> None:
        """Have `record` called soon: by the recorder, or now if there is none."""
        self._is_expected = True
        recorder = self._recorder
        if recorder is None:
            self.record()
        else:
            recorder.expect(self)

    def record(self) -> None:
        """Record what was billed, and count what was added, since the last call."""
        self._is_expected = False
        if self._num_uncounted is not None:
            self._admitted.count(self._num_uncounted)
            self._num_uncounted = None
        if any(self._num_unrecorded):
            amounts, self._num_unrecorded = Amounts(*self._num_unrecorded), [0, 0, 0, 0]
            self._record(amounts)

    def _record(self, amounts: Amounts) -> None:
        services, caller, recorder = self._context.services, self._caller, self._recorder
        if recorder is None:
            return
        adapter, price, table = self._context.adapter, self._price(), caller.policy.prices
        recorder.record(
            UsageEvent(
                tenant=caller.tenant,
                owner="" if adapter is None or adapter.tenant == caller.tenant else adapter.tenant,
                adapter=_name(adapter),
                version=0 if adapter is None or adapter.is_ephemeral else adapter.version,
                num_requests=amounts.num_requests,
                prompt_tokens=amounts.prompt_tokens,
                cached_tokens=amounts.cached_tokens,
                completion_tokens=amounts.completion_tokens,
                undelivered_tokens=amounts.undelivered_tokens,
                num_cached_requests=amounts.num_requests if self._is_replayed else 0,
                cached_completion_tokens=amounts.completion_tokens if self._is_replayed else 0,
                price="" if price is None or table is None else price_tag(table.currency, price),
                at=services.clock(),
            )
        )

    @property
    def _recorder(self) -> UsageMeter | CollectedUsage | None:
        return self._admitted.collected or self._context.services.usage

    def _price(self) -> Price | None:
        """Look up the price of the adapter that answers now; None: the tenant has no prices.

        Of an answer that was kept, every token has the price of a cached one.
        """
        price = self._prices.get(_digest(self._context.adapter))
        if price is None or not self._is_replayed:
            return price
        return replace(price, completion=min(price.cached, price.completion))


def _digest(adapter: AdapterRef | None) -> str:
    return "" if adapter is None else adapter.digest


def _price_of(table: PriceTable, tenant: TenantId, adapter: AdapterRef | None, granted: Sequence[str]) -> Price:
    """Look up the price of the adapter, as the tenant calls it.

    A sum has its dearest part's, so that it is no way around a price.

    Args:
        granted: ``OWNER/NAME``, with the name's key, of those that the request may name so.
    """
    if adapter is None:
        return table.price
    if adapter.parts:
        return highest([_price_of(table, tenant, part.adapter, granted) for part in adapter.parts])
    if adapter.tenant == tenant:
        return table.price_of(adapter.name)
    # more than one only in a sum of two owners' adapters of one name
    key = name_key(adapter.name)
    paths = [path for path in granted if path.partition("/")[2] == key]
    return highest([table.price_of(path) for path in paths] or [table.price])


def _name(adapter: AdapterRef | None) -> str:
    """Choose the adapter's name in usage.

    Ephemeral ones share a name: each would leave rows behind. A sum's is without its weights: each
    client's would be a row of their own.
    """
    if adapter is None:
        return ""
    if adapter.is_ephemeral:
        return EPHEMERAL
    if not adapter.parts:
        return adapter.name
    name = "+".join(label(part.adapter) for part in adapter.parts)
    if len(name) <= _MAX_LABEL:
        return name
    # cut short, what identifies it distinguishes it from others that begin alike
    return f"{name[: _MAX_LABEL - 17]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
