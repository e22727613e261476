"""A device whose model is a hash, and a pager whose loads take a few steps:
an engine over them runs in microseconds.

A request's next token depends on every token that its block table leads to, and on its adapter. So
a block given away too early, a token fed from the wrong row or a prefix that isn't what it says
changes the text. What a slot holds depends on the adapter of its token too, and of all before it:
no step may read what another adapter computed, or the base in its stead.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from loraserve.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.execution.batch import Batch
from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest, StepResult
from loraserve.engine.speculation.speculation import Speculation
from loraserve.engine_client.messages import AddRequest
from loraserve.memory.timings import Stopwatch
from loraserve.types import (
    BaseSpec,
    Digest,
    PoolingParams,
    RequestId,
    Residency,
    SamplingParams,
    TenantId,
    Tier,
    TokenLogprobs,
    TokenOutput,
)

from .conftest import Adapters, make_ref

VOCAB = 50
EOS = 7
BLOCK_SIZE = 4

BASE = BaseSpec(
    id="simulated",
    digest=Digest("b" * 64),
    architecture="hash",
    num_layers=1,
    hidden_size=1,
    vocab_size=VOCAB,
    max_model_len=256,
    modules={},
    module_paths={},
    layers_path="",
    eos_token_ids=(EOS,),
    dtype="float32",
    quantization="none",
)


def digest_of(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest())


def next_token(adapter: int, context: list[int], penalised: list[int] | None = None) -> int:
    return digest_of(adapter, context, penalised) % VOCAB


def last_start(part: tuple[int, ...], whole: list[int]) -> int | None:
    starts = [i for i in range(len(whole) - len(part) + 1) if tuple(whole[i : i + len(part)]) == part]
    return starts[-1] if starts else None


def score(token_id: int, context: list[int]) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=-float(digest_of("logprob", token_id, context) % 1000))


@dataclass(eq=False)
class SimulatedStep:
    device: SimulatedDevice
    batch: Batch
    histories: list[list[int]]
    """What the host knew of each entry's tokens at launch."""
    step_results: list[StepResult] | None = None

    def results(self) -> list[StepResult]:
        self.device.log.append("results")
        self.device.num_out -= 1
        try:
            self.device.fail_results(self.batch)
        except BaseException:
            self.device.skip(self)
            raise
        while self.step_results is None:
            self.device.run_next()
        return self.step_results


