"""The values that cross packages.

Immutable, comparable, and able to travel between processes (msgspec).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NewType

import msgspec

Digest = NewType("Digest", str)
"""SHA-256 in lower-case hex, 64 characters."""

RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
"""The tenant's immutable id (not its name)."""

TIMEOUT = "timeout"
"""Stop reason of an answer that its request's timeout cut short."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every value: frozen, keyword-only."""


class MemoryFile(Struct, frozen=True):
    """Anonymous memory of the server that holds the two files of an ephemeral version."""

    path: str
    """Path by which the engine opens it while the server lives: ``/proc/PID/fd/NUMBER``."""
    weights_bytes: int
    """Bytes of the weights, which come first."""
    config_bytes: int
    """Bytes of the config after them."""
    extra_bytes: int = 0
    """Bytes of the extra files after it."""


class ExtraFile(Struct, frozen=True):
    """File of a version beside its config and its weights."""

    blob: Digest
    """SHA-256 of its bytes, under which the store has them."""
    num_bytes: int


class VersionExtras(Struct, frozen=True):
    """What a version has beside its config and its weights, for chats with it."""

    chat_template: ExtraFile | None = None
    """``chat_template.jinja``; None: the base's template is used."""
    generation_config: ExtraFile | None = None
    """``generation_config.json``; None: the defaults of fields are the base's."""
    tool_parser: str | None = None
    """Format of its tool calls, by its name; None: recognized, or the base's."""
    reasoning_parser: str | None = None
    """Format of its reasoning, by its name; None: recognized, or the base's."""
    chat_template_kwargs: str | None = None
    """Variables of its chat template, as JSON; None: those of the server alone."""
    tokenizer: ExtraFile | None = None
    """``tokenizer_summary.json``: what of its tokenizer differs from the base's; None: nothing."""

    @property
    def files(self) -> tuple[ExtraFile, ...]:
        """Its files, in the order in which memory holds them."""
        files = (self.chat_template, self.generation_config, self.tokenizer)
        return tuple(file for file in files if file is not None)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class AdapterRef(Struct, frozen=True, weakref=True):
    """One immutable adapter version, as the engine needs it.

    It is its identity and the blobs that hold it. `digest` is the identity (caches, KV prefixes and
    pins use it); `name` and `version` are for people.

    Of an ephemeral version the registry hands out one object, and frees the memory when the last
    holder has dropped it: pass it on, don't copy it
    (`loraserve.registry.catalog.ephemeral_adapters`).
    """

    tenant: TenantId
    name: str
    version: int
    digest: Digest
    config_blob: Digest
    weights_blob: Digest
    has_head: bool = False
    """Whether it has a classification head."""
    parts: tuple[AdapterPart, ...] = ()
    """Of a composition, which has no blobs of its own: the weighted sum of what these change."""
    memory: MemoryFile | None = None
    """Memory that holds an ephemeral version; None: the store does."""
    extras: VersionExtras | None = None
    """Files for chats with it; None: it has none. The engine doesn't need them."""

    @property
    def is_ephemeral(self) -> bool:
        """Whether it is held in the server's memory, or is a sum with such a part."""
        return self.memory is not None or any(part.adapter.is_ephemeral for part in self.parts)


class AdapterPart(Struct, frozen=True):
    """One term of a composition."""

    adapter: AdapterRef
    weight: float


