"""Time the loading of an adapter when nothing else is done.

Its blobs are read from the project's store and verified, then compiled and copied to where steps
read them.

    yes | python -m benchmarks.loading --model benchmarks/models/S --size S --ranks 24 --count 10

Runs on one thread, as a server's loaders do, in a process without a server. The blobs are in the
page cache, as they are soon after an upload, and an adapter stays where it was copied to, as on a
server that has room: the next one's memory is fresh. (A virtual machine may get fresh memory from
its host at a tenth of the speed of copying: so a load takes 31 ms that takes 17 in memory that the
process has had before.) Loads one for each line that it reads, so that whoever compares it with
something can measure both in turn, and prints how many seconds that took; in the end, a list of how
long reading and verifying alone take for each.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters_store import BlobStore, LocalStore
from benchmarks.make_model import MODULES, SIZES
from benchmarks.registering import base_spec
from benchmarks.synthetic import Adapters
from loraserve.adapters.digest import adapter_digest
from loraserve.adapters.format.peft_format import read_adapter
from loraserve.limits import GIB
from loraserve.memory.devices.base import PlacedAdapter
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.load import load_adapter
from loraserve.types import AdapterRef, BaseSpec, TenantId

HOST_TAKES_BACK_S = 5.0
"""A virtual machine's kernel tells its host of free memory after two seconds (free page reporting).

Until then a load may be given pages that the host still backs, and takes half its time or not, as
luck would have it.
"""


def store_adapter(store: BlobStore, adapters: Adapters, number: int) -> AdapterRef:
    """The adapter's blobs are committed."""
    blobs = []
    for data in adapters.files(number):
        staged = store.stage()
        staged.write(data)
        blobs.append(staged.commit())
    read = read_adapter(*adapters.files(number))
    digest = adapter_digest(read.config, read.tensors)
    return AdapterRef(TenantId("bench"), adapters.name(number), 1, digest, blobs[0], blobs[1])


@contextmanager
def stored(adapters: Adapters, count: int) -> Iterator[tuple[BlobStore, list[AdapterRef]]]:
    """A store of its own with so many adapters; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="loraserve-bench-") as folder:
        store = LocalStore(Path(folder))
        try:
            yield store, [store_adapter(store, adapters, number) for number in range(count)]
        finally:
            store.close()


def give_back_memory() -> None:
    """Give the system back what this process needs no more: the base but for its shapes, and files.

    Loads would be given that memory instead of fresh one.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Loading:
    """Loads one adapter after the other, and keeps them."""

    def __init__(self, base: BaseSpec, store: BlobStore, num_bytes: int) -> None:
        self._base, self._store = base, store
        self._device = CpuDevice(base, num_bytes)
        self._placed: list[PlacedAdapter] = []

    def load(self, ref: AdapterRef) -> float:
        """Seconds to read an adapter's blobs, verify them, compile and copy."""
        started = time.perf_counter()
        self._placed.append(self._device.place(load_adapter(self._store, ref, self._base, self._device).host))
        return time.perf_counter() - started

    def read(self, ref: AdapterRef) -> float:
        """Seconds to read and verify them alone."""
        started = time.perf_counter()
        self._store.read(ref.config_blob)
        self._store.read(ref.weights_blob)
        return time.perf_counter() - started


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--targets", default=",".join(MODULES))
    parser.add_argument("--ranks", default="24")
    parser.add_argument("--count", type=int, default=10, help="at most so many")
    options = parser.parse_args(arguments)
    ranks = tuple(int(rank) for rank in options.ranks.split(","))
    adapters = Adapters(SIZES[options.size], ranks=ranks, targets=tuple(options.targets.split(",")))
    base = base_spec(options.model, options.quantize)
    with stored(adapters, options.count + 1) as (store, refs):
        loading = Loading(base, store, GIB)
        give_back_memory()
        if options.size != "tiny":
            time.sleep(HOST_TAKES_BACK_S)
        # the first one compiles and imports
        loading.load(refs[0])
        print("ready", flush=True)
        for ref, _ in zip(refs[1:], sys.stdin, strict=False):
            print(loading.load(ref), flush=True)
        # not between the loads: what a read has just given back would be the next one's memory
        print(json.dumps([loading.read(ref) for ref in refs[1:]]))


if __name__ == "__main__":
    main()