@dataclass
class SimulatedDevice:
    """A StepRunner.

    A lazy one computes a step only when its results, or a later step's, are asked for: the host
    must not count on more.
    """

    num_blocks: int = 64
    is_lazy: bool = False
    log: list[str] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    bad: set[tuple[RequestId, int]] = field(default_factory=set)
    """(request, position): the logits that choose the token at the position aren't finite."""
    fail_launch: Callable[[Batch], None] = lambda batch: None
    fail_results: Callable[[Batch], None] = lambda batch: None
    num_out: int = 0
    """Steps whose results were not taken."""
    vocab: int = VOCAB
    invocations: dict[Digest, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory: list[int | None] = [None] * (self.num_blocks * BLOCK_SIZE)
        self._kv: list[int] = [0] * (self.num_blocks * BLOCK_SIZE)
        self._queue: deque[SimulatedStep] = deque()
        self._sampled: list[int] = []

    def launch(self, batch: Batch) -> SimulatedStep:
        self.fail_launch(batch)
        self.log.append("launch")
        self.batches.append(batch)
        self.num_out += 1
        assert self.num_out <= 2
        step = SimulatedStep(self, batch, [list(entry.request.token_ids) for entry in batch.entries])
        for entry in batch.entries:
            if entry.is_sampled and self.needs_results_first(entry.request):
                assert len(entry.request.token_ids) == entry.known_end
        self._queue.append(step)
        if not self.is_lazy:
            self.run_next()
        return step

    def needs_results_first(self, request: Request) -> bool:
        return request.params.presence_penalty != 0.0

    def skip(self, step: SimulatedStep) -> None:
        """The step wasn't computed, if it hadn't been: what is fed by it is nonsense."""
        if step in self._queue:
            self._queue.remove(step)
            self._sampled = []

    def run_next(self) -> None:
        step = self._queue.popleft()
        batch = step.batch
        tokens = batch.token_ids.tolist()
        for row, entry in zip(*(part.tolist() for part in batch.deferred_tokens), strict=True):
            tokens[row] = self._sampled[entry]
        for slot, token in zip(batch.slots.tolist(), tokens, strict=True):
            self.memory[slot] = token
        adapters = [0] * len(tokens)
        for adapter, first, last in batch.adapters:
            adapters[first:last] = [adapter] * (last - first)
        results = []
        for i, entry in enumerate(batch.entries):
            table = batch.block_tables[i].tolist()
            slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(batch.context_lens[i])]
            context = [self.memory[slot] for slot in slots]
            assert None not in context
            for row in range(batch.query_starts[i], batch.query_starts[i + 1]):
                position = batch.positions[row]
                before = self._kv[slots[position - 1]] if position else 0
                self._kv[slots[position]] = digest_of(before, tokens[row], adapters[row])
            assert [self._kv[slot] for slot in slots] == self._plain_kv(entry.request, context)
            start, end = batch.logits_ranges[i]
            wanted = entry.num_tokens if entry.is_scored else entry.is_sampled and 1 + len(entry.proposed)
            last_row = batch.query_starts[i + 1]
            assert batch.logits_rows[start:end].tolist() == list(range(last_row - wanted, last_row))
            assert batch.pooled_rows[slice(*batch.pooled_ranges[i])].tolist() == self._pooled_rows(batch, i)
            if entry.request.pooler is not None:
                results.append(self._pooled(entry, [self._kv[slot] for slot in slots]))
                continue
            results.append(self._result(entry, adapters[last_row - 1], context, step.histories[i]))
        self._sampled = [result.token_ids[-1] if result.token_ids else 0 for result in results]
        step.step_results = results

    def _pooled_rows(self, batch: Batch, i: int) -> list[int]:
        first, last = batch.entries[i].pooled_tokens
        return list(range(batch.query_starts[i] + first, batch.query_starts[i] + last))

    def _pooled(self, entry: ScheduledRequest, kv: list[int]) -> StepResult:
        if (entry.request.request_id, entry.end) in self.bad:
            return StepResult(is_finite=False)
        first, last = entry.pooled_tokens
        return StepResult(hidden=hidden_states(kv[entry.start + first : entry.start + last]) if first < last else None)

    def _plain_kv(self, request: Request, tokens: list[int]) -> list[int]:
        """What the slots of these tokens hold, had the request been alone in the world and computed
        in one go.
        """
        adapter, start = 0, None
        if request.adapter is not None:
            invocation = self.invocations.get(request.adapter.digest, ())
            adapter = digest_of(request.adapter.digest)
            start = last_start(invocation, request.token_ids[: request.num_prompt_tokens]) if invocation else 0
        kv, last = [], 0
        for position, token in enumerate(tokens):
            acts = start is not None and position >= start
            last = digest_of(last, token, adapter if acts else 0)
            kv.append(last)
        return kv

    def _result(self, entry, adapter: int, context: list[int], history: list[int]) -> StepResult:
        params = entry.request.params
        last = min(entry.end, entry.request.num_prompt_tokens - 1)
        scored = range(entry.start + 1, last + 1) if entry.is_scored else ()
        prompt_logprobs = tuple(score(history[p], context[:p]) for p in scored)
        if not entry.is_sampled or params.max_tokens == 0:
            return StepResult(prompt_logprobs=prompt_logprobs)
        tokens, scores = [], []
        for place in range(1 + len(entry.proposed)):
            before = context[: entry.known_end + place]
            if (entry.request.request_id, len(before)) in self.bad:
                break
            known = [*history, *tokens] if params.presence_penalty else None
            tokens.append(next_token(adapter, before, known) % self.vocab)
            scores.append(score(tokens[-1], before))
            if entry.proposed[place : place + 1] != (tokens[-1],):
                break
        if not tokens:
            return StepResult(is_finite=False)
        return StepResult(tuple(tokens), None if params.logprobs is None else tuple(scores), prompt_logprobs)


def hidden_states(kv: list[int]) -> torch.Tensor:
    """What is pooled of slots that hold these numbers."""
    return torch.tensor([[number % 997 / 997, number % 1009 / 1009] for number in kv])


