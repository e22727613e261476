"""POST /v1/score and /v1/rerank, as vLLM, Jina and Cohere have them.

An adapter with a classification head scores a pair with it; any other model by the cosine of the
two texts' vectors. The answer says which.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api.inference.context import ResolvedModel, check_priority, resolve_model
from loraserve.api.inference.fields import json_fields, parse_body
from loraserve.api.inference.inputs import InputReader, Named, check_num_inputs
from loraserve.api.inference.pooling_context import PoolingContext
from loraserve.api.inference.quota import admitted_caller
from loraserve.api.inference.schemas import PoolingBody, RerankBody, ScoreBody
from loraserve.api.services import Services, services_of
from loraserve.errors import InvalidRequest
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import PoolingKind, PoolingParams

router = APIRouter()

_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_HEAD, _COSINE = "classification_head", "cosine"
_MAX_LABELS = 2
"""Labels of a head whose one score is clear: that of the only one, or of the second against the
first.
"""


@router.post("/v1/score", response_model=None)
@router.post("/score", response_model=None)
async def score(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Score pairs of texts: one with each of many, or many with as many.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full.
        RateLimited: the tenant's share is used up.
    """
    services = services_of(request)
    body, ignored = parse_body(ScoreBody, raw)
    check_priority(body, caller)
    left, right = _read_sides(body)
    model = await resolve_model(services, caller, body.model, body.adapters, user=body.user)
    scoring = _Scoring.of(left, right, body, model)
    reader = InputReader(services, caller.tenant, len(await request.body()), body, model.tokenizer)
    context = await scoring.begin("score", services, reader, ignored)
    return await context.answer(
        request,
        caller,
        scoring.params,
        add=scoring.add,
        whole=lambda usage: {
            "id": context.id,
            "object": "list",
            "created": context.created,
            "model": body.model,
            "scoring": scoring.method,
            "data": [
                {"index": index, "object": "score", "score": number} for index, number in enumerate(scoring.scores())
            ],
            "usage": usage,
        },
    )


@router.post("/v1/rerank", response_model=None)
@router.post("/rerank", response_model=None)
@router.post("/v2/rerank", response_model=None)
async def rerank(
    request: Request,
    caller: Caller = Depends(admitted_caller),
    raw: dict[str, Any] = Depends(json_fields),
) -> Response:
    """Order documents by how well they fit the query.

    Raises:
        InvalidRequest: a field is wrong; `param` names it.
        ModelNotFound: the tenant has no such model.
        AdapterQuarantined: it isn't served.
        Overloaded: the queue is full.
        RateLimited: the tenant's share is used up.
    """
    services = services_of(request)
    body, ignored = parse_body(RerankBody, raw)
    check_priority(body, caller)
    query, documents = [Named("query", body.query)], _read_texts(body.documents, "documents")
    model = await resolve_model(services, caller, body.model, body.adapters, user=body.user)
    scoring = _Scoring.of(query, documents, body, model)
    reader = InputReader(services, caller.tenant, len(await request.body()), body, model.tokenizer)
    context = await scoring.begin("rerank", services, reader, ignored)

    def results() -> list[dict[str, Any]]:
        ranked = sorted(enumerate(scoring.scores()), key=lambda item: (-item[1], item[0]))
        return [
            {"index": index}
            | ({"document": {"text": documents[index].text}} if body.return_documents else {})
            | {"relevance_score": number}
            for index, number in ranked[: body.top_n or None]
        ]

    return await context.answer(
        request,
        caller,
        scoring.params,
        add=scoring.add,
        whole=lambda usage: {
            "id": context.id,
            "model": body.model,
            "scoring": scoring.method,
            "results": results(),
            "usage": usage,
        },
    )


