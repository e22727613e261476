"""A draft base on a CPU, beside a random Llama with PEFT adapters: whatever it says, and however
often it is right, each answer has the tokens and the logprobs of plain steps, to the last bit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraserve.engine.engine import Engine
from loraserve.engine.execution.runner import allocate_kv
from loraserve.engine.speculation.draft_base import DraftBase
from loraserve.engine.speculation.drafting import Drafting
from loraserve.engine.speculation.proposal import ProposalSource
from loraserve.engine.speculation.speculation import Speculation
from loraserve.engine.worker.startup import build_engine
from loraserve.errors import ConfigError, ModelError, TokenizerMismatch
from loraserve.memory.memory_plan import DRAFT_SEQUENCES
from loraserve.model.checkpoint.loader import load_model

from .conftest import World
from .test_overlap_on_cpu import answer
from .test_speculation import FlatCosts
from .test_speculation_on_cpu import NAMES, facts, random_work


def write_draft(base: Path, out: Path, num_layers: int = 3, *, noise: float = 0.0, vocab_size: int = 320) -> Path:
    """Write a base of another's first layers, or of all with some noise, that may lack tokens."""
    tensors = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    kept = {}
    for name, tensor in tensors.items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= num_layers:
            continue
        if noise:
            tensor = tensor + noise * torch.randn(tensor.shape, generator=generator)
        is_ends = name in ("model.embed_tokens.weight", "lm_head.weight")
        kept[name] = tensor[:vocab_size].contiguous() if is_ends else tensor
    shutil.copytree(base, out)
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": num_layers, "vocab_size": vocab_size, "layer_types": None})
    )
    return out


def load_draft(directory: Path, base: Engine, num_tokens: int = 128) -> DraftBase:
    decoder = load_model(
        directory, model_id="draft", dtype=torch.float32, quantize="none", device="cpu", max_model_len=num_tokens
    )
    return DraftBase(decoder, allocate_kv(decoder, DRAFT_SEQUENCES * num_tokens // 16, 16), base.base)


DRAFTS = {"the base itself": {}, "nearly the base": {"noise": 0.01}, "two of its layers": {"num_layers": 2}}


@pytest.fixture(scope="module")
def draft_dirs(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {name: write_draft(world.model_dir, root / name.replace(" ", "-"), **of) for name, of in DRAFTS.items()}


@pytest.fixture
def make_engine(world: World):
    engines: list[Engine] = []

    def make(draft_dir: Path | None = None, *, num_tokens: int = 128, **changes: object) -> Engine:
        plain = build_engine(world.config(speculation="off", **changes)).engine
        engines.append(plain)
        if draft_dir is None:
            return plain
        speculation = Speculation(drafting=Drafting(load_draft(draft_dir, plain, num_tokens)))
        speculation.costs = FlatCosts()
        config = world.config(**changes)
        return Engine(config, plain.base, plain._pipeline._runner, plain.pager, overlap=False, speculation=speculation)

    yield make
    for engine in engines:
        engine.pager.close()


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_answers_are_the_same_to_the_last_bit(world, make_engine, draft_dirs, draft, quantize):
    work = random_work(3, 20, NAMES)
    options = {"max_num_seqs": 6, "quantize": quantize}
    expected = answer(make_engine(**options), world, work)
    engine = make_engine(draft_dirs[draft], **options)
    assert [facts(outputs) for outputs in answer(engine, world, work)] == [facts(outputs) for outputs in expected]
    stats = engine.stats()
    assert stats.proposed_draft_tokens > len(work)
    assert stats.accepted_draft_tokens > 0
    assert stats.draft_s > 0
    assert not engine._speculation._drafting._is_broken