class Certificate(Struct, frozen=True):
    """Distance of an adapter's answers on this engine from a plain float32 evaluation's.

    First on the same weights, those that the base is served with: differences are of logits, over
    all tokens of the vocabulary at every probe position, the adapter alone and in a mixed batch.
    They show whether the engine computes right. Then on the weights as they were before they were
    rounded, on the adapter's own answers: what rounding the base costs this adapter.
    """

    verdict: str
    """passed; degraded: computed right, but rounding the base takes too much of the adapter's
    effect; failed: computed wrong; not_possible: a comparison couldn't be made.
    """
    max_difference: float
    mean_difference: float
    base_difference: float
    """The largest of the base alone, which has no part in the verdict on an adapter but in its
    bound.
    """
    tolerance: float
    """What `max_difference` must not pass."""
    max_effect: float
    """The largest change that the adapter makes to a logit of the base, by the reference."""
    top1_agreement: float
    """The part of probe positions at which the two have the same likeliest token."""
    precision_loss: float
    """The largest relative error, over the adapter's modules,
    of ``B A`` as it is served against as it was uploaded.
    """
    num_probe_tokens: int
    seconds: float
    reason: str = ""
    """Why it isn't passed, for people."""
    base_spread: float = 0.0
    """The rms change of the base's logits by the next code for activations that lie next to the
    middle between two, where they are rounded: the base may differ from its reference by four times
    that.
    """
    module_difference: float | None = None
    """The largest relative difference of what a module adds to random inputs, in the engine's
    kernels and in float32; None: not compared, as on GPUs.
    """
    effect_kept: float | None = None
    """The part of the adapter's effect that is left on the served base (1: all of it); None: not
    measured, as the six below.
    """
    min_effect_kept: float | None = None
    """The least `effect_kept` that passes."""
    answer_divergence: float | None = None
    """Mean KL divergence, in nats, of the adapter's answers on the served base from those on the
    float base, by token.
    """
    answer_agreement: float | None = None
    """The part of the answers' tokens at which the two have the same likeliest token."""
    base_divergence: float | None = None
    """`answer_divergence` of the base alone, on the same texts."""
    base_agreement: float | None = None
    """`answer_agreement` of the base alone, on the same texts."""
    num_answer_tokens: int = 0
    rounding_note: str = ""
    """Why the cost of rounding isn't measured on this base; empty if it is."""
    base_digest: str = ""
    """The digest of the base that it holds for.

    Empty, like the four below, in certificates of releases that didn't say.
    """
    quantization: str = ""
    """`BaseSpec.quantization` of that base."""
    arithmetic: str = ""
    """`BaseSpec.arithmetic` of that base."""
    instructions: str = ""
    """`BaseSpec.instructions` of that base."""
    device: str = ""
    """`BaseSpec.device` of that base."""


class ExpertsSpec(Struct, frozen=True):
    """Mixture of experts that each layer has, as adapters may change it.

    A shared expert's linears are among `BaseSpec.modules`.
    """

    num_experts: int
    modules: Mapping[str, tuple[int, int]]
    """Module (``experts.gate_proj``, ``router``) → (out_features, in_features); those of experts in
    each of them.
    """
    module_paths: Mapping[str, str]
    """Module → its path inside a layer; ``{}`` stands for the number of an expert.

    Experts' modules that aren't there are changed by parameters alone; such a router, not at all.
    """
    parameters_path: str
    """Path inside a layer of the module in which transformers 5 has all experts' weights, as two
    parameters.
    """
    is_interleaved: bool = False
    """Whether the outputs of gate and up take turns in their parameter."""


