"""Messages between server and engine: msgspec structs on ZeroMQ, one tagged union each way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from loraserve.types import (
    AdapterRef,
    AdapterResidency,
    BasePrecision,
    BaseSpec,
    Certificate,
    Digest,
    EngineStats,
    KernelChoice,
    PoolingParams,
    RequestId,
    SamplingParams,
    Struct,
    TenantId,
    TokenOutput,
)

if TYPE_CHECKING:
    from loraserve.engine_client.chunk import ChunkReader
    from loraserve.text.tokenizer import Tokenizer


class GenerateRequest(Struct, frozen=True):
    """A request as the API makes it. The engine gets its tokens; the client handles stop strings.

    Attributes:
        priority: lower runs first among its tenant's; below 0 it comes before every tenant's.
        weight: of its tenant: twice the weight gets twice the service while both have requests
            waiting.
        kv_share: part of the KV blocks that its tenant's requests may hold together.
        max_queued: cap on the tenant's requests without a first token while all slots are taken; 0:
            none.
        timeout_s: seconds from its arrival until it ends with what there is.
        shown_token_ids: special tokens that stay in the text although the others are skipped.
        pooling: the vector to make of the prompt; None: tokens are made, by `params`.
        is_background: no client waits for it, and it doesn't count in the queue's bounds; its
            sender bounds such requests.
        reader: takes chunks between the first and the last past the iterator that waits for them.
        tokenizer: makes the text; None: the base's.
    """

    request_id: RequestId
    tenant: TenantId
    adapter: AdapterRef | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_token_ids: tuple[int, ...] = ()
    priority: int = 0
    weight: float = 1.0
    kv_share: float = 1.0
    max_queued: int = 0
    timeout_s: float | None = None
    pooling: PoolingParams | None = None
    is_background: bool = False
    reader: ChunkReader | None = None
    tokenizer: Tokenizer | None = None


class AddRequest(Struct, frozen=True, tag="add"):
    """Start a request, or continue it after a crash.

    Attributes:
        output_token_ids: tokens that its client already has.
        timeout_s: seconds left of its timeout.
        pooling: as `GenerateRequest`'s.
    """

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
    pooling: PoolingParams | None = None


class AbortRequest(Struct, frozen=True, tag="abort"):
    """End a request; no-op if it is over. It isn't answered."""

    request_id: RequestId


class WarmAdapter(Struct, frozen=True, tag="warm"):
    """Load an adapter onto the device without a request; answered by CallReply."""

    call_id: int
    adapter: AdapterRef


class PinAdapter(Struct, frozen=True, tag="pin"):
    """Pin an adapter to the device, or unpin it; answered by CallReply."""

    call_id: int
    adapter: AdapterRef
    is_pinned: bool


class DiscardAdapter(Struct, frozen=True, tag="discard"):
    """Free what an ephemeral adapter occupies once no request uses it; it isn't answered."""

    digest: Digest


class ForgetTexts(Struct, frozen=True, tag="forget_texts"):
    """Forget the texts that a deleted version made, of whichever tenant; it isn't answered.

    Nothing is looked up in them any more.
    """

    owner: TenantId
    name: str | None = None
    """Name of the adapter; None: all of a deleted tenant, and its own requests."""
    version: int | None = None
    """Number of the version; None: all of a deleted adapter."""


class VerifyAdapter(Struct, frozen=True, tag="verify"):
    """Compare an adapter's logits with their reference; answered by VerifyReply."""

    call_id: int
    adapter: AdapterRef


class AbortVerification(Struct, frozen=True, tag="abort_verify"):
    """End a verification; it isn't answered."""

    call_id: int


class MeasureBase(Struct, frozen=True, tag="measure_base"):
    """Measure what rounding costs the base, while serving; answered by BaseMeasured."""

    call_id: int


class QueryResidency(Struct, frozen=True, tag="residency"):
    """Query which adapters are in memory; answered by ResidencyReply.

    Attributes:
        only: adapters to look up; None: all.
    """

    call_id: int
    only: frozenset[Digest] | None = None


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """End the engine process."""


EngineInput = (
    AddRequest
    | AbortRequest
    | WarmAdapter
    | PinAdapter
    | DiscardAdapter
    | ForgetTexts
    | VerifyAdapter
    | AbortVerification
    | MeasureBase
    | QueryResidency
    | Shutdown
)


class Ready(Struct, frozen=True, tag="ready"):
    """Report that the base is loaded and memory is allocated.

    Attributes:
        device: where steps are computed: cpu or cuda.
        kernels: kernels that were chosen on a CPU, for the engines that follow this one.
    """

    base: BaseSpec
    num_kv_blocks: int
    block_size: int
    adapter_budget_bytes: int
    device: str
    kernels: tuple[KernelChoice, ...] = ()


class Fatal(Struct, frozen=True, tag="fatal"):
    """Report why the engine can't start or continue; it exits after this."""

    code: str
    message: str
    hint: str | None = None


class StepOutputs(Struct, frozen=True, tag="outputs"):
    """Send the outputs of a step."""

    outputs: tuple[TokenOutput, ...]


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """Send the engine's counters and gauges."""

    stats: EngineStats


class Pulse(Struct, frozen=True, tag="pulse"):
    """Report the working thread's progress, also during loads and long steps.

    Attributes:
        num_moves: moves of `loraserve.progress`; the same number twice means that the thread didn't
            move in between.
        what: current work, as in "the engine is …": ``loading shard 1 of 4``.
        doing: the same with how far it is: ``loading shard 1 of 4: 12 of 291 tensors``.
    """

    num_moves: int
    what: str
    doing: str


class CallReply(Struct, frozen=True, tag="reply"):
    """Answer a call: done, or the error."""

    call_id: int
    error_code: str | None = None
    error_message: str | None = None


class VerifyReply(Struct, frozen=True, tag="verify"):
    """Answer a verification with a certificate, whose verdict may be "failed", or with the error.

    Attributes:
        is_permanent: whether the adapter can never be served here; otherwise it may be tried again.
    """

    call_id: int
    certificate: Certificate | None = None
    error_code: str | None = None
    error_message: str | None = None
    is_permanent: bool = False


class BaseMeasured(Struct, frozen=True, tag="base_measured"):
    """Answer MeasureBase with what was found, or the reason why there is nothing, or the error.

    Attributes:
        note: reason why nothing is measured: there is no float base, or nothing is rounded.
    """

    call_id: int
    precision: BasePrecision | None = None
    note: str = ""
    error_code: str | None = None
    error_message: str | None = None


class ResidencyReply(Struct, frozen=True, tag="residency"):
    """Answer QueryResidency."""

    call_id: int
    adapters: tuple[AdapterResidency, ...]


class AdapterDamaged(Struct, frozen=True, tag="damaged"):
    """Report a failed load: a blob of the version is gone or no longer hashes to its digest."""

    digest: Digest
    blob: Digest


EngineOutput = (
    Ready
    | Fatal
    | StepOutputs
    | Heartbeat
    | Pulse
    | CallReply
    | VerifyReply
    | BaseMeasured
    | ResidencyReply
    | AdapterDamaged
)

encode_input = msgspec.msgpack.Encoder().encode
decode_input = msgspec.msgpack.Decoder(EngineInput).decode
encode_output = msgspec.msgpack.Encoder().encode
decode_output = msgspec.msgpack.Decoder(EngineOutput).decode
