"""What each format costs a base: bits a weight, divergence from float32, perplexity.

    python -m benchmarks.quality --model DIR
    python -m benchmarks.quality --model DIR --formats int8 --text book.txt --tokens 20480

Every format computes the same windows of a text: this project's own documentation, or a file. KL is
the mean divergence of a format's distribution of the next token from that of the same weights in
float32, top-1 the share of positions with the same likeliest token, and perplexity is a multiple of
float32's. A base of random weights has no distribution worth keeping: take a trained one.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.formats import FORMATS, Format
from benchmarks.reporting import command, describe, facts, today, write
from benchmarks.serving import HERE, say
from loraserve.config import EngineConfig
from loraserve.model.checkpoint.loader import load_model
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.planning.base import plan_base
from loraserve.text.passage import PASSAGE
from loraserve.text.tokenizer import Tokenizer

REFERENCE = "float32"
COMPARED = ("bfloat16", "int8", "int8-float", "fp8", "nf4", "int4", "int4-rounded")
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Loss:
    """What rounding costs a base's distributions.

    Attributes:
        divergence: mean Kullback-Leibler divergence from float32, in nats.
        agreement: share of positions with float32's likeliest token.
        perplexity: multiple of float32's.
    """

    divergence: float
    agreement: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Quality(Loss):
    """The loss of one of our formats.

    Attributes:
        bits: of a weight of the layers' linears, with scales and zeros.
    """

    format: str
    arithmetic: str
    bits: float


def prose(path: Path | None) -> str:
    """Return the text that is computed: a file's, or the passage and the paragraphs of docs/."""
    if path is not None:
        return path.read_text()
    pages = [page.read_text() for page in sorted((HERE.parent / "docs").glob("*.md"))]
    paragraphs = (part for page in pages for part in page.split("\n\n"))
    # neither tables, lists, code nor headings
    return "\n\n".join([PASSAGE, *(part for part in paragraphs if part[:1].isalpha() and "```" not in part)])


