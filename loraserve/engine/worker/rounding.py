"""Cost of rounding a base: its logits on real text, compared with those in float32.

    python -m loraserve.engine.worker.rounding < config.json

prints a `types.RoundingCost` as JSON. Three evaluations of the same positions separate weights from
activations: the checkpoint's weights in float32, read as they are multiplied; the resident base's
weights in float32; and the engine's own steps. Memory holds the resident base, one sequence's KV, a
block of weights, and three times the positions' logits.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from loraserve.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.probe import Probe
from loraserve.engine.verification.base_precision import compare, loss_of
from loraserve.engine.worker.startup import build_engine, resolve
from loraserve.errors import ConfigError, EngineError, InvariantViolation, LoraserveError
from loraserve.limits import GIB, MIB
from loraserve.model.checkpoint.blueprint import context_len
from loraserve.model.checkpoint.original import OriginalBase
from loraserve.model.config.model_config import read_config
from loraserve.model.reference_model import ReferenceBase, evaluate
from loraserve.model.reference_pass import Subject
from loraserve.text.passage import PASSAGE
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import FinishReason, RequestId, RoundingCost

NUM_POSITIONS = 256
_MIN_POSITIONS = 16
_BUDGET_BYTES = 2 * GIB
"""Memory for one sequence of the positions' length: more than any base of 70B parameters takes.

Untouched parts cost nothing.
"""


def measure(config: EngineConfig, *, text: str = PASSAGE) -> RoundingCost:
    """Measure what rounding costs the config's base over `NUM_POSITIONS` positions of a text.

    Raises:
        ConfigError, ModelError: the base can't be served so, or its tokenizer makes too few tokens
            of the text.
        EngineError: a step failed.
    """
    started = time.monotonic()
    model_dir = Path(config.model_dir)
    max_model_len = context_len(read_config(model_dir), config.max_model_len)
    windows = _windows(Tokenizer(model_dir).encode(text), max_model_len)
    config = msgspec.structs.replace(
        resolve(config),
        max_model_len=min(max_model_len, NUM_POSITIONS + 1),
        memory_budget_bytes=_BUDGET_BYTES,
        host_cache_bytes=MIB,
        enable_prefix_cache=False,
        cuda_graphs=False,
    )
    inputs = [window[:-1] for window in windows]
    targets = torch.tensor([token for window in windows for token in window[1:]])
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    # in Triton's interpreter a GPU's engine runs on the CPU
    device = torch.device("cuda" if config.device == "cuda" and torch.cuda.is_available() else "cpu")
    exact = _reference_logits(OriginalBase(model_dir, device), inputs)
    with tempfile.TemporaryDirectory(prefix="loraserve-rounding-") as folder:
        parts = build_engine(msgspec.structs.replace(config, store_url=Path(folder).as_uri()))
        try:
            served = _served_logits(parts.engine, inputs)
            rounded = _reference_logits(parts.verifier.base, inputs)
        finally:
            parts.close()
    base = parts.engine.base
    return RoundingCost(
        base_id=base.id,
        base_digest=base.digest,
        dtype=base.dtype,
        quantization=base.quantization,
        arithmetic=base.arithmetic,
        kernels=base.kernels,
        instructions=base.instructions,
        device=base.device,
        num_positions=len(targets),
        weights=compare(rounded, exact, targets),
        activations=compare(served, rounded, targets),
        total=compare(served, exact, targets),
        loss=loss_of(exact, targets),
        served_loss=loss_of(served, targets),
        seconds=time.monotonic() - started,
    )


def _windows(token_ids: Sequence[int], max_model_len: int) -> list[list[int]]:
    """Cut a text into sequences that fit the context, each one token longer than its positions."""
    # a probe requests one token beyond its last
    size = min(NUM_POSITIONS, max_model_len - 1)
    windows: list[list[int]] = []
    num_left = NUM_POSITIONS
    for start in range(0, len(token_ids) - 1, max(size, 1)):
        window = list(token_ids[start : start + min(size, num_left) + 1])
        windows.append(window)
        num_left -= len(window) - 1
        if num_left <= 0:
            break
    if NUM_POSITIONS - num_left < _MIN_POSITIONS:
        raise ConfigError(
            f"The base's tokenizer makes {len(token_ids)} tokens of the text that the rounding error is"
            f" measured on; at least {_MIN_POSITIONS + 1} are needed."
        )
    return windows


def _reference_logits(base: ReferenceBase, inputs: Sequence[Sequence[int]]) -> Tensor:
    """Compute every position's logits, [num_positions, vocab_size], in the host's memory."""
    # a subject without terms is the base, whose logits needn't be computed a second time
    (found,) = evaluate(base, [Subject(inputs, (), known_base=())], is_rounding=False)
    return torch.cat(found.adapted)


def _served_logits(engine: Engine, inputs: Sequence[Sequence[int]]) -> Tensor:
    """Compute every position's logits as the engine does.

    Raises:
        EngineError: a step failed.
    """
    probes = [Probe(RequestId(f"rounding-{number}"), list(tokens)) for number, tokens in enumerate(inputs)]
    for probe in probes:
        engine.add_probe(probe, None)
    while engine.has_requests:
        for output in engine.step():
            if output.finish_reason is FinishReason.ERROR:
                raise EngineError(output.error_message or "The base doesn't answer.")
    logits = [probe.logits() for probe in probes]
    if any(rows is None for rows in logits):
        raise InvariantViolation("A probe ended before all of its rows were computed.")
    return torch.cat([rows for rows in logits if rows is not None])


def main() -> int:
    """Measure by the EngineConfig on stdin; print the cost, or what is wrong, as JSON."""
    try:
        found = measure(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig))
    except LoraserveError as error:
        sys.stdout.buffer.write(msgspec.json.encode({"error": error.message, "hint": error.hint or ""}) + b"\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
