"""Requests that pool on a GPU, its kernels in Triton's interpreter, in float16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from loraserve.types import PoolingKind

from .conftest import World
from .test_gpu_engine import make_gpu_engine as make_gpu_engine
from .test_pooling import KINDS, add, expected, prompts, run, vector

pytestmark = pytest.mark.interpreted


def test_step_pools_and_samples_as_in_peft(world: World, make_gpu_engine: Any) -> None:
    engine, wanted = make_gpu_engine(), {}
    for i, prompt in enumerate(prompts(3, high=20)):
        name = ("r8", None, "rs")[i]
        wanted[add(engine, world, prompt, name, kind=KINDS[i])] = expected(world, prompt, name, KINDS[i])
    plain = add(engine, world, [5, 6, 7], "r8", kind="none", max_tokens=2)
    outputs = run(engine)
    for request_id, pooled in wanted.items():
        np.testing.assert_allclose(vector(outputs[request_id]), pooled, atol=0.01)
    alone = add(engine, world, [5, 6, 7], "r8", kind="none", max_tokens=2)
    again = run(engine)
    assert [o.token_ids for o in outputs[plain]] == [o.token_ids for o in again[alone]]


def test_chunks_and_neighbours_change_no_bit(world: World, make_gpu_engine: Any) -> None:
    engine, prompt = make_gpu_engine(max_num_batched_tokens=13), prompts(1, seed=2, low=20, high=20)[0]
    ids = [add(engine, world, prompt, "r8", kind=kind) for kind in (PoolingKind.MEAN, PoolingKind.CLS)]
    outputs = run(engine)
    for kind, request_id in zip((PoolingKind.MEAN, PoolingKind.CLS), ids, strict=True):
        alone = add(engine, world, prompt, "r8", kind=kind)
        [again] = run(engine)[alone]
        [together] = outputs[request_id]
        assert again.pooled == together.pooled
