"""The page of `make bench ARGS=peers`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from benchmarks import figures
from benchmarks import peers_quality as quality
from benchmarks.peers_rows import MAX_OTHERS, Row, tables

REAL = "real"


def text(
    options: argparse.Namespace,
    rows: Sequence[Row],
    settings: Mapping[str, str],
    qualities: quality.Qualities,
    limits: str = "",
) -> str:
    """Build the page.

    Args:
        limits: what reading weights allows, as `peers_limits.text` says it.
    """
    words = "\n".join(f"- {name}: {value}." for name, value in settings.items())
    speed, first_tokens = tables(rows)
    if options.size == REAL:
        base, prompts = "Base SmolLM2-135M-Instruct (benchmarks/real_model.py)", "of this project's documentation"
    else:
        base, prompts = f"Size {options.size}, random weights", "of random tokens"
    return f"""{base}; prompts {prompts}, 64 tokens out, greedy, all requests at once; the base, or request i for \
adapter i of {options.adapters} (ranks 8, 16, 32 and 64 in turn, all seven linears). Turns of the two contenders \
alternate, {options.rounds} of each a row.

{speed}

- Tokens a second of all requests together: of the best turn, and in parentheses of the median one. The ratio is that \
of the best turns; "of pairs": the median of the turns that followed each other, and their range.
- Others: cores that everything else on the machine took, at the median; idle one: the most that the contender took \
whose turn it wasn't; dropped: turns beside which others took more than {MAX_OTHERS} cores, taken again.
- Prompts are sent to servers as token ids; PEFT generates in process, without a server, and its rows begin and end \
together.

Time to first token, of servers, at the median of the turns; "last": of the request whose first token came last:

{first_tokens}
{limits}{quality_text(qualities)}
What ran, with its arithmetic, instruction set and threads:

{words}
"""


def quality_text(qualities: quality.Qualities) -> str:
    """Return what each format loses, as a table; nothing of random weights."""
    if not qualities:
        return ""
    rows = [
        [
            "loraserve" if who == quality.OURS else who,
            name,
            f"{one.divergence:.4f}",
            f"{one.agreement:.1%}",
            f"{one.perplexity:.3f} ×",
        ]
        for (who, name), one in sorted(qualities.items(), key=lambda item: item[1].divergence)
    ]
    table = figures.table(("whose", "format", "KL", "same top-1", "perplexity"), rows)
    return f"""
What each format loses of its own float32, over the second halves of {quality.NUM_WINDOWS} windows of \
{quality.WINDOW} tokens of this project's documentation:

{table}
"""
