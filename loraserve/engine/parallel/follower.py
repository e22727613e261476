"""A rank above 0: load a part of the base, then execute rank 0's messages in order, until it ends.

    python -m loraserve.engine.parallel.follower DESCRIPTOR COUNTS RANK STORE ENGINE_PID < CONFIG

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
    from loraserve.model.parallel.member import GroupMember
    from loraserve.model.parallel.part_facts import PartFacts
    from loraserve_kernels.common.packed import PackedAdapter

logger = logging.getLogger("loraserve.engine.rank")

_PR_SET_PDEATHSIG = 1


class Follower:
    """Execute rank 0's messages, in order, on one thread."""

    def __init__(self, decoder: Decoder, member: GroupMember, connection: Connection) -> None:
        self._decoder, self._pipe, self._connection = decoder, member.pipe, connection
        self._module_shapes = member.place(decoder.config).modules
        self._adapters: dict[int, PackedAdapter] = {}

    def run(self) -> None:
        """Run until rank 0 stops this rank, or has ended."""
        while True:
            try:
                message = m.decode_to_rank(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            if isinstance(message, m.Stop):
                return
            self.handle(message)

    def handle(self, message: m.ToRank) -> None:
        """Execute one message."""
        from loraserve.engine.parallel.part_memory import map_part
        from loraserve_kernels.ops import prepare_adapters

        match message:
            case m.OpenCache():
                self._open_cache(message)
            case m.HoldAdapter(number=number):
                adapter = map_part(message, self._module_shapes)
                # rank 0 had it compiled when it packed the adapter; here it is only read
                prepare_adapters(adapter.data.dtype)
                self._adapters[number] = adapter
            case m.DropAdapter(number=number):
                del self._adapters[number]
            case m.ReleaseBlocks(runs=runs):
                for first, count in runs:
                    self._memory.release(first * self._block_num_bytes, count * self._block_num_bytes)
            case m.ComputeStep():
                self._compute(self._inputs(message))

    def _compute(self, inputs: ModelInputs) -> None:
        """Compute a micro-batch as far as this part of the base goes."""
        pipe, received = self._pipe, None
        if pipe is not None and not pipe.is_first:
            received = pipe.expect(inputs.token_ids.shape[0], self._decoder.config.hidden_size).wait()
        if pipe is None or pipe.is_last:
            # rank 0 has the logits
            self._decoder.forward_pooled(inputs, self._kv, received)
        else:
            pipe.send(self._decoder.pass_on(inputs, self._kv, received))

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
    descriptor, counts, rank, engine_pid = (int(sys.argv[i]) for i in (1, 2, 3, 5))
    store_path = sys.argv[4]
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
        follower = _load(connection, counts, rank, store_path)
        follower.run()
    except LoraserveError as error:
        _report(connection, m.Failed(code=error.code, message=error.message, hint=error.hint))
        return 1
    except Exception as error:
        logger.exception("rank %d can't go on", rank)
        _report(connection, m.Failed(code="", message=f"{type(error).__name__}: {error}", hint="See the log."))
        return 1
    return 0


def _load(connection: Connection, counts: int, rank: int, store_path: str) -> Follower:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    import torch

    from loraserve.engine.parallel.kernel_choices import adopt_kernels, chosen_kernels, share_choices
    from loraserve.engine.parallel.rank_counts import RankCounts, RankProgress
    from loraserve.engine.parallel.store import open_store
    from loraserve.memory.devices.cpu import cpu_adapter_dtype
    from loraserve.model.checkpoint.loader import load_model
    from loraserve.model.parallel.grid import Grid
    from loraserve.model.parallel.member import join
    from loraserve.model.parallel.traffic import Traffic
    from loraserve_kernels.ops import compile_kernels

    def share(facts: PartFacts) -> list[PartFacts]:
        connection.send_bytes(m.encode(m.PartLoaded(facts, chosen_kernels())))
        return [facts]

    torch.set_num_threads(config.num_threads)
    adopt_kernels(config.kernels)
    connection.send_bytes(m.encode(m.Joining()))
    grid = Grid.of(config)
    store = open_store(store_path, grid.size)
    row = RankCounts(counts).row(rank)
    member = join(grid, rank, store, share, Traffic(row))
    share_choices(store)
    decoder = load_model(
        Path(config.model_dir),
        model_id=config.model_id,
        dtype=getattr(torch, config.dtype),
        quantize=config.quantize,
        activation_dtype=config.activation_dtype,
        device=config.device,
        max_model_len=config.max_model_len,
        progress=RankProgress(row),
        member=member,
    )
    held = cpu_adapter_dtype(config.adapter_dtype)
    compile_kernels(() if held is None else (held,))
    connection.send_bytes(m.encode(m.Loaded()))
    return Follower(decoder, member, connection)


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
