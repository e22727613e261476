"""A cluster's engine is ready once a replica has answered."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from loraserve.config import EngineConfig
from loraserve.types import BaseSpec


@dataclass
class Handle:
    """Serve's handle of replicas of which the first ones are gone when they are asked."""

    base: BaseSpec
    num_gone: int
    error: type[Exception]
    asked: list[str] = field(default_factory=list)

    def options(self, *, method_name: str, stream: bool = False) -> Handle:
        return self

    def remote(self, message: bytes, **placement: object) -> Awaitable[bytes]:
        return self._answer()

    async def _answer(self) -> bytes:
        self.asked.append("describe")
        if len(self.asked) <= self.num_gone:
            raise self.error
        return msgspec.msgpack.encode(self.base)


class Context:
    def get_node_id(self) -> str:
        return "node"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Pydantic, when Ray is imported
async def test_engine_starts_though_first_replica_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_base: BaseSpec
) -> None:
    ray = pytest.importorskip("ray", reason="the extra ray")
    from loraserve.cluster import engine as engine_module

    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(engine_module, "_LOOK_S", 0.0)
    handle = Handle(small_base, num_gone=2, error=ray.exceptions.RayActorError)
    engine = engine_module.ClusterEngine(
        handle, EngineConfig(model_dir=str(tmp_path), model_id="tiny", store_url=""), tokenizer=None, drain_s=1.0
    )
    assert not engine.is_ready
    await engine.start()
    assert len(handle.asked) == 3
    assert engine.base == small_base
