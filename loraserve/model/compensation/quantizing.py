"""A float checkpoint rounded to int4 on calibration text, in a process of its own.

    python -m loraserve.model.compensation.quantizing < request.json

prints a line of JSON for each site that is done, and one with the result, or with what is wrong.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import msgspec
import torch

from loraserve.errors import ConfigError, LoraserveError
from loraserve.model.checkpoint.blueprint import Blueprint, SiteKind, draw
from loraserve.model.checkpoint.files import open_checkpoint
from loraserve.model.checkpoint.original import OriginalBase
from loraserve.model.compensation.calibration import calibrate
from loraserve.model.compensation.compressed import CompressedWriter
from loraserve.model.config.model_config import read_config
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import QuantizeDone, QuantizeProgress, QuantizeRequest

_MIN_TOKENS = 1024
_KEPT = ("v_proj", "k_proj")
"""Linears whose bits count most: 6 % of SmolLM2-135M's weights, a quarter of its divergence."""
_INT4_BITS, _MAX_BITS = 4 + 24 / 32, 5
"""Bits of a weight; a group of 32 has a scale of two bytes and a zero of one."""


def quantize_checkpoint(request: QuantizeRequest, progress: Callable[[int, int], None]) -> QuantizeDone:
    """Write the rounded checkpoint of a request.

    Raises:
        ConfigError: the checkpoint is quantized already, the text has too few tokens, or no linear
            has such a name.
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
    int8_paths = _int8_paths(blueprint, request.int8_modules)
    sequences = _windows(Tokenizer(source).encode(text), request, config.max_model_len)
    writer = CompressedWriter(source, out, blueprint, checkpoint)
    try:
        calibrate(base, blueprint, sequences, writer.put_layer, progress, int8_paths)
        writer.finish()
    finally:
        writer.discard()
    return QuantizeDone(str(out), sum(map(len, sequences)))


def _int8_paths(blueprint: Blueprint, names: Sequence[str] | None) -> list[str]:
    """List the paths of the layers' linears whose last parts are these names.

    None: of those in `_KEPT`, as far as `_MAX_BITS` allows.
    """
    kinds = (SiteKind.LAYER, SiteKind.EXPERT)
    sites = [site for site in blueprint.sites if site.kind in kinds]
    sizes = {module.path: module.out_features * site.in_features for site in sites for module in site.modules}
    by_name: dict[str, list[str]] = {}
    for path in sizes:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    if names is None:
        return _paths_within(_MAX_BITS, sizes, by_name)
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError(
            f"{', '.join(unknown)}: no linear of this checkpoint's layers has such a name.",
            hint=f"Its linears are {', '.join(sorted(by_name))}.",
        )
    return [path for name in names for path in by_name[name]]


def _paths_within(max_bits: float, sizes: Mapping[str, int], by_name: Mapping[str, Sequence[str]]) -> list[str]:
    """Choose the paths of `_KEPT` that leave all weights at `max_bits` on average.

    Scales of int8 aren't counted: 32 bits for an output channel.
    """
    paths: list[str] = []
    for name in _KEPT:
        more = [*paths, *by_name.get(name, ())]
        share = sum(sizes[path] for path in more) / sum(sizes.values())
        if 8 * share + _INT4_BITS * (1 - share) <= max_bits:
            paths = more
    return paths


def calibration_text() -> str:
    """Read the bundled text, of some 40,000 tokens, whose kinds alternate.

    Written for this project: parts of its documentation and code, a story, letters, answers, data,
    and paragraphs in eight languages. In the public domain: annual messages of presidents of the
    United States (1907 to 1981), the Jargon File 4.4.7, and Pride and Prejudice.
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

    # its parent's way to end it: files that aren't finished go
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=QuantizeRequest)
        # served rows are rounded to 8 bits: 16 are enough for the products that weigh errors, and
        # processors with AMX multiply them several times as fast
        torch.set_float32_matmul_precision("medium")
        if request.num_threads:
            torch.set_num_threads(request.num_threads)
        tell(quantize_checkpoint(request, lambda done, total: tell(QuantizeProgress(done, total))))
    except LoraserveError as error:
        tell({"error": error.message, "hint": error.hint or ""})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