def cut(token_ids: Sequence[int], num_tokens: int, width: int) -> list[list[int]]:
    """Return windows of so many tokens together."""
    count = max(1, num_tokens // width)
    if len(token_ids) < count * width:
        sys.exit(f"the text has {len(token_ids)} tokens; {count * width} are wanted: lower --tokens")
    # spread over the whole text
    step = len(token_ids) // count
    return [list(token_ids[start * step : start * step + width]) for start in range(count)]


def load(model: Path, format: Format, width: int) -> Decoder:
    """Return the base in a format, as a server on this machine's CPU computes it."""
    dtype = "float32" if format.dtype == "auto" else format.dtype
    return load_model(
        model,
        model_id=model.name,
        dtype=getattr(torch, dtype),
        quantize=format.quantize,
        device="cpu",
        max_model_len=width,
        activation_dtype=format.activations,
    )


def logits_of(decoder: Decoder, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Yield each window's logits, [width, vocab_size] float32."""
    num_layers, num_kv_heads, head_dim = decoder.kv_shape
    width = len(windows[0])
    num_blocks = -(-width // BLOCK_SIZE)
    shape = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
    k, v = (tuple(torch.zeros(shape) for _ in range(num_layers)) for _ in range(2))
    places = torch.arange(width)
    for window in windows:
        inputs = ModelInputs(
            token_ids=torch.tensor(window),
            positions=places,
            slot_mapping=places,
            query_starts=[0, width],
            context_lens=[width],
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            logits_rows=places,
            lora=None,
        )
        yield decoder.forward(inputs, KVTensors(k=k, v=v, block_size=BLOCK_SIZE))


def compare(
    found: Iterator[Tensor], exact: Sequence[Tensor], windows: Sequence[Sequence[int]], first_scored: int = 0
) -> tuple[float, float, float]:
    """Return the mean divergence, the share of equal likeliest tokens, and perplexity's ratio.

    Args:
        first_scored: position of a window from which on it counts.
    """
    divergence = agreed = loss = 0.0
    count = num_targets = 0
    for logits, expected, tokens in zip(found, exact, windows, strict=True):
        window = tokens[first_scored:]
        ours, theirs = logits[first_scored:].log_softmax(-1), expected[first_scored:].log_softmax(-1)
        divergence += float((theirs.exp() * (theirs - ours)).sum(-1).double().sum())
        agreed += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        targets = torch.tensor(window[1:])[:, None]
        loss += float((theirs[:-1].gather(1, targets) - ours[:-1].gather(1, targets)).double().sum())
        count, num_targets = count + len(window), num_targets + len(targets)
    return divergence / count, agreed / count, math.exp(loss / num_targets)


def bits_of(model: Path, format: Format) -> float:
    """Return the bits of a weight of the layers' linears."""
    config = EngineConfig(
        model_id=model.name,
        model_dir=str(model),
        store_url="file:///unused",
        quantize=format.quantize,
        dtype="float32" if format.dtype == "auto" else format.dtype,
        activation_dtype=format.activations,
    )
    plan = plan_base(config, "cpu")
    num_bytes = sum(part.num_bytes for part in plan.parts if part.name in ("linears", "experts"))
    shapes = plan.config.module_shapes.values()
    return 8 * num_bytes / (plan.config.num_layers * sum(rows * columns for rows, columns in shapes))


def measure(
    model: Path,
    names: Sequence[str],
    checkpoints: Sequence[Path],
    windows: Sequence[Sequence[int]],
    first_scored: int = 0,
) -> Iterator[Quality]:
    """Yield the quality of each format, and of each rounded checkpoint of the base.

    Args:
        first_scored: position of a window from which on it counts.
    """
    with tempfile.TemporaryDirectory(prefix="loraserve-quality-") as folder, torch.inference_mode():
        decoder = load(model, FORMATS[REFERENCE], len(windows[0]))
        # whole distributions of large vocabularies don't fit in memory beside the base
        shape = (len(windows), len(windows[0]), decoder.spec.vocab_size)
        kept = np.memmap(Path(folder) / "logits", np.float32, "w+", shape=shape)
        exact = [torch.from_numpy(rows) for rows in kept]
        for rows, logits in zip(exact, logits_of(decoder, windows), strict=True):
            rows.copy_(logits)
        contenders = [(name, model, FORMATS[name]) for name in names]
        contenders += [(path.name, path, FORMATS[REFERENCE]) for path in checkpoints]
        for name, path, format in contenders:
            del decoder
            decoder = load(path, format, len(windows[0]))
            found = compare(logits_of(decoder, windows), exact, windows, first_scored)
            yield Quality(*found, name, decoder.spec.arithmetic, bits_of(path, format))


def table(rows: Sequence[Quality]) -> str:
    lines = [
        "| format | arithmetic | bits a weight | KL | same top-1 | perplexity |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.format} | {row.arithmetic} | {row.bits:.2f} | {row.divergence:.4f} | {row.agreement:.1%} "
        f"| {row.perplexity:.3f} × |"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a base's directory, in a float dtype")
    parser.add_argument("--formats", default=",".join(COMPARED), help=f"of {', '.join(FORMATS)}")
    parser.add_argument(
        "--checkpoint", type=Path, action="append", default=[], help="a rounded checkpoint of the base; may be repeated"
    )
    parser.add_argument("--text", type=Path, help="a file of plain text; default: this project's documentation")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512, help="tokens that see each other")
    parser.add_argument("--keep", action="store_true", help="write the table to benchmarks/results/")
    options = parser.parse_args(arguments)
    names = [name for name in options.formats.split(",") if name]
    if unknown := [name for name in names if name not in FORMATS]:
        parser.error(f"unknown formats: {', '.join(unknown)}")
    machine = facts()
    windows = cut(Tokenizer(options.model).encode(prose(options.text)), options.tokens, options.window)
    rows = []
    for row in measure(options.model, names, options.checkpoint, windows):
        rows.append(row)
        say(f"{row.format}: KL {row.divergence:.4f}, top-1 {row.agreement:.1%}, perplexity {row.perplexity:.3f} ×")
    head = describe(machine, command("quality", arguments), os.getloadavg()[0], today())
    source = "docs/ and loraserve's passage" if options.text is None else options.text.name
    page = f"{head}\n{len(windows)} windows of {options.window} tokens of {source}.\n\n{table(rows)}"
    print(page)
    numbers = {"windows": len(windows), "window": options.window, "text": source, "rows": [asdict(row) for row in rows]}
    name, title = f"quality-{options.model.name}-{today()}", f"Formats of {options.model.name}"
    if options.keep:
        for path in write(name, title, page, numbers, machine):
            say(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