class BaseSpec(Struct, frozen=True):
    """What others need to know of the base model without seeing a tensor of it."""

    id: str
    digest: Digest
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    """The logits' width: every token id in a request is below it."""
    max_model_len: int
    modules: Mapping[str, tuple[int, int]]
    """Module's short name (``q_proj``) → (out_features, in_features).

    ``lm_head`` and ``embed_tokens``, taken for a linear of one-hot rows, are among them.
    """
    module_paths: Mapping[str, str]
    """Module's short name → its path inside a layer (``self_attn.q_proj``); of ``lm_head`` and
    ``embed_tokens``, which are in none, the whole path.
    """
    layers_path: str
    """Where the layers are in the checkpoint: ``model.layers``."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: str
    arithmetic: str = ""
    """How the linears multiply, by the names of `loraserve_kernels.common.arithmetic`:
    ``w8a8-row-h64``; several joined by ``+``, those of the layers before the head's. Empty, like
    the three below, where no weight was loaded.
    """
    kernels: str = ""
    """Kernels that multiply so: ``onednn-u8``; several joined likewise."""
    instructions: str = ""
    """The widest instruction sets that those may use: ``avx512_core_vnni``;
    several joined likewise.
    """
    device: str = ""
    """cpu or cuda."""
    num_parameters: int = 0
    size_bytes: int = 0
    biased_modules: tuple[str, ...] = ()
    """Those of `modules` that have a bias in this base."""
    norm_paths: Mapping[str, str] = {}
    """Norm that an adapter may have a weight of its own for (`attention_norm`, `mlp_norm`: what a
    layer's linears read; `attention_out_norm`, `mlp_out_norm`: what their outputs pass before they
    are added; `norm`: what the head reads) → its path: inside a layer, but for `norm`.
    """
    norm_offset: float = 0.0
    """What is added to a norm's stored weight."""
    implementation: str = "native"
    """Code that computes the layers: native (this package's decoder), or transformers."""
    is_head_tied: bool = False
    """Whether the head's weight is the embedding's."""
    is_head_quantized: bool = False
    """Whether the head's weight is rounded, by the checkpoint or while it was loaded."""
    head_dim: int = 0
    """Numbers of a query or a key of one head."""
    experts: ExpertsSpec | None = None
    """Mixture of experts that adapters may change; None: there is none, or they may not."""
    module_layers: Mapping[str, tuple[int, ...]] = {}
    """Module → the layers that have it, where some lack it: recurrent ones don't attend."""

    has_recurrent_state: bool = False
    """Whether layers keep a state of all tokens before, in the place of keys and values.

    A state can't go back: no tokens are proposed, and prefixes are reused up to a snapshot of it.
    """

    @property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: what computes answers, ``fp_1f0c9a3e_w8a8-row-h64``.

        It changes with the base's weights, and with the arithmetic in which they are multiplied
        (the dtype, where no weight was loaded).
        """
        return f"fp_{self.digest[:8]}_{self.arithmetic or self.dtype}"

    @property
    def module_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Module → (out_features, in_features), those of a mixture among them."""
        return self.modules if self.experts is None else {**self.modules, **self.experts.modules}

    def has_module(self, layer: int, module: str) -> bool:
        """Return whether a layer has a module of `modules`."""
        return module not in self.module_layers or layer in self.module_layers[module]


class KernelChoice(Struct, frozen=True):
    """Kernel that computes a CPU's linears of one format and of about one shape.

    An engine that follows another computes with the same.
    """

    format: str
    out_features: int
    in_features: int
    arithmetic: str
    kernel: str
    instructions: str


class Rounding(Struct, frozen=True):
    """Distance between the answers of two evaluations of a base, over positions of real text."""

    top1_agreement: float
    """The part of positions at which the two have the same likeliest token."""
    mean_difference: float
    """Mean of the absolute differences of the log probability (natural)
    of the text's own next token.
    """
    max_difference: float
    """The largest of those."""
    mean_divergence: float
    """The mean Kullback-Leibler divergence from the evaluation that was expected, in nats."""


class BasePrecision(Struct, frozen=True):
    """What rounding costs a base: its next tokens on a text, compared with the float base's."""

    num_positions: int
    top1_agreement: float
    """The part of positions at which both have the same likeliest token."""
    mean_divergence: float
    """The mean Kullback-Leibler divergence from the float base, in nats."""
    loss: float
    """Mean of -log p of the text's own next token, by the float base; in nats."""
    served_loss: float
    """The same by the base as it is served."""


