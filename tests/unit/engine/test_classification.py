"""Prompts that an adapter's classification head reads: PEFT on transformers'
AutoModelForSequenceClassification is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from adapters_store import open_store
from loraserve.engine.engine import Engine
from loraserve.types import AdapterRef, FinishReason, PoolingKind

from .conftest import World, store_adapter
from .test_pooling import add, expected, make_engine, prompts, run, vector

__all__ = ["make_engine"]

Classifier = tuple[AdapterRef, Callable[[list[int]], np.ndarray]]


@pytest.fixture(scope="module")
def world(world: World) -> World:
    """The session's base, with adapters that other modules' tests don't see."""
    return replace(world, refs=dict(world.refs))


@pytest.fixture(scope="module")
def classifiers(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Classifier]:
    """Adapters of the task SEQ_CLS, and the logits that PEFT gives for a prompt."""
    torch.manual_seed(1)
    root, made = tmp_path_factory.mktemp("classifiers"), {}
    for name, num_labels, options in (
        ("one", 1, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
        ("two", 2, {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "bias": "all"}),
        ("five", 5, {"r": 2, "lora_alpha": 4, "target_modules": ["down_proj"], "use_dora": True}),
    ):
        base = transformers.AutoModelForSequenceClassification.from_pretrained(world.model_dir, num_labels=num_labels)
        model = peft.get_peft_model(base.eval(), peft.LoraConfig(task_type="SEQ_CLS", **options))
        for key, parameter in model.named_parameters():
            if "lora_A" in key or "lora_B" in key or ("score" in key and parameter.requires_grad):
                torch.nn.init.normal_(parameter.data, std=0.2)
        model.save_pretrained(str(root / name))

        def logits(prompt: list[int], model: Any = model) -> np.ndarray:
            with torch.inference_mode():
                return model(torch.tensor([prompt])).logits[0].numpy()

        made[name] = (store_adapter(open_store(world.store_url), root / name), logits)
    return made


def classify(engine: Engine, world: World, prompt: list[int], ref: AdapterRef | None) -> Any:
    world.refs["classifier"] = ref  # type: ignore[assignment]
    return add(engine, world, prompt, None if ref is None else "classifier", kind=PoolingKind.LAST, classify=True)


def test_mixed_batch_is_classified_as_in_peft(
    world: World, make_engine: Any, classifiers: dict[str, Classifier]
) -> None:
    for budget in (64, 17):
        engine, wanted = make_engine(max_num_batched_tokens=budget), {}
        for i, prompt in enumerate(prompts(12, seed=3)):
            ref, logits = classifiers[("one", "two", "five")[i % 3]]
            wanted[classify(engine, world, prompt, ref)] = logits(prompt)
            add(engine, world, prompt, "r8", kind="none", max_tokens=3)
        outputs = run(engine)
        for request_id, numbers in wanted.items():
            assert numbers.shape in ((1,), (2,), (5,))
            np.testing.assert_allclose(vector(outputs[request_id]), numbers, atol=1e-4, rtol=1e-4)


def test_classifier_also_embeds_and_shares_pages(
    world: World, make_engine: Any, classifiers: dict[str, Classifier]
) -> None:
    engine, prompt = make_engine(), prompts(1, seed=5, low=20, high=20)[0]
    ref, logits = classifiers["one"]
    classify(engine, world, prompt, ref)
    run(engine)
    # its prompt's blocks are the adapter's, whatever is made of them
    again = classify(engine, world, prompt, ref)
    np.testing.assert_allclose(vector(run(engine)[again]), logits(prompt), atol=1e-4, rtol=1e-4)
    assert engine.stats().prefix_tokens_hit == 16
    world.refs["classifier"] = ref
    pooled = vector(_pool(engine, world, prompt))
    assert pooled.shape == (64,)
    assert not np.allclose(pooled, expected(world, prompt, None, PoolingKind.MEAN), atol=1e-2)
    size = {adapter.digest: adapter.device_bytes for adapter in engine.pager.residency()}
    assert engine.pager.metadata(ref.digest).head is engine.pager.handle(ref.digest).head
    assert size[ref.digest] >= engine.pager.handle(ref.digest).num_bytes


def _pool(engine: Engine, world: World, prompt: list[int]) -> Any:
    request_id = add(engine, world, prompt, "classifier", kind=PoolingKind.MEAN)
    return run(engine)[request_id]


def test_adapter_without_head_classifies_no_input(
    world: World, make_engine: Any, classifiers: dict[str, Classifier]
) -> None:
    engine = make_engine()
    for ref in (world.refs["r8"], None):
        failed = classify(engine, world, [1, 2, 3], ref)
        good = classify(engine, world, [1, 2, 3], classifiers["two"][0])
        outputs = run(engine)
        [output] = outputs[failed]
        assert (output.finish_reason, output.error_code) == (FinishReason.ERROR, "invalid_value")
        assert vector(outputs[good]).shape == (2,)
