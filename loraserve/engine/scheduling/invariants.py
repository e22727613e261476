"""What is always so of the requests that the scheduler holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loraserve.engine.request import Request, Status
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.scheduling.fair_queue import Accounts


def broken_invariants(
    requests: Sequence[Request],
    running: Sequence[Request],
    accounts: Accounts,
    in_flight: Sequence[ScheduledRequest],
    *,
    num_waiting: int,
    block_size: int,
) -> list[str]:
    """Return every broken invariant, in words.

    Args:
        requests: all that live.
        in_flight: what was scheduled and not updated yet.
        block_size: tokens of a KV block.
    """
    problems = []
    sampled = Counter(id(entry.request) for entry in in_flight if entry.num_sampled_tokens)
    for request in requests:
        capacity = len(request.blocks) * block_size
        facts = (
            (
                request.num_in_flight_tokens == sampled[id(request)],
                f"{request.num_in_flight_tokens} tokens in flight",
            ),
            (request.num_computed_tokens <= request.num_tokens, "more computed tokens than tokens"),
            (request.num_computed_tokens <= capacity, f"{request.num_computed_tokens} tokens in {capacity} slots"),
            (request.status is Status.RUNNING or not request.blocks, "blocks without running"),
            (len(request.block_keys) <= len(request.blocks), "published more blocks than it holds"),
        )
        problems += [f"request {request.request_id}: {what}" for is_so, what in facts if not is_so]
    if num_waiting + len(running) != len(requests):
        problems.append("a request is neither waiting nor running")
    held: Counter[int] = Counter()
    places: Counter[int] = Counter()
    for request in running:
        held[id(request.share.account)] += len(request.blocks)
        places[id(request.share.account)] += 1
    for request in requests:
        account = request.share.account
        if (account.num_blocks, account.num_running) != (held[id(account)], places[id(account)]):
            problems.append(f"tenant {account.tenant} has {account.num_blocks} blocks and {account.num_running} places")
    return problems + accounts.check()
