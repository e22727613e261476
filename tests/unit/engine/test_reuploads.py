"""A name may point to other weights tomorrow:
keys and values that the old ones made answer nobody who asks the new ones.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from adapters_store import open_store
from loraserve.engine.engine import Engine
from loraserve.engine.worker.startup import build_engine
from loraserve.engine_client.messages import AddRequest
from loraserve.memory.kv import prefix_cache
from loraserve.memory.kv.prefix_cache import Activation
from loraserve.types import AdapterRef, Digest, RequestId, SamplingParams, TenantId

from .conftest import World, store_adapter

PROMPT = [(7 * i) % 311 for i in range(50)]


@pytest.fixture(scope="module")
def versions(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[AdapterRef, list[int]]]:
    """Two versions of one name, and what PEFT answers with each."""
    root, store, found = tmp_path_factory.mktemp("versions"), open_store(world.store_url), []
    for number in range(2):
        torch.manual_seed(number)
        base = AutoModelForCausalLM.from_pretrained(world.model_dir)
        model = get_peft_model(
            base, LoraConfig(r=4, lora_alpha=8, target_modules=["k_proj", "v_proj"], task_type="CAUSAL_LM")
        )
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter.data, std=0.3)
        model.save_pretrained(root / str(number) / "same")
        ref = store_adapter(store, root / str(number) / "same")
        found.append((ref, greedy(model.eval(), 6)))
    return found


def greedy(model: Any, count: int) -> list[int]:
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def answer(engine: Engine, ref: AdapterRef, number: int) -> list[int]:
    engine.add(
        AddRequest(
            request_id=RequestId(f"r{number}"),
            tenant=TenantId("t"),
            adapter=ref,
            prompt_token_ids=tuple(PROMPT),
            params=SamplingParams(max_tokens=6, temperature=0.0),
        )
    )
    tokens: list[int] = []
    while engine.has_requests:
        tokens += [token for output in engine.step() for token in output.token_ids]
    return tokens


def answers_of(world: World, versions: list[tuple[AdapterRef, list[int]]]) -> list[list[int]]:
    engine = build_engine(world.config()).engine
    try:
        return [answer(engine, ref, number) for number, (ref, _) in enumerate([*versions, versions[0]])]
    finally:
        engine.pager.close()


def test_each_version_answers_with_own_weights(world: World, versions: list[tuple[AdapterRef, list[int]]]) -> None:
    first, second = (expected for _, expected in versions)
    assert first != second
    assert versions[0][0].name == versions[1][0].name
    assert answers_of(world, versions) == [first, second, first]


def test_kv_keyed_by_name_would_be_stale(
    world: World, versions: list[tuple[AdapterRef, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant that keys them by the adapter's name, as some servers do:
    what this file is against.
    """

    name, key = Digest(hashlib.sha256(b"same").hexdigest()), prefix_cache.activate_key
    monkeypatch.setattr(
        prefix_cache, "activate_key", lambda parent, activation: key(parent, Activation(name, activation.start))
    )
    first, second = (expected for _, expected in versions)
    answers = answers_of(world, versions)
    assert answers[0] == first
    assert answers[1] != second
