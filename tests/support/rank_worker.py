"""A rank above 0 for tests: bases one after the other, each served until rank 0 stops it.

As a program: ``python rank_worker.py DESCRIPTOR``.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection

import torch
from torch.distributed import FileStore

from loraserve.engine.parallel import messages as m
from loraserve.engine.parallel.follower import Follower
from loraserve.model.checkpoint.loader import load_model
from loraserve.model.parallel.ranks import Ranks
from loraserve.model.parallel.shard import Shard


def main() -> None:
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            rank, size, store, directory, options = connection.recv()
        except EOFError:
            return
        try:
            ranks = Ranks(rank, size, FileStore(store, size))
            decoder = load_model(directory, ranks=ranks, **options)
            connection.send_bytes(m.encode(m.Loaded()))
            Follower(decoder, Shard(rank, size, decoder.config).modules, connection).run()
        except Exception:
            traceback.print_exc()
            return


if __name__ == "__main__":
    main()
