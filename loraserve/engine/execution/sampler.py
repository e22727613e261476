"""Sample tokens from logits, each row by its own request's parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from loraserve.engine.execution.batch import Batch
from loraserve.engine.grammar.constraint import Constraint
from loraserve.engine.greedy import MIN_TEMPERATURE
from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest, StepResult
from loraserve.errors import InvariantViolation
from loraserve.types import ThinkingBudget, TokenLogprobs
from loraserve_kernels.cpu.sampling.drawing import Draw, draw
from loraserve_kernels.cpu.sampling.likeliest import NOT_FINITE, likeliest

_MAX_LOGIT = 1e30
"""Logits that penalties make larger are this."""

_MAX_BLANKS = 4
"""Tokens of white space that an answer may have before its reasoning."""

_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """Compute the number in [0, 1) that chooses the token at a position of a sequence.

    It depends on nothing else, so sampled text is the same after preemption, a crash or in another
    batch.

    Source: SplitMix64 (Steele, Lea, Flood 2014), seeded by the seed and stepped to the position.
    """
    z = (seed * 0xD1342543DE82EF95 + position * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK64
    for _ in range(2):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        z ^= z >> 31
    return (z >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one token to sample.

    Attributes:
        position: of the token in its sequence.
        sampled: tokens that the same step has sampled just before it: proposed ones that stand.
    """

    request: Request
    position: int
    sampled: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """Tokens before it, as far as the host has them."""
        return [*self.request.token_ids, *self.sampled]

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens of `token_ids` that are output."""
        return [*self.request.token_ids[self.request.num_prompt_tokens :], *self.sampled]

    @property
    def is_too_early_to_end(self) -> bool:
        return _is_too_early_to_end(self.request, self.position)


class Sampler:
    """Sample the next tokens of each request that a step completed, and score prompts."""

    def __init__(self, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        """Make a sampler.

        Args:
            vocab_size: columns of the base's logits; those of adapters with more come behind them.
        """
        self._eos_token_ids, self._vocab_size = tuple(eos_token_ids), vocab_size

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: Batch) -> list[StepResult]:
        """Sample one result per entry of the batch, in its order.

        Args:
            logits: [num_logits, vocab_size] float32, split by ``batch.logits_ranges``; may be
                overwritten. With more columns where adapters of these rows have more tokens.
        """
        if logits.shape[0] == 0:
            return [StepResult() for _ in batch.entries]
        greedy = likeliest(logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size])
        if logits.shape[1] > self._vocab_size:
            self._look_at_extra(logits, batch, greedy)
        for entry, (start, end) in zip(batch.entries, batch.logits_ranges, strict=True):
            constraint = entry.request.constraint
            if (
                start < end
                and constraint is not None
                and self._is_taken(entry.request, entry.known_end, greedy[end - 1])
            ):
                constraint.wanted = greedy[end - 1]
        wait_for_masks(batch.entries)
        results, drawn = list[StepResult](), list[tuple[int, int, Draw]]()
        for entry, (start, end) in zip(batch.entries, batch.logits_ranges, strict=True):
            if start == end:
                results.append(StepResult())
                continue
            if _is_plain(entry) and greedy[start] != NOT_FINITE:
                if entry.request.takes_likeliest:
                    results.append(StepResult((greedy[start],)))
                    continue
                if logits.shape[1] == self._vocab_size:
                    drawn.append((len(results), start, _draw_of(entry.request, entry.end)))
                    results.append(StepResult())
                    continue
            # what follows a row that isn't finite isn't sampled: only a later step may fail for it
            rows = greedy[start:end]
            num_finite = rows.index(NOT_FINITE) if NOT_FINITE in rows else end - start
            if num_finite < end - start - len(entry.proposed):
                results.append(StepResult(is_finite=False))
            else:
                own = self._own(entry.request, logits)
                results.append(self._sample_entry(entry, own, greedy, start, start + num_finite))
        if drawn:
            tokens = draw(logits, [row for _, row, _ in drawn], [of_row for _, _, of_row in drawn])
            for (index, _, _), token_id in zip(drawn, tokens, strict=True):
                results[index] = StepResult((token_id,))
        return results

    def _look_at_extra(self, logits: Tensor, batch: Batch, greedy: list[int]) -> None:
        """Find the likeliest tokens of requests that may sample tokens beyond the base's."""
        for entry, (start, end) in zip(batch.entries, batch.logits_ranges, strict=True):
            own, constraint = self._own(entry.request, logits[start:end]), entry.request.constraint
            if start < end and own.shape[1] > self._vocab_size:
                # a grammar doesn't restrict rows that no token has
                greedy[start:end] = likeliest(own if constraint is None else own[:, : constraint.vocab_size])

    def _own(self, request: Request, logits: Tensor) -> Tensor:
        """Select the columns of the tokens that a request may sample.

        A probe's are the base's: they are compared with the base's.
        """
        if logits.shape[1] == self._vocab_size:
            return logits
        is_narrow = request.probe is not None and not request.probe.is_wide
        return logits[:, : self._vocab_size + (0 if is_narrow else request.num_extra_rows)]

    @torch.inference_mode()
    def sample_entry(self, entry: ScheduledRequest, logits: Tensor) -> StepResult:
        """Sample one entry's result.

        Args:
            logits: [num_rows, vocab_size] float32, the entry's own; at least one row.
        """
        # a GPU has no adapters with tokens beyond the base's
        greedy = likeliest(logits)
        if NOT_FINITE in greedy:
            return StepResult(is_finite=False)
        return self._sample_entry(entry, logits, greedy, 0, logits.shape[0])

    def _sample_entry(
        self, entry: ScheduledRequest, logits: Tensor, greedy: Sequence[int], start: int, end: int
    ) -> StepResult:
        """Sample the result of an entry whose rows are finite, or as many of them as are.

        Rows are taken out of the tensor only where something looks at them: that costs as much as
        all else that is done for a request whose likeliest token is taken.

        Args:
            logits: [num_logits, vocab_size] float32.
            greedy: the likeliest token of each row.
            start, end: the entry's rows.
        """
        request = entry.request
        if request.probe is not None:
            token_id = request.probe.next_token(entry.end, greedy[end - 1]) if entry.is_sampled else None
            return StepResult(() if token_id is None else (token_id,), logits=logits[start:end].clone())
        prompt_logprobs = _score_prompt(entry, logits[start:end]) if entry.is_scored else ()
        if not entry.is_sampled or request.params.max_tokens == 0:
            return StepResult(prompt_logprobs=prompt_logprobs)
        refused = without_mask(entry)
        if refused is not None:
            return refused
        # the last known token's row, and those of proposed tokens
        first = start if entry.proposed else end - 1
        sampled: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for index in range(first, end):
            likeliest, constraint = greedy[index], request.constraint
            position = entry.known_end + len(sampled)
            if constraint is not None:
                wanted = likeliest if self._is_taken(request, position, likeliest) else None
                if not sampled and not constraint.start_over(wanted):
                    return StepResult(is_deferred=True)
                if sampled and (sampled[-1] in self._eos_token_ids or not constraint.look_ahead(sampled, wanted)):
                    break
            forced = forced_after(request, sampled)
            if forced is not None and (constraint is None or constraint.allows(forced)):
                token_id = forced
            # a token whose permission was requested is taken
            elif (constraint is not None and constraint.permitted == likeliest) or (
                self._is_taken(request, position, likeliest) and (constraint is None or constraint.allows(likeliest))
            ):
                token_id = likeliest
            else:
                place = Place(request, position, tuple(sampled))
                if constraint is not None and request.takes_likeliest:
                    token_id = self._likeliest_allowed(place, logits[index], constraint)
                else:
                    token_id = self._choose(place, logits[index])
            sampled.append(token_id)
            if request.params.logprobs is not None:
                scores = torch.log_softmax(logits[index], dim=0)
                own = request.params.logprob_token_ids
                logprobs.append(
                    _own_logprobs(scores, token_id, own)
                    if own
                    else _top_logprobs(scores, token_id, request.params.logprobs)
                )
            # the next row stands if it was computed for this token
            if entry.proposed[len(sampled) - 1 : len(sampled)] != (token_id,):
                break
        return StepResult(tuple(sampled), None if request.params.logprobs is None else tuple(logprobs), prompt_logprobs)

    def _is_taken(self, request: Request, position: int, likeliest: int) -> bool:
        """Check whether a row's likeliest token is taken if no grammar forbids it."""
        # the likeliest of all tokens is the likeliest of those that are allowed
        return request.takes_likeliest and likeliest not in self.end_tokens(request, position)

    def next_token(self, place: Place, row: Tensor) -> int:
        """Sample the token of a request without a grammar from one row.

        Args:
            row: [vocab_size] float32, finite or -inf.
        """
        forced = forced_after(place.request, place.sampled)
        if forced is not None:
            return forced
        likeliest = int(row.argmax())
        return likeliest if self._is_taken(place.request, place.position, likeliest) else self._choose(place, row)

    def _likeliest_allowed(self, place: Place, row: Tensor, constraint: Constraint) -> int:
        """Find the likeliest of the tokens that a grammar allows, of which there are some."""
        return constraint.likeliest(
            row[: constraint.vocab_size].numpy(), self.end_tokens(place.request, place.position)
        )

    def _choose(self, place: Place, row: Tensor) -> int:
        request, params, constraint = place.request, place.request.params, place.request.constraint
        row = (row if constraint is None else row[: constraint.vocab_size]).clone()
        if constraint is None and place.is_too_early_to_end:
            row[torch.tensor(self.end_tokens(request, place.position), dtype=torch.int64)] = -inf
        _apply_penalties(row, place)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
            row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype)
        chosen_from = _restrict(row, place) if params.allowed_token_ids or params.bad_words else row
        if constraint is not None:
            allowed = torch.from_numpy(constraint.allowed(self.end_tokens(request, place.position)))
            both = torch.where(allowed, chosen_from, -inf)
            # the grammar decides where it allows none of the tokens that the request chose
            chosen_from = both if bool((both > -inf).any()) else torch.where(allowed, row, -inf)
        row = chosen_from
        if params.temperature <= MIN_TEMPERATURE:
            return int(row.argmax())
        return draw(row[None], (0,), (_draw_of(request, place.position),))[0]

    def end_tokens(self, request: Request, position: int) -> list[int]:
        """List the tokens that the request's answer mustn't end with yet, at a position.

        Of a request with a grammar these are chosen where the grammar allows no others.
        `ignore_eos` means the same there as a `min_tokens` without end: an answer can't continue
        after its grammar has ended.
        """
        params, is_early = request.params, _is_too_early_to_end(request, position)
        if not is_early and not (params.ignore_eos and request.constraint is not None):
            return []
        stops = params.stop_token_ids if is_early else ()
        return sorted({*stops, *self._eos_token_ids})


