"""Streams of requests: which adapter, how long, and when. The same arguments give the same stream.

Popularity is Zipf's, or the power law of S-LoRA's generator (arXiv:2311.03285, §7.1); arrivals are
that generator's too.
"""

from __future__ import annotations

import bisect
import itertools
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a stream.

    Attributes:
        at_s: when it is sent, from the stream's start.
        adapter: its number.
        prompt_seed: of the prompt's tokens (`prompt`).
    """

    at_s: float
    adapter: int
    num_prompt_tokens: int
    num_output_tokens: int
    prompt_seed: int

    def prompt(self, vocab: int) -> list[int]:
        """Random tokens that no other request has, so that nothing of it is in a prefix cache; none
        of them is a special one.
        """
        rng = random.Random(self.prompt_seed)
        return [rng.randrange(260, vocab) for _ in range(self.num_prompt_tokens)]


class Zipf:
    """Numbers from 0, the k-th drawn in proportion to 1 / (k + 1) ** exponent; 0 is uniform."""

    def __init__(self, num_items: int, exponent: float) -> None:
        weights = [(k + 1) ** -exponent for k in range(num_items)]
        self._sums = list(itertools.accumulate(weights))

    def pick(self, u: float) -> int:
        """The item of a number in [0, 1): for the same number,
        a larger set gives the same item or a less popular one.
        """
        return min(bisect.bisect_right(self._sums, u * self._sums[-1]), len(self._sums) - 1)


def zipf_stream(
    num_requests: int,
    num_adapters: int,
    num_ranks: int,
    seed: int,
    *,
    exponent: float,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
) -> list[Ask]:
    """Requests to be sent as fast as their turns come; streams of one seed are equal but for their
    adapters, whatever ``num_adapters`` is.

    Adapter i has the rank number i % ``num_ranks``. A request's rank is drawn first, then one of
    the adapters that have it, by popularity: so the ranks, and the work, of two streams of one seed
    are equal too.

    Args:
        prompt_tokens: from, to (not included).
        output_tokens: the same.

    Raises:
        ValueError: fewer adapters than ranks.
    """
    if num_adapters < num_ranks:
        raise ValueError(f"{num_adapters} adapters can't have {num_ranks} ranks; expected as many or more.")
    rng = random.Random(seed)
    per_rank = [Zipf(len(range(rank, num_adapters, num_ranks)), exponent) for rank in range(num_ranks)]
    asks = []
    for _ in range(num_requests):
        rank, u = rng.randrange(num_ranks), rng.random()
        lengths = rng.randrange(*prompt_tokens), rng.randrange(*output_tokens)
        asks.append(Ask(0.0, rank + num_ranks * per_rank[rank].pick(u), *lengths, rng.getrandbits(48)))
    return asks


def slora_trace(
    num_adapters: int,
    alpha: float,
    rate: float,
    cv: float,
    duration_s: float,
    seed: int,
    *,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
) -> list[Ask]:
    """S-LoRA's synthetic trace: ``rate * duration_s`` requests, by the time they arrive.

    Gaps are gamma distributed with a mean of 1 / ``rate`` and a coefficient of variation of ``cv``
    (1: Poisson's arrivals); adapters are drawn by a power law, of which ``alpha`` 1 is uniform and
    less favours the first; lengths are uniform in [from, to).
    """
    rng = random.Random(seed)
    asks, now_s = [], 0.0
    for _ in range(max(1, int(rate * duration_s))):
        now_s += rng.gammavariate(1 / cv**2, cv**2 / rate)
        adapter = int(rng.random() ** (1 / alpha) * num_adapters)
        lengths = rng.randrange(*prompt_tokens), rng.randrange(*output_tokens)
        asks.append(Ask(now_s, adapter, *lengths, rng.getrandbits(48)))
    return asks
