"""Answers of embeddings, scores and rerankings."""

from __future__ import annotations

import base64
import struct
from typing import Any

from pydantic import field_validator

from loraserve.contract.result import Result
from loraserve.sdk.types.inference import Usage


class Embedding(Result):
    """A vector.

    `embedding` holds its numbers, also where they came as base64.
    """

    index: int
    embedding: list[float]

    @field_validator("embedding", mode="before")
    @classmethod
    def _decode(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        data = base64.b64decode(value, validate=True)
        return list(struct.unpack(f"<{len(data) // 4}f", data))


class EmbeddingList(Result):
    """An answer of `/v1/embeddings`, in the order of the inputs."""

    model: str
    data: list[Embedding]
    usage: Usage | None = None


class Score(Result):
    index: int
    score: float


class ScoreList(Result):
    """An answer of `/v1/score`, in the order of the pairs.

    `scoring` is ``classification_head`` or ``cosine``.
    """

    model: str
    scoring: str
    data: list[Score]
    usage: Usage | None = None


class RerankedDocument(Result):
    text: str


class RerankResult(Result):
    """A document's place in the request, and how well it fits."""

    index: int
    relevance_score: float
    document: RerankedDocument | None = None


class Reranking(Result):
    """An answer of `/v1/rerank`, the best first; `scoring` as in `ScoreList`."""

    id: str
    model: str
    scoring: str
    results: list[RerankResult]
    usage: Usage | None = None