class RoundingCost(Struct, frozen=True):
    """Cost of rounding a base as it is served, against the same checkpoint computed in float32."""

    base_id: str
    base_digest: Digest
    dtype: str
    quantization: str
    arithmetic: str
    kernels: str
    instructions: str
    device: str
    num_positions: int
    weights: Rounding
    """Cost of the weights as they are multiplied, against the checkpoint's, both in float32:
    nothing where the checkpoint is quantized already.
    """
    activations: Rounding
    """Cost in the engine's own answers, against the same weights in float32."""
    total: Rounding
    """Cost in the engine's own answers, against the checkpoint's weights in float32."""
    loss: float
    """The mean of -log p of the text's next token, by the checkpoint's weights in float32."""
    served_loss: float
    """The same by the engine."""
    seconds: float


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ThinkingBudget(Struct, frozen=True):
    """Bound on the tokens of an answer's reasoning, and the tokens around it."""

    num_tokens: int
    """Tokens after which the reasoning is ended by the first of `closers`."""
    closers: tuple[int, ...]
    """Tokens that end it, at least one."""
    openers: tuple[int, ...] = ()
    """Tokens that begin it."""
    blanks: tuple[int, ...] = ()
    """Tokens of white space that may come before it."""
    is_open: bool = False
    """Whether the answer's first token belongs to it already; otherwise an opener begins it."""


class SamplingParams(Struct, frozen=True):
    """How to choose tokens.

    Ranges are checked at the API's edge; the engine takes them as they are.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = {}
    seed: int = 0
    """The uniform number of a token is a hash of (seed, position): always set, drawn by the API
    when the caller gives none.
    """
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the sampled one; None: report nothing."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens to report in the place of the likeliest; empty: the likeliest."""
    prompt_logprobs: int | None = None
    grammar: str = ""
    """Grammar of the answer in llguidance's JSON form, checked by the API; empty: any text."""
    tokenizer: str = ""
    """Tokenizer of the version that the grammar is for, as its differences from the base's
    (`TokenizerSummary`); empty: the base's.
    """
    grammar_bytes: int = 0
    """Bytes that the compiled grammar takes, as the API measured; 0: unknown."""
    allowed_token_ids: tuple[int, ...] = ()
    """Tokens that may be chosen; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens whose last token isn't chosen after the others."""
    thinking: ThinkingBudget | None = None
    """Bound on its reasoning; None: there is none."""


class PoolingKind(StrEnum):
    """Hidden states, after the last norm, of which a sequence's one vector is made."""

    MEAN = "mean"
    LAST = "last"
    CLS = "cls"
    """The first token's."""


class PoolingParams(Struct, frozen=True):
    """Parameters of a vector that is made of a sequence, in the place of tokens."""

    kind: PoolingKind
    dimensions: int | None = None
    """Number of the vector's first components to keep; None: all."""
    normalize: bool = True
    """Whether the vector, cut to its dimensions, is divided by its length."""
    classify: bool = False
    """Whether the adapter's classification head is applied to the whole vector: a number for each
    label, before any activation. `dimensions` and `normalize` say nothing then.
    """


class TokenLogprobs(Struct, frozen=True):
    """The sampled (or given) token's log probability, and the likeliest tokens, best first.

    Natural log, of the raw model's distribution.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenOutput(Struct, frozen=True, omit_defaults=True):
    """What one step made for one request."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Sent once, with the first token: one entry per prompt token, the first None."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for EOS or length."""
    error_code: str | None = None
    error_message: str | None = None
    pooled: bytes | None = None
    """Vector of a request that pools, as float32 in little-endian order; sent once, at its end."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    queue_s: float = 0.0
    adapter_s: float = 0.0
    prefill_s: float = 0.0
    """Seconds spent waiting in the queue, waiting for the adapter, and in prefill;
    sent with the first token.
    """
    adapter_tier: str = ""
    """Tier where the request found its adapter: device, host or disk; empty for the base.

    Sent with the first token, as `adapter_read_s` is.
    """
    adapter_read_s: float = 0.0
    """Part of `adapter_s` in which the adapter was read from the disk and made ready."""


TIME_BOUNDS_S: tuple[float, ...] = (
    *(0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5),
    *(0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0),
)
"""Seconds up to and with which a bucket of `Histogram` counts, ascending: from what a step's
bookkeeping takes to the longest that a request may wait.
"""


