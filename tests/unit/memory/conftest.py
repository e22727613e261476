from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save

from adapters_store import LocalStore
from loraserve.memory.devices.base import AdapterDevice, HostAdapter
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.adapter_metadata import AdapterMetadata, LoadedAdapter
from loraserve.memory.loading.precision import EXACT, Precision
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.pager import Pager
from loraserve.types import AdapterRef, BaseSpec, Digest, TenantId
from loraserve_kernels.cpu.lora.layout import LoraModule, PackedAdapter, pack_adapter
from loraserve_kernels.gpu.paged.pool import PagedPool

MODULES = {"q_proj": (32, 32), "v_proj": (16, 32), "down_proj": (32, 48)}
BASE = BaseSpec(
    id="tiny",
    digest=Digest("0" * 64),
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=32,
    vocab_size=64,
    max_model_len=128,
    modules=MODULES,
    module_paths={"q_proj": "self_attn.q_proj", "v_proj": "self_attn.v_proj", "down_proj": "mlp.down_proj"},
    layers_path="model.layers",
    eos_token_ids=(0,),
    dtype="float32",
    quantization="none",
)

RANK_BYTES = 2 * (32 + 32) * 4 + 32
"""What a quarter of an adapter of rank 4 on q_proj takes in both layers, in float32: its weights,
and its part of the rows of scalings, padded to 16.
"""


def make_base(modules: dict[str, tuple[int, int]], **fields: Any) -> BaseSpec:
    """A base of two layers with other linears."""
    return msgspec.structs.replace(BASE, modules=modules, **fields)


class Clock:
    """Stands still unless told to go on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def publish(
    store: LocalStore, *, rank: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> AdapterRef:
    """An adapter on q_proj in both layers, in the store as an upload leaves it."""
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = MODULES["q_proj"]
    tensors = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator).to(dtype)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator).to(dtype)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"], **config}
    blobs = []
    for data in (json.dumps(settings).encode(), save(tensors)):
        with store.stage() as staged:
            staged.write(data)
            blobs.append(staged.commit())
    return AdapterRef(
        tenant=TenantId("t"),
        name=f"adapter-{seed}",
        version=1,
        digest=Digest(hashlib.sha256("".join(blobs).encode()).hexdigest()),
        config_blob=blobs[0],
        weights_blob=blobs[1],
    )


def settle(pager: Pager, timeout_s: float = 10.0) -> list[Digest]:
    """Poll until no load is in flight; everything that changed meanwhile.

    Each poll finds all loads done: no race decides.
    """
    deadline = time.monotonic() + timeout_s
    changed = []
    while True:
        while pager._loaders._results.qsize() < pager.num_loading:
            assert time.monotonic() < deadline, "a load hangs"
            time.sleep(0.0002)
        changed += pager.poll()
        if not pager.num_loading:
            return changed


def make_packed(rank: int = 4) -> PackedAdapter:
    out_features, in_features = MODULES["q_proj"]
    modules = [
        LoraModule(layer, "q_proj", torch.ones(rank, in_features), torch.ones(out_features, rank), 1.0)
        for layer in (0, 1)
    ]
    return pack_adapter(modules, num_layers=2, module_shapes=MODULES, dtype=torch.float32)


def make_loaded(host: HostAdapter | int = 4, **metadata: Any) -> LoadedAdapter:
    """An adapter as the loader hands it over; a number is a rank."""
    return LoadedAdapter(make_packed(host) if isinstance(host, int) else host, AdapterMetadata(**metadata))


def make_digest(name: object) -> Digest:
    return Digest(hashlib.sha256(str(name).encode()).hexdigest())


def make_ref(name: str, tenant: str = "t") -> AdapterRef:
    """An adapter that no store has; its digest is its name."""
    digest = Digest(name)
    return AdapterRef(
        tenant=TenantId(tenant), name=name, version=1, digest=digest, config_blob=digest, weights_blob=digest
    )


def damage(store: LocalStore, digest: Digest) -> bytes:
    """Flip a bit of a blob; returns its right bytes."""
    path = store.root / digest[:2] / digest[2:4] / digest
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return data


def restore(store: LocalStore, data: bytes) -> None:
    with store.stage() as staged:
        staged.write(data)
        staged.commit()


PAGE_BYTES = 256
"""Four rows of q_proj in bfloat16: one rank in both layers."""


def make_pool(*, num_pages: int = 64, max_tiles: int = 32, max_slots: int = 33) -> PagedPool:
    """An empty pool for `BASE`, of random bytes."""
    pool = PagedPool(
        num_pages=num_pages,
        page_num_bytes=PAGE_BYTES,
        num_layers=BASE.num_layers,
        max_tiles=max_tiles,
        max_slots=max_slots,
        module_shapes=MODULES,
        dtype=torch.bfloat16,
        device="cpu",
    )
    pool.data.copy_(torch.randint(0, 256, pool.data.shape, dtype=torch.uint8))
    return pool


def make_modules(
    rank: int = 4, *, seed: int = 0, names: tuple[str, ...] = ("q_proj",), layers: tuple[int, ...] = (0, 1)
) -> list[LoraModule]:
    generator = torch.Generator().manual_seed(seed)
    return [
        LoraModule(
            layer,
            name,
            torch.randn(rank, MODULES[name][1], generator=generator),
            torch.randn(MODULES[name][0], rank, generator=generator),
            2.0,
        )
        for layer in layers
        for name in names
    ]


class Builders:
    """What the tests of this folder make things with."""

    base = BASE
    base_of = staticmethod(make_base)
    cpu = CpuDevice(BASE, 1 << 30)
    rank_bytes = RANK_BYTES
    publish = staticmethod(publish)
    ref = staticmethod(make_ref)
    settle = staticmethod(settle)
    packed = staticmethod(make_packed)
    loaded = staticmethod(make_loaded)
    page_bytes = PAGE_BYTES
    pool = staticmethod(make_pool)
    modules = staticmethod(make_modules)
    digest = staticmethod(make_digest)
    damage = staticmethod(damage)
    restore = staticmethod(restore)
    Clock = Clock


@pytest.fixture(scope="session")
def make() -> type[Builders]:
    return Builders


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = LocalStore(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def make_pager(store: LocalStore, clock: Clock) -> Iterator[Callable[..., Pager]]:
    made: list[Pager] = []

    def run(
        *,
        device_ranks: float = 100,
        host_ranks: float = 100,
        num_threads: int = 2,
        dtype: torch.dtype | None = None,
        device: AdapterDevice | None = None,
        precision: Precision = EXACT,
    ) -> Pager:
        """Budgets in ranks of `publish`'s adapters; a CPU's device unless one is given."""
        pager = Pager(
            store,
            BASE,
            DeviceCache(device or CpuDevice(BASE, int(device_ranks * RANK_BYTES), dtype), clock),
            HostCache(int(host_ranks * RANK_BYTES)),
            num_threads,
            precision=precision,
            clock=clock,
        )
        made.append(pager)
        return pager

    yield run
    for pager in made:
        pager.close()
        assert pager.check() == []
