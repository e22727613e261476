"""Cost of rounding the base, measured in a process of its own.

That process loads the base, as `serve` would.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from loraserve.base_advice import MAX_DIVERGENCE, MIN_AGREEMENT, better_choice, is_low
from loraserve.config import EngineConfig
from loraserve.doctor.checks import Check, fail, ok, warn
from loraserve.limits import GIB
from loraserve.types import Rounding, RoundingCost

TIMEOUT_S = 3600.0
"""A base of 8B parameters on two cores takes minutes,
of which most is the plain evaluation of its weights, twice.
"""
BESIDE_BASE_BYTES = 2 * GIB
"""Memory that measuring takes in addition to the base: blocks of weights, KV of 256 positions,
and their logits three times.
"""
_MODULE = "loraserve.engine.worker.rounding"


def room(base_bytes: int, device: str, available_bytes: int | None) -> Iterator[Check]:
    """Report if this machine has no memory for another copy of the base.

    Args:
        base_bytes: what it takes resident.
        device: cpu or cuda; a GPU's own loader refuses what doesn't fit.
        available_bytes: of the host; None: it isn't known.
    """
    needed = base_bytes + BESIDE_BASE_BYTES
    if device == "cpu" and available_bytes is not None and needed > available_bytes:
        yield fail(
            "precision",
            f"{available_bytes / GIB:.1f} GiB of memory available",
            f"{needed / GIB:.1f} GiB: the base is loaded to be measured",
            "Stop the server that has loaded it, or measure on a larger machine.",
        )


def measure(config: EngineConfig) -> RoundingCost:
    """Measure what rounding costs the base of a config.

    This takes as long as a start of the server and a minute or more.

    Raises:
        OSError: the process can't be started, doesn't answer, or reports what is wrong with the
        base.
    """
    # keys are none of its business
    variables = {name: value for name, value in os.environ.items() if not name.upper().startswith("LORASERVE_")}
    command = [sys.executable, "-P", "-m", _MODULE]
    try:
        done = subprocess.run(  # noqa: S603 (our own words)
            command,
            input=msgspec.json.encode(config),
            capture_output=True,
            timeout=TIMEOUT_S,
            env=variables,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"the measurement took longer than {TIMEOUT_S:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    try:
        if done.returncode == 0 and lines:
            return msgspec.json.decode(lines[-1], type=RoundingCost)
        told = msgspec.json.decode(lines[-1], type=dict[str, str]) if lines else {}
    except msgspec.DecodeError:
        told = {}
    stderr = done.stderr.decode(errors="replace").strip().splitlines()
    last = told.get("error") or (stderr or [f"exit code {done.returncode}"])[-1]
    raise OSError(f"the base can't be measured: {last[:500]}")


def check(cost: RoundingCost) -> Iterator[Check]:
    """Report what rounding costs, in all and by weights and activations alone.

    Warn where it is much.
    """
    yield _total(cost)
    yield ok("precision_weights", f"rounding weights: {_words(cost.weights)}")
    yield ok("precision_activations", f"rounding activations: {_words(cost.activations)}")


def _total(cost: RoundingCost) -> Check:
    how = f"{cost.arithmetic} ({cost.kernels}, {cost.instructions}) on {cost.device}"
    loss = f"loss {cost.loss:.4f} in float32, {cost.served_loss:.4f} served"
    found = f"{how}: {_words(cost.total)}, over {cost.num_positions} positions of text; {loss}"
    if not is_low(cost.total.top1_agreement, cost.total.mean_divergence):
        return ok("precision", found)
    expected = f"the same likeliest token at {MIN_AGREEMENT:.0%}, and {MAX_DIVERGENCE:g} nats of divergence at most"
    is_of_activations = cost.activations.mean_divergence > cost.weights.mean_divergence
    advice = better_choice(cost.quantization, cost.arithmetic, is_of_activations=is_of_activations)
    return warn("precision", found, expected, f"Use {advice}.")


def _words(one: Rounding) -> str:
    return (
        f"the same likeliest token at {one.top1_agreement:.1%}, "
        f"log probabilities off by {one.mean_difference:.2g} on average "
        f"and {one.max_difference:.2g} at most, {one.mean_divergence:.2g} nats of divergence"
    )
