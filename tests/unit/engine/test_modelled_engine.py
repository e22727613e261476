"""The engine with its default settings on bases that transformers' code computes: what shares a
step, a prefix or too little memory changes no token. transformers and PEFT are the oracles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loraserve.engine.engine import Engine

from .conftest import World, make_engines, save_modelled_world
from .test_engine import add, prompts, run

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Cohere2": ({"sliding_window": 9, "num_key_value_heads": 2}, ["q_proj", "o_proj", "down_proj"]),
    "GPTNeoX": ({}, ["query_key_value", "dense", "dense_4h_to_h"]),
    "GptOss": (
        {"sliding_window": 9, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4},
        ["q_proj", "v_proj", "o_proj"],
    ),
}
"""transformers' config → fields of its own, and the linears that adapters change."""
NAMES = [None, "first", "second"]
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module", params=FAMILIES)
def modelled_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    options, targets = FAMILIES[request.param]
    return save_modelled_world(request.param, tmp_path_factory.mktemp(request.param), options, targets)


@pytest.fixture
def make_engine(modelled_world: World) -> Iterator[MakeEngine]:
    yield from make_engines(modelled_world)


def test_mixed_batch_in_chunks_equals_peft(modelled_world: World, make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=23)
    wanted = {}
    for i, prompt in enumerate(prompts(9)):
        name = NAMES[i % len(NAMES)]
        wanted[add(engine, modelled_world, prompt, name)] = modelled_world.expected(name, prompt, 12)
    assert run(engine) == wanted


def test_repeated_prompt_hits_own_prefix(modelled_world: World, make_engine: MakeEngine) -> None:
    engine = make_engine()
    (prompt,) = prompts(1, seed=9, low=70, high=70)
    for num_hits in range(2):
        for name in NAMES:
            before = engine.stats().prefix_tokens_hit
            request_id = add(engine, modelled_world, prompt, name)
            assert run(engine)[request_id] == modelled_world.expected(name, prompt, 12)
            assert (engine.stats().prefix_tokens_hit > before) == bool(num_hits)


@pytest.mark.usefixtures("quick_loads")
def test_preemption_changes_no_token(modelled_world: World, make_engine: MakeEngine) -> None:
    config = modelled_world.model.config
    num_kv_heads = getattr(config, "num_key_value_heads", 4)
    # 13 blocks of 16 tokens, less what adapters take, for 8 requests of up to 70
    engine = make_engine(
        memory_budget_bytes=13 * 16 * 4 * 2 * num_kv_heads * 16 * 4,
        max_model_len=96,
        max_num_batched_tokens=23,
        max_num_seqs=8,
    )
    wanted = {}
    (shared,) = prompts(1, seed=5, low=40, high=40)
    for i, tail in enumerate(prompts(10, seed=6, low=1, high=8)):
        name = NAMES[i % 2]
        request_id = add(engine, modelled_world, shared + tail, name, max_tokens=22)
        wanted[request_id] = modelled_world.expected(name, shared + tail, 22)
    assert run(engine) == wanted
    assert engine.stats().num_preemptions > 0
    assert engine.stats().prefix_tokens_hit > 0