class Histogram(Struct, frozen=True):
    """How long something took, and how often.

    Its buckets are `TIME_BOUNDS_S`, whatever is measured: their number never changes.
    """

    counts: tuple[int, ...] = (0,) * (len(TIME_BOUNDS_S) + 1)
    """Of each bucket by itself, not of those below it too;
    the last is of what was longer than every bound.
    """
    sum_s: float = 0.0

    @property
    def num(self) -> int:
        return sum(self.counts)


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    LOADING = "loading"


class Residency(StrEnum):
    """Whether a request's adapter is on the device (`Pager.request`)."""

    RESIDENT = "resident"
    LOADING = "loading"
    WAITING_FOR_SPACE = "waiting_for_space"
    """Loaded, or known in size; everything on the device is in use."""
    FAILED = "failed"
    """`Pager.error` says why."""


class AdapterResidency(Struct, frozen=True):
    """Where one adapter's weights are now."""

    digest: Digest
    tier: Tier
    device_bytes: int
    host_bytes: int
    num_pins: int
    """Running sequences that hold it."""
    is_pinned: bool
    """Pinned by an operator: never evicted."""
    last_used_s: float
    """Seconds since its last use."""
    dtype: str = ""
    """What its matrices are held in: fp32, bf16, fp16, int8; empty while it's being read."""
    precision_loss: float | None = None
    """The largest relative error, over its modules, of its update as it is held against as it was
    uploaded; None while it's being read.
    """
    uses_per_s: float | None = None
    """Uses per second of late, older ones counting less and less;
    None where they aren't counted.
    """


class RankTraffic(Struct, frozen=True):
    """What a rank has received of others within steps: seconds, waiting included, and bytes.

    Attributes:
        sum_s, sum_bytes: of sums and gathers among ranks that share layers.
        transfer_s, transfer_bytes: of hidden states from the stage before.
    """

    sum_s: float = 0.0
    sum_bytes: int = 0
    transfer_s: float = 0.0
    transfer_bytes: int = 0


