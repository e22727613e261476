"""Places of running requests for recurrent states: a slot each, and snapshots at block borders.

A prompt keeps its state at its last full block, where a conversation goes on, and where it leaves a
prefix that is cached without a snapshot, as the first two prompts with one system message do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from loraserve.engine.request import Request, RequestStatus

if TYPE_CHECKING:
    from loraserve.memory.kv.block_pool import BlockPool, PrefixMatch


class StatePlaces:
    """Give requests slots and snapshots, and take them back."""

    def __init__(self, kv: BlockPool, num_slots: int) -> None:
        self._kv, self._num_slots = kv, num_slots
        # the lowest last
        self._free_slots = list(range(num_slots - 1, -1, -1))

    def attach(self, request: Request, match: PrefixMatch) -> None:
        """Let a request begin from the snapshot behind the cached blocks that it was given."""
        if self._kv.snapshots is None:
            return
        size, start = self._kv.block_size, len(match.blocks) * self._kv.block_size
        if match.blocks:
            request.resumed = self._kv.snapshots.pin(match.blocks[-1], start)
        borders = {match.num_found * size, (request.num_tokens - 1) // size * size}
        request.state_borders = tuple(sorted(border for border in borders if border > start))

    def take(self, request: Request) -> None:
        """Give a request that begins to run a slot, and places for its snapshots.

        There are as many slots as may run.
        """
        request.state_slot = self._free_slots.pop()
        if self._kv.snapshots is None:
            return
        for border in request.state_borders:
            snapshot = self._kv.snapshots.reserve()
            if snapshot is not None:
                request.snapshots[border] = snapshot

    def begin(self, request: Request) -> None:
        """Note that a step has computed tokens of a request: its slot has its state."""
        if request.resumed is not None and self._kv.snapshots is not None:
            self._kv.snapshots.unpin(request.resumed.block)
            request.resumed = None

    def keep(self, request: Request) -> None:
        """Keep the snapshots of a request whose prompt is computed, for later prompts."""
        if self._kv.snapshots is None:
            return
        for border, snapshot in request.snapshots.items():
            block = self._kv.prefix_cache.block_of(request.block_keys[border // self._kv.block_size - 1])
            if block is None:
                self._kv.snapshots.free([snapshot])
            else:
                self._kv.snapshots.keep(block, snapshot)
        request.snapshots.clear()

    def free(self, request: Request) -> None:
        """Take back what a request has: nothing of it is computed any more."""
        self.begin(request)
        if self._kv.snapshots is not None:
            self._kv.snapshots.free(request.snapshots.values())
        request.snapshots.clear()
        request.state_borders = ()
        if request.state_slot is not None:
            self._free_slots.append(request.state_slot)
        request.state_slot = None

    def check(self, requests: Collection[Request]) -> list[str]:
        """Return every broken invariant, in words.

        Args:
            requests: all live ones.
        """
        problems = []
        for request in requests:
            is_running = request.status is RequestStatus.RUNNING
            if (request.state_slot is not None) != is_running:
                problems.append(f"request {request.request_id}: the state slot {request.state_slot}")
            if not is_running and (request.resumed is not None or request.snapshots):
                problems.append(f"request {request.request_id}: snapshots without running")
        slots = [*self._free_slots, *(one.state_slot for one in requests if one.state_slot is not None)]
        if sorted(slots) != list(range(self._num_slots)):
            problems.append("a state slot is free and held, or held twice, or lost")
        if self._kv.snapshots is not None:
            problems += self._kv.snapshots.check(place for one in requests for place in one.snapshots.values())
        return problems
