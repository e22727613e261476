"""Bases over several processes, as an engine of `--tensor-parallel` and `--pipeline-parallel` has
them, without an engine.

The processes are forks of one that has imported torch, and load one base after the other.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from loraserve.engine.parallel import messages as m
from loraserve.engine.parallel.device import AdapterParts, GroupDevice
from loraserve.engine.parallel.group_runner import GroupForward
from loraserve.engine.parallel.rank_counts import RankCounts
from loraserve.memory.arena import Arena, Owner
from loraserve.memory.devices.base import HostAdapter
from loraserve.model.checkpoint.loader import load_model
from loraserve.model.checkpoint.whole_weights import WholeWeights
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.parallel.grid import Grid
from loraserve.model.parallel.member import join
from loraserve.model.parallel.part_facts import PartFacts
from loraserve.model.parallel.traffic import Traffic
from loraserve.types import RankTraffic
from loraserve_kernels.cpu.lora.layout import PackedAdapter


class RankedBase:
    """A base over all ranks; what `Decoder` has that tests use.

    Attributes:
        device: of adapters' parts.
        weights: of the whole base.
    """

    def __init__(self, pool: RankPool, grid: Grid, directory: Path, store: Path, options: dict[str, Any]) -> None:
        self._connections = pool.connections[: grid.size - 1]
        held = options.pop("held", None)
        self.grid, self._counts = grid, RankCounts()
        for rank, connection in enumerate(self._connections, 1):
            counts = f"/proc/{os.getpid()}/fd/{self._counts.descriptor}"
            connection.send((rank, grid, str(store), directory, counts, options))
        self.member = join(grid, 0, FileStore(str(store), grid.size), self._share, Traffic(self._counts.row(0)))
        self.decoder = load_model(directory, member=self.member, **options)
        for connection in self._connections:
            assert isinstance(m.decode_from_rank(connection.recv_bytes()), m.Loaded)
        self.spec, self.config, self.backend = self.decoder.spec, self.decoder.config, self.decoder.backend
        self.kv_shape, self.kv_dtype = self.decoder.kv_shape, self.decoder.kv_dtype
        client = Arena(1 << 16, 4096).client(Owner.ADAPTERS)
        places = list(grid.places(self.config))
        self.device = GroupDevice(self.spec, 1 << 28, held, client, places, self.send_to)
        self.weights = WholeWeights(directory, self.decoder, options["dtype"], options["quantize"])
        self.group_forward = GroupForward(self.decoder, self.member.pipe, self.device, self._send)
        self._kv: KVTensors | None = None

    @property
    def traffic(self) -> tuple[RankTraffic, ...]:
        """What each rank has received so far."""
        return self._counts.read(self.grid.size)

    def _share(self, facts: PartFacts) -> list[PartFacts]:
        parts = [facts]
        for connection in self._connections:
            message = m.decode_from_rank(connection.recv_bytes())
            assert isinstance(message, m.PartLoaded)
            parts.append(message.facts)
        return [*parts[self.grid.tensor :], *parts[: self.grid.tensor]]

    def place(self, packed: HostAdapter) -> PackedAdapter:
        """RankPlace an adapter on all ranks; what `PagedRun` takes of it."""
        assert isinstance(packed, AdapterParts)
        handle = self.device.place(packed).handle
        assert isinstance(handle, PackedAdapter)
        return handle

    def send_to(self, rank: int, message: m.ToRank) -> None:
        self._connections[rank - 1].send_bytes(m.encode(message))

    def forward(self, inputs: ModelInputs, kv: KVTensors) -> Tensor:
        return self.forward_pooled(inputs, kv)[0]

    def forward_pooled(self, inputs: ModelInputs, kv: KVTensors) -> tuple[Tensor, Tensor | None]:
        self.open_cache(kv)
        with torch.inference_mode():
            return self.group_forward(inputs, kv)

    def open_cache(self, kv: KVTensors) -> None:
        """Have the other ranks reserve their parts of a cache of as many blocks."""
        if kv is self._kv:
            return
        self._kv = kv
        for place in self.grid.places(self.config):
            if place.rank:
                num_bytes = -(-place.kv_block_bytes(kv.block_size, 4) // 4096) * 4096
                cache = m.OpenCache(num_blocks=len(kv.k[0]), block_num_bytes=num_bytes, block_size=kv.block_size)
                self.send_to(place.rank, cache)

    def _send(self, message: m.ToRank) -> None:
        for rank in range(1, len(self._connections) + 1):
            self.send_to(rank, message)

    def close(self) -> None:
        self._send(m.Stop())
        self._counts.close()


class RankPool:
    """Three processes, for groups of up to four."""

    def __init__(self, root: Path) -> None:
        self._root, self._num_bases = root, 0
        self._start()

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        theirs = [pair[1].fileno() for pair in pairs]
        command = [sys.executable, "-P", str(Path(__file__).with_name("rank_worker.py")), *map(str, theirs)]
        self._process = subprocess.Popen(command, pass_fds=theirs, start_new_session=True)
        for _, their in pairs:
            their.close()
        self.connections = [Connection(our.detach()) for our, _ in pairs]

    @contextmanager
    def load(self, directory: Path, size: int, pipeline: int = 1, **options: Any) -> Iterator[RankedBase]:
        """Load a base over so many ranks of so many stages."""
        settings = {
            "model_id": "org/base",
            "dtype": torch.float32,
            "quantize": "none",
            "device": "cpu",
            "max_model_len": None,
            **options,
        }
        self._num_bases += 1
        try:
            base = RankedBase(self, Grid(size, pipeline), directory, self._root / f"store-{self._num_bases}", settings)
            try:
                yield base
            finally:
                base.close()
        except BaseException:
            # a rank may wait for what never comes: the next base has others
            os.killpg(self._process.pid, signal.SIGKILL)
            self.close()
            self._start()
            raise

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self._process.wait(120)


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
