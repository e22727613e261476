"""An engine replica: an engine process with its watch and replay, behind Ray Serve's handles."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import ray
from ray.experimental import internal_kv

from loraserve.api.logs import configure_logging
from loraserve.cluster.autoscaling import RUNNING, TTFT_S, WAITING
from loraserve.cluster.loopback import keep_to_loopback
from loraserve.cluster.routing.members import MAX_REPORTED_ADAPTERS, REPORT, ReplicaReport, encode_report
from loraserve.config import EngineConfig
from loraserve.engine_client import messages as m
from loraserve.engine_client.client import EngineClient, GenerateRequest
from loraserve.errors import EngineUnavailable, InvariantViolation, LoraserveError
from loraserve.types import (
    AdapterResidency,
    BaseSpec,
    Digest,
    FinishReason,
    KernelChoice,
    RequestId,
    Tier,
    TokenOutput,
)

logger = logging.getLogger(__name__)

_TTFT_WINDOW_S = 15.0
"""Seconds for which a time to the first token counts."""
_KV_NAMESPACE = b"loraserve"
"""Key of the cluster's key-value store, which is empty again when the cluster is."""
encode_base = msgspec.msgpack.Encoder().encode
decode_base = msgspec.msgpack.Decoder(BaseSpec).decode
_encode_config = msgspec.msgpack.Encoder().encode
_encode_kernels = msgspec.msgpack.Encoder().encode
_decode_kernels = msgspec.msgpack.Decoder(tuple[KernelChoice, ...]).decode


