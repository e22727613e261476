"""What each contender's format keeps of the base: divergence from float32, and perplexity.

Ours are computed by `benchmarks.quality`, llama.cpp's by its own `llama-perplexity`, on the same
windows of the same text and on the second half of each, as that program does. Both are compared
with their own float32.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import peers_installing as installing
from benchmarks import quality
from benchmarks.formats import CALIBRATED, file_type
from benchmarks.peers_installing import CACHE, PeerUnavailableError, last_words
from benchmarks.quality import Loss
from benchmarks.serving import say
from loraserve.model.checkpoint.source import local_model_dir
from loraserve.text.tokenizer import Tokenizer

WINDOW, NUM_WINDOWS = 512, 16
_MEAN_KL = re.compile(r"^Mean\s+KLD:\s+(\S+)", re.MULTILINE)
_TOP1 = re.compile(r"^Same top p:\s+(\S+)", re.MULTILINE)
_PERPLEXITY = re.compile(r"^Mean PPL\(Q\)/PPL\(base\)\s*:\s+(\S+)", re.MULTILINE)


Qualities = Mapping[tuple[str, str], Loss]
"""Quality by contender ("ours", or a peer) and its base format."""
OURS = "ours"


def base_format(name: str) -> str:
    """Return the base's part of a format, without that of the adapters."""
    return name.partition("+")[0]


def of_ours(model: Path, calibrated: Path | None, text: Path, names: Iterable[str]) -> dict[tuple[str, str], Loss]:
    """Measure our formats.

    Args:
        calibrated: the checkpoint that `loraserve quantize` made of the base; None where none of
            the formats is its.
    """
    token_ids = Tokenizer(model).encode(text.read_text())[: WINDOW * NUM_WINDOWS]
    windows = [token_ids[first : first + WINDOW] for first in range(0, len(token_ids) - WINDOW + 1, WINDOW)]
    wanted = sorted({base_format(name) for name in names})
    folders: dict[str, Path] = {}
    for name in wanted:
        if (type_name := file_type(name)) is not None:
            folders[name] = local_model_dir(installing.gguf_base(model, type_name))
        elif name in CALIBRATED and calibrated is not None:
            folders[name] = calibrated
    formats, checkpoints = [name for name in wanted if name not in folders], list(dict.fromkeys(folders.values()))
    measured = quality.measure(model, formats, checkpoints, windows, first_scored=WINDOW // 2)
    found = {row.format: Loss(row.divergence, row.agreement, row.perplexity) for row in measured}
    return {(OURS, name): found[folders[name].name if name in folders else name] for name in wanted}


def of_llama_cpp(model: Path, text: Path, names: Iterable[str]) -> dict[tuple[str, str], Loss]:
    """Measure llama.cpp's formats.

    Raises:
        PeerUnavailableError: it can't be built, or doesn't say.
    """
    program, kept = installing.llama_cpp() / "llama-perplexity", CACHE / "logits.kld"
    common: list[str | Path] = [program, "--kl-divergence-base", kept, "-c", str(WINDOW), "-b", str(WINDOW)]
    first: list[str | Path] = ["-m", installing.gguf_base(model, "F32"), "-f", text, "--chunks", str(NUM_WINDOWS)]
    found = {}
    try:
        _run([*common, *first])
        for name in sorted({base_format(name) for name in names}):
            said = _run([*common, "-m", installing.gguf_base(model, name), "--kl-divergence"])
            found["llama.cpp", name] = parse_llama_cpp(said)
    finally:
        kept.unlink(missing_ok=True)
    return found


def parse_llama_cpp(text: str) -> Loss:
    """Return what `llama-perplexity --kl-divergence` printed.

    Raises:
        PeerUnavailableError: a figure isn't there.
    """
    figures = [match[1] if (match := pattern.search(text)) else None for pattern in (_MEAN_KL, _TOP1, _PERPLEXITY)]
    with contextlib.suppress(TypeError, ValueError):
        divergence, percent, perplexity = map(float, figures)  # type: ignore[arg-type]
        return Loss(divergence, percent / 100, perplexity)
    raise PeerUnavailableError(f"llama-perplexity didn't say what a format loses: {last_words(text)}")


def _run(command: Sequence[str | Path]) -> str:
    say(f"  {Path(command[0]).name} …")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerUnavailableError(f"llama-perplexity ended with {done.returncode}: {last_words(done.stderr)}")
    return done.stdout


def nearest_not_better(ours: float, theirs: Mapping[str, float]) -> str | None:
    """Return the peer's format that loses least of those that lose as much as ours, or more."""
    worse = {name: divergence for name, divergence in theirs.items() if divergence >= ours}
    return min(worse, key=lambda name: worse[name]) if worse else None


def nearest(theirs: float, ours: Mapping[str, float]) -> str:
    """Return our format whose divergence is nearest a peer's, as a ratio."""
    return min(ours, key=lambda name: max(ours[name], theirs) / max(min(ours[name], theirs), 1e-12))
