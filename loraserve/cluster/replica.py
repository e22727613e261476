"""An engine replica: an engine process with its watch and replay, behind Ray Serve's handles."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import ray
from ray.experimental import internal_kv

from loraserve.api.logs import configure_logging
from loraserve.cluster.autoscaling import LINKS, RUNNING, TTFT_S, WAITING
from loraserve.cluster.loopback import keep_to_loopback
from loraserve.cluster.relay.base_message import encode_base
from loraserve.cluster.relay.outbox import Outbox
from loraserve.cluster.routing.members import MAX_REPORTED_ADAPTERS, REPORT, ReplicaReport, encode_report
from loraserve.config import EngineConfig
from loraserve.engine_client import messages as m
from loraserve.engine_client.client import EngineClient, GenerateRequest
from loraserve.errors import EngineUnavailable, InvariantViolation, LoraserveError
from loraserve.types import (
    AdapterResidency,
    FinishReason,
    KernelChoice,
    RequestId,
    Tier,
    TokenOutput,
)

logger = logging.getLogger(__name__)

_OUTBOX_S = 30.0
"""Seconds that outputs are kept for an ingress that has no link, after its last request."""
_TTFT_WINDOW_S = 15.0
"""Seconds for which a time to the first token counts."""
_KV_NAMESPACE = b"loraserve"
"""Key of the cluster's key-value store, which is empty again when the cluster is."""
_encode_config = msgspec.msgpack.Encoder().encode
_encode_kernels = msgspec.msgpack.Encoder().encode
_decode_kernels = msgspec.msgpack.Decoder(tuple[KernelChoice, ...]).decode


class EngineReplica:
    """Owns an engine, and answers the ingress in the engine's own messages.

    What an engine would send for the requests of an ingress comes as one stream of `StepOutputs`;
    calls are answered as an engine answers them.
    """

    async def __init__(self, config: EngineConfig, hang_timeout_s: float, log_level: str) -> None:  # type: ignore[misc]
        """Start the engine, and wait until it is ready.

        Args:
            hang_timeout_s: seconds without progress after which the engine is replaced.

        Raises:
            LoraserveError: why no engine can be had.
        """
        configure_logging(log_level)
        keep_to_loopback()
        self._damaged: list[m.AdapterDamaged] = []
        self._outboxes: defaultdict[str, Outbox] = defaultdict(Outbox)
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
            on_damage=lambda digest, blob: self._damaged.append(m.AdapterDamaged(digest=digest, blob=blob)),
        )

    async def _agree(self, config: EngineConfig) -> None:
        """Restart the engine if another replica was first to choose, and chose other kernels."""
        kernels = _agree_on_kernels(config, self._engine.kernels)
        if kernels == self._engine.kernels:
            return
        logger.info("another replica chose other kernels first; the engine is started again with those")
        await self._engine.stop()
        self._engine = self._make_engine(msgspec.structs.replace(config, kernels=kernels))
        await self._engine.start()

    # what the ingress calls

    def describe(self, request: bytes, placement: object = None) -> bytes:
        """Encode the base that this replica serves; the request needs no content."""
        return encode_base(self._engine.base)

    async def compute(self, request: bytes, ingress: str, placement: object = None) -> None:
        """Compute an `AddRequest`; its outputs go to the ingress by `batches`.

        Return once its last one, which has a finish reason, is on its way.

        Args:
            placement: what the router reads of the call.
        """
        add = m.decode_input(request)
        if not isinstance(add, m.AddRequest):
            raise InvariantViolation(f"expected a request, not {type(add).__name__}")
        outbox = self._outboxes[ingress]
        outbox.enter()
        try:
            async with aclosing(self._engine.outputs(_rest(add), output_token_ids=add.output_token_ids)) as outputs:
                has_begun = False
                async for output in outputs:
                    if not has_begun:
                        has_begun = True
                        self._note_first(output)
                    outbox.put(output, self._take_damaged())
        except LoraserveError as error:
            failed = TokenOutput(
                request_id=add.request_id,
                finish_reason=FinishReason.ERROR,
                error_code=error.code,
                error_message=str(error),
            )
            outbox.put(failed, self._take_damaged())
        finally:
            outbox.leave()
            if outbox.is_unused:
                asyncio.get_running_loop().call_later(_OUTBOX_S, self._drop, ingress, outbox)

    async def batches(
        self, request: bytes, ingress: str, placement: object = None
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield what the engine makes of an ingress' requests, as `Outbox.batches` does."""
        outbox = self._outboxes[ingress]
        async with aclosing(outbox.batches()) as batches:
            async for batch in batches:
                yield batch
        self._drop(ingress, outbox)

    def _drop(self, ingress: str, outbox: Outbox) -> None:
        """Forget what is for an ingress that has no requests here."""
        if outbox.is_unused and self._outboxes.get(ingress) is outbox:
            del self._outboxes[ingress]

    async def call(self, request: bytes, placement: object = None) -> list[bytes]:
        """Answer a message of the engine's, after the damage that it may have met."""
        message = m.decode_input(request)
        reply: m.EngineOutput
        try:
            reply = await self._answer(message)
        except LoraserveError as error:
            reply = m.CallReply(call_id=0, error_code=error.code, error_message=str(error))
        return [m.encode_output(one) for one in (*self._take_damaged(), reply)]

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
            case m.MeasureBase():
                found = await engine.measure_base()
                if isinstance(found, str):
                    return m.BaseMeasured(call_id=0, note=found)
                return m.BaseMeasured(call_id=0, precision=found)
            case _:
                raise InvariantViolation(f"a replica takes no {type(message).__name__}")
        return m.CallReply(call_id=0)

    def _take_damaged(self) -> list[m.AdapterDamaged]:
        damaged, self._damaged = self._damaged, []
        return damaged

    # what Serve calls

    def check_health(self) -> None:
        """Check that the engine runs or is being replaced.

        Raises:
            EngineUnavailable: no engine can be had; Serve replaces this replica.
        """
        if not self._engine.is_live:
            raise EngineUnavailable(self._engine.status or "The engine hangs.")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Build this replica's report for routers."""
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
        """Collect what the autoscaling policy decides on."""
        stats = self._engine.stats
        return {
            TTFT_S: self._mean_ttft_s(),
            WAITING: float(stats.num_waiting),
            RUNNING: float(stats.num_running),
            LINKS: float(len(self._outboxes)),
        }

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
    """Rebuild the request as a client sends it; the ingress has admitted it already."""
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


# one choice of kernels for all replicas: streams continue in the same arithmetic on any of them


def _agreed_kernels(config: EngineConfig) -> tuple[KernelChoice, ...] | None:
    """Look up the kernels that a replica of this configuration chose; None: none has yet."""
    found: bytes | None = internal_kv._internal_kv_get(_key(config), namespace=_KV_NAMESPACE)
    return None if found is None else _decode_kernels(found)


def _agree_on_kernels(config: EngineConfig, own: tuple[KernelChoice, ...]) -> tuple[KernelChoice, ...]:
    """Agree on what the first replica chose that called this, maybe `own`."""
    internal_kv._internal_kv_put(_key(config), _encode_kernels(own), overwrite=False, namespace=_KV_NAMESPACE)
    return _agreed_kernels(config) or own


def _key(config: EngineConfig) -> bytes:
    return b"kernels:" + hashlib.sha256(_encode_config(config)).hexdigest().encode()
