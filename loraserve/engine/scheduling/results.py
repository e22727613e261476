"""Turn a step's results into tokens and outputs of requests, and name the errors that end them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest, StepResult
from loraserve.errors import AdapterNotReady, AdapterNumerics, EngineError, InvariantViolation, LoraserveError
from loraserve.memory.kv.prefix_cache import BlockId
from loraserve.types import FinishReason, Residency, TokenOutput

if TYPE_CHECKING:
    from loraserve.engine.pooler import Pooler
    from loraserve.engine.scheduling.state_places import StatePlaces
    from loraserve.memory.kv.block_pool import BlockPool


class ResultProcessor:
    """Give requests what was computed and sampled, and publish their full blocks."""

    def __init__(
        self, kv: BlockPool, states: StatePlaces | None, eos_token_ids: frozenset[int], clock: Callable[[], float]
    ) -> None:
        self._kv, self._states, self._eos_token_ids, self._clock = kv, states, eos_token_ids, clock

    def process(self, entry: ScheduledRequest, result: StepResult) -> TokenOutput | None:
        """Add a finite result to a live request; return what its client gets, if anything.

        The caller ends the request if the output has a finish reason.

        Raises:
            LoraserveError: the request has no answer, and fails.
        """
        request = entry.request
        if self._states is not None and entry.is_current:
            self._states.begin(request)
        if request.pooler is not None:
            return self._pool(entry, result, request.pooler)
        request.prompt_logprobs.extend(result.prompt_logprobs)
        if request.probe is not None and result.logits is not None:
            request.probe.capture(entry.end, result.logits)
        if not entry.is_sampled:
            return None
        is_first = request.num_output_tokens == 0
        token_ids, reason, stop_reason = self._append(request, result.token_ids)
        num_accepted = max(0, len(token_ids) - 1)
        # Only now are the blocks offered to others: logits were finite, so the KV that led to them
        # is sound. Only up to this step's last token that stands: what a later one computes isn't
        # known to be. And not after a preemption: the blocks were given away, the tokens are good.
        if entry.is_current:
            request.num_computed_tokens += num_accepted
            if not request.is_internal:
                self._publish(request, entry.known_end + num_accepted)
        if request.constraint is not None and token_ids and reason is None:
            # the next mask is computed beside the next step's forward pass, or right after it
            request.constraint.advance(token_ids)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=None if result.logprobs is None else result.logprobs[: len(token_ids)],
            prompt_logprobs=(None, *request.prompt_logprobs)
            if is_first and request.params.prompt_logprobs is not None
            else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            **self._first_token_facts(request) if is_first else {},
        )

    def _append(
        self, request: Request, token_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """Add sampled tokens to the request, up to the first that ends it.

        Return those that were added, and why the request ends, if it does.
        """
        if not token_ids:
            return (), *self._finish_reason(request, None)
        for number, token_id in enumerate(token_ids):
            request.token_ids.append(token_id)
            reason, stop_reason = self._finish_reason(request, token_id)
            if reason is not None:
                return token_ids[: number + 1], reason, stop_reason
        return token_ids, None, None

    def _pool(self, entry: ScheduledRequest, result: StepResult, pooler: Pooler) -> TokenOutput | None:
        """Add hidden states; return the request's only output once all of its tokens are computed.

        Blocks are published if a request of its kind can use them.
        """
        request = entry.request
        if result.hidden is not None:
            pooler.add(result.hidden)
        if entry.end < request.num_prompt_tokens:
            return None
        pooled = pooler.finish()
        if pooled is None:
            raise numerics_error(request)
        if entry.is_current and request.can_use_prefix_cache:
            self._publish(request, entry.end)
        return TokenOutput(
            request_id=request.request_id,
            finish_reason=FinishReason.STOP,
            pooled=pooled,
            **self._first_token_facts(request),
        )

    def _publish(self, request: Request, num_tokens: int) -> None:
        size = self._kv.block_size
        for index in range(len(request.block_keys), num_tokens // size):
            parent = self._kv.prefix_cache.parent_key(
                request.prefix_root, request.activation, request.block_keys, index
            )
            content = request.token_ids[index * size : (index + 1) * size]
            request.block_keys.append(self._kv.prefix_cache.publish(BlockId(request.blocks[index]), parent, content))
        if self._states is not None and request.snapshots:
            self._states.keep(request)

    def _finish_reason(self, request: Request, token_id: int | None) -> tuple[FinishReason | None, int | None]:
        params = request.params
        if request.constraint is not None and token_id in self._eos_token_ids:
            # it ends the grammar too, which allows nothing after it
            return FinishReason.STOP, None
        if token_id is not None and request.num_output_tokens >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
            if token_id in self._eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP, None
        if request.num_output_tokens >= params.max_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def _first_token_facts(self, request: Request) -> dict[str, Any]:
        now = self._clock()
        started = now if request.first_scheduled_s is None else request.first_scheduled_s
        return {
            "num_cached_tokens": request.num_cached_tokens,
            "queue_s": max(0.0, started - request.arrival_s - request.adapter_wait_s),
            "adapter_s": request.adapter_wait_s,
            "prefill_s": now - started,
            "adapter_tier": request.adapter_tier,
            "adapter_read_s": request.adapter_read_s,
        }


def failed_output(request: Request, error: LoraserveError) -> TokenOutput:
    """Return the last output of a request that ends with an error."""
    return TokenOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error_code=error.code,
        error_message=str(error),
    )


def adapter_overdue_error(request: Request, state: Residency, deadline_s: float) -> LoraserveError:
    """Return the error of a request without its adapter by the deadline."""
    adapter = request.adapter
    if adapter is None:
        raise InvariantViolation(f"request {request.request_id} waits for an adapter and has none")
    why = (
        "everything on the device is in use"
        if state is Residency.WAITING_FOR_SPACE
        else "it is still loading, or in the queue"
    )
    name = adapter.name if adapter.parts else f"{adapter.name}@{adapter.version}"
    return AdapterNotReady(
        f'The adapter "{name}" was not on the device within {deadline_s:g} s: {why}.',
        hint="Try again shortly: its load continues.",
    )


def numerics_error(request: Request) -> LoraserveError:
    """Return the error of a request with NaN or infinite logits, or hidden states."""
    what = "logits" if request.pooler is None else "hidden states"
    if request.adapter is None or request.activation is None:
        return EngineError(f"The base model's {what} for this request were not finite.")
    return AdapterNumerics(
        f'The {what} of adapter "{request.adapter.name}@{request.adapter.version}" for this request were not finite.',
        hint="Check the adapter's weights. Other requests were not affected.",
    )