@dataclass(slots=True)
class _Scoring:
    """Scores of pairs, from a head's numbers or from the vectors of both sides.

    Attributes:
        left: as many as `right`, or one that stands beside each.
    """

    left: Sequence[Named]
    right: Sequence[Named]
    body: PoolingBody
    model: ResolvedModel
    has_head: bool
    pooled: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = field(default_factory=dict)

    @classmethod
    def of(cls, left: Sequence[Named], right: Sequence[Named], body: PoolingBody, model: ResolvedModel) -> _Scoring:
        """Choose the way of scoring by the adapter that the model is bound to."""
        if body.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens should be 1 or more, or -1 for the model's context.",
                param="truncate_prompt_tokens",
            )
        binding = model.binding
        has_head = binding.adapter is not None and binding.adapter.has_head
        fallback = binding.fallback
        if has_head and fallback is not None and (fallback.adapter is None or not fallback.adapter.has_head):
            # prompts of pairs mean nothing to another's vectors
            model = dataclasses.replace(model, binding=dataclasses.replace(binding, fallback=None))
        return cls(left, right, body, model, has_head)

    @property
    def method(self) -> str:
        return _HEAD if self.has_head else _COSINE

    @property
    def params(self) -> PoolingParams:
        if self.has_head:
            return PoolingParams(kind=PoolingKind.LAST, classify=True)
        return PoolingParams(kind=self.body.pooling)

    async def begin(
        self, prefix: str, services: Services, reader: InputReader, ignored: tuple[str, ...]
    ) -> PoolingContext:
        """Tokenize the pairs, or each text of them once."""
        if self.has_head:
            left = [*self.left] * (len(self.right) if len(self.left) == 1 else 1)
            texts = [Named(b.param, a.text, b.text) for a, b in zip(left, self.right, strict=True)]
        else:
            texts = [*self.left, *self.right]
        prompts = await reader.texts(texts)
        return PoolingContext.begin(prefix, services, self.body, self.model, prompts, ignored)

    def add(self, index: int, pooled: bytes) -> None:
        """Take the vector or the head's numbers of a prompt.

        Raises:
            InvalidRequest: the head has more labels than one score can be made of.
        """
        numbers = np.frombuffer(pooled, dtype="<f4")
        if self.has_head and len(numbers) > _MAX_LABELS:
            raise InvalidRequest(
                f"The adapter's classification head has {len(numbers)} labels; a score is made of one label, or of "
                "the second of two.",
                param="model",
            )
        self.pooled[index] = numbers

    def scores(self) -> list[float]:
        """Return the pairs' scores, in order, once all is there."""
        if not self.has_head:
            num_left = len(self.left)
            return [
                _cosine(self.pooled[index if num_left > 1 else 0], self.pooled[num_left + index])
                for index in range(len(self.right))
            ]
        return [self._head_score(self.pooled[index]) for index in range(len(self.right))]

    def _head_score(self, numbers: np.ndarray[Any, np.dtype[np.float32]]) -> float:
        # the second of two labels' softmax is the sigmoid of what it has more
        number = float(numbers[-1]) - (float(numbers[0]) if len(numbers) == _MAX_LABELS else 0.0)
        return _sigmoid(number) if self.body.use_activation else number


def _cosine(a: np.ndarray[Any, np.dtype[np.float32]], b: np.ndarray[Any, np.dtype[np.float32]]) -> float:
    return min(1.0, max(-1.0, float(a.astype(np.float64) @ b.astype(np.float64))))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _read_sides(body: ScoreBody) -> tuple[list[Named], list[Named]]:
    names = [pair for pair in _SIDES if all(getattr(body, name) is not None for name in pair)]
    given = {name for pair in _SIDES for name in pair if getattr(body, name) is not None}
    if len(names) != 1 or given != set(names[0]):
        missing = next((name for pair in _SIDES if given & set(pair) for name in pair if name not in given), "text_1")
        raise InvalidRequest(
            "Send text_1 and text_2, or queries and documents, queries and items, or data_1 and data_2: one pair.",
            param=missing if len(names) != 1 else sorted(given - set(names[0]))[0],
        )
    [(first, second)] = names
    left, right = (_read_texts(getattr(body, name), name) for name in (first, second))
    if len(left) not in (1, len(right)):
        raise InvalidRequest(
            f"{first} has {len(left)} texts and {second} {len(right)}; expected one, or as many.", param=first
        )
    return left, right


def _read_texts(value: object, param: str) -> list[Named]:
    items = value if isinstance(value, list) else [value]
    if not items:
        raise InvalidRequest(f"{param} is empty.", param=param)
    check_num_inputs(len(items), param)
    named = []
    for index, item in enumerate(items):
        where = f"{param}.{index}" if isinstance(value, list) else param
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise InvalidRequest(f'{where} should be a string, or {{"text": "…"}}.', param=where)
        named.append(Named(where, text))
    return named
