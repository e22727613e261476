"""Builders for the engine's tests: a request, a scheduler over real KV bookkeeping, adapters that
arrive when the test says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import torch

from adapters_store import BlobStore, open_store
from loraserve.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.probe import Probe
from loraserve.engine.request import Request
from loraserve.engine.scheduled import ScheduledRequest, StepResult
from loraserve.engine.scheduling.fair_queue import AdapterFlow
from loraserve.engine.scheduling.scheduler import Scheduler
from loraserve.engine.worker.startup import build_engine
from loraserve.errors import AdapterCorrupt, LoraserveError
from loraserve.limits import MIB
from loraserve.memory.kv.block_pool import BlockPool
from loraserve.memory.kv.prefix_cache import prefix_root
from loraserve.memory.loading.adapter_metadata import AdapterMetadata
from loraserve.memory.residency.loader import LoaderPool
from loraserve.types import AdapterRef, Digest, RequestId, Residency, SamplingParams, TenantId, TokenOutput

ADAPTERS = {
    "r1": {"r": 1, "lora_alpha": 4, "target_modules": ["q_proj"]},
    "r8": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    },
    "rs": {
        "r": 6,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["down_proj", "v_proj"],
        "layers_to_transform": [1],
    },
    "mixed": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["gate_proj", "up_proj", "o_proj"],
        "rank_pattern": {"gate_proj": 12},
        "alpha_pattern": {"o_proj": 20},
    },
}

EOS = 7
_numbers = itertools.count()


@pytest.fixture
def quick_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each load end before the step that asked for it goes on.

    Which requests share a step, and so who is preempted, is then the same on a busy machine.
    """
    start = LoaderPool.start

    def start_and_wait(self: LoaderPool, ref: AdapterRef, tenants: Iterable[TenantId]) -> None:
        start(self, ref, tenants)
        while self._results.qsize() < len(self):
            time.sleep(0.0005)

    monkeypatch.setattr(LoaderPool, "start", start_and_wait)


def make_ref(name: str, tenant: str = "t") -> AdapterRef:
    digest = Digest(name.encode().hex().ljust(64, "0"))
    return AdapterRef(
        tenant=TenantId(tenant), name=name, version=1, digest=digest, config_blob=digest, weights_blob=digest
    )


def make_request(
    num_prompt_tokens: int = 4,
    *,
    adapter: str | None = None,
    tokens: list[int] | None = None,
    priority: int = 0,
    tenant: str = "t",
    weight: float = 1.0,
    kv_share: float = 1.0,
    timeout_s: float | None = None,
    arrival_s: float = 0.0,
    **params: object,
) -> Request:
    number = next(_numbers)
    ref = None if adapter is None else make_ref(adapter)
    # every prompt its own, so that no test shares prefixes by accident
    token_ids = tokens if tokens is not None else [100 + number * 1000 + i for i in range(num_prompt_tokens)]
    return Request(
        request_id=RequestId(f"r{number}"),
        tenant=TenantId(tenant),
        adapter=ref,
        params=SamplingParams(**{"max_tokens": 3, "temperature": 0.0, **params}),  # type: ignore[arg-type]
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        priority=priority,
        prefix_root=prefix_root(TenantId(tenant), Digest("b"), "float32"),
        arrival_s=arrival_s,
        sequence_number=number,
        weight=weight,
        kv_share=kv_share,
        timeout_s=timeout_s,
    )


def as_probe(request: Request, token_ids: Sequence[int] | None = None) -> Request:
    """Return the same request, made by the engine for the logits of these tokens or its prompt."""
    probe = Probe(request.request_id, list(request.token_ids if token_ids is None else token_ids))
    return dataclasses.replace(request, probe=probe)


class CountedPin:
    def __init__(self, adapters: Adapters, digest: Digest) -> None:
        self._adapters, self._digest = adapters, digest
        adapters.pins[digest] = adapters.pins.get(digest, 0) + 1

    def release(self) -> None:
        self._adapters.pins[self._digest] -= 1