class SimulatedPager(Adapters):
    """Adapters that arrive some polls after they were asked for, and leave when they are idle."""

    num_violations = 0

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.stopwatch = Stopwatch()
        self._rng = rng

    @property
    def num_pins(self) -> int:
        return sum(self.pins.values())

    @property
    def num_loading(self) -> int:
        return sum(state is Residency.LOADING for state in self.states.values())

    def request(self, ref):
        self.states.setdefault(ref.digest, Residency.LOADING)
        return super().request(ref)

    def poll(self) -> list[Digest]:
        for digest, state in self.states.items():
            if state is Residency.LOADING and self._rng.random() < 0.4:
                self.states[digest] = Residency.RESIDENT
            elif state is Residency.RESIDENT and not self.pins.get(digest) and self._rng.random() < 0.3:
                self.states[digest] = Residency.LOADING
        return self.changed()

    def tier(self, digest: Digest) -> Tier:
        return Tier.DEVICE if self.states.get(digest) is Residency.RESIDENT else Tier.DISK

    def prefetch(self, refs: object) -> None:
        pass

    def handle(self, digest: Digest) -> int:
        assert self.states[digest] is Residency.RESIDENT
        assert self.pins[digest] > 0
        return digest_of(digest)

    def check(self) -> list[str]:
        return [f"{count} pins of {digest}" for digest, count in self.pins.items() if count < 0]

    def stats(self) -> dict[str, int]:
        return {}


@dataclass
class Received:
    """What one client has got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    ending: tuple[object, ...] | None = None
    pooled: bytes | None = None


class Simulation:
    """An engine over a simulated device, its clients, and its invariants after every step."""

    def __init__(
        self,
        *,
        overlap: bool,
        is_lazy: bool = False,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        token_budget: int = 32,
        seed: int = 0,
        vocab: int = VOCAB,
        invocations: dict[str, tuple[int, ...]] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        config = EngineConfig(
            model_dir="",
            model_id="simulated",
            store_url="",
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
        )
        self.max_num_seqs, self.token_budget = max_num_seqs, token_budget
        by_digest = {make_ref(name).digest: tokens for name, tokens in (invocations or {}).items()}
        self.device = SimulatedDevice(num_blocks, is_lazy, vocab=vocab, invocations=by_digest)
        self.pager = SimulatedPager(random.Random(seed))
        self.pager.invocations = by_digest
        self.engine = Engine(config, BASE, self.device, self.pager, overlap=overlap, speculation=speculation)
        self.received: dict[RequestId, Received] = {}

    def add(
        self,
        name: str,
        prompt: list[int],
        adapter: str | None = None,
        output: tuple[int, ...] = (),
        pooling: PoolingParams | None = None,
        **params: object,
    ) -> RequestId:
        request_id = RequestId(name)
        self.received[request_id] = Received()
        message = AddRequest(
            request_id=request_id,
            tenant=TenantId("t"),
            adapter=None if adapter is None else make_ref(adapter),
            prompt_token_ids=tuple(prompt),
            output_token_ids=output,
            params=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}),  # type: ignore[arg-type]
            pooling=pooling,
        )
        self.engine.add(msgspec.structs.replace(message, priority=0))
        return request_id

    def abort(self, request_id: RequestId) -> None:
        if self.engine.abort(request_id):
            self.received[request_id].ending = ("abort",)

    def step(self) -> list[TokenOutput]:
        num_batches = len(self.device.batches)
        outputs = self.engine.step()
        for output in outputs:
            got = self.received[output.request_id]
            assert got.ending is None, "an output after the last"
            got.token_ids.extend(output.token_ids)
            got.logprobs.extend(output.logprobs or ())
            got.pooled = output.pooled
            if output.prompt_logprobs is not None:
                assert got.prompt_logprobs is None
                got.prompt_logprobs = output.prompt_logprobs
            if output.finish_reason is not None:
                got.ending = (output.finish_reason, output.stop_reason, output.error_code)
        assert self.engine.check() == []
        for batch in self.device.batches[num_batches:]:
            assert len(batch.entries) <= self.max_num_seqs
            assert len(batch.token_ids) <= self.token_budget
        self._check_prefixes()
        return outputs

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_requests:
                self.check_idle()
                return
            self.step()
        raise AssertionError("requests never ended")

    def check_idle(self) -> None:
        stats = self.engine.stats()
        assert (stats.num_kv_blocks_used, self.pager.num_pins, stats.invariant_violations) == (0, 0, 0)
        assert self.device.num_out == 0
        assert stats.generation_tokens == sum(len(got.token_ids) for got in self.received.values())

    def rows(self) -> Counter[RequestId]:
        """How many rows of each request were launched."""
        rows: Counter[RequestId] = Counter()
        for batch in self.device.batches:
            for entry in batch.entries:
                rows[entry.request.request_id] += entry.num_tokens
        return rows

    def _check_prefixes(self) -> None:
        """What is offered as a prefix is on the device: none of it is still to be computed."""
        for block, cached in self.engine._kv.prefix_cache._cached.items():
            assert len(cached.token_ids) == BLOCK_SIZE
            memory = self.device.memory[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            assert tuple(memory) == cached.token_ids
