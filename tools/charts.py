"""Draw the charts of docs/ from benchmarks/results: the same results give the same bytes.

python tools/charts.py [--check]

Each is an SVG of a few KiB without a library, and without fonts or colors from elsewhere. With
``--check``, nothing is written: exit code 1 if a file differs.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, CHARTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "charts"
WIDTH, LABEL_WIDTH, BAR_WIDTH, BAR_HEIGHT, GAP = 760, 230, 420, 18, 12
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2933 }
.title { font-weight: 600; font-size: 15px } .small { font-size: 11px; fill: #52606d }
.ours { fill: #1f7a5c } .other { fill: #9aa5b1 }
@media (prefers-color-scheme: dark) {
text { fill: #e4e7eb } .small { fill: #9aa5b1 } .ours { fill: #45b891 } .other { fill: #616e7c } }
"""


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    is_ours: bool
    text: str


def draw(title: str, groups: Iterable[tuple[str, list[Bar]]], note: str) -> str:
    """Return an SVG of horizontal bars in labelled groups, all on one scale from zero."""
    groups = list(groups)
    most = max(bar.value for _, bars in groups for bar in bars)
    y, parts = 24, [f'<text class="title" x="0" y="16">{escape(title)}</text>']
    for name, bars in groups:
        y += GAP
        if name:
            parts.append(f'<text x="0" y="{y + 12}">{escape(name)}</text>')
            y += BAR_HEIGHT
        for bar in bars:
            width = round(BAR_WIDTH * bar.value / most, 1)
            kind, middle = ("ours" if bar.is_ours else "other"), y + 13
            parts.append(f'<text x="{LABEL_WIDTH - 8}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>')
            parts.append(f'<rect class="{kind}" x="{LABEL_WIDTH}" y="{y}" width="{width}" height="{BAR_HEIGHT - 2}"/>')
            parts.append(f'<text x="{LABEL_WIDTH + width + 6}" y="{middle}">{escape(bar.text)}</text>')
            y += BAR_HEIGHT
    y += GAP
    for line in note.splitlines():
        y += 14
        parts.append(f'<text class="small" x="0" y="{y}">{escape(line)}</text>')
    height = y + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title><style>{STYLE}</style>", *parts, "</svg>", ""])


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def newest(kind: str) -> str:
    """Return the name of the newest result of a kind; names end with their date, or `-quick`."""
    found = sorted(RESULTS.glob(f"{kind}-*.json"), key=lambda path: path.stem.removesuffix("-quick")[-10:])
    return found[-1].stem


def median(turns: list[dict[str, float]]) -> float:
    return statistics.median(turn["tokens_per_s"] for turn in turns)


def source(name: str) -> str:
    machine = read(name)["machine"]
    return f"benchmarks/results/{name}.md: {machine['processor']}, {machine['cores']} cores"


def peers(name: str) -> str:
    """Return the chart of pairs; of a trained base, each format has its divergence beside it."""
    found, groups, num_turns = read(name), [], 0
    lost = {(one["whose"], one["format"]): one["divergence"] for one in found.get("qualities", ())}

    def label(whose: str, format: str) -> str:
        divergence = lost.get((whose, format.partition("+")[0]))
        return format if divergence is None else f"{format} (KL {divergence:.3f})"

    for row in found["rows"]:
        which = row["requests"], row["mode"], row.get("prompt_tokens", 64), row.get("speculation", "auto")
        if which not in ((32, "mixed", 64, "auto"), (32, "mixed", 64, "off")) or not row["ours"] or not row["peer"]:
            continue
        pair, theirs, ours = row["pair"], median(row["peer"]), median(row["ours"])
        bars = [
            Bar(f"loraserve, {label('ours', pair['ours'])}", ours, True, f"{ours:.0f} ({ours / theirs:.1f} ×)"),
            Bar(f"{pair['peer']}, {label(pair['peer'], pair['format'])}", theirs, False, f"{theirs:.0f}"),
        ]
        groups.append(("", bars))
        num_turns = len(row["ours"])
    turns = "one turn" if num_turns == 1 else f"medians of {num_turns} turns"
    base = "SmolLM2-135M, speculation off" if found["options"]["size"] == "real" else "size S of random weights"
    note = f"32 requests at once, each with an adapter of its own, {base}, greedy; {turns} each.\n{source(name)}"
    return draw("Tokens per second, beside others in alternating turns", groups, note)


