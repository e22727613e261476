"""Steps that embeddings, scores and rerankings share: context, the engine's requests, answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from fastapi import Request
from starlette.responses import Response
from ulid import ULID

from loraserve.api.inference.answering.answer import Answer
from loraserve.api.inference.answering.delivery import Delivery
from loraserve.api.inference.answering.generation import Generation
from loraserve.api.inference.answering.metering import RequestUsage
from loraserve.api.inference.context import ResolvedModel, priority_of, response_headers
from loraserve.api.inference.prompts import Prompt
from loraserve.api.inference.quota import reserve
from loraserve.api.inference.schemas import PoolingBody
from loraserve.api.inference.target import TargetSelector
from loraserve.api.services import Services
from loraserve.engine_client.messages import GenerateRequest
from loraserve.errors import EngineUnavailable
from loraserve.limits import LIMITS
from loraserve.types import AdapterRef, PoolingParams, RequestId, SamplingParams

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk
    from loraserve.tenancy.identity.auth import Caller

_NO_TOKENS = SamplingParams(max_tokens=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class PoolingContext:
    """Admitted HTTP request whose prompts are pooled."""

    id: str
    created: int
    services: Services
    body: PoolingBody
    target: TargetSelector
    prompts: Sequence[Prompt]
    ignored: tuple[str, ...]
    granted: tuple[str, ...] = ()
    """Granted adapters, as in `ResolvedModel`."""

    @property
    def adapter(self) -> AdapterRef | None:
        """Adapter that answers now; None is the base. It may change once before any vector."""
        return self.target.adapter

    @classmethod
    def begin(
        cls,
        prefix: str,
        services: Services,
        body: PoolingBody,
        model: ResolvedModel,
        prompts: Sequence[Prompt],
        ignored: tuple[str, ...],
    ) -> PoolingContext:
        target = TargetSelector(model.binding, services.engine.base.id, tenant=model.tenant)
        ident = f"{prefix}-{ULID()}"
        return cls(ident, int(services.clock()), services, body, target, prompts, ignored, model.granted)

    async def answer(
        self,
        request: Request,
        caller: Caller,
        pooling: PoolingParams,
        *,
        add: Callable[[int, bytes], None],
        whole: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> Response:
        """Answer once every prompt is pooled.

        Args:
            add: called with each prompt's number and vector, in any order.
            whole: returns the answer, given its usage.

        Raises:
            LoraserveError: a prompt can't be pooled.
            ClientDisconnect: the client has left.
        """
        admitted = reserve(request, self.prompts, [0] * len(self.prompts), 1, is_bounded=True)
        max_queued = self.services.admissions.part_of(caller.policy.limits.max_queued_requests) or 0
        generation = Generation(
            self.services,
            self._requests(caller, pooling, max_queued),
            target=self.target,
            # no more than its tenant may have waiting
            max_live=min(LIMITS.max_live_pooled_inputs, max_queued or LIMITS.max_live_pooled_inputs),
        )
        usage = RequestUsage(self, caller, admitted)
        return await Delivery(request, generation, _PooledAnswer(self, usage, add, whole), usage).respond()

    def _requests(self, caller: Caller, pooling: PoolingParams, max_queued: int) -> list[GenerateRequest]:
        policy = caller.policy
        return [
            GenerateRequest(
                request_id=RequestId(f"{self.id}-{number}"),
                tenant=caller.tenant,
                adapter=self.adapter,
                prompt_token_ids=prompt.token_ids,
                params=_NO_TOKENS,
                pooling=pooling,
                priority=priority_of(self.body, caller),
                is_background=caller.is_background,
                timeout_s=self.body.timeout,
                weight=policy.weight,
                kv_share=1.0 if policy.limits.max_kv_share is None else policy.limits.max_kv_share,
                max_queued=max_queued,
            )
            for number, prompt in enumerate(self.prompts)
        ]


def vector_json(pooled: bytes) -> orjson.Fragment:
    """Write a vector as JSON, in the shortest decimals of its numbers."""
    return orjson.Fragment(orjson.dumps(np.frombuffer(pooled, dtype="<f4"), option=orjson.OPT_SERIALIZE_NUMPY))


@dataclass(frozen=True, slots=True)
class _PooledAnswer(Answer):
    """Whole answer of pooled prompts.

    Attributes:
        take: called with each prompt's number and vector, in any order.
        render_whole: returns the answer, given its usage.
    """

    context: PoolingContext
    usage: RequestUsage
    take: Callable[[int, bytes], None]
    render_whole: Callable[[dict[str, Any]], dict[str, Any]]

    def headers(self, first: Chunk | None) -> dict[str, str]:
        return response_headers(first, self.context.target, self.context.ignored)

    def add(self, index: int, chunk: Chunk) -> None:
        if chunk.pooled is None:
            raise EngineUnavailable("The engine ended this request without a vector.", hint="Try again.")
        self.take(index, chunk.pooled)

    def whole(self) -> dict[str, Any]:
        return self.render_whole(self.usage.as_dict())
