"""A rank above 0: load a part of the base, then do in order what rank 0 says, until it ends.

    python -m loraserve.engine.parallel.follower DESCRIPTOR RANK STORE ENGINE_PID < config.json

It has no scheduler, no store and no socket of the server's: rank 0 is the engine.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from loraserve.config import EngineConfig
from loraserve.engine.parallel import messages as m
from loraserve.errors import LoraserveError

if TYPE_CHECKING:
    from loraserve.model.decoder import Decoder
    from loraserve.model.inputs import KVTensors, ModelInputs
    from loraserve_kernels.common.packed import PackedAdapter

logger = logging.getLogger("loraserve.engine.rank")

_PR_SET_PDEATHSIG = 1
_STORE_TIMEOUT = timedelta(hours=1)


class Follower:
    """Do what rank 0 says, in order, on one thread."""

    def __init__(self, decoder: Decoder, module_shapes: dict[str, tuple[int, int]], connection: Connection) -> None:
        self._decoder, self._module_shapes, self._connection = decoder, module_shapes, connection
        self._adapters: dict[int, PackedAdapter] = {}

    def run(self) -> None:
        """Return once rank 0 says so, or has ended."""
        while True:
            try:
                message = m.decode_to_rank(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            if isinstance(message, m.Stop):
                return
            self.handle(message)

    def handle(self, message: m.ToRank) -> None:
        """Do what one message says."""
        from loraserve.engine.parallel.part_memory import map_part

        match message:
            case m.OpenCache():
                self._open_cache(message)
            case m.HoldAdapter(number=number):
                self._adapters[number] = map_part(message, self._module_shapes)
            case m.DropAdapter(number=number):
                del self._adapters[number]
            case m.ReleaseBlocks(runs=runs):
                for first, count in runs:
                    self._memory.release(first * self._block_num_bytes, count * self._block_num_bytes)
            case m.ComputeStep():
                self._decoder.forward_pooled(self._inputs(message), self._kv)

    def _open_cache(self, message: m.OpenCache) -> None:
        from loraserve.engine.execution.runner import view_kv
        from loraserve.memory.devices.cpu import HostMemory

        self._block_num_bytes = message.block_num_bytes
        self._memory = HostMemory(message.num_blocks * message.block_num_bytes)
        self._kv: KVTensors = view_kv(self._decoder, self._memory.data, message.block_num_bytes, message.block_size)

    def _inputs(self, message: m.ComputeStep) -> ModelInputs:
        import torch

        from loraserve.model.inputs import ModelInputs, PooledRows
        from loraserve_kernels.common.plan import make_plan

        def numbers(data: bytes, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)

        token_ids = numbers(message.token_ids)
        segments = [(self._adapters[number], start, end) for number, start, end in message.adapters]
        return ModelInputs(
            token_ids=token_ids,
            positions=numbers(message.positions),
            slot_mapping=numbers(message.slots),
            query_starts=message.query_starts,
            context_lens=message.context_lens,
            block_tables=numbers(message.block_tables, torch.int32).view(-1, message.max_blocks),
            logits_rows=None if message.logits_rows is None else numbers(message.logits_rows),
            lora=make_plan(segments, len(token_ids)),
            pooled=None if message.pooled is None else PooledRows(*map(numbers, message.pooled)),
        )


def main() -> int:
    """Run the process; return its exit code."""
    descriptor, rank, store_path, engine_pid = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("LORASERVE_LOG_LEVEL", "INFO").upper(),
        format=f"%(levelname)s %(name)s: rank {rank}: %(message)s",
    )
    # as the engine's own: its server stops it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _end_with_the_engine(engine_pid)
    connection = Connection(descriptor)
    try:
        follower = _load(connection, rank, store_path)
        follower.run()
    except LoraserveError as error:
        _report(connection, m.Failed(code=error.code, message=error.message, hint=error.hint))
        return 1
    except Exception as error:
        logger.exception("rank %d can't go on", rank)
        _report(connection, m.Failed(code="", message=f"{type(error).__name__}: {error}", hint="See the log."))
        return 1
    return 0


def _load(connection: Connection, rank: int, store_path: str) -> Follower:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    import torch
    from torch._C._distributed_c10d import FileStore

    from loraserve.engine.parallel.kernel_choices import follow_choices
    from loraserve.memory.devices.cpu import cpu_adapter_dtype
    from loraserve.memory.loading.lowering import FILE_DTYPES
    from loraserve.model.checkpoint.loader import load_model
    from loraserve.model.parallel.ranks import Ranks
    from loraserve.model.parallel.shard import Shard
    from loraserve_kernels.common.arithmetic import Arithmetic
    from loraserve_kernels.cpu.linear.chooser import chooser
    from loraserve_kernels.ops import warm_up

    torch.set_num_threads(config.num_threads)
    for one in config.kernels:
        arithmetic = Arithmetic(one.arithmetic, one.kernel, one.instructions)
        chooser().adopt(one.format, one.out_features, one.in_features, arithmetic)
    connection.send_bytes(m.encode(m.Joining()))
    store = FileStore(store_path, config.tensor_parallel)
    store.set_timeout(_STORE_TIMEOUT)
    ranks = Ranks(rank, config.tensor_parallel, store)
    follow_choices(store)
    decoder = load_model(
        Path(config.model_dir),
        model_id=config.model_id,
        dtype=getattr(torch, config.dtype),
        quantize=config.quantize,
        activation_dtype=config.activation_dtype,
        device=config.device,
        max_model_len=config.max_model_len,
        ranks=ranks,
    )
    held = cpu_adapter_dtype(config.adapter_dtype)
    for dtype in tuple(FILE_DTYPES.values()) if held is None else (held,):
        warm_up(dtype)
    connection.send_bytes(m.encode(m.Loaded()))
    return Follower(decoder, Shard(rank, config.tensor_parallel, decoder.config).modules, connection)


def _report(connection: Connection, message: m.Failed) -> None:
    with suppress(OSError):
        connection.send_bytes(m.encode(message))


def _end_with_the_engine(engine_pid: int) -> None:
    """Have the system kill this process when the engine ends, even within a collective."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != engine_pid:
        _end_process(0)


def _end_process(code: int) -> NoReturn:
    """End the process without tearing the interpreter down, which takes half a second."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end_process(main())
