"""Make text of a request's tokens as they come, and end it at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loraserve.engine_client.chunk import Chunk
from loraserve.engine_client.messages import GenerateRequest
from loraserve.text.detokenizer import decode_stream
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import FinishReason, TokenOutput

__all__ = ["Chunk", "OutputProcessor", "StopStrings", "merge"]


class StopStrings:
    """Find the first stop string in a growing text; hold back no more than could begin one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, delta: str) -> tuple[str, str | None]:
        """Search more text; return (final text, the stop string that it ends before).

        After a stop string, no push may follow.
        """
        text = self._held + delta
        found = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            at, stop = min(found)
            self._held = ""
            return text[:at], stop
        hold = self._num_open(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], None

    def pass_by(self, delta: str) -> str:
        """Pass text without searching it (before `min_tokens`)."""
        text, self._held = self._held + delta, ""
        return text

    def finish(self) -> str:
        """Take the text held back."""
        text, self._held = self._held, ""
        return text

    def _num_open(self, text: str) -> int:
        """Compute the length of the longest end of ``text`` that some stop string begins with."""
        longest, last = 0, text[-1:]
        for stop in self._stop if text else ():
            # each place of the text's last character may end a beginning
            end = stop.rfind(last, longest, min(len(stop) - 1, len(text))) + 1
            while end > longest:
                if text.endswith(stop[:end]):
                    longest = end
                    break
                end = stop.rfind(last, longest, end - 1) + 1
        return longest


class OutputProcessor:
    """Turn one request's TokenOutputs into Chunks."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._detokenizer = decode_stream(
            request.tokenizer or tokenizer,
            request.skip_special_tokens,
            request.prompt_token_ids,
            shown=request.shown_token_ids,
        )
        self._stop = StopStrings(request.stop)
        self._num_tokens = 0

    def push(self, output: TokenOutput) -> Chunk:
        """Convert an output to its chunk.

        One with a finish reason is the last, though the engine may not have finished yet.
        """
        num_taken, stop = len(output.token_ids), None
        # The token that ends a text by being EOS or a stop token isn't part of the text.
        ends_by_token = output.finish_reason is FinishReason.STOP and not self._request.include_stop_str_in_output
        shown = output.token_ids[:-1] if ends_by_token else output.token_ids
        if self._request.stop:
            text, num_taken, stop = self._push_searched(shown, num_taken)
        else:
            text = self._detokenizer.push(shown)
        if stop is None and output.finish_reason is not None:
            # incomplete characters are flushed, and a stop string may end in them
            tail, stop = self._search(self._detokenizer.finish())
            text += tail if stop is not None else tail + self._stop.finish()
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if stop is not None:
            finish_reason, stop_reason = FinishReason.STOP, stop
            if self._request.include_stop_str_in_output:
                text += stop
        return Chunk(
            text=text,
            token_ids=output.token_ids[:num_taken],
            logprobs=None if output.logprobs is None else output.logprobs[:num_taken],
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=output.num_cached_tokens,
            queue_s=output.queue_s,
            adapter_s=output.adapter_s,
            prefill_s=output.prefill_s,
            adapter_tier=output.adapter_tier,
            adapter_read_s=output.adapter_read_s,
            pooled=output.pooled,
        )

    @property
    def direct_taker(self) -> Callable[[TokenOutput], bool] | None:
        """`LiveRequest.taker` that gives outputs to the reader while that is ready.

        None: it has no reader, or a stop string may end its text anywhere.
        """
        return None if self._request.reader is None or self._request.stop else self._give

    def _give(self, output: TokenOutput) -> bool:
        reader = self._request.reader
        if reader is None or not reader.is_ready():
            return False
        reader.take(self.push(output))
        return True

    def _push_searched(self, token_ids: Sequence[int], num_tokens: int) -> tuple[str, int, str | None]:
        """Decode tokens up to a stop string.

        Return (text, number of tokens consumed, stop string found); without one, all `num_tokens`
        are consumed.
        """
        pieces = []
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            piece, stop = self._search(self._detokenizer.push((token_id,)))
            pieces.append(piece)
            if stop is not None:
                return "".join(pieces), i + 1, stop
        return "".join(pieces), num_tokens, None

    def _search(self, delta: str) -> tuple[str, str | None]:
        if self._num_tokens < self._request.params.min_tokens:
            return self._stop.pass_by(delta), None
        return self._stop.push(delta)


def merge(outputs: Sequence[TokenOutput]) -> TokenOutput:
    """Join the outputs of one request that came while its reader was busy."""
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    return TokenOutput(
        request_id=first.request_id,
        token_ids=tuple(t for output in outputs for t in output.token_ids),
        logprobs=None if first.logprobs is None else tuple(p for output in outputs for p in output.logprobs or ()),
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error_code=last.error_code,
        error_message=last.error_message,
        num_cached_tokens=first.num_cached_tokens,
        queue_s=first.queue_s,
        adapter_s=first.adapter_s,
        prefill_s=first.prefill_s,
        adapter_tier=first.adapter_tier,
        adapter_read_s=first.adapter_read_s,
        pooled=last.pooled,
    )
