"""Embeddings, scores and rerankings."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Any

from pydantic import WithJsonSchema, field_validator

from loraserve.contract.result import ALWAYS, OPTIONAL, Result, one_of
from loraserve.contract.usage import Usage

_NUMBERS_OR_BASE64 = WithJsonSchema(
    {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}, mode="serialization"
)


class Embedding(Result):
    """A vector.

    `embedding` holds its numbers, also where they came as base64.
    """

    object: Annotated[str, one_of("embedding")] = "embedding"
    index: int
    embedding: Annotated[list[float], _NUMBERS_OR_BASE64]
    """Sent as numbers, or as base64 of float32 in little-endian order."""

    @field_validator("embedding", mode="before")
    @classmethod
    def _decode(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        data = base64.b64decode(value, validate=True)
        return list(struct.unpack(f"<{len(data) // 4}f", data))


class EmbeddingList(Result):
    """An answer of `/v1/embeddings`, in the order of the inputs."""

    id: Annotated[str | None, ALWAYS] = None
    object: Annotated[str, one_of("list")] = "list"
    created: Annotated[int | None, ALWAYS] = None
    model: str
    data: list[Embedding]
    usage: Annotated[Usage | None, ALWAYS] = None


class Score(Result):
    index: int
    object: Annotated[str, one_of("score")] = "score"
    score: float


class ScoreList(Result):
    """An answer of `/v1/score`, in the order of the pairs."""

    id: Annotated[str | None, ALWAYS] = None
    object: Annotated[str, one_of("list")] = "list"
    created: Annotated[int | None, ALWAYS] = None
    model: str
    scoring: Annotated[str, one_of("classification_head", "cosine")]
    """Source of the scores: the adapter's head, or the cosine of the texts' vectors."""
    data: list[Score]
    usage: Annotated[Usage | None, ALWAYS] = None


class RerankedDocument(Result):
    text: str


class RerankResult(Result):
    """A document's place in the request, and how well it fits."""

    index: int
    document: Annotated[RerankedDocument | None, OPTIONAL, ALWAYS] = None
    """Absent if return_documents is false."""
    relevance_score: float


class Reranking(Result):
    """An answer of `/v1/rerank`, the best first; `scoring` as in `ScoreList`."""

    id: str
    model: str
    scoring: Annotated[str, one_of("classification_head", "cosine")]
    results: list[RerankResult]
    usage: Annotated[Usage | None, ALWAYS] = None
