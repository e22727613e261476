"""KV blocks and places of running requests, and what part of them each tenant has."""

from __future__ import annotations

from array import array

from loraserve.engine.request import Request, Status
from loraserve.engine.scheduling.fair_queue import Account, Accounts
from loraserve.memory.kv_cache import BlockId, KVCache


class Holdings:
    """Gives requests their blocks and takes them back; every block that a request holds is counted in its tenant's account."""

    def __init__(self, kv: KVCache, accounts: Accounts, max_num_seqs: int) -> None:
        self._kv, self._accounts, self._max_num_seqs = kv, accounts, max_num_seqs

    def take_prefix(self, request: Request) -> None:
        """The request holds the cached blocks that its tokens begin with."""
        # The last token is always computed: its logits are what the step is for.
        blocks, keys = self._kv.match_prefix(
            request.prefix_root, request.token_ids, request.num_tokens - 1, request.activation
        )
        request.blocks, request.block_keys = array("i", blocks), keys
        request.num_computed_tokens = len(blocks) * self._kv.block_size
        request.share.account.num_blocks += len(blocks)

    def reserve(self, request: Request, count: int) -> bool:
        """Give the request the blocks that its next ``count`` tokens need."""
        needed = self._num_needed_blocks(request, count)
        if needed <= 0:
            return True
        blocks = self._kv.allocate(needed)
        if blocks is None:
            return False
        request.blocks.extend(blocks)
        request.share.account.num_blocks += needed
        return True

    def _num_needed_blocks(self, request: Request, count: int) -> int:
        return -(-(request.num_computed_tokens + count) // self._kv.block_size) - len(request.blocks)

    def exceeds_share(self, request: Request, count: int) -> bool:
        """Whether its tenant would hold more KV blocks than it may. The only one of a tenant that runs may.

        Who waits is judged by all of its tokens: begun with a part of them, it would be put back for the others of its tenant again and again.
        """
        account = request.share.account
        if account.kv_share >= 1.0 or account.num_running <= (request.status is Status.RUNNING):
            return False
        if request.status is not Status.RUNNING:
            count = request.num_pending_tokens
        needed = max(0, self._num_needed_blocks(request, count))
        return needed > 0 and account.num_blocks + needed > account.kv_share * self._kv.num_blocks

    def fits_whole(self, request: Request) -> bool:
        """Whether there are blocks for all of its tokens."""
        return self._num_needed_blocks(request, request.num_pending_tokens) <= self._kv.num_available

    def is_below_share(self, request: Request) -> bool:
        """Whether its tenant holds less than its part of the KV blocks, beside others. Nobody's requests have none."""
        return (
            not request.is_urgent
            and not request.share.account.is_nobody
            and self._accounts.num_live > 1
            and not self.holds_more(request.share.account)
        )

    def holds_more(self, account: Account) -> bool:
        """Whether the tenant holds more than its part of the KV blocks, by the weights of all that are here."""
        if account.is_nobody:
            return False
        return account.num_blocks * self._accounts.total_weight > self._kv.num_blocks * account.weight

    def _num_due_places(self, account: Account) -> int:
        """A tenant's part of the places, by the weights of all that are here; one at least."""
        return max(1, int(self._max_num_seqs * account.weight / self._accounts.total_weight))

    def lacks_places(self, account: Account) -> bool:
        """Less than its part, which is one at least."""
        return not account.is_nobody and account.num_running < self._num_due_places(account)

    def has_its_places(self, account: Account) -> bool:
        """Its whole part: what is due by the weights may lie between two numbers of places."""
        return (
            not account.is_nobody
            and account.num_running >= self._max_num_seqs * account.weight / self._accounts.total_weight
        )

    def has_places_to_give(self, account: Account) -> bool:
        """More than a part of one beyond what is due."""
        if account.is_nobody:
            return False
        due = self._max_num_seqs * account.weight / self._accounts.total_weight
        return account.num_running >= max(2.0, due + 1.0)

    def drop_blocks(self, request: Request, *, is_use: bool = True) -> None:
        """The request holds none, and nothing of it is computed.

        Args:
            is_use: whether having held them counts as a use of each.
        """
        self._kv.release([BlockId(block) for block in request.blocks], is_use=is_use)
        request.share.account.num_blocks -= len(request.blocks)
        request.blocks = array("i")
        request.block_keys = []
        request.num_computed_tokens = 0