class EngineReplica:
    """Owns an engine, and answers the ingress in the engine's own messages.

    What an engine would send for a request comes as a stream of `StepOutputs`; calls are answered
    as an engine answers them.
    """

    async def __init__(self, config: EngineConfig, hang_timeout_s: float, log_level: str) -> None:  # type: ignore[misc]
        """Return once the engine is ready.

        Args:
            hang_timeout_s: seconds without progress after which the engine is replaced.

        Raises:
            LoraserveError: why no engine can be had.
        """
        configure_logging(log_level)
        keep_to_loopback()
        self._damaged: list[tuple[Digest, Digest]] = []
        self._first_tokens: deque[tuple[float, float]] = deque()
        self._hang_timeout_s = hang_timeout_s
        agreed = _agreed_kernels(config)
        self._engine = self._make_engine(config if agreed is None else msgspec.structs.replace(config, kernels=agreed))
        await self._engine.start()
        if agreed is None:
            await self._agree(config)
        self._num_slots = config.max_num_seqs

    def _make_engine(self, config: EngineConfig) -> EngineClient:
        return EngineClient(
            config,
            None,
            hang_timeout_s=self._hang_timeout_s,
            on_damage=lambda digest, blob: self._damaged.append((digest, blob)),
        )

    async def _agree(self, config: EngineConfig) -> None:
        """Start the engine anew if another replica was first to choose, and chose other kernels."""
        kernels = _agree_on_kernels(config, self._engine.kernels)
        if kernels == self._engine.kernels:
            return
        logger.info("another replica chose other kernels first; the engine is started again with those")
        await self._engine.stop()
        self._engine = self._make_engine(msgspec.structs.replace(config, kernels=kernels))
        await self._engine.start()

    # what the ingress calls

    def describe(self, request: bytes, placement: object = None) -> bytes:
        """Return the base that this replica serves; nothing needs to be said in the request."""
        return encode_base(self._engine.base)

    async def outputs(self, request: bytes, placement: object = None) -> AsyncGenerator[bytes, None]:
        """Yield what the engine makes of an `AddRequest`; the last message has a finish reason.

        Args:
            placement: what the router reads of the call.
        """
        add = m.decode_input(request)
        if not isinstance(add, m.AddRequest):
            raise InvariantViolation(f"expected a request, not {type(add).__name__}")
        try:
            async with aclosing(self._engine.outputs(_rest(add), output_token_ids=add.output_token_ids)) as outputs:
                has_begun = False
                async for output in outputs:
                    if not has_begun:
                        has_begun = True
                        self._note_first(output)
                    for message in self._damage():
                        yield message
                    yield m.encode_output(m.StepOutputs(outputs=(output,)))
        except LoraserveError as error:
            for message in self._damage():
                yield message
            failed = TokenOutput(
                request_id=add.request_id,
                finish_reason=FinishReason.ERROR,
                error_code=error.code,
                error_message=str(error),
            )
            yield m.encode_output(m.StepOutputs(outputs=(failed,)))

    async def call(self, request: bytes, placement: object = None) -> list[bytes]:
        """Return the answer to a message of the engine's, after the damage that it may have met."""
        message = m.decode_input(request)
        try:
            reply = await self._answer(message)
        except LoraserveError as error:
            reply = m.CallReply(call_id=0, error_code=error.code, error_message=str(error))
        return [*self._damage(), m.encode_output(reply)]

    async def _answer(self, message: m.EngineInput) -> m.EngineOutput:
        engine = self._engine
        match message:
            case m.WarmAdapter(adapter=ref):
                await engine.warm(ref)
            case m.PinAdapter(adapter=ref, is_pinned=True):
                await engine.pin(ref)
            case m.PinAdapter(adapter=ref):
                await engine.unpin(ref)
            case m.DiscardAdapter(digest=digest):
                engine.discard(digest)
            case m.ForgetTexts(owner=owner, name=name, version=version):
                engine.forget_texts(owner, name, version)
            case m.QueryResidency(only=only):
                return m.ResidencyReply(call_id=0, adapters=await engine.residency(only))
            case m.VerifyAdapter(adapter=ref):
                return m.VerifyReply(call_id=0, certificate=await engine.verify(ref))
            case _:
                raise InvariantViolation(f"a replica takes no {type(message).__name__}")
        return m.CallReply(call_id=0)

    def _damage(self) -> list[bytes]:
        damaged, self._damaged = self._damaged, []
        return [m.encode_output(m.AdapterDamaged(digest=digest, blob=blob)) for digest, blob in damaged]

    # what Serve calls

    def check_health(self) -> None:
        """Check that the engine runs or is being replaced.

        Raises:
            EngineUnavailable: no engine can be had; Serve replaces this replica.
        """
        if not self._engine.is_live:
            raise EngineUnavailable(self._engine.status or "The engine hangs.")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return this replica's report for routers."""
        try:
            rows: tuple[AdapterResidency, ...] = await self._engine.residency()
        except LoraserveError:
            rows = ()
        rows = tuple(sorted(rows, key=lambda row: row.last_used_s)[:MAX_REPORTED_ADAPTERS])
        report = ReplicaReport(
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            engine_pid=self._engine.pid,
            status=self._engine.status,
            num_restarts=self._engine.num_restarts,
            num_hangs=self._engine.num_hangs,
            num_slots=self._num_slots,
            ttft_s=self._mean_ttft_s(),
            stats=self._engine.stats,
            device=tuple(row.digest for row in rows if row.tier is Tier.DEVICE),
            host=tuple(row.digest for row in rows if row.tier in (Tier.HOST, Tier.LOADING)),
        )
        return {REPORT: encode_report(report)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaling policy decides on."""
        stats = self._engine.stats
        return {TTFT_S: self._mean_ttft_s(), WAITING: float(stats.num_waiting), RUNNING: float(stats.num_running)}

    async def __del__(self) -> None:
        # Serve awaits it once the replica has nothing left to do
        engine = getattr(self, "_engine", None)
        if engine is not None:
            await engine.stop()

    def _note_first(self, output: TokenOutput) -> None:
        waited_s = output.queue_s + output.adapter_s + output.prefill_s
        self._first_tokens.append((time.monotonic(), waited_s))

    def _mean_ttft_s(self) -> float:
        while self._first_tokens and time.monotonic() - self._first_tokens[0][0] > _TTFT_WINDOW_S:
            self._first_tokens.popleft()
        return sum(took_s for _, took_s in self._first_tokens) / max(1, len(self._first_tokens))


def _rest(add: m.AddRequest) -> GenerateRequest:
    """Return the request as a client makes it; the ingress has admitted it already."""
    return GenerateRequest(
        request_id=RequestId(add.request_id),
        tenant=add.tenant,
        adapter=add.adapter,
        prompt_token_ids=add.prompt_token_ids,
        params=add.params,
        priority=add.priority,
        weight=add.weight,
        kv_share=add.kv_share,
        timeout_s=add.timeout_s,
        pooling=add.pooling,
        is_background=True,
    )


# one choice of kernels for all replicas: streams go on in the same arithmetic on any of them


def _agreed_kernels(config: EngineConfig) -> tuple[KernelChoice, ...] | None:
    """Return the kernels that a replica of this configuration chose; None: none has yet."""
    found: bytes | None = internal_kv._internal_kv_get(_key(config), namespace=_KV_NAMESPACE)
    return None if found is None else _decode_kernels(found)


def _agree_on_kernels(config: EngineConfig, own: tuple[KernelChoice, ...]) -> tuple[KernelChoice, ...]:
    """Return what the first replica chose that called this, maybe `own`."""
    internal_kv._internal_kv_put(_key(config), _encode_kernels(own), overwrite=False, namespace=_KV_NAMESPACE)
    return _agreed_kernels(config) or own


def _key(config: EngineConfig) -> bytes:
    return b"kernels:" + hashlib.sha256(_encode_config(config)).hexdigest().encode()
