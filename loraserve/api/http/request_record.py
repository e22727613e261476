"""Facts of one request, of which its line in the access log and its spans are made.

Names, numbers and codes: nothing of a prompt or an answer, and no key.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote

MAX_MODEL_NAME = 200
"""Characters of a model's name in the access log and in spans."""
_PLAIN = "/:@.,*+~_-"
"""Characters of a model's name that stand in the access log as they are."""


class AnswerPiece(Protocol):
    """Piece of an answer, as far as it is recorded."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def queue_s(self) -> float: ...
    @property
    def adapter_s(self) -> float: ...
    @property
    def prefill_s(self) -> float: ...
    @property
    def adapter_tier(self) -> str: ...
    @property
    def adapter_read_s(self) -> float: ...


@dataclass(slots=True)
class ChoiceRecord:
    """Record of a choice, which is one request to the engine. Times are of `time.monotonic`.

    Attributes:
        sent_s: when it was handed to the engine's client.
        first_s: when its first piece came; None: none has.
        ended_s: when it ended; None: it runs.
        queue_s, adapter_s, prefill_s: the engine's own measures, as in `Server-Timing`.
        adapter_tier: tier where the request found its adapter: device, host or disk; empty for the
            base, and until the first piece has come.
        adapter_read_s: part of `adapter_s` in which the adapter was read from the disk.
        finish_reason: OpenAI's word, an error's code, or ``abort``: the client left.
        is_replayed: whether it was kept before, and the engine made nothing.
    """

    index: int
    sent_s: float
    first_s: float | None = None
    ended_s: float | None = None
    queue_s: float = 0.0
    adapter_s: float = 0.0
    prefill_s: float = 0.0
    adapter_tier: str = ""
    adapter_read_s: float = 0.0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    finish_reason: str = ""
    is_replayed: bool = False

    def note(self, chunk: AnswerPiece) -> None:
        """Note a piece of the answer, which has come now; the first has the engine's measures."""
        if self.first_s is None:
            self.first_s = time.monotonic()
            self.queue_s, self.adapter_s, self.prefill_s = chunk.queue_s, chunk.adapter_s, chunk.prefill_s
            self.adapter_tier, self.adapter_read_s = chunk.adapter_tier, chunk.adapter_read_s
            self.num_cached_tokens = chunk.num_cached_tokens
        self.num_tokens += len(chunk.token_ids)

    def end(self, reason: str) -> None:
        """Note that the choice has ended now, and why."""
        self.ended_s = time.monotonic()
        self.finish_reason = reason


@dataclass(slots=True)
class InferenceRecord:
    """Record of the inference for a request: what answered it, and with how many tokens.

    Attributes:
        base: id of the base.
        adapter: name of the adapter that answers, as the client can request it; of a sum, the
            whole sum; empty: the base answers.
        version: of that adapter; None: the base, a sum or an ephemeral adapter answers.
        fell_back_for: code of the error for which it isn't what was requested; empty: it is.
        choices: in the order in which they were sent; those of a fallback follow the failed ones.
        num_prompt_tokens, num_cached_tokens, num_tokens: as in the answer's usage.
        is_pooled: whether vectors were requested.
    """

    base: str = ""
    adapter: str = ""
    version: int | None = None
    fell_back_for: str = ""
    choices: list[ChoiceRecord] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    is_pooled: bool = False

    @property
    def first_s(self) -> float | None:
        """Time at which the first piece of any choice came."""
        return min((one.first_s for one in self.choices if one.first_s is not None), default=None)

    @property
    def finish_reasons(self) -> list[str]:
        """Reasons of the choices that ended, each once."""
        return list(dict.fromkeys(one.finish_reason for one in self.choices if one.finish_reason))


@dataclass(slots=True)
class RequestRecord:
    """Record of a request, from its headers to the end of its answer.

    Attributes:
        method: HTTP's.
        started_s: when its headers were read, of `time.monotonic`.
        started_ns: the same instant, in nanoseconds since 1970.
        route: path of the route, with its parameters' names.
        asked_model: the client's own word for the model; empty: the request named none, or was
            refused before its body was read.
        code: code of the error that it was answered with; empty: there was none.
        first_byte_s: when the answer's body began to go out; None: it has none.
        num_pieces: pieces of the answer's body.
    """

    method: str
    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    route: str = ""
    tenant: str | None = None
    key_id: str | None = None
    asked_model: str = ""
    status: int = 0
    code: str = ""
    ended_s: float = 0.0
    first_byte_s: float | None = None
    num_pieces: int = 0
    inference: InferenceRecord | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the headers to the engine's first token; None: there was none."""
        first_s = None if self.inference is None else self.inference.first_s
        return None if first_s is None else first_s - self.started_s

    @property
    def model(self) -> str:
        """Name of the model that answered, else of the requested one."""
        answered = "" if self.inference is None else self.inference.adapter or self.inference.base
        return (answered or self.asked_model)[:MAX_MODEL_NAME]

    def note_piece(self, body: bytes) -> None:
        """Note that a piece of the answer's body goes out now."""
        if body:
            self.num_pieces += 1
            if self.first_byte_s is None:
                self.first_byte_s = time.monotonic()

    def as_line(self) -> dict[str, str | int | float | None]:
        """Collect the request's fields in the access log, without empty ones.

        A model's name may be any text that a client sends: it is quoted, so that no renderer can
        break the line or its meaning at it.
        """
        line: dict[str, str | int | float | None] = {
            "status": self.status,
            "duration_ms": _ms(self.ended_s - self.started_s),
            "request_id": self.request_id,
            "key_id": self.key_id,
            "tenant": self.tenant,
        }
        if self.model:
            line["model"] = quote(self.model, safe=_PLAIN)
        inference = self.inference
        if inference is not None:
            if inference.version is not None:
                line["version"] = inference.version
            if inference.fell_back_for:
                line["fallback_for"] = inference.fell_back_for
            line |= {
                "prompt_tokens": inference.num_prompt_tokens,
                "cached_tokens": inference.num_cached_tokens,
                "completion_tokens": inference.num_tokens,
            }
            if self.ttft_s is not None:
                line["ttft_ms"] = _ms(self.ttft_s)
            if inference.finish_reasons:
                line["finish_reason"] = ",".join(inference.finish_reasons)
        if self.code:
            line["code"] = self.code
        return line


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
