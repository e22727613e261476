"""A float checkpoint rounded to int4 on calibration text, in a process of its own.

    python -m loraserve.model.compensation.quantizing < request.json

prints a line of JSON for each site that is done, and one with the result, or with what is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

import msgspec
import torch

from loraserve.errors import ConfigError, LoraserveError
from loraserve.model.checkpoint.blueprint import draw
from loraserve.model.checkpoint.files import open_checkpoint
from loraserve.model.checkpoint.original import OriginalBase
from loraserve.model.compensation.calibration import calibrate
from loraserve.model.compensation.compressed import CompressedWriter
from loraserve.model.config.model_config import read_config
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import QuantizeDone, QuantizeProgress, QuantizeRequest

_MIN_TOKENS = 1024


def quantize_checkpoint(request: QuantizeRequest, progress: Callable[[int, int], None]) -> QuantizeDone:
    """Write the rounded checkpoint of a request.

    Raises:
        ConfigError: the checkpoint is quantized already, or the text has too few tokens.
        ModelError: what is wrong with the directory, or can't be written.
    """
    source, out = Path(request.model_dir), Path(request.out_dir)
    config = read_config(source)
    base, checkpoint = OriginalBase(source, torch.device("cpu")), open_checkpoint(source)
    if base.stored_formats:
        raise ConfigError(
            f"{source} is quantized to {' and '.join(base.stored_formats)} already.", hint="Give the float checkpoint."
        )
    blueprint = draw(config, checkpoint.tensors, "int4")
    text = calibration_text() if request.text_file is None else _read(Path(request.text_file))
    sequences = _windows(Tokenizer(source).encode(text), request, config.max_model_len)
    writer = CompressedWriter(source, out, blueprint, checkpoint)
    try:
        calibrate(base, blueprint, sequences, writer.put_layer, progress)
        writer.finish()
    finally:
        writer.discard()
    return QuantizeDone(str(out), sum(map(len, sequences)))


def calibration_text() -> str:
    """Return the bundled text, of some 17,000 tokens.

    It was written for this project: parts of its documentation and code, a story, and answers.
    """
    return files("loraserve.text").joinpath("calibration.txt").read_text(encoding="utf-8")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The calibration text {path} can't be read: {error}.") from error


def _windows(token_ids: Sequence[int], request: QuantizeRequest, max_model_len: int) -> list[list[int]]:
    """Cut a text into sequences of equal length, spread over all of it."""
    width = min(request.window, max_model_len)
    count = min(request.max_tokens, len(token_ids)) // width
    if count * width < _MIN_TOKENS:
        raise ConfigError(
            f"The calibration text has {len(token_ids)} tokens; at least {_MIN_TOKENS} are needed.",
            hint="Give a longer text, or leave --text out.",
        )
    step = len(token_ids) // count
    return [list(token_ids[number * step : number * step + width]) for number in range(count)]


def main() -> int:
    """Quantize by the QuantizeRequest on stdin."""

    def tell(value: QuantizeProgress | QuantizeDone | dict[str, str]) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
        sys.stdout.buffer.flush()

    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=QuantizeRequest)
        if request.num_threads:
            torch.set_num_threads(request.num_threads)
        tell(quantize_checkpoint(request, lambda done, total: tell(QuantizeProgress(done, total))))
    except LoraserveError as error:
        tell({"error": error.message, "hint": error.hint or ""})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
