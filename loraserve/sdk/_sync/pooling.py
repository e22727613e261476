# Generated from loraserve/sdk/_async/pooling.py by `make sdk`: don't edit.
"""`client.embeddings`, `client.scores` and `client.rerankings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from loraserve.contract.pooling import EmbeddingList, Reranking, ScoreList
from loraserve.sdk._sync.transport import Transport
from loraserve.sdk.call import Call, encode, read_into
from loraserve.sdk.types.fields import EmbeddingFields, ExtraBody, PoolingFields, Prompt, RerankFields, merge


class Embeddings:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        *,
        model: str,
        input: Prompt,
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[EmbeddingFields],
    ) -> EmbeddingList:
        """Return a vector for each input; on the wire they are base64 unless the caller says so.

        Args:
            model: `NAME`, `NAME@ALIAS`, `NAME@VERSION`, a sum of such (``a+0.5*b``), or the base's
                id.
            input: text or token ids, one input or several.
            timeout: seconds between two bytes of the answer; None: the client's.
        """
        required = {"model": model, "input": input, "encoding_format": "base64"}
        body = encode(merge(required, fields, EmbeddingFields, extra_body))
        call = Call("POST", "/v1/embeddings", read_into(EmbeddingList), body=body, timeout_s=timeout)
        return self._transport.send(call)


class Scores:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        *,
        model: str,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[PoolingFields],
    ) -> ScoreList:
        """Return a score for each pair: by the adapter's head, or else the cosine of the vectors.

        Args:
            model: as `Embeddings.create` takes it.
            text_1: one text, which stands beside each of `text_2`, or as many.
            timeout: seconds between two bytes of the answer; None: the client's.
        """
        body = encode(merge({"model": model, "text_1": text_1, "text_2": text_2}, fields, PoolingFields, extra_body))
        call = Call("POST", "/v1/score", read_into(ScoreList), body=body, timeout_s=timeout)
        return self._transport.send(call)


class Rerankings:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        *,
        model: str,
        query: str,
        documents: Sequence[str | Mapping[str, str]],
        extra_body: ExtraBody = None,
        timeout: float | None = None,
        **fields: Unpack[RerankFields],
    ) -> Reranking:
        """Return the documents in the order in which they fit the query, the best first.

        Args:
            model: as `Embeddings.create` takes it.
            documents: texts, or objects with a ``text``.
            timeout: seconds between two bytes of the answer; None: the client's.
        """
        required = {"model": model, "query": query, "documents": documents}
        body = encode(merge(required, fields, RerankFields, extra_body))
        call = Call("POST", "/v1/rerank", read_into(Reranking), body=body, timeout_s=timeout)
        return self._transport.send(call)
