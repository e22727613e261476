"""A request inside the engine: its tokens, how far it is computed, and what it holds."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from loraserve.engine.greedy import MIN_TEMPERATURE, reads_logits_alone
from loraserve.types import AdapterRef, FinishReason, RequestId, SamplingParams, TenantId, TokenLogprobs

if TYPE_CHECKING:
    from loraserve.engine.grammar.constraint import Constraint
    from loraserve.engine.pooler import Pooler
    from loraserve.engine.probe import Probe
    from loraserve.memory.kv.prefix_cache import Activation, PrefixKey
    from loraserve.memory.kv.state_snapshots import ResumedState, Snapshot

VersionName = tuple[TenantId, str, int]
"""A version's owner, its name and its number."""


class AdapterPin(Protocol):
    """Keeps an adapter on the device until `release`, which is called exactly once."""

    def release(self) -> None: ...


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A sequence being generated: `num_computed_tokens` catches up with `num_tokens`.

    The scheduler sees no more than that. Prefill, chunked prefill, decode, preemption (computed
    falls to 0), a prefix hit (computed starts above 0) and replay after a crash (tokens start with
    earlier output) need no states of their own. Nor does a step in flight: both numbers move when
    the step is scheduled, since steps are computed in order. Only the token's id comes with the
    results.
    """

    request_id: RequestId
    tenant: TenantId
    adapter: AdapterRef | None
    params: SamplingParams
    token_ids: list[int]
    """Prompt, then the output that the host has."""
    num_prompt_tokens: int
    priority: int
    prefix_root: PrefixKey
    """Key from which its blocks' keys are chained, up to where its adapter acts."""
    arrival_s: float
    sequence_number: int
    """Order of arrival, which breaks ties of priority."""
    weight: float = 1.0
    kv_share: float = 1.0
    """Part of the KV blocks that its tenant may hold, as sent with the request; so is `weight`."""
    timeout_s: float | None = None
    """Seconds from arrival after which the request ends with the output that there is."""

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens computed by earlier steps or by one in flight."""
    num_in_flight_tokens: int = 0
    """Last tokens of `num_tokens`, which steps in flight sample: their ids aren't known yet."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    """Ids of its KV blocks, as int32 for a step's block table."""
    state_slot: int | None = None
    """Slot of its recurrent state; None: it isn't running, or the base has none."""
    resumed: ResumedState | None = None
    """State that its slot begins from, until a step has computed its first tokens; None: none."""
    state_borders: tuple[int, ...] = ()
    """Numbers of tokens after which its state is to be kept, at the ends of blocks, ascending."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """Number of tokens → the place for its state after them, until it is kept with a block."""
    block_keys: list[PrefixKey] = field(default_factory=list)
    """Keys of the leading blocks that are published or were prefix hits."""
    num_cached_tokens: int = 0
    pin: AdapterPin | None = None
    activation: Activation | None = None
    """Token from which its adapter acts, found when it is pinned; None if it acts on none."""
    num_extra_rows: int = 0
    """Tokens beyond the base's that its adapter has rows for, found when it is pinned."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    first_scheduled_s: float | None = None
    adapter_wait_started_s: float | None = None
    adapter_wait_s: float = 0.0
    adapter_tier: str = ""
    """Tier where it found its adapter when it came; empty for the base."""
    adapter_read_s: float = 0.0
    """Part of `adapter_wait_s` in which the adapter was read from the disk."""
    num_preemptions: int = 0
    num_charged_tokens: int = 0
    """Tokens, from the first, that were charged or cost nothing."""
    probe: Probe | None = None
    """Collects the logits of an internal request."""
    constraint: Constraint | None = None
    """Tokens that its grammar allows next; None: it has no grammar."""
    versions: tuple[VersionName, ...] = ()
    """Versions that its adapter consists of: none of the base, several of a sum."""
    leaves_text: bool = True
    """Whether its text may be kept for requests that come later: of a deleted version it isn't."""
    pooler: Pooler | None = None
    """Makes a vector of the prompt, in the place of tokens."""
    is_internal: bool = field(init=False)
    """Whether the engine itself made the request, as a probe.

    Its tenant is the empty id, which has no quota. It gets few rows in steps that serve tenants. It
    is stored because a step reads it several times of each running request.
    """
    reads_logits_alone: bool = field(init=False)
    """Whether each token is chosen by logits as the model gives them."""
    takes_likeliest: bool = field(init=False)
    """Whether each token is the likeliest of those that may be taken."""

    def __post_init__(self) -> None:
        self.is_internal = self.probe is not None
        self.reads_logits_alone = reads_logits_alone(self.params)
        self.takes_likeliest = self.reads_logits_alone and self.params.temperature <= MIN_TEMPERATURE

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_base_tokens(self) -> int:
        """Tokens, from the first, on which no adapter acts."""
        return self.num_tokens if self.activation is None else self.activation.start

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the host has."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that the next step may compute; 0 once the last one is in flight."""
        num_tokens = len(self.token_ids) + self.num_in_flight_tokens
        if self.num_in_flight_tokens and num_tokens - self.num_prompt_tokens >= self.params.max_tokens:
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logits are still needed; scores go out with the first token."""
        is_wanted = self.params.prompt_logprobs is not None or (
            self.probe is not None and not self.probe.max_answer_tokens
        )
        return is_wanted and self.num_tokens == self.num_prompt_tokens

    @property
    def is_held(self) -> bool:
        """Whether the request's next mask is slow and isn't there: no step computes it."""
        return self.constraint is not None and self.constraint.is_held

    @property
    def is_exclusive(self) -> bool:
        """Whether the request's prompt needs a step without rows of tenants' requests."""
        return self.probe is not None and self.probe.has_own_step

    @property
    def is_urgent(self) -> bool:
        """Whether the request runs before every tenant's others."""
        return self.priority < 0

    @property
    def is_fair_queued(self) -> bool:
        """Whether the request waits in its tenant's part of the fair queue."""
        return not (self.is_urgent or self.is_exclusive)

    @property
    def can_use_prefix_cache(self) -> bool:
        """Whether cached blocks may replace its first tokens: nothing of them is needed."""
        is_needed = self.wants_prompt_logprobs or self.is_internal
        return not is_needed and (self.pooler is None or self.pooler.needs_last_token_alone)

    @property
    def order(self) -> tuple[int, int]:
        return (self.priority, self.sequence_number)
