"""The processes that share a base with this one: started, commanded, watched."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import torch

from loraserve.config import EngineConfig
from loraserve.engine.parallel import messages as m
from loraserve.engine.parallel.device import GroupDevice
from loraserve.engine.parallel.group_runner import GroupForward, GroupRunner
from loraserve.engine.parallel.kernel_choices import adopt_kernels, choose_alone, chosen_kernels, share_choices
from loraserve.engine.parallel.rank_counts import RankCounts
from loraserve.engine.parallel.store import open_store
from loraserve.errors import EngineError, LoraserveError, error_from_code
from loraserve.memory.arena import ArenaClient
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import KVTensors
from loraserve.model.parallel.grid import Grid
from loraserve.model.parallel.member import join
from loraserve.model.parallel.part_facts import PartFacts
from loraserve.model.parallel.traffic import Traffic
from loraserve.progress import Progress

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", m.Joining, m.PartLoaded, m.Loaded)

_POLL_S = 0.1
_END_PATIENCE_S = 2.0


class RankGroup:
    """Ranks 1 and up, each a process that ends with this one.

    Attributes:
        grid: which stages there are, and how many ranks of each.
        member: this process as rank 0.
    """

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        """Start the processes; each loads its part of the base while this one loads its own.

        Raises:
            LoraserveError: a rank could not join; the message says which, and why.
        """
        _raise_descriptor_limit()
        self.grid = Grid.of(config)
        size = self.grid.size
        self._progress = progress
        self._dir = tempfile.mkdtemp(prefix="loraserve-ranks-")  # 0700
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_over, self._worked = False, list[str]()
        self._forward: GroupForward | None = None
        self._counts = RankCounts()
        path = str(Path(self._dir) / "store")
        try:
            progress.begin(f"starting ranks 1 to {size - 1}")
            for rank in range(1, size):
                self._start(config, rank, path)
            self._expect(m.Joining)
            self._store = open_store(path, size)
            self.member = join(self.grid, 0, self._store, self._share, Traffic(self._counts.row(0)))
        except BaseException:
            self.close()
            raise
        share_choices(self._store, self._check_alive)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by rank from 1."""
        return tuple(process.pid for process in self._processes)

    @property
    def size(self) -> int:
        """Number of ranks, this one among them."""
        return len(self._processes) + 1

    def serve(
        self,
        decoder: Decoder,
        kv: KVTensors,
        block_bytes: Sequence[int],
        adapter_bytes: int,
        held: torch.dtype | None,
        client: ArenaClient,
    ) -> tuple[GroupRunner, GroupDevice]:
        """Build what computes steps and holds adapters on all ranks, once each has its part.

        The ranks are watched from now on: one that ends ends this process.

        Args:
            kv: this rank's part of the cache; the others have one of as many blocks.
            block_bytes: from one block to the next, of each rank's part.
            adapter_bytes: what adapters may take at most, all parts together.
            held: the dtype of adapters; None: each in its own.

        Raises:
            LoraserveError: a rank could not load its part; the message says which, and why.
        """
        self._progress.begin("waiting for the other ranks' parts of the base")
        choose_alone()
        self._expect(m.Loaded)
        shutil.rmtree(self._dir, ignore_errors=True)
        for rank in range(1, self.size):
            cache = m.OpenCache(
                num_blocks=kv.k[0].shape[0], block_num_bytes=block_bytes[rank], block_size=kv.block_size
            )
            self.send_to(rank, cache)
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        threading.Thread(target=self._follow_progress, name="rank-progress", daemon=True).start()
        places = list(self.grid.places(decoder.config))
        device = GroupDevice(decoder.spec, adapter_bytes, held, client, places, self.send_to)
        self._forward = GroupForward(decoder, self.member.pipe, device, self.send)
        return GroupRunner(decoder, kv, self._forward), device

    def stats(self) -> dict[str, Any]:
        """Collect the ranks' fields of EngineStats."""
        count = 0 if self._forward is None else self._forward.num_micro_batches
        return {"ranks": self._counts.read(self.size), "num_micro_batches": count}

    def release(self, runs: list[tuple[int, int]]) -> None:
        """Have the other ranks return the memory of KV blocks, in runs of (first, count)."""
        self.send(m.ReleaseBlocks(runs=runs))

    def send(self, message: m.ToRank) -> None:
        """Send a message to every other rank, which acts on it after those before."""
        data = m.encode(message)
        for connection in self._connections:
            connection.send_bytes(data)

    def send_to(self, rank: int, message: m.ToRank) -> None:
        """Send a message to one rank."""
        self._connections[rank - 1].send_bytes(m.encode(message))

    def close(self) -> None:
        """End the processes. No step runs."""
        self._is_over = True
        with suppress(OSError):
            self.send(m.Stop())
        for process in self._processes:
            try:
                process.wait(_END_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._counts.close()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _start(self, config: EngineConfig, rank: int, store: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603 (our own words)
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "loraserve.engine.parallel.follower",
                    str(theirs.fileno()),
                    str(self._counts.descriptor),
                    str(rank),
                    store,
                    str(os.getpid()),
                ],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno(), self._counts.descriptor],
            )
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(config))
                process.stdin.close()

    def _share(self, facts: PartFacts) -> list[PartFacts]:
        """Collect what each rank has read of the base, in the order of their stages."""
        self._progress.begin("waiting for the other ranks' parts of the base")
        loaded = self._expect(m.PartLoaded)
        # for the engine after this one, whose stages may need them first
        known = {(one.format, one.out_features, one.in_features) for one in chosen_kernels()}
        adopt_kernels(
            one
            for part in loaded
            for one in part.kernels
            if (one.format, one.out_features, one.in_features) not in known
        )
        # the first ranks are the last stage's
        parts = [facts, *(part.facts for part in loaded)]
        return [*parts[self.grid.tensor :], *parts[: self.grid.tensor]]

    def _check_alive(self) -> None:
        """Raise an error if a rank has ended.

        Raises:
            LoraserveError: one has; the message says which.
        """
        for rank, (process, connection) in enumerate(zip(self._processes, self._connections, strict=True), 1):
            if process.poll() is not None:
                self._raise_ended(rank, process, connection)
        worked = [_work_of(process.pid) for process in self._processes]
        if worked != self._worked:
            # ranks that stand still are a load that does
            self._worked = worked
            self._progress.tick()

    def _raise_ended(self, rank: int, process: subprocess.Popen[bytes], connection: Connection) -> NoReturn:
        """Raise what a rank reported at its end, or that it ended."""
        message: m.FromRank | None = None
        with suppress(EOFError, OSError):
            while not isinstance(message, m.Failed) and connection.poll(0):
                message = m.decode_from_rank(connection.recv_bytes())
        if isinstance(message, m.Failed):
            raise _error(rank, message)
        raise EngineError(f"rank {rank} of {self.size} {_end(process.wait())}.")

    def _expect(self, kind: type[Answer]) -> list[Answer]:
        """Wait for a message of every rank; return them in the ranks' order."""
        answers = list[Answer]()
        for rank, (process, connection) in enumerate(zip(self._processes, self._connections, strict=True), 1):
            worked = ""
            while not connection.poll(_POLL_S):
                if process.poll() is not None and not connection.poll(0):
                    raise EngineError(f"rank {rank} of {self.size} {_end(process.returncode)}.")
                now = _work_of(process.pid)
                if now != worked:
                    # a rank that stands still is a load that does
                    worked = now
                    self._progress.tick()
            try:
                message = m.decode_from_rank(connection.recv_bytes())
            except (EOFError, OSError):
                code = process.wait()
                raise EngineError(f"rank {rank} of {self.size} {_end(code)}.") from None
            if isinstance(message, m.Failed):
                raise _error(rank, message)
            if not isinstance(message, kind):
                raise EngineError(f"rank {rank} sent {type(message).__name__} in the place of {kind.__name__}.")
            answers.append(message)
        return answers

    def _follow_progress(self) -> None:
        """Note other ranks' progress as this process's own, which waits for them meanwhile."""
        num_moves = 0
        while not self._is_over:
            time.sleep(_POLL_S)
            now = self._counts.num_moves()
            if now != num_moves:
                num_moves = now
                self._progress.tick()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """End this process when a rank ends: no step can be computed, and one may wait for it."""
        code = process.wait()
        if self._is_over:
            return
        logger.error(
            "rank %d of %d (process %d) %s: this engine ends, and another takes its requests over",
            rank,
            self.size,
            process.pid,
            _end(code),
        )
        logging.shutdown()
        os._exit(1)


def _error(rank: int, message: m.Failed) -> LoraserveError:
    error = error_from_code(message.code or EngineError.code, f"Rank {rank} could not be started: {message.message}")
    error.hint = message.hint
    return error


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _work_of(pid: int) -> str:
    """Read the processor time of a process, as the system counts it; empty where it doesn't."""
    try:
        fields: Sequence[str] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return " ".join(fields[11:13])


def _raise_descriptor_limit() -> None:
    """Allow as many open files as the system does: each adapter in memory has one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