def registered(name: str) -> str:
    bars = []
    for point in read(name)["points"]:
        rate = statistics.median(turn["summary"]["tokens_per_s"] for turn in point["turns"])
        bars.append(Bar(f"{point['num_adapters']} adapters", rate, True, f"{rate:.0f}"))
    note = f"The same requests over more and more registered adapters, size S.\n{source(name)}"
    return draw("Tokens per second, by the number of registered adapters", [("", bars)], note)


def speculation(name: str) -> str:
    ratios = read(name)["ratios"]
    bars = [
        Bar(f"{case} stream{'s' * (not case.endswith(', 1'))}", x, True, f"{x:.2f} ×") for case, x in ratios.items()
    ]
    note = f"1 × is the same work without speculation.\n{source(name)}"
    return draw("Tokens per second with speculation, against without", [("", bars)], note)


SCENARIOS = ("centre", "flash", "64 replicas", "a replica lost")
"""Scenarios of a placement's result that are drawn, of some twenty."""


def placement(name: str) -> str:
    results = {result["scenario"]["name"]: result for result in read(name)["results"]}
    groups = []
    for scenario in SCENARIOS:
        result = results[scenario]
        bars = [
            Bar(
                outcome["policy"],
                outcome["in_memory"],
                outcome["policy"] == "loraserve",
                f"{outcome['in_memory']:.1%}; {outcome['minute_ratio']:.2f} ×",
            )
            for outcome in result["outcomes"]
        ]
        one = result["scenario"]
        words = f"{scenario}: {one['num_replicas']} replicas, {one['num_adapters']:,} adapters, Zipf {one['zipf']:g}"
        groups.append((words, bars))
    note = (
        "Simulated. Bars: requests that find their adapter in memory. Numbers: also the most requests of\n"
        "a replica, averaged over a minute, to the mean of all replicas.\n"
        f"benchmarks/results/{name}.md"
    )
    return draw("Adapters found in memory, and how uneven the load is, by placement", groups, note)


CALLS = (
    ("binds", "bind, looked up", "bind a name, looked up"),
    ("calls", "list adapters, in the middle", "a page of adapters"),
    ("calls", "list versions, in the middle", "a page of versions"),
    ("calls", "push a version, small tenant", "push, a small tenant"),
    ("calls", "push a version, largest tenant", "push, the largest tenant"),
)
"""Calls of a million's result that are drawn: where they are, their names there and here."""


def million(name: str) -> str:
    groups = []
    for part, call, words in CALLS:
        bars = []
        for registry in read(name)["registries"]:
            took = next(one for one in registry[part] if one["name"] == call)["p99_s"]
            bars.append(Bar(f"{registry['num_versions']:,} versions", took, True, f"{1e3 * took:.1f} ms"))
        groups.append((words, bars))
    note = f"One process, PostgreSQL on the same machine; sizes in turn.\n{source(name)}"
    return draw("p99 of the registry's calls, by the number of versions", groups, note)


def charts() -> dict[str, str]:
    """Return the text of each chart by its file's name."""
    return {
        "million.svg": million(newest("million")),
        "peers.svg": peers(newest("peers-real")),
        "peers-random.svg": peers(newest("peers-S")),
        "placement.svg": placement(newest("placement")),
        "registered.svg": registered(newest("registered-S")),
        "speculation.svg": speculation(newest("speculation-S")),
    }


def main() -> int:
    drawn = charts()
    if "--check" in sys.argv[1:]:
        old = [
            name for name, text in drawn.items() if not (CHARTS / name).is_file() or (CHARTS / name).read_text() != text
        ]
        if old:
            print("draw them again by python tools/charts.py:", *old, file=sys.stderr)
        return 1 if old else 0
    CHARTS.mkdir(exist_ok=True)
    for name, text in drawn.items():
        (CHARTS / name).write_text(text)
        print(CHARTS / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
