"""Decide which tokens to propose in a step: none, unless that is expected to save time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cachetools import LRUCache

from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.speculation.draft import FORCED, Draft, Rates
from loraserve.engine.speculation.drafting import DraftCandidate, Drafting
from loraserve.engine.speculation.history import History, HistoryKey, history_key
from loraserve.engine.speculation.proposal import Proposal, ProposalSource
from loraserve.engine.step_costs import BOUNDS, MAX_ROWS, StepCosts
from loraserve.limits import LIMITS
from loraserve.types import Digest, TenantId

MAX_REQUESTS = 4
"""Requests of a step beyond which a server proposes nothing.

With eight requests of which no text repeated itself, 0.93 of the tokens per second without
speculation were measured: what is looked up, and tried, for each of them.
"""
MAX_PROPOSED = 15
"""Proposed tokens of a request in a step, at most."""
MIN_GAIN = 1.1
"""Expected tokens per second with proposals, by those without, from which on they are made."""
MIN_PROBABILITY = 0.05
"""Probability of being right below which a token isn't proposed, whatever a row costs."""
SETTLING_STEPS = 2
"""Steps without proposals that aren't measured after one with the draft base's.

With S in int8 on two cores with AVX2 they took a tenth longer than those behind them, as much as
the draft base has to be expected to gain.
"""
MAX_REMEMBERED_RATES = 4096
"""Tenants and adapters of which the rates are remembered, at most."""
MIN_TEXT_TOKENS = 8
"""Output tokens of a request from which on its text is kept for others."""


_LOOKED_UP = (ProposalSource.REQUEST, ProposalSource.HISTORY)


