"""Answers of embeddings, scores and rerankings."""

from __future__ import annotations

from loraserve.contract.pooling import Embedding as Embedding
from loraserve.contract.pooling import EmbeddingList as EmbeddingList
from loraserve.contract.pooling import RerankedDocument as RerankedDocument
from loraserve.contract.pooling import Reranking as Reranking
from loraserve.contract.pooling import RerankResult as RerankResult
from loraserve.contract.pooling import Score as Score
from loraserve.contract.pooling import ScoreList as ScoreList