@dataclass
class Adapters:
    """An AdapterSource whose states the test sets."""

    states: dict[Digest, Residency] = field(default_factory=dict)
    pins: dict[Digest, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Names, in the order of the scheduler's questions."""
    invocations: dict[Digest, tuple[int, ...]] = field(default_factory=dict)
    """Of those that don't act on every token."""
    is_admission_paused: bool = False
    mean_load_s: float = 0.0
    read_s: float = 0.0
    """What each load took."""
    num_uses: int = 0
    """Pins that count as one of their adapter."""
    shares: dict[Digest, float] = field(default_factory=dict)
    """Parts of the device's memory that adapters take."""
    ahead: list[str] = field(default_factory=list)
    """Names, of the last look ahead."""
    answered: dict[Digest, Residency] = field(default_factory=dict)
    """The last answer about each."""

    def request(self, ref: AdapterRef) -> Residency:
        self.asked.append(ref.name)
        self.answered[ref.digest] = self.states.get(ref.digest, Residency.LOADING)
        return self.answered[ref.digest]

    def changed(self) -> list[Digest]:
        """As a pager's poll: those of which another answer would be given now."""
        return [digest for digest, state in self.answered.items() if state is not self.states.get(digest, state)]

    def error(self, digest: Digest) -> LoraserveError | None:
        return AdapterCorrupt("bad bytes")

    def pin(self, digest: Digest, *, is_use: bool = True) -> CountedPin:
        self.num_uses += is_use
        return CountedPin(self, digest)

    def metadata(self, digest: Digest) -> AdapterMetadata:
        assert self.states[digest] is Residency.RESIDENT
        return AdapterMetadata(invocation_token_ids=self.invocations.get(digest, ()), read_s=self.read_s)

    def memory_share(self, digest: Digest) -> float:
        return self.shares.get(digest, 0.0)

    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        self.ahead = [ref.name for ref in refs]

    def set(self, name: str, state: Residency, invocation_token_ids: tuple[int, ...] = ()) -> None:
        self.states[make_ref(name).digest] = state
        self.invocations[make_ref(name).digest] = invocation_token_ids


class Harness:
    """A scheduler, and steps in which every sampled token is 1 (or what `tokens` says)."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, token_budget: int = 32
    ) -> None:
        self.kv = BlockPool(num_blocks, block_size)
        self.adapters = Adapters()
        self.now = 0.0
        self._flows: dict[RequestId, AdapterFlow] = {}
        self.scheduler = Scheduler(
            self.kv,
            self.adapters,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            eos_token_ids=[EOS],
            clock=lambda: self.now,
        )

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self._flows[request.request_id] = self.scheduler._fair_queue.flow(request)

    def flow(self, request: Request) -> AdapterFlow:
        """What an added request is charged to, also once it has ended."""
        return self._flows[request.request_id]

    def schedule(self) -> list[ScheduledRequest]:
        self.scheduler.note_changed(self.adapters.changed())
        scheduled = self.scheduler.schedule()
        assert self.kv.check() == []
        return scheduled

    def step(self, token_id: int = 1, **result: object) -> tuple[list[ScheduledRequest], list[TokenOutput]]:
        scheduled = self.schedule()
        outputs = self.update(scheduled, token_id, **result)
        assert self.kv.check() == []
        return scheduled, outputs

    def update(self, scheduled: list[ScheduledRequest], token_id: int = 1, **result: object) -> list[TokenOutput]:
        results = [
            StepResult((token_id,) if entry.is_sampled and entry.request.params.max_tokens else (), **result)  # type: ignore[arg-type]
            for entry in scheduled
        ]
        return self.scheduler.take_failed() + self.scheduler.update(scheduled, results)

    def run(self, max_steps: int = 1000) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for _ in range(max_steps):
            if not self.scheduler.has_requests:
                return outputs
            outputs += self.step()[1]
        raise AssertionError("requests never ended")


@pytest.fixture
def harness() -> Harness:
    return Harness()


def write_tokenizer(model_dir: Path) -> None:
    """A byte-level tokenizer of 256 bytes and 64 merges."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(model_dir / "tokenizer.json"))


class GreedyText(Sequence[int]):
    """The likeliest tokens after a prompt, computed when they are read or compared.

    A pass of the model over a text shows how much of it is greedy: one that is takes a single pass,
    instead of one for each token.

    Args:
        likeliest: returns the likeliest token after each of a sequence's.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, likeliest: Callable[[list[int]], list[int]], prompt: list[int], count: int) -> None:
        self._likeliest, self._prompt, self._count = likeliest, list(prompt), count
        self._tokens: list[int] | None = None

    def tokens(self, guess: Sequence[int] = ()) -> list[int]:
        """Return them; `guess` is what they may be, and changes nothing but how long that takes."""
        if self._tokens is None:
            found: list[int] = []
            while len(found) < self._count:
                tried = [*found, *guess[len(found) : self._count - 1]]
                likeliest = self._likeliest([*self._prompt, *tried])[len(self._prompt) - 1 :]
                num_right = next((i for i, token in enumerate(tried) if likeliest[i] != token), len(tried))
                if num_right < len(tried):
                    guess = ()
                found = likeliest[: num_right + 1]
            self._tokens = found
        return self._tokens

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self.tokens()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and self.tokens(other) == other

    def __repr__(self) -> str:
        return repr(self.tokens())


@dataclass
class World:
    """A base on disk, its adapters in a store, and what transformers and PEFT say."""

    model_dir: Path
    store_url: str
    refs: dict[str, AdapterRef]
    model: Any
    texts: dict[tuple[str | None, tuple[int, ...], int], GreedyText] = field(default_factory=dict)

    def config(self, **changes: object) -> EngineConfig:
        config = EngineConfig(
            model_dir=str(self.model_dir),
            model_id="tiny",
            store_url=self.store_url,
            memory_budget_bytes=8 * MIB,
            host_cache_bytes=8 * MIB,
            max_num_batched_tokens=64,
        )
        return msgspec.structs.replace(config, **changes)

    def expected(self, adapter: str | None, prompt: list[int], count: int) -> GreedyText:
        key = (adapter, tuple(prompt), count)
        if key not in self.texts:
            self.texts[key] = GreedyText(lambda ids: self._likeliest(adapter, ids), prompt, count)
        return self.texts[key]

    @torch.inference_mode()
    def _likeliest(self, adapter: str | None, ids: list[int]) -> list[int]:
        """Return the likeliest token after each of these."""
        if adapter is None:
            with self.model.disable_adapter():
                logits = self.model(torch.tensor([ids])).logits
        else:
            self.model.set_adapter(adapter)
            logits = self.model(torch.tensor([ids])).logits
        tokens: list[int] = logits[0].argmax(-1).tolist()
        return tokens


def store_adapter(store: BlobStore, directory: Path) -> AdapterRef:
    """Put what PEFT saved in this directory into the store;
    the directory's name becomes the adapter's.
    """
    blobs = []
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        with store.stage() as staged:
            staged.write((directory / file).read_bytes())
            blobs.append(staged.commit())
    digest = Digest(hashlib.sha256("".join(blobs).encode()).hexdigest())
    return AdapterRef(
        tenant=TenantId("t"), name=directory.name, version=1, digest=digest, config_blob=blobs[0], weights_blob=blobs[1]
    )


def save_world(root: Path, base: Any, adapters: Mapping[str, Mapping[str, Any]]) -> World:
    """Save a base and random adapters of it below `root`, and store them.

    Args:
        base: transformers' model.
        adapters: fields of PEFT's config of each, by name.
    """
    import peft

    base.save_pretrained(root / "base")
    write_tokenizer(root / "base")
    store_url = f"file://{root}/blobs"
    store = open_store(store_url)
    model: peft.PeftModel | None = None
    refs = {}
    for name, options in adapters.items():
        lora = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        if model is None:
            model = peft.get_peft_model(base, lora, adapter_name=name)
        else:
            model.add_adapter(name, lora)
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                torch.nn.init.normal_(parameter.data, std=0.2)
        model.save_pretrained(str(root / "adapters"), selected_adapters=[name])
        refs[name] = store_adapter(store, root / "adapters" / name)
    assert model is not None
    return World(root / "base", store_url, refs, model.eval())


def save_modelled_world(name: str, root: Path, options: Mapping[str, Any], targets: Sequence[str]) -> World:
    """Save a random base of a class of transformers, and the adapters ``first`` and ``second``.

    Args:
        name: of the class's config, without ``Config``.
        options: fields of that config beside the sizes that all have here.
        targets: linears that both adapters change.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    ranks: dict[str, dict[str, Any]] = {"first": {"r": 8, "lora_alpha": 16}, "second": {"r": 3, "use_rslora": True}}
    return save_world(root, model, {name: {"target_modules": list(targets), **one} for name, one in ranks.items()})


def make_engines(world: World, **config: object) -> Iterator[Callable[..., Engine]]:
    """Yield what builds engines of a world, with changes of its config; close them afterwards."""
    engines: list[Engine] = []

    def make(**changes: object) -> Engine:
        engines.append(build_engine(world.config(**{**config, **changes})).engine)
        return engines[-1]

    yield make
    for engine in engines:
        engine.pager.close()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("engine")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=256,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return save_world(root, transformers.LlamaForCausalLM(config).eval(), ADAPTERS)