def forced_after(request: Request, sampled: Sequence[int]) -> int | None:
    """Find the token that ends the request's reasoning, if it has to come next."""
    budget = request.params.thinking
    return None if budget is None else forced_end(budget, request.token_ids, request.num_prompt_tokens, sampled)


def forced_end(budget: ThinkingBudget, token_ids: Sequence[int], start: int, sampled: Sequence[int]) -> int | None:
    """Find the token that has to come next, which ends the reasoning; None: any may come.

    It follows from the tokens alone, so it is the same after a preemption, a replay or a proposal.

    Args:
        token_ids: prompt, then output that is known.
        start: number of the prompt's tokens.
        sampled: output after `token_ids`.
    """
    num_output = len(token_ids) - start + len(sampled)
    if num_output < budget.num_tokens:
        return None
    first = [*token_ids[start : start + _MAX_BLANKS + 1], *sampled][: _MAX_BLANKS + 1]
    begin = 0 if budget.is_open else _after_opener(budget, first)
    if begin is None or num_output - begin < budget.num_tokens:
        return None
    is_closed = any(closer in sampled or _occurs(closer, token_ids, start) for closer in budget.closers)
    return None if is_closed else budget.closers[0]


def _occurs(token_id: int, token_ids: Sequence[int], start: int) -> bool:
    """Check whether a token is among these from `start` on, without a copy of them."""
    try:
        token_ids.index(token_id, start)
    except ValueError:
        return False
    return True


