"""Sampling parameters of a step's rows as the GPU's kernels read them.

What these kernels leave one another is here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from typing import Protocol

import numpy as np
import torch
import triton
from torch import Tensor

from loraserve_kernels.errors import InvalidPlan

MIN_TEMPERATURE = 1e-5
"""Temperature at or below which the likeliest token is taken."""

CHUNK = 4096
"""Tokens that a program of `scan` or `weigh` reads."""

NUM_CANDIDATES = 1024
"""Top-p looks among at least that many of the likeliest tokens first, and among all only where
these don't hold the mass that it needs.
"""

MAX_CANDIDATES = 4096
"""A row's candidates are kept in the registers of one program."""

MAX_GROUPS = 4096
_MASK64 = (1 << 64) - 1


class RowSamplingParams(Protocol):
    """Parameters by which a row's token is chosen."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int:
        """0: all tokens."""

    @property
    def top_p(self) -> float:
        """1: all tokens."""

    @property
    def min_p(self) -> float:
        """0: all tokens."""

    @property
    def seed(self) -> int:
        """Taken modulo 2^64."""


class SamplingRows:
    """Sampling parameters of a step's rows, and scratch memory.

    Addresses are fixed for life; one step at a time.

    Attributes:
        num_rows: of the step that was filled in last; 0 before. Rows behind them count as greedy.
        is_greedy: no row draws: `sample` reads the logits once and launches half of its kernels. A
            CUDA graph keeps what this was when it was captured.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        """Allocate for steps of up to `max_num_seqs` rows, on the device and for the host.

        The host's memory is pinned where there is a GPU.
        """
        self.num_rows = 0
        self.is_greedy = True
        self.max_num_seqs = max_num_seqs
        self._rows = torch.zeros((5, max_num_seqs), dtype=torch.int64, device=device)
        # with its index, as tensors tell theirs
        self.device = self._rows.device
        self.seed, self.position = self._rows[0], self._rows[1]
        self.top_p, self.depth = self._rows[2].view(torch.float64), self._rows[3].view(torch.float64)
        self.top_k = self._rows[4].view(torch.int32)[:max_num_seqs]
        self.temperature = self._rows[4].view(torch.float32)[max_num_seqs:]
        pinned = device.type == "cuda"
        self._staged = [torch.zeros((5, max_num_seqs), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._hosts = [staged.numpy() for staged in self._staged]
        self._turn = 0
        self._scratch: SamplingScratch | None = None

    def fill(self, params: Sequence[RowSamplingParams], positions: Sequence[int]) -> None:
        """Describe the next step and send it to the device in one copy, which doesn't wait.

        It must be done by the next fill but one.

        Args:
            params: of each row.
            positions: of each row's token in its sequence.

        Raises:
            InvalidPlan: more rows than there is room for, or not as many positions; the last step
                stands.
        """
        count = len(params)
        if count > self.max_num_seqs or len(positions) != count:
            raise InvalidPlan(
                f"{count} rows with {len(positions)} positions to sample; there is room for {self.max_num_seqs}"
            )
        host = self._hosts[self._turn]
        temperature = np.array([p.temperature for p in params], dtype=np.float64)
        host[0].view(np.uint64)[:count] = [p.seed & _MASK64 for p in params]
        host[1, :count] = positions
        host[2].view(np.float64)[:count] = [p.top_p for p in params]
        host[3].view(np.float64)[:count] = [-log(p.min_p) if p.min_p > 0 else inf for p in params]
        host[4].view(np.int32)[:count] = [p.top_k for p in params]
        drawn = np.where(temperature > MIN_TEMPERATURE, temperature, 0.0)
        temperatures = host[4].view(np.float32)[self.max_num_seqs :]
        temperatures[:count], temperatures[count:] = drawn, 0.0
        self._rows.copy_(self._staged[self._turn], non_blocking=True)
        self._turn = 1 - self._turn
        self.num_rows = count
        self.is_greedy = not drawn.any()

    def scratch(self, vocab_size: int) -> SamplingScratch:
        """Provide the kernels' memory, allocated at its first use for logits of this width."""
        if self._scratch is None or self._scratch.vocab_size != vocab_size:
            self._scratch = SamplingScratch(self.max_num_seqs, vocab_size, self.device)
        return self._scratch


class SamplingScratch:
    """Scratch memory that the kernels leave one another."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.num_chunks = -(-vocab_size // CHUNK)
        self.group = group_size(vocab_size)
        self.num_groups = -(-vocab_size // self.group)
        # half of the groups at most: the more of them, the more tokens of the same groups reach the
        # bound as well
        wanted = min(NUM_CANDIDATES, self.num_groups // 2)
        self.num_wanted = wanted if vocab_size > MAX_CANDIDATES else self.num_groups + 1

        def rows(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros((max_num_seqs, *width), dtype=dtype, device=device)

        self.chunk_tops = rows(torch.float32, self.num_chunks)
        self.chunk_tokens = rows(torch.int32, self.num_chunks)
        self.chunk_finite = rows(torch.int32, self.num_chunks)
        self.group_tops = rows(torch.float32, self.num_groups)
        self.ways, self.counts = rows(torch.int32), rows(torch.int32)
        self.tops, self.bounds = rows(torch.float32), rows(torch.float32)
        self.candidates = rows(torch.float32, MAX_CANDIDATES)
        self.candidate_ids = rows(torch.int32, MAX_CANDIDATES)
        self.masses = rows(torch.int64, self.num_chunks)


def group_size(vocab_size: int) -> int:
    """Choose the number of neighbours whose largest logit stands for them.

    They are few enough that there are more groups than candidates, wherever there are that many
    tokens.
    """
    size: int = triton.next_power_of_2(-(-vocab_size // MAX_GROUPS))
    return max(8, size)
