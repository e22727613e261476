"""The demo's base with the markers of every family as special tokens, and engines of it that
propose whatever can be proposed, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from loraserve.config import EngineConfig
from loraserve.demo.pack import base_dir
from loraserve.engine.engine import Engine
from loraserve.engine.grammar.constraints import Constraints
from loraserve.engine.speculation.speculation import Speculation
from loraserve.engine.step_costs import StepCosts
from loraserve.engine.worker.startup import build_engine
from loraserve.engine_client.live_request import LiveRequest
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import Chunk, OutputProcessor
from loraserve.errors import error_from_code
from loraserve.limits import MIB
from loraserve.text.grammar import GrammarCompiler
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import AdapterResidency, BaseSpec, Digest, EngineStats, FinishReason, TenantId


def write_marked(path: Path, markers: Iterable[str]) -> None:
    """Write the demo's base, its last tokens replaced by special ones."""
    markers = tuple(markers)
    data = json.loads((base_dir() / "tokenizer.json").read_text())
    vocab, first = data["model"]["vocab"], len(data["model"]["vocab"]) - len(markers)
    gone = {text for text, token_id in vocab.items() if token_id >= first}
    data["model"]["merges"] = [pair for pair in data["model"]["merges"] if not gone & {*pair, "".join(pair)}]
    for text in gone:
        del vocab[text]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    for token_id, text in enumerate(markers, start=first):
        vocab[text] = token_id
        data["added_tokens"].append({"id": token_id, "content": text, **flags})
    for file in base_dir().iterdir():
        if file.is_file() and file.name != "tokenizer.json":
            (path / file.name).symlink_to(file)
    (path / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))


class FlatCosts(StepCosts):
    """Steps that cost the same however many rows they have: all that is found is proposed."""

    def of(self, num_rows: int) -> float:
        return 1.0


def make_engines(model_dir: Path, store: Path) -> tuple[Engine, Engine]:
    """Return two engines of one base: one that proposes tokens, and one that doesn't."""
    config = EngineConfig(
        model_dir=str(model_dir),
        model_id="marked",
        store_url=f"file://{store}",
        memory_budget_bytes=32 * MIB,
        host_cache_bytes=8 * MIB,
        num_threads=1,
        speculation="off",
    )
    plain = build_engine(config).engine
    tokenizer = Tokenizer(model_dir)
    speculation = Speculation()
    speculation.costs = FlatCosts()
    assert tokenizer.eos_token_id is not None
    proposing = Engine(
        config,
        plain.base,
        plain._pipeline._runner,
        plain.pager,
        overlap=False,
        speculation=speculation,
        constraints=Constraints(
            GrammarCompiler(model_dir, tokenizer.vocab_size, [tokenizer.eos_token_id]), are_beside_steps=False
        ),
    )
    return proposing, plain


@dataclass
class EngineHere:
    """An engine client whose engine steps in this process, one request at a time.

    Attributes:
        said: tokens of the last answers.
        failures: codes of the errors that ended answers.
    """

    engine: Engine
    base: BaseSpec
    tokenizer: Tokenizer
    is_ready: bool = True
    is_live: bool = True
    status: str | None = None
    num_restarts: int = 0
    num_hangs: int = 0
    num_waiting_clients: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    said: list[tuple[int, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def forget_texts(self, owner: TenantId, name: str | None = None, version: int | None = None) -> None: ...

    async def residency(self, only: Collection[Digest] | None = None) -> tuple[AdapterResidency, ...]:
        return ()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the answer, a chunk for each step that computed something of it."""
        processor = OutputProcessor(request, self.tokenizer)
        self.said.append(())
        self.engine.add(msgspec.structs.replace(LiveRequest(request).begin_sending(), output_token_ids=()))
        try:
            while self.engine.has_requests:
                for output in self.engine.step():
                    self.said[-1] += output.token_ids
                    if output.finish_reason is FinishReason.ERROR:
                        self.failures.append(output.error_code or "")
                        raise error_from_code(output.error_code or "", output.error_message or "")
                    yield processor.push(output)
        finally:
            self.engine.abort(request.request_id)
            while self.engine.has_requests:
                self.engine.step()
        assert self.engine.check() == []
