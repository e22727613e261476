"""KV blocks and slots of running requests, and each tenant's quota of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from loraserve.engine.request import Request, RequestStatus
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.scheduling.fair_queue import FairQueue, TenantFlow
from loraserve.engine.scheduling.state_places import StatePlaces
from loraserve.memory.kv.prefix_cache import BlockId

if TYPE_CHECKING:
    from loraserve.memory.kv.block_pool import BlockPool


class ResourceQuota:
    """Allocate and free KV blocks, and compare what each tenant holds with its quota.

    A tenant's quota is its part of the blocks, or of the slots, by the weights of all tenants with
    a live request. Internal requests have none.

    Attributes:
        states: places of recurrent states; None: the base has none.
    """

    def __init__(
        self, kv: BlockPool, fair_queue: FairQueue, max_num_seqs: int, *, has_recurrent_state: bool = False
    ) -> None:
        self._kv, self._fair_queue, self._max_num_seqs = kv, fair_queue, max_num_seqs
        self.states = StatePlaces(kv, max_num_seqs) if has_recurrent_state else None

    def attach_prefix(self, request: Request) -> None:
        """Give the request the cached blocks that its tokens begin with."""
        # The last token is always computed: its logits are what the step is for.
        match = self._kv.match_prefix(
            request.prefix_root, request.token_ids, request.num_tokens - 1, request.activation
        )
        request.blocks, request.block_keys = array("i", match.blocks), match.keys
        request.num_computed_tokens = len(match.blocks) * self._kv.block_size
        self._fair_queue.tenant(request).num_blocks += len(match.blocks)
        if self.states is not None:
            self.states.attach(request, match)

    def reserve(self, request: Request, count: int) -> bool:
        """Give the request the blocks that its next ``count`` tokens need, if there are."""
        needed = self._num_needed_blocks(request, count)
        if needed <= 0:
            return True
        blocks = self._kv.allocate(needed)
        if blocks is None:
            return False
        request.blocks.extend(blocks)
        self._fair_queue.tenant(request).num_blocks += needed
        return True

    def free_blocks(self, request: Request, *, is_use: bool = True) -> None:
        """Free the request's blocks and its state: nothing of it is computed any more.

        Args:
            is_use: whether having held them counts as a use of each.
        """
        self._kv.release([BlockId(block) for block in request.blocks], is_use=is_use)
        self._fair_queue.tenant(request).num_blocks -= len(request.blocks)
        request.blocks = array("i")
        request.block_keys = []
        request.num_computed_tokens = 0
        if self.states is not None:
            self.states.free(request)

    def _num_needed_blocks(self, request: Request, count: int) -> int:
        return -(-(request.num_computed_tokens + count) // self._kv.block_size) - len(request.blocks)

    def has_blocks_for_all(self, request: Request) -> bool:
        """Return whether there are blocks for all of the request's tokens."""
        return self._num_needed_blocks(request, request.num_pending_tokens) <= self._kv.num_available

    # KV blocks and adapters

    def exceeds_kv_share(self, request: Request, count: int) -> bool:
        """Return whether the request's tenant would hold more memory than its `kv_share` allows.

        The only running request of a tenant may. A waiting one is judged by all of its tokens:
        started with a part of them, it would be preempted for others of its tenant again and again.
        """
        tenant = self._fair_queue.tenant(request)
        if tenant.kv_share >= 1.0 or tenant.num_running <= (request.status is RequestStatus.RUNNING):
            return False
        if request.status is not RequestStatus.RUNNING:
            count = request.num_pending_tokens
        needed = max(0, self._num_needed_blocks(request, count))
        blocks_share = (tenant.num_blocks + needed) / self._kv.num_blocks
        return needed > 0 and blocks_share + tenant.adapter_share > tenant.kv_share

    def exceeds_adapter_share(self, request: Request, memory_share: float) -> bool:
        """Return whether its tenant would hold more than its `kv_share` with the request's adapter.

        A tenant that runs nothing may, whatever its waiting requests have pinned.

        Args:
            memory_share: part of the device's memory that the adapter takes.
        """
        flow = self._fair_queue.flow(request)
        tenant = flow.tenant
        if tenant.kv_share >= 1.0 or not tenant.num_running:
            return False
        held = tenant.num_blocks / self._kv.num_blocks + tenant.adapter_share
        return held + (0.0 if flow.num_pins else memory_share) > tenant.kv_share

    def is_below_block_quota(self, request: Request) -> bool:
        """Return whether the request's tenant, one of several, is within its quota of KV blocks."""
        tenant = self._fair_queue.tenant(request)
        return (
            not request.is_urgent
            and not tenant.is_internal
            and self._fair_queue.num_tenants > 1
            and not self.is_over_block_quota(tenant)
        )

    def is_over_block_quota(self, tenant: TenantFlow) -> bool:
        """Return whether the tenant holds more than its quota of KV blocks."""
        if tenant.is_internal:
            return False
        return tenant.num_blocks * self._fair_queue.total_weight > self._kv.num_blocks * tenant.weight

    # slots

    def _slot_quota(self, tenant: TenantFlow) -> float:
        return self._max_num_seqs * tenant.weight / self._fair_queue.total_weight

    def is_below_slot_quota(self, tenant: TenantFlow) -> bool:
        """Return whether the tenant has fewer slots than its quota, at least 1, rounded down."""
        return not tenant.is_internal and tenant.num_running < max(1, int(self._slot_quota(tenant)))

    def has_reached_slot_quota(self, tenant: TenantFlow) -> bool:
        """Return whether the tenant has all of its quota of slots, not rounded."""
        return not tenant.is_internal and tenant.num_running >= self._slot_quota(tenant)

    def is_over_slot_quota(self, tenant: TenantFlow) -> bool:
        """Return whether the tenant exceeds its quota by a slot, and has two at least."""
        return not tenant.is_internal and tenant.num_running >= max(2.0, self._slot_quota(tenant) + 1.0)

    def check(
        self, requests: Collection[Request], running: Sequence[Request], in_flight: Sequence[ScheduledRequest]
    ) -> list[str]:
        """Return every broken invariant of what requests hold, in words.

        Args:
            requests: all live ones.
            in_flight: entries of steps that were scheduled and not updated yet.
        """
        problems = []
        sampled = Counter(id(entry.request) for entry in in_flight if entry.num_sampled_tokens)
        for request in requests:
            capacity = len(request.blocks) * self._kv.block_size
            facts = (
                (
                    request.num_in_flight_tokens == sampled[id(request)],
                    f"{request.num_in_flight_tokens} tokens in flight",
                ),
                (request.num_computed_tokens <= request.num_tokens, "more computed tokens than tokens"),
                (request.num_computed_tokens <= capacity, f"{request.num_computed_tokens} tokens in {capacity} slots"),
                (request.status is RequestStatus.RUNNING or not request.blocks, "blocks without running"),
                (len(request.block_keys) <= len(request.blocks), "published more blocks than it holds"),
            )
            problems += [f"request {request.request_id}: {what}" for is_so, what in facts if not is_so]
        if self.states is not None:
            problems += self.states.check(requests)
        num_blocks: Counter[TenantFlow] = Counter()
        num_running: Counter[TenantFlow] = Counter()
        for request in running:
            tenant = self._fair_queue.tenant(request)
            num_blocks[tenant] += len(request.blocks)
            num_running[tenant] += 1
        for tenant in self._fair_queue.tenants(requests):
            if (tenant.num_blocks, tenant.num_running) != (num_blocks[tenant], num_running[tenant]):
                problems.append(
                    f"tenant {tenant.tenant_id} has {tenant.num_blocks} blocks and {tenant.num_running} slots"
                )
        return problems
