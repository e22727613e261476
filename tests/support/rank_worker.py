"""Ranks above 0 for tests: bases one after the other, each served until rank 0 stops it.

As a program, which becomes one process for each descriptor: ``python rank_worker.py DESCRIPTOR…``.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from loraserve.engine.parallel import messages as m
from loraserve.engine.parallel.follower import Follower
from loraserve.engine.parallel.rank_counts import RankCounts
from loraserve.model.checkpoint.loader import load_model
from loraserve.model.parallel.member import join
from loraserve.model.parallel.part_facts import PartFacts
from loraserve.model.parallel.traffic import Traffic


def main() -> None:
    """Have a fork serve each descriptor, and end with the last."""
    connections = [Connection(int(argument)) for argument in sys.argv[1:]]
    forks = []
    while connections:
        connection = connections.pop()
        if pid := os.fork():
            connection.close()
            forks.append(pid)
            continue
        for other in connections:
            other.close()
        serve(connection)
        os._exit(0)
    for pid in forks:
        os.waitpid(pid, 0)


def serve(connection: Connection) -> None:
    torch.set_num_threads(1)

    def share(facts: PartFacts) -> list[PartFacts]:
        connection.send_bytes(m.encode(m.PartLoaded(facts, [])))
        return [facts]

    while True:
        try:
            rank, grid, store, directory, counts_path, options = connection.recv()
        except EOFError:
            return
        try:
            counts = RankCounts(os.open(counts_path, os.O_RDWR | os.O_CLOEXEC))
            member = join(grid, rank, FileStore(store, grid.size), share, Traffic(counts.row(rank)))
            decoder = load_model(directory, member=member, **options)
            connection.send_bytes(m.encode(m.Loaded()))
            Follower(decoder, member, connection).run()
            counts.close()
        except Exception:
            traceback.print_exc()
            return


if __name__ == "__main__":
    main()