class Speculation:
    """Find proposals, choose among them by what they save and cost, and learn from results.

    Proposed tokens change no text, since what isn't sampled in their place is dropped. They cost
    rows of a step. A step with more rows takes longer by what `StepCosts` has measured, and a row
    is right with the probability that `Rate` has. A proposal is made if tokens per second are
    expected to rise by `MIN_GAIN`: for few requests in a step of which the time hardly depends on
    its rows, and for none in a full one.

    Called on the steps' thread alone.
    """

    def __init__(
        self,
        *,
        max_bytes: int = LIMITS.max_speculation_bytes,
        max_requests: int | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """Begin without requests and texts.

        Args:
            max_bytes: bytes of all indices, half of them for those of live requests.
            max_requests: requests of a step beyond which nothing is proposed; None: there may be as
                many as pay.
            drafting: uses a draft base too; None: there is none.
        """
        self._max_requests = max_requests
        self._drafting = drafting
        # seconds in the draft base that `note_step` has seen
        self._noted_draft_s = 0.0
        self._num_plain = SETTLING_STEPS
        self.costs = StepCosts()
        self.num_proposed: Counter[ProposalSource] = Counter()
        self.num_accepted: Counter[ProposalSource] = Counter()
        self.num_drafts = 0
        self._max_own_bytes = max_bytes // 2
        self._own_bytes = 0
        self._drafts: dict[Request, Draft] = {}
        self._made: dict[Request, Proposal] = {}
        self._history = History(max_bytes // 2)
        self._rates: LRUCache[HistoryKey, Rates] = LRUCache(MAX_REMEMBERED_RATES)

    def propose(self, scheduled: Sequence[ScheduledRequest], budget: int) -> list[Proposal]:
        """Propose tokens for a step that only decodes, as far as they pay.

        Args:
            budget: tokens that the step still has room for.
        """
        if self._max_requests is not None and len(scheduled) > self._max_requests:
            return []
        room = min(budget, MAX_ROWS - len(scheduled))
        if not scheduled or room <= 0 or self.costs.most_gain(len(scheduled)) < MIN_GAIN:
            return []
        if self._drafting is not None and self._drafting.needs_plain_step(self.costs, len(scheduled)):
            return []
        found, drafts = [], {}
        for number, entry in enumerate(scheduled):
            # one of the tokens that are left is sampled anyway
            count = min(room, _num_left(entry) - 1)
            draft = self._draft_of(entry.request) if count > 0 and _may_speculate(entry) else None
            if draft is None:
                continue
            drafts[number] = draft
            count = min(count, MAX_PROPOSED)
            proposals = (self._forced(number, draft, count), self._find(number, draft, count))
            if any(proposals):
                found.append(max(filter(None, proposals), key=_num_expected))
        chosen = self._choose(found, len(scheduled), room) if found else []
        return self._with_drafted(scheduled, drafts, chosen, room)

    def _with_drafted(
        self, scheduled: Sequence[ScheduledRequest], drafts: Mapping[int, Draft], chosen: list[Proposal], room: int
    ) -> list[Proposal]:
        """Add the draft base's proposals, where these are expected to be better."""
        if self._drafting is None or not self._drafting.takes(len(scheduled)):
            return chosen
        found, candidates = {proposal.number: proposal for proposal in chosen}, []
        for number, draft in drafts.items():
            if draft.request.constraint is not None:
                continue
            candidate = DraftCandidate(
                number,
                draft.request,
                draft.rates,
                min(self._drafting.max_count(draft.request), _num_left(scheduled[number]) - 1),
                found.get(number),
            )
            is_better = candidate.lookup is None or candidate.lookup.rate.value < candidate.rate.value
            if candidate.max_count and is_better:
                candidates.append(candidate)
        return self._drafting.propose(
            candidates, chosen, self.costs, num_requests=len(scheduled), room=room, min_gain=MIN_GAIN
        )

    def _draft_of(self, request: Request) -> Draft | None:
        """Look up or make a request's index and rates; None where there is no room for them."""
        draft = self._drafts.get(request)
        if draft is None:
            if self._own_bytes >= self._max_own_bytes:
                return None
            key = history_key(request)
            draft = self._drafts[request] = Draft(request, key, Rates(self._rates_of(key)))
            self._own_bytes += draft.index.num_bytes
        return draft

    def _find(self, number: int, draft: Draft, count: int) -> Proposal | None:
        """Find what followed the last tokens of a request the last time, `count` at most."""
        if not draft.is_due():
            return None
        self._own_bytes -= draft.index.num_bytes
        match = draft.find(self._history.get(draft.history_key))
        self._own_bytes += draft.index.num_bytes
        if match is None:
            return None
        (place, index) = match
        token_ids = index.read(place.position, count)
        source = ProposalSource.REQUEST if index is draft.index else ProposalSource.HISTORY
        return Proposal(number, draft.request, token_ids, source, place.length, draft.rates) if token_ids else None

    def _forced(self, number: int, draft: Draft, count: int) -> Proposal | None:
        """Propose what a request's grammar leaves no choice about, `count` tokens at most."""
        constraint = draft.request.constraint
        token_ids = () if constraint is None else constraint.forced(count)
        if not token_ids:
            return None
        return Proposal(number, draft.request, token_ids, ProposalSource.GRAMMAR, FORCED, draft.rates)

    def _rates_of(self, key: HistoryKey) -> Rates:
        """Look up or make the rates of a tenant's and adapter's requests."""
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = Rates()
        return rates

    def _choose(self, found: Sequence[Proposal], num_rows: int, room: int) -> list[Proposal]:
        """Choose what of the proposals gives the most tokens per second, if it is enough."""
        # the probability that each proposed token is right, with those before it
        gains: list[tuple[float, int, int]] = []
        for which, proposal in enumerate(found):
            rate = gain = proposal.rate.value
            for place in range(len(proposal.token_ids)):
                if gain < MIN_PROBABILITY:
                    break
                gains.append((gain, -place, which))
                gain *= rate
        gains.sort(reverse=True)
        del gains[room:]
        best, best_count = MIN_GAIN * num_rows / self.costs.of(num_rows), 0
        num_expected, counts = float(num_rows), {min(bound - num_rows, len(gains)) for bound in BOUNDS}
        for count, (gain, _, _) in enumerate(gains, start=1):
            num_expected += gain
            if count in counts and num_expected / self.costs.of(num_rows + count) > best:
                best, best_count = num_expected / self.costs.of(num_rows + count), count
        lengths = Counter(which for _, _, which in gains[:best_count])
        chosen = []
        for which, proposal in enumerate(found):
            if lengths[which]:
                chosen.append(replace(proposal, token_ids=proposal.token_ids[: lengths[which]]))
            else:
                proposal.rate.note_unmade()
        return chosen

    def note_made(self, proposal: Proposal) -> None:
        """Note that a step computes a proposal's tokens."""
        self._made[proposal.request] = proposal

    def note_result(self, entry: ScheduledRequest, num_accepted: int) -> None:
        """Learn how many of an entry's proposed tokens were right."""
        proposal = self._made.pop(entry.request, None)
        if proposal is not None:
            num_proposed = len(entry.proposed)
            self.num_drafts += 1
            self.num_proposed[proposal.source] += num_proposed
            self.num_accepted[proposal.source] += num_accepted
            proposal.rates.note(proposal.length, num_proposed, num_accepted)
            draft = self._drafts.get(entry.request)
            if num_accepted and draft is not None and proposal.source in _LOOKED_UP:
                draft.note_fruit()

    def note_step(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        """Learn what a step took, if it only decoded. What the draft base took isn't its own.

        With a draft base, a step without proposals counts after `SETTLING_STEPS` others.
        """
        is_settled = self._num_plain >= SETTLING_STEPS
        self._num_plain = 0 if any(entry.proposed for entry in scheduled) else self._num_plain + 1
        if self._drafting is not None:
            seconds -= self._drafting.seconds - self._noted_draft_s
            self._noted_draft_s = self._drafting.seconds
            if self._num_plain and not is_settled:
                return
        if all(entry.is_sampled and entry.known_end - entry.start == 1 for entry in scheduled):
            self.costs.note(sum(entry.num_tokens for entry in scheduled), seconds)

    def end(self, request: Request) -> None:
        """Keep an ended request's text for others of its tenant and adapter."""
        self._made.pop(request, None)
        draft = self._drafts.pop(request, None)
        if draft is not None:
            self._own_bytes -= draft.index.num_bytes
        if self._drafting is not None:
            self._drafting.forget(request)
        if request.num_output_tokens >= MIN_TEXT_TOKENS and request.leaves_text and not request.is_internal:
            self._history.add(history_key(request), request.token_ids, request.versions)

    def forget(self, digest: Digest) -> None:
        """Forget the texts of an adapter's version."""
        self._history.forget(digest)
        for key in [key for key in self._rates if key[1] == digest]:
            del self._rates[key]

    def forget_deleted(self, owner: TenantId, name: str | None, version: int | None) -> None:
        """Forget the texts of a deleted version, adapter or tenant, by `history.is_of`."""
        for key in self._history.forget_deleted(owner, name, version):
            self._rates.pop(key, None)

    def stats(self) -> dict[str, Any]:
        return {
            "num_drafts": self.num_drafts,
            "proposed_own_tokens": self.num_proposed[ProposalSource.REQUEST],
            "proposed_history_tokens": self.num_proposed[ProposalSource.HISTORY],
            "proposed_draft_tokens": self.num_proposed[ProposalSource.DRAFT],
            "proposed_grammar_tokens": self.num_proposed[ProposalSource.GRAMMAR],
            "accepted_own_tokens": self.num_accepted[ProposalSource.REQUEST],
            "accepted_history_tokens": self.num_accepted[ProposalSource.HISTORY],
            "accepted_draft_tokens": self.num_accepted[ProposalSource.DRAFT],
            "accepted_grammar_tokens": self.num_accepted[ProposalSource.GRAMMAR],
            "draft_s": 0.0 if self._drafting is None else self._drafting.seconds,
            "speculation_bytes": self._own_bytes + self._history.num_bytes,
        }


def _num_left(entry: ScheduledRequest) -> int:
    """Compute how many tokens an entry's request may still sample."""
    return entry.request.params.max_tokens - entry.request.num_output_tokens


def _num_expected(proposal: Proposal) -> float:
    """Compute how many of a proposal's tokens are expected to be right."""
    return proposal.rate.expected(len(proposal.token_ids))


def _may_speculate(entry: ScheduledRequest) -> bool:
    """Check whether an entry is one token of a decoding request, and known.

    If it has a grammar, that must be followed at no great cost.
    """
    request = entry.request
    return (
        entry.is_sampled
        and not request.is_internal
        and (request.constraint is None or request.constraint.may_look_ahead)
        and entry.num_tokens == 1
        and entry.end == len(request.token_ids)
        and request.num_output_tokens > 0
    )
