"""Verifications on a GPU's engine, its kernels in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from ..conftest import World
from ..test_gpu_engine import GPU
from .test_verification import make_engine, replies

__all__ = ["make_engine"]

pytestmark = pytest.mark.interpreted


@pytest.mark.campaign
def test_probes_come_back_from_the_device(world: World, make_engine) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine(**{**GPU, "max_num_batched_tokens": 64})
    (reply,) = replies(engine, world.refs["rs"])
    found = reply.certificate
    assert found is not None, reply
    assert found.verdict == "passed", found.reason
    assert 0 < found.base_difference < 1
    assert found.num_probe_tokens == 30
