"""Generated sequences as LoRAX and TGI show them: a token at a time, or text and details."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loraserve.api.inference.context import InferenceContext
from loraserve.api.inference.logprobs import finite_logprob
from loraserve.api.lorax.schemas import GenerateParameters
from loraserve.text.detokenizer import decode_stream
from loraserve.types import FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from loraserve.engine_client.client import Chunk

_LENGTH, _EOS, _STOP = "length", "eos_token", "stop_sequence"


class Sequence:
    """Collect the chunks of one sequence.

    A token's text is what it adds to the text before it, so that the texts of all tokens that
    aren't special add up to the generated text.

    Args:
        seed: reported where tokens are drawn; None: they aren't.
    """

    def __init__(self, context: InferenceContext, parameters: GenerateParameters, index: int, seed: int | None) -> None:
        self._tokenizer = context.tokenizer
        self._parameters = parameters
        self._prompt = context.prompt_of(index)
        self._eos_token_id = context.services.engine.base.eos_token_ids[:1]
        self._inputs: str = context.body.prompt if parameters.return_full_text else ""  # type: ignore[attr-defined]
        self._seed = seed
        self._detokenizer = decode_stream(self._tokenizer, False, self._prompt.token_ids)
        self._texts: list[str] = []
        self._tokens: list[dict[str, Any]] = []
        self._top: list[list[dict[str, Any]]] = []
        self._num_tokens = 0
        self._sum_logprobs = 0.0
        self._prefill: list[dict[str, Any]] = []
        self._finish_reason: str | None = None

    @property
    def mean_logprob(self) -> float:
        """Log probability per token, by which the best of several sequences is chosen."""
        return self._sum_logprobs / max(1, self._num_tokens)

    def add(self, chunk: Chunk) -> None:
        """Take a chunk of an answer in one piece."""
        self._take(chunk)
        for token, top in self._read(chunk):
            self._tokens.append(token)
            self._top.append(top)
        if chunk.prompt_logprobs is not None:
            self._prefill = [
                {"id": token_id, "text": self._spelled(token_id)}
                | {"logprob": None if entry is None else finite_logprob(entry.logprob)}
                for token_id, entry in zip(self._prompt.token_ids, chunk.prompt_logprobs, strict=True)
            ]

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Build a chunk's events, one per token; the last of a sequence has its whole text."""
        first = self._num_tokens + 1
        self._take(chunk)
        found = list(self._read(chunk))
        is_last = chunk.finish_reason is not None
        if is_last and not found:
            # Clients read the end of a stream from a token; one that is special adds no text.
            found = [(self._end_token(), [])]
        events = [self._event(first + place, token, top) for place, (token, top) in enumerate(found)]
        if is_last:
            events[-1] |= {"generated_text": self._text(), "details": self._stream_details()}
        return events

    def whole(self, others: list[Sequence]) -> dict[str, Any]:
        """Build the answer in one piece.

        Args:
            others: the sequences of `best_of` that weren't the best.
        """
        answer: dict[str, Any] = {"generated_text": self._text()}
        if self._parameters.details or self._parameters.decoder_input_details:
            details = {"finish_reason": self._finish_reason, "prompt_tokens": len(self._prompt.token_ids)}
            details |= {"generated_tokens": self._num_tokens, "skipped_tokens": 0, "seed": self._seed}
            answer["details"] = details | self._all_tokens()
            if others:
                answer["details"]["best_of_sequences"] = [other._as_other() for other in others]
        return answer

    def _as_other(self) -> dict[str, Any]:
        known = {"generated_text": self._text(), "finish_reason": self._finish_reason}
        return {**known, "generated_tokens": self._num_tokens, "seed": self._seed, **self._all_tokens()}

    def _all_tokens(self) -> dict[str, Any]:
        found: dict[str, Any] = {"prefill": self._prefill, "tokens": self._tokens}
        return found | ({"top_tokens": self._top} if self._parameters.top_n_tokens else {})

    def _stream_details(self) -> dict[str, Any] | None:
        if not self._parameters.details:
            return None
        num_prompt_tokens = len(self._prompt.token_ids)
        return {
            "finish_reason": self._finish_reason,
            "prompt_tokens": num_prompt_tokens,
            "generated_tokens": self._num_tokens,
            "seed": self._seed,
            "input_length": num_prompt_tokens,
        }

    def _event(self, index: int, token: dict[str, Any], top: list[dict[str, Any]]) -> dict[str, Any]:
        event: dict[str, Any] = {"index": index, "token": token}
        if self._parameters.top_n_tokens:
            event["top_tokens"] = top
        return {**event, "generated_text": None, "details": None}

    def _take(self, chunk: Chunk) -> None:
        self._texts.append(chunk.text)
        if chunk.finish_reason is not None:
            self._finish_reason = _finish_reason(chunk)

    def _read(self, chunk: Chunk) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Read the chunk's tokens, and the likeliest with each; none if nothing shows them."""
        self._num_tokens += len(chunk.token_ids)
        if chunk.logprobs is None:
            return []
        self._sum_logprobs += sum(finite_logprob(entry.logprob) for entry in chunk.logprobs)
        read = [self._token(entry) for entry in chunk.logprobs]
        if chunk.finish_reason is not None and read:
            # bytes that never became a character
            read[-1][0]["text"] += self._detokenizer.finish()
        return read

    def _token(self, entry: TokenLogprobs) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        token: dict[str, Any] = {
            "id": entry.token_id,
            "text": self._detokenizer.push((entry.token_id,)),
            "logprob": finite_logprob(entry.logprob),
            "special": entry.token_id in self._tokenizer.special_token_ids,
            "skipped": False,
        }
        top = [
            {"id": token_id, "text": self._spelled(token_id), "logprob": finite_logprob(logprob)}
            | {"special": token_id in self._tokenizer.special_token_ids}
            for token_id, logprob in entry.top
        ]
        if self._parameters.return_k_alternatives:
            token["alternative_tokens"] = top[: self._parameters.return_k_alternatives]
        return token, top[: self._parameters.top_n_tokens]

    def _end_token(self) -> dict[str, Any]:
        token_id = self._eos_token_id[0] if self._eos_token_id else 0
        return {"id": token_id, "text": "", "logprob": None, "special": True, "skipped": False}

    def _text(self) -> str:
        return self._inputs + "".join(self._texts)

    def _spelled(self, token_id: int) -> str:
        """Decode a token's own text, of which part of a character isn't one."""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _finish_reason(chunk: Chunk) -> str:
    if chunk.finish_reason is not FinishReason.STOP:
        return _LENGTH
    return _EOS if chunk.stop_reason is None else _STOP