def _after_opener(budget: ThinkingBudget, first: Sequence[int]) -> int | None:
    """Count the tokens up to the reasoning's first; None: there is no reasoning.

    Args:
        first: output's first tokens, at most `_MAX_BLANKS` + 1.
    """
    for index, token_id in enumerate(first):
        if token_id in budget.openers:
            return index + 1
        if token_id not in budget.blanks:
            return None
    return None


def wait_for_masks(entries: Sequence[ScheduledRequest]) -> None:
    """Wait for the masks of the entries that are sampled, within a bound."""
    constraints = [
        entry.request.constraint for entry in entries if entry.is_sampled and entry.request.constraint is not None
    ]
    if constraints:
        constraints[0].threads.wait(constraints)


def without_mask(entry: ScheduledRequest) -> StepResult | None:
    """Decide the result of an entry whose mask isn't there.

    None if it is, or if all tokens are allowed.
    """
    constraint = entry.request.constraint
    if constraint is None:
        return None
    if not constraint.is_ready:
        return StepResult(is_deferred=True)
    if constraint.error is not None:
        return StepResult(error=constraint.error)
    if constraint.num_output_tokens != entry.known_end - entry.request.num_prompt_tokens:
        raise InvariantViolation(
            f"the mask of request {entry.request.request_id} follows {constraint.num_output_tokens} tokens of output;"
            f" token {entry.known_end - entry.request.num_prompt_tokens} is sampled"
        )
    return None


