"""What loading an adapter takes when nothing else is done: its blobs read from the project's store and verified, then compiled and copied to where steps read them.

    python -m benchmarks.loading --model benchmarks/models/S --size S --ranks 24 --count 10

Runs on one thread, as a server's loaders do, in a process without a server. The blobs are in the page cache, as they are soon after an upload. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
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
from loraserve.adapters.peft_format import read_adapter
from loraserve.limits import GIB
from loraserve.memory.device import CpuDevice
from loraserve.memory.load import load_adapter
from loraserve.types import AdapterRef, BaseSpec, TenantId


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


def measure(base: BaseSpec, adapters: Adapters, count: int) -> dict[str, list[float]]:
    """Seconds of each adapter: to read and verify its blobs, and to load it, which does the same and copies."""
    device = CpuDevice(base, GIB)
    read_s, load_s = [], []
    with stored(adapters, count + 1) as (store, refs):
        for ref in refs:
            started = time.perf_counter()
            store.read(ref.config_blob)
            store.read(ref.weights_blob)
            read_s.append(time.perf_counter() - started)
            started = time.perf_counter()
            device.place(load_adapter(store, ref, base, device).host)
            load_s.append(time.perf_counter() - started)
    # the first one compiles and imports
    return {"read_s": read_s[1:], "load_s": load_s[1:]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--targets", default=",".join(MODULES))
    parser.add_argument("--ranks", default="24")
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args(arguments)
    ranks = tuple(int(rank) for rank in options.ranks.split(","))
    adapters = Adapters(SIZES[options.size], ranks=ranks, targets=tuple(options.targets.split(",")))
    print(json.dumps(measure(base_spec(options.model, options.quantize), adapters, options.count)))


if __name__ == "__main__":
    main()
