"""Processes that share a base: whether it can be cut so, and what they need of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from loraserve.config import EngineConfig
from loraserve.doctor.checks import Check, fail, ok, warn
from loraserve.errors import LoraserveError
from loraserve.model.checkpoint.blueprint import draw
from loraserve.model.checkpoint.cutting import check_grid
from loraserve.model.checkpoint.headers import read_headers
from loraserve.model.config.model_config import read_config
from loraserve.model.parallel.grid import Grid

_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 5.0


def check_parallel(config: EngineConfig, device: str, has_gloo: bool) -> Iterator[Check]:
    """Check that a base can be shared by the processes that the settings name.

    Returns nothing for one process.

    Args:
        has_gloo: whether torch has the collectives of CPUs.

    Raises:
        ModelError: what is wrong with the base's directory.
    """
    grid = Grid.of(config)
    if grid.size == 1:
        return
    words = f"--tensor-parallel {grid.tensor} and --pipeline-parallel {grid.pipeline}"
    if device != "cpu":
        yield fail("parallel", f"{words} on a GPU", "a CPU", "Leave them out, or use --device cpu.")
        return
    if not has_gloo:
        yield fail("parallel", "torch without gloo", "a build of torch with it", "Install another build of torch.")
        return
    model_dir = Path(config.model_dir)
    try:
        check_grid(draw(read_config(model_dir), read_headers(model_dir), config.quantize), grid)
        _connect()
    except LoraserveError as error:
        yield fail("parallel", error.message, "", error.hint or "")
        return
    except OSError as error:
        yield fail(
            "parallel",
            f"{_LOOPBACK} can't be connected to: {error.strerror or error}",
            "the loopback interface, by which the processes exchange what they have",
            "Bring the interface lo up, or allow connections to it.",
        )
        return
    num_cores = len(os.sched_getaffinity(0))
    num_threads = grid.size * max(1, config.num_threads)
    if num_threads > num_cores:
        yield warn(
            "parallel",
            f"{grid.size} processes of {max(1, config.num_threads)} threads on {num_cores} cores",
            "a core for each thread: processes wait for each other in each step",
            "Lower --tensor-parallel, --pipeline-parallel or --num-threads.",
        )
    else:
        yield ok("parallel", f"{words}: {grid.size} processes, which this base can be cut into")


def _connect() -> None:
    """Connect to this machine as the processes do.

    Raises:
        OSError: it isn't possible.
    """
    with socket.create_server((_LOOPBACK, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        with socket.create_connection(server.getsockname(), timeout=_TIMEOUT_S):
            server.accept()[0].close()