def _draw_of(request: Request, position: int) -> Draw:
    """Describe how the token at a position of a sequence is drawn."""
    params = request.params
    return Draw(params.temperature, params.top_k, params.top_p, params.min_p, uniform(params.seed, position))


def _is_plain(entry: ScheduledRequest) -> bool:
    """Check whether the entry's one row gives a token by its logits alone, and nothing else.

    That is so of nearly all, which skip everything that others may request.
    """
    request = entry.request
    params = request.params
    return (
        request.reads_logits_alone
        and request.constraint is None
        and params.logprobs is None
        and params.max_tokens > 0
        and not entry.proposed
        and not entry.is_scored
        and request.probe is None
        and not _is_too_early_to_end(request, entry.end)
    )


def _is_too_early_to_end(request: Request, position: int) -> bool:
    # by position, not by the tokens that are known: the one before may be in flight
    return position - request.num_prompt_tokens < request.params.min_tokens


def _apply_penalties(row: Tensor, place: Place) -> None:
    """Penalize in place: repetition over all tokens, presence and frequency over the output."""
    params = place.request.params
    if params.repetition_penalty != 1.0:
        seen: Tensor = torch.unique(torch.tensor(place.token_ids, dtype=torch.int64))
        logits = row[seen]
        penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        # a tiny penalty makes infinity of a logit, which no distribution has
        row[seen] = penalized.clamp(max=_MAX_LOGIT)
    if (params.presence_penalty or params.frequency_penalty) and place.output_token_ids:
        output = torch.tensor(place.output_token_ids, dtype=torch.int64)
        ids, counts = torch.unique(output, return_counts=True)
        row[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _restrict(row: Tensor, place: Place) -> Tensor:
    """Keep the logits of the tokens that may be chosen; set others to -inf.

    Bad words are ignored where no other token is left. So are the tokens that mustn't end the
    answer yet, if only they are allowed.
    """
    params = place.request.params
    if params.allowed_token_ids:
        allowed = torch.tensor(params.allowed_token_ids, dtype=torch.int64)
        kept = row[allowed]
        row = torch.full_like(row, -inf)
        row[allowed] = kept if bool((kept > -inf).any()) else 0.0
    banned = _bad_word_ends(params.bad_words, place.output_token_ids)
    if not banned:
        return row
    rest = row.clone()
    rest[torch.tensor(banned, dtype=torch.int64)] = -inf
    return rest if bool((rest > -inf).any()) else row


def _bad_word_ends(bad_words: Sequence[tuple[int, ...]], output: Sequence[int]) -> list[int]:
    """List the tokens that would complete a bad word after the output."""
    longest = max((len(word) for word in bad_words), default=1) - 1
    end = tuple(output[max(0, len(output) - longest) :])
    # an output shorter than the word's beginning equals none of it
    return [word[-1] for word in bad_words if end[max(0, len(end) + 1 - len(word)) :] == word[:-1]]


def _score_prompt(entry: ScheduledRequest, logits: Tensor) -> tuple[TokenLogprobs, ...]:
    """Compute log probabilities of the prompt tokens that this step's rows predict.

    The prompt's last row predicts none.
    """
    request = entry.request
    last = min(entry.end, request.num_prompt_tokens - 1)
    targets = request.token_ids[entry.start + 1 : last + 1]
    num_top = request.params.prompt_logprobs or 0
    scores = torch.log_softmax(logits[: len(targets)], dim=1)
    return tuple(_top_logprobs(row, token_id, num_top) for row, token_id in zip(scores, targets, strict=True))


def _top_logprobs(logprobs: Tensor, token_id: int, count: int) -> TokenLogprobs:
    values, ids = logprobs.topk(min(count, logprobs.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id=token_id, logprob=float(logprobs[token_id]), top=top)


def _own_logprobs(logprobs: Tensor, token_id: int, own: Sequence[int]) -> TokenLogprobs:
    """Report the tokens that the request names, in its order."""
    values = logprobs[torch.tensor(own)].tolist()
    return TokenLogprobs(token_id=token_id, logprob=float(logprobs[token_id]), top=tuple(zip(own, values, strict=True)))
