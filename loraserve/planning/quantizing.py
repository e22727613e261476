"""A base rounded on a text, in a process of its own: the command line has no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import msgspec

from loraserve.errors import ConfigError, EngineError
from loraserve.types import QuantizeDone, QuantizeProgress, QuantizeRequest

_MODULE = "loraserve.model.compensation.quantizing"


def quantize(request: QuantizeRequest, progress: Callable[[int, int], None]) -> QuantizeDone:
    """Write a rounded checkpoint; nothing is left of one that is interrupted or fails.

    Args:
        progress: notified of the groups of linears that are done, and of all.

    Raises:
        ConfigError: what is wrong with the directory or the text.
        EngineError: the process ended without an answer.
    """
    # keys are none of its business
    variables = {name: value for name, value in os.environ.items() if not name.upper().startswith("LORASERVE_")}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603 (our own words)
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=variables,
        )
        try:
            return _follow(process, request, progress)
        except EngineError as error:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise EngineError(f"{error.message} {' '.join(last)}".strip()) from error
        finally:
            # an interrupted command takes its process with it, which removes what it has written
            if process.poll() is None:
                process.terminate()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _follow(
    process: subprocess.Popen[bytes], request: QuantizeRequest, progress: Callable[[int, int], None]
) -> QuantizeDone:
    if process.stdin is None or process.stdout is None:
        raise EngineError("The quantizing process has no pipes.")
    process.stdin.write(msgspec.json.encode(request))
    process.stdin.close()
    for line in process.stdout:
        told = msgspec.json.decode(line)
        if "error" in told:
            raise ConfigError(told["error"], hint=told.get("hint") or None)
        if "out_dir" in told:
            process.wait()
            return msgspec.convert(told, QuantizeDone)
        one = msgspec.convert(told, QuantizeProgress)
        progress(one.num_done, one.num_all)
    raise EngineError(f"The quantizing process ended with exit code {process.wait()}.")
