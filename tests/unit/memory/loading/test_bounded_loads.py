"""Loads within a budget of host memory: LoKr of kilobytes that unfolds to megabytes."""

from __future__ import annotations

import hashlib
import threading
import tracemalloc
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import peft
import pytest
import transformers

from adapters_store import LocalStore
from loraserve.adapters.load_memory import Reservation
from loraserve.errors import AdapterUnavailable
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.memory.loading.bounded_loads import BoundedLoads
from loraserve.memory.loading.load import load_adapter
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.pager import Pager
from loraserve.types import AdapterRef, BaseSpec, Digest, Residency, TenantId

SIZE = 512


@pytest.fixture(scope="module")
def lokr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return PEFT's folder of a LoKr whose rank is 8 · 16 on two linears."""
    folder = tmp_path_factory.mktemp("lokr")
    config = transformers.LlamaConfig(
        hidden_size=SIZE, intermediate_size=8, num_hidden_layers=2, num_attention_heads=8, vocab_size=8
    )
    model = transformers.LlamaForCausalLM(config)
    lokr = peft.LoKrConfig(r=8, alpha=8, decompose_factor=16, target_modules=["q_proj", "o_proj"], init_weights=False)
    peft.get_peft_model(model, lokr).save_pretrained(folder)
    return folder


@pytest.fixture
def base(make: Any) -> BaseSpec:
    modules = {"q_proj": (SIZE, SIZE), "o_proj": (SIZE, SIZE)}
    paths = {name: f"self_attn.{name}" for name in modules}
    return make.base_of(modules, hidden_size=SIZE, vocab_size=8, module_paths=paths)


@pytest.fixture
def ref(lokr: Path, store: LocalStore) -> AdapterRef:
    blobs = []
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with store.stage() as staged:
            staged.write((lokr / name).read_bytes())
            blobs.append(staged.commit())
    return AdapterRef(
        tenant=TenantId("t"),
        name="lokr",
        version=1,
        digest=Digest(hashlib.sha256("".join(blobs).encode()).hexdigest()),
        config_blob=blobs[0],
        weights_blob=blobs[1],
    )


def test_load_counts_unpacked_bytes(base: BaseSpec, store: LocalStore, ref: AdapterRef) -> None:
    device, taken = CpuDevice(base, 1 << 30), list[int]()
    load_adapter(store, ref, base, device)
    tracemalloc.start()
    try:
        loaded = load_adapter(store, ref, base, device, take=taken.append)
        # NumPy's arrays; torch's packed tensors aren't traced
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    file_bytes = store.num_bytes(ref.weights_blob)
    factors_bytes = 2 * 2 * 4 * 128 * 2 * SIZE
    assert taken == [file_bytes, factors_bytes, device.footprint_of(loaded.host).num_bytes]
    assert factors_bytes > 30 * file_bytes
    # beside them, one module's product is in memory twice
    assert file_bytes + factors_bytes <= peak_bytes < file_bytes + 1.5 * factors_bytes


class Loads:
    """Loads of as many bytes each, which go on when the test lets them."""

    def __init__(self, store: LocalStore, loaded: LoadedAdapter, budget_bytes: int) -> None:
        self.bounded = BoundedLoads(store, self._load, budget_bytes)
        self.go_on = threading.Semaphore(0)
        self.unfolded = threading.Semaphore(0)
        self.max_running = 0
        self._loaded = loaded
        self._num_running = 0
        self._lock = threading.Lock()

    def _load(self, ref: AdapterRef, reservation: Reservation) -> LoadedAdapter:
        reservation.take(2 * self._loaded.num_bytes)
        with self._lock:
            self._num_running += 1
            self.max_running = max(self.max_running, self._num_running)
        self.unfolded.release()
        self.go_on.acquire()
        with self._lock:
            self._num_running -= 1
        return self._loaded


@pytest.mark.parametrize(("loads_in_budget", "most"), [(0.1, 1), (1.4, 1), (2, 2)])
def test_loads_at_once_stay_within_budget(store: LocalStore, make: Any, loads_in_budget: float, most: int) -> None:
    loaded = make.loaded(256)
    loads = Loads(store, loaded, int(loads_in_budget * 2 * loaded.num_bytes))
    refs = [make.publish(store, rank=1, seed=seed) for seed in range(4)]
    ended: SimpleQueue[Digest] = SimpleQueue()

    def load(ref: AdapterRef) -> None:
        loads.bounded.load(ref)
        ended.put(ref.digest)

    threads = [threading.Thread(target=load, args=(ref,), daemon=True) for ref in refs]
    for thread in threads:
        thread.start()
    for _ in threads:
        for _ in range(most if len(refs) == 4 else 0):
            assert loads.unfolded.acquire(timeout=30)
        refs.pop()
        assert loads.bounded.check() == []
        loads.go_on.release()
        # what is loaded counts until it was taken
        loads.bounded.taken(ended.get(timeout=30))
        if len(refs) >= most:
            assert loads.unfolded.acquire(timeout=30)
    assert loads.max_running == most
    assert loads.bounded.memory.num_bytes == 0


def test_failed_load_returns_reserved_bytes(store: LocalStore, make: Any) -> None:
    def load(ref: AdapterRef, reservation: Reservation) -> LoadedAdapter:
        reservation.take(10)
        raise AdapterUnavailable("It is gone.")

    bounded = BoundedLoads(store, load, 100)
    with pytest.raises(AdapterUnavailable):
        bounded.load(make.publish(store))
    bounded.taken(Digest("0"))
    assert bounded.memory.num_bytes == 0


def test_pager_gives_load_bytes_back(base: BaseSpec, store: LocalStore, ref: AdapterRef, make: Any) -> None:
    pool = DeviceCache(CpuDevice(base, 1 << 30), make.Clock())
    pager = Pager(store, base, pool, HostCache(0), 2, load_bytes=1)
    other = msgspec.structs.replace(ref, digest=Digest("1" * 64))
    assert pager.request(ref) is pager.request(other) is Residency.LOADING
    while len(pager.residency()) < 2 or any(row.device_bytes == 0 for row in pager.residency()):
        pager.poll()
        assert pager.check() == []
    assert pager.stats()["load_bytes"] == 0
    rows = pager.residency()
    assert all(row.device_bytes > 15 * store.num_bytes(ref.weights_blob) for row in rows)
    assert pager.stats()["device_adapter_bytes"] == sum(row.device_bytes for row in rows)
    pager.close()


def test_closed_pager_ends_waiting_loads(base: BaseSpec, store: LocalStore, ref: AdapterRef, make: Any) -> None:
    pager = Pager(store, base, DeviceCache(CpuDevice(base, 1 << 30), make.Clock()), HostCache(0), 2, load_bytes=1)
    for seed in range(2):
        pager.request(msgspec.structs.replace(ref, digest=Digest(str(seed) * 64)))
    pager.close()
    assert pager.check() == []
