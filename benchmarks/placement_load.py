"""Requests of a simulated run: arrivals of four shapes, adapters by Zipf's law; and what no
placement can better.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement_costs import Costs
from benchmarks.simulated_cluster import SimulatedRequest, request_of

SHAPES = ("steady", "bursty", "diurnal", "flash")
PREFIX_SHARES = (0.5, 0.25, 0.15, 0.1)
"""Popularity of an adapter's prefixes."""
PREFIX_TOKENS = 32
OWN_TOKENS = (16, 48)
OUTPUT_TOKENS = (16, 112)
"""Uniform, both ends included."""
UTILIZATION = 0.6
"""Offered requests, as a part of what the replicas could serve with all slots in use."""
BURST_RATES, BURST_S = (0.4, 1.6), 30.0
"""Rates between which bursty arrivals change, and the mean time that each lasts."""
DIURNAL_SWING = 0.6
FLASH_SHARE, FLASH_START, FLASH_END = 0.5, 0.5, 0.7
"""Requests for one adapter, beside all others, and when, as parts of the run."""


@dataclass(frozen=True, slots=True)
class Traffic:
    shape: str
    num_adapters: int
    zipf: float
    rate_per_s: float
    duration_s: float
    seed: int

    def popularity(self) -> NDArray[np.float64]:
        weights = np.arange(1, self.num_adapters + 1, dtype=np.float64) ** -self.zipf
        return weights / weights.sum()

    @property
    def flash_adapter(self) -> int:
        """Number of the adapter that a flash crowd asks for: the least popular before."""
        return self.num_adapters - 1

    def requests(self, costs: Costs) -> list[SimulatedRequest]:
        """Return the run's requests in order of arrival; equal ones for an equal seed."""
        random = np.random.default_rng(self.seed)
        times = self._times(random)
        adapters = random.choice(self.num_adapters, len(times), p=self.popularity())
        if self.shape == "flash":
            start_s, end_s = FLASH_START * self.duration_s, FLASH_END * self.duration_s
            crowd = start_s + np.cumsum(self._gaps(random, FLASH_SHARE * self.rate_per_s, end_s - start_s))
            crowd = crowd[crowd < end_s]
            order = np.argsort(np.concatenate([times, crowd]), kind="stable")
            times = np.concatenate([times, crowd])[order]
            adapters = np.concatenate([adapters, np.full(len(crowd), self.flash_adapter)])[order]
        prefixes = random.choice(len(PREFIX_SHARES), len(times), p=PREFIX_SHARES)
        own = random.integers(*OWN_TOKENS, len(times), endpoint=True)
        output = random.integers(*OUTPUT_TOKENS, len(times), endpoint=True)
        return [
            SimulatedRequest(number, *row, request_of(row[1], row[2], costs.adapter_bytes))
            for number, row in enumerate(
                zip(
                    times.tolist(),
                    adapters.tolist(),
                    prefixes.tolist(),
                    [PREFIX_TOKENS] * len(times),
                    own.tolist(),
                    output.tolist(),
                    strict=True,
                )
            )
        ]

    def _times(self, random: np.random.Generator) -> NDArray[np.float64]:
        """Return arrivals of a Poisson process, of which the shape keeps some."""
        most = {"bursty": max(BURST_RATES), "diurnal": 1 + DIURNAL_SWING}.get(self.shape, 1.0)
        times = np.cumsum(self._gaps(random, most * self.rate_per_s, self.duration_s))
        times = times[times < self.duration_s]
        if self.shape == "diurnal":
            rate = 1 - DIURNAL_SWING * np.cos(2 * np.pi * times / self.duration_s)
        elif self.shape == "bursty":
            ends = np.cumsum(random.exponential(BURST_S, max(2, int(8 * self.duration_s / BURST_S))))
            rate = np.asarray(BURST_RATES)[np.searchsorted(ends, times) % 2]
        else:
            return times
        kept: NDArray[np.float64] = times[random.random(len(times)) < rate / most]
        return kept

    @staticmethod
    def _gaps(random: np.random.Generator, rate_per_s: float, duration_s: float) -> NDArray[np.float64]:
        mean = rate_per_s * duration_s
        return random.exponential(1 / rate_per_s, int(mean + 10 * math.sqrt(mean) + 10))


def offline_optimum(adapters: Sequence[int], held: int, first_counted: int) -> float:
    """Return the share of requests that find their adapter in memory if all memory were one, the
    future known, and only what is asked for were loaded (Belady's MIN, which may also not keep what
    it loaded): no policy that loads on demand has more.

    Args:
        adapters: the requests' adapters in order; at first the `held` most popular (the lowest
            numbers) are in memory.
        held: adapters that the memory holds.
        first_counted: requests before it warm the memory and aren't counted.
    """
    never = len(adapters)
    following = [never] * len(adapters)
    last: dict[int, int] = {}
    for place in range(len(adapters) - 1, -1, -1):
        following[place] = last.get(adapters[place], never)
        last[adapters[place]] = place
    next_use = {adapter: last.get(adapter, never) for adapter in range(held)}
    furthest = [(-use, adapter) for adapter, use in next_use.items()]
    heapq.heapify(furthest)
    num_hits = 0
    for place, adapter in enumerate(adapters):
        is_hit = adapter in next_use
        num_hits += is_hit and place >= first_counted
        next_use[adapter] = following[place]
        heapq.heappush(furthest, (-following[place], adapter))
        if is_hit or len(next_use) <= held:
            continue
        # entries of earlier uses are out of date
        while furthest and next_use.get(furthest[0][1]) != -furthest[0][0]:
            heapq.heappop(furthest)
        del next_use[heapq.heappop(furthest)[1]]
    return num_hits / max(1, len(adapters) - first_counted)


def che_hit_share(popularity: NDArray[np.float64], held: int) -> float:
    """Return the share of hits of one LRU memory of so many adapters in the long run (Che, Tung and
    Wang, 2002): where pooled memory without duplicates ends up that doesn't know the future.
    """
    if held >= len(popularity):
        return 1.0
    low, high = 0.0, 1.0
    while float((1 - np.exp(-popularity * high)).sum()) < held:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((1 - np.exp(-popularity * middle)).sum()) < held else (low, middle)
    return float((popularity * (1 - np.exp(-popularity * high))).sum())