class EngineStats(Struct, frozen=True):
    """Counters and gauges of the engine process, sent with every heartbeat."""

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_adapter: int = 0
    num_preemptions: int = 0
    num_fair_preemptions: int = 0
    """Of those, for the sake of a tenant that had less than its part,
    or by one that held more than it may.
    """
    num_timeouts: int = 0
    """Requests that ended since their own time was over."""
    num_tenants: int = 0
    """Those with a request in the engine."""
    num_kv_blocks: int = 0
    num_kv_blocks_used: int = 0
    """Referenced by a sequence."""
    num_kv_blocks_cached: int = 0
    """Idle, kept for prefix hits."""
    num_kv_blocks_available: int = 0
    """Blocks that sequences could be given now, after evicting what is idle."""
    kv_block_size: int = 0
    """Tokens of a block."""
    prefix_tokens_hit: int = 0
    prefix_tokens_queried: int = 0
    base_prefix_tokens_hit: int = 0
    """Of those found for an activated adapter's requests, the ones before it acts: any other
    request of the tenant may have computed them.
    """
    num_state_snapshots: int = 0
    """Recurrent states at the ends of cached blocks, from which prompts may begin."""
    state_snapshot_evictions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    device_adapters: int = 0
    device_adapter_bytes: int = 0
    device_adapter_budget_bytes: int = 0
    num_arriving_adapters: int = 0
    """Adapters on the device that steps can't use yet: their copies run."""
    max_device_adapters: int = 0
    """Number of adapters of the mean size of those on the device that fit; 0: none is there."""
    host_adapters: int = 0
    host_adapter_bytes: int = 0
    host_adapter_budget_bytes: int = 0
    load_bytes: int = 0
    """Bytes of the host's memory that loads of adapters hold."""
    load_budget_bytes: int = 0
    num_pins: int = 0
    adapter_loads: int = 0
    adapter_load_failures: int = 0
    adapter_load_s: float = 0.0
    adapters_brought_back: int = 0
    """Loads that no request waited for: of adapters that are often used and had been evicted."""
    device_evictions: int = 0
    device_evictions_for_kv: int = 0
    """Of those, for KV blocks' sake; the others gave their place to another adapter."""
    host_evictions: int = 0
    kv_evictions: int = 0
    """Idle prefix blocks that lost their content."""
    kv_evictions_for_adapters: int = 0
    """Of those, for an adapter's sake; the others were taken by sequences."""
    adapter_lookups_device: int = 0
    adapter_lookups_host: int = 0
    adapter_lookups_disk: int = 0
    """Requests for an adapter, by where it was when they came."""
    host_load_s: Histogram = Histogram()
    """Of loads into the host's memory that went well: read, verified, compiled and packed."""
    device_load_s: Histogram = Histogram()
    """From an adapter's place on the device to its being usable there."""
    adapter_wait_s: Histogram = Histogram()
    """Seconds that each request for an adapter waited for it, 0 where it was there;
    of those too that ended waiting.
    """
    step_adapter_s: Histogram = Histogram()
    """Seconds of each step that its thread spent on adapters' behalf: taking loads in,
    giving places, asking.
    """
    device_bytes: int = 0
    """The budget that KV blocks and adapters share."""
    kv_bytes_used: int = 0
    kv_bytes_idle: int = 0
    adapter_bytes_used: int = 0
    """Of adapters that are pinned or on their way."""
    adapter_bytes_idle: int = 0
    free_bytes: int = 0
    """Part of `device_bytes` that nothing holds."""
    step_s: float = 0.0
    """Seconds spent in steps since the start."""
    num_micro_batches: int = 0
    """Parts of steps that several ranks computed; 0: one process has the base."""
    ranks: tuple[RankTraffic, ...] = (RankTraffic(),)
    """By rank; of one process nothing is counted."""
    num_constrained: int = 0
    """Live requests with a grammar."""
    num_grammars: int = 0
    """Compiled grammars in memory."""
    grammar_bytes: int = 0
    """Bytes that they take, as estimated."""
    grammars_compiled: int = 0
    grammar_failures: int = 0
    """Requests that ended because their grammar couldn't be compiled, or was too slow."""
    late_masks: int = 0
    """Masks that a step didn't wait for: their rows were computed again in a later step."""
    grammar_compile_s: Histogram = Histogram()
    """Seconds of each compilation."""
    mask_s: Histogram = Histogram()
    """Seconds of processor time that each mask took."""
    mask_wait_s: Histogram = Histogram()
    """Seconds that each step with constrained requests waited for their masks."""
    num_drafts: int = 0
    """Times that tokens were proposed for a request in a step."""
    proposed_own_tokens: int = 0
    """Proposed tokens that were found in the request's own text."""
    proposed_history_tokens: int = 0
    """Proposed tokens that were found in texts of ended requests."""
    proposed_draft_tokens: int = 0
    """Proposed tokens that the draft base said."""
    proposed_grammar_tokens: int = 0
    """Proposed tokens that a request's grammar left no choice about."""
    accepted_own_tokens: int = 0
    accepted_history_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_grammar_tokens: int = 0
    draft_s: float = 0.0
    """Seconds spent in the draft base."""
    speculation_bytes: int = 0
    """Bytes of the indices in which they were looked for."""
    invariant_violations: int = 0


class QuantizeRequest(Struct, frozen=True):
    """Work of ``loraserve quantize``, as its process is told."""

    model_dir: str
    out_dir: str
    text_file: str | None = None
    """Calibration text; None: the bundled one."""
    max_tokens: int = 12_288
    """Tokens of the text that are computed, at most."""
    window: int = 512
    """Tokens that see each other."""
    num_threads: int = 0
    """Threads of the products; 0: torch's own number."""
    int8_modules: tuple[str, ...] | None = None
    """Linears that are rounded to int8 instead, by the last part of their path.

    None: v_proj and k_proj, as far as the layers keep within 5 bits a weight.
    """


class QuantizeProgress(Struct, frozen=True):
    """Groups of linears that are rounded, and all."""

    num_done: int
    num_all: int


class QuantizeDone(Struct, frozen=True):
    """A checkpoint that was written, and the tokens that it was calibrated on."""

    out_dir: str
    num_tokens: int
