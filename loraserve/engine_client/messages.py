"""What travels between the server and the engine process: msgspec structs on ZeroMQ, one tagged union each way."""

from __future__ import annotations

import msgspec

from loraserve.types import (
    AdapterRef,
    AdapterResidency,
    BaseSpec,
    Certificate,
    Digest,
    EngineStats,
    KernelChoice,
    RequestId,
    SamplingParams,
    Struct,
    TenantId,
    TokenOutput,
)


class GenerateRequest(Struct, frozen=True):
    """What the API asks of `EngineClient.generate`. The engine gets its tokens' part; stop strings are the client's."""

    request_id: RequestId
    tenant: TenantId
    adapter: AdapterRef | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    """Lower runs first, among its tenant's; below 0 it comes before every tenant's."""
    weight: float = 1.0
    """Of its tenant: one of twice the weight gets twice the service while both have something waiting."""
    kv_share: float = 1.0
    """The part of the KV blocks that its tenant's requests may hold together."""
    max_queued: int = 0
    """How many of its tenant's requests may wait for their first token while every place is taken; 0: no bound of its own."""
    timeout_s: float | None = None
    """From its arrival; then it ends with what there is."""
    is_background: bool = False
    """Nobody waits for it: it takes no place in a queue's bounds, and so no other's. Whoever sends such requests bounds them."""


class AddRequest(Struct, frozen=True, tag="add"):
    """Start a request, or go on with it after a crash: ``output_token_ids`` were already sent to its client."""

    request_id: RequestId
    tenant: TenantId
    adapter: AdapterRef | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    weight: float = 1.0
    kv_share: float = 1.0
    timeout_s: float | None = None
    """What is left of it."""


class AbortRequest(Struct, frozen=True, tag="abort"):
    request_id: RequestId


class WarmAdapter(Struct, frozen=True, tag="warm"):
    """Bring an adapter to the device without a request; answered by CallReply once it is there or failed."""

    call_id: int
    adapter: AdapterRef


class PinAdapter(Struct, frozen=True, tag="pin"):
    """Keep an adapter from eviction (or stop keeping it). Answered by CallReply."""

    call_id: int
    adapter: AdapterRef
    is_pinned: bool


class VerifyAdapter(Struct, frozen=True, tag="verify"):
    """Compare an adapter's answers with a plain evaluation of it; answered by VerifyReply."""

    call_id: int
    adapter: AdapterRef


class AbortVerification(Struct, frozen=True, tag="abort_verify"):
    """Nobody waits for it any more: it isn't answered."""

    call_id: int


class QueryResidency(Struct, frozen=True, tag="residency"):
    call_id: int


class Shutdown(Struct, frozen=True, tag="shutdown"):
    pass


EngineInput = (
    AddRequest | AbortRequest | WarmAdapter | PinAdapter | VerifyAdapter | AbortVerification | QueryResidency | Shutdown
)


class Ready(Struct, frozen=True, tag="ready"):
    """The base is loaded and memory is set aside."""

    base: BaseSpec
    num_kv_blocks: int
    block_size: int
    adapter_budget_bytes: int
    device: str
    """Where steps are computed: cpu or cuda."""
    kernels: tuple[KernelChoice, ...] = ()
    """Kernels that it chose on a CPU, for the engines that follow it."""


class Fatal(Struct, frozen=True, tag="fatal"):
    """The engine can't start or go on; it exits after this."""

    code: str
    message: str
    hint: str | None = None


class StepOutputs(Struct, frozen=True, tag="outputs"):
    outputs: tuple[TokenOutput, ...]


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    stats: EngineStats


class Pulse(Struct, frozen=True, tag="pulse"):
    """State of the working thread, said by another: from before the base is loaded on, also within a long step."""

    num_moves: int
    """Moves of `loraserve.progress`: the same number twice says that the thread didn't move in between."""
    what: str
    """Work that it is at, as in "the engine is …": ``loading shard 1 of 4``."""
    doing: str
    """The same work, with how far it is: ``loading shard 1 of 4: 12 of 291 tensors``."""


class CallReply(Struct, frozen=True, tag="reply"):
    call_id: int
    error_code: str | None = None
    error_message: str | None = None


class VerifyReply(Struct, frozen=True, tag="verify"):
    """A certificate, whose verdict may be that the adapter failed; or why there is none."""

    call_id: int
    certificate: Certificate | None = None
    error_code: str | None = None
    error_message: str | None = None
    is_permanent: bool = False
    """Whether the adapter can never be served here; otherwise another try may go well."""


class ResidencyReply(Struct, frozen=True, tag="residency"):
    call_id: int
    adapters: tuple[AdapterResidency, ...]


class AdapterDamaged(Struct, frozen=True, tag="damaged"):
    """A load of this version failed, since one of its blobs is gone or no longer hashes to its digest. One per load that failed so."""

    digest: Digest
    blob: Digest


EngineOutput = (
    Ready | Fatal | StepOutputs | Heartbeat | Pulse | CallReply | VerifyReply | ResidencyReply | AdapterDamaged
)

encode_input = msgspec.msgpack.Encoder().encode
decode_input = msgspec.msgpack.Decoder(EngineInput).decode
encode_output = msgspec.msgpack.Encoder().encode
decode_output = msgspec.msgpack.Decoder(EngineOutput).decode
