"""Check the tenant's quota.

It is checked before the body is read, and again when the prompt's length is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Depends, Request

from loraserve.api import scopes
from loraserve.api.inference.prompts import Prompt
from loraserve.api.services import services_of
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.auth import Caller
from loraserve.tenancy.limits.admission import Admitted


async def admitted_caller(request: Request, caller: Caller = Depends(scopes.require(scopes.INFERENCE))) -> Caller:
    """Admit the caller, once its tenant may send one more request.

    The guard releases it when the answer has ended, however it ends, and says in the answer's
    headers how the tenant stands, in a refusal's too.

    Raises (in addition to `scopes.require`'s):
        Overloaded: the server is shutting down and takes no new work.
        RateLimited: more than the tenant may have at once, or more than its rate.
    """
    services = services_of(request)
    services.check_open()
    admissions = services.admissions
    request.state.rate_headers = lambda: admissions.headers(caller)
    admitted = request.state.admitted = admissions.enter(caller)
    admitted.collected = request.scope.get(scopes.COLLECTED_USAGE)
    return caller


def reserve(
    request: Request, prompts: Sequence[Prompt], max_tokens: Sequence[int], n: int, *, is_bounded: bool
) -> Admitted:
    """Reserve the tokens that the request may take: its prompts once, each answer at its longest.

    Args:
        max_tokens: of an answer to each of the prompts.
        is_bounded: whether the request bounds how long an answer may be; otherwise a part is set
            aside, and what comes beyond it is charged within `LIMITS.usage_journal_s`.

    Raises:
        RateLimited: they are more than the tenant's rate leaves.
        QuotaExceeded: they are more than the tenant has in a minute.
    """
    admitted: Admitted = request.state.admitted
    longest = max_tokens if is_bounded else [min(number, LIMITS.unasked_tokens_reserved) for number in max_tokens]
    admitted.reserve(sum(len(prompt.token_ids) for prompt in prompts), n * sum(longest))
    return admitted
