"""The most tokens a second that one request can have: each reads all weights once, at the rate at
which this machine reads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import figures
from benchmarks import peers_installing as installing
from benchmarks.formats import CALIBRATED, FORMATS, file_type
from benchmarks.peers_quality import OURS
from benchmarks.peers_rows import BASE, Row, best
from benchmarks.serving import HERE
from loraserve.model.config.model_config import read_config

_WIDE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight, where a peer keeps all of them in one dtype."""


def read_rate() -> float:
    """Measure the bytes a second that this machine reads with all of its threads."""
    command = [sys.executable, "-P", str(HERE / "machine.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["read_bytes_per_s"])


def token_bytes(model: Path, whose: str, format: str) -> float:
    """Return the bytes of weights that a token of the base reads.

    Those of a GGUF file are its own; of other formats, those of the layers' linears and of the
    head. Norms are left out.

    Args:
        whose: a peer, or `OURS`.
    """
    config = read_config(model)
    layers = config.num_layers * sum(rows * columns for rows, columns in config.module_shapes.values())
    head = config.hidden_size * config.vocab_size
    stored = None
    if whose == OURS:
        stored = file_type(format)
    elif whose == "llama.cpp":
        stored = format.partition("+")[0]
    if stored is not None:
        # of an embedding that isn't the head, a row is read
        unread = 0 if config.is_tied else head
        return installing.gguf_base(model, stored).stat().st_size * (layers + head) / (layers + head + unread)
    if whose != OURS:
        return _WIDE_BYTES[format] * (layers + head)
    ours = {**FORMATS, **CALIBRATED}[format]
    return layers * ours.layer_bytes + head * ours.head_bytes


def text(model: Path, rows: Sequence[Row], rate: float) -> str:
    """Build the table of contenders that were asked one thing at a time, without adapters.

    Args:
        rate: bytes a second that this machine reads.
    """
    speeds: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.requests != 1 or row.mode != BASE or row.speculation == "on" or row.reason:
            continue
        for name, turns in (((row.pair.peer, row.pair.format), row.peer), ((OURS, row.pair.ours), row.ours)):
            # a peer may have dtypes that nothing here knows
            if name[0] in (OURS, "llama.cpp") or name[1] in _WIDE_BYTES:
                speeds[name] = max(speeds.get(name, 0.0), best(turns))
    if not speeds:
        return ""
    sizes = {name: token_bytes(model, *name) for name in speeds}
    lines = [
        [
            "loraserve" if whose == OURS else whose,
            format,
            f"{sizes[whose, format] / 1e6:.0f}",
            f"{rate / sizes[whose, format]:.1f}",
            f"{speed:.1f}",
            f"{speed * sizes[whose, format] / rate:.0%}",
        ]
        for (whose, format), speed in sorted(speeds.items())
    ]
    table = figures.table(("whose", "format", "MB a token", "at most tokens/s", "best tokens/s", "share"), lines)
    return f"""
One request, without adapters and speculation, beside what reading its weights allows: this machine reads \
{rate / 1e9:.1f} GB/s with all of its threads (`benchmarks/machine.py`; caches may give more). The best of all prompts:

{table}
"""
