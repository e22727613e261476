"""Reports of a run: everything as JSON, and the same for readers as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import summary
from benchmarks.gpu.parts import BY_NAME, Outcome, Part, Row

MOST_CHARACTERS = 8800
"""Characters that are printed at most: of a long output only the last 9,000 or so are kept."""
MOST_OF_A_LINE = 240


def shown(key: str, value: object) -> str:
    """A cell's text; a dash where nothing was measured."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return {True: "yes", False: "**no**"}[value]
    if key == "share" and isinstance(value, float):
        return f"{100 * value:.0f} %"
    if key in ("error", "bound") and isinstance(value, float):
        return f"{value:.1e}"
    if key == "num_bytes" and isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(part: Part, rows: list[Row]) -> str:
    """The rows as a Markdown table; columns that no row fills are left out."""
    columns = {
        key: heading
        for key, heading in part.columns.items()
        if any(row.get(key) is not None and row.get(key) != "" for row in rows)
    }
    cells = [list(columns.values()), ["---"] * len(columns)]
    cells += [[shown(key, row.get(key)) for key in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def machine_lines(facts: Mapping[str, Any], command: str, date: str) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())
    lines = [f"- Device: {facts.get('device', 'unknown: no worker has come so far as to say')}"]
    if "copy_bytes_per_s" in facts:
        lines[0] += (
            f", compute capability {facts['capability']}, {facts['multiprocessors']} multiprocessors, "
            f"{facts['memory_bytes'] / 2**30:.0f} GiB, {facts['cache_bytes'] / 2**20:.0f} MiB of cache"
        )
        lines.append(
            f"- Measured in the same run, the limits: copies {facts['copy_bytes_per_s'] / 1e12:.2f} TB/s (read and "
            f"written), bfloat16 products {facts['operations_per_s'] / 1e12:.0f} TFLOP/s, from pinned memory "
            f"{facts['load_bytes_per_s'] / 1e9:.1f} GB/s"
        )
    return [
        *lines,
        f"- Versions: Python {facts.get('python', '?')}, {versions}; CUDA {facts.get('cuda')}",
        f"- Date: {date}. Command: `{command}`",
    ]


def markdown(
    outcomes: Mapping[str, Outcome], facts: Mapping[str, Any], *, command: str, date: str, seconds: float
) -> str:
    """The whole page."""
    is_dry = bool(facts.get("is_dry_run"))
    lines = ["# Kernels and decode steps on a GPU", ""]
    if is_dry:
        lines += ["**A dry run without a GPU, at toy sizes: it shows that the script runs. Nothing is measured.**", ""]
    lines += [*machine_lines(facts, command, date), f"- It took {seconds:.0f} s.", "", "## Summary", ""]
    lines += [f"- {line}" for line in summary.lines(outcomes)]
    for name, outcome in outcomes.items():
        part = BY_NAME[name]
        lines += ["", f"## {part.title}", "", f"`{name}`: {outcome.state}, {outcome.seconds:.0f} s."]
        if part.note:
            lines += ["", part.note]
        if outcome.problems:
            lines += ["", *(f"- **failed** {shown('', problem)}" for problem in outcome.problems)]
        if outcome.rows:
            lines += ["", table(part, outcome.rows)]
    return "\n".join(lines) + "\n"


def brief(outcomes: Mapping[str, Outcome], facts: Mapping[str, Any], *, seconds: float) -> str:
    """The tables for a reader of a terminal's end, within `MOST_CHARACTERS`: the summary last.

    Checks that hold are counted alone. Where everything is too long, the last rows of the longest
    tables are left out first.
    """
    head = [f"{facts.get('device', 'no device')}; {seconds:.0f} s"]
    sections: list[tuple[str, list[str]]] = []
    for name, outcome in outcomes.items():
        part = BY_NAME[name]
        title = f"{name}: {outcome.state}, {outcome.seconds:.0f} s, {outcome.num_cases} cases"
        if part.is_check:
            head.append(f"{title}, {sum(row.get('ok') is True for row in outcome.rows)} checks hold")
        elif outcome.rows:
            sections.append((title, compact(part, outcome.rows)))
        else:
            head.append(title)
    tail = [f"- {line}" for line in summary.lines(outcomes)]
    tail = [line if len(line) <= MOST_OF_A_LINE else f"{line[: MOST_OF_A_LINE - 1]}…" for line in tail]

    def text() -> str:
        tables = ["\n".join(["", title, *lines]) for title, lines in sections]
        return "\n".join([*head, *tables, "", *tail])

    while len(text()) > MOST_CHARACTERS and any(len(lines) > 2 for _, lines in sections):
        longest = max((lines for _, lines in sections), key=len)
        del longest[-2 if longest[-1] == "…" else -1]
        if longest[-1] != "…":
            longest.append("…")
        if len(longest) <= 3:
            longest[:] = longest[:1]
    return text()[-MOST_CHARACTERS:]


def compact(part: Part, rows: list[Row]) -> list[str]:
    """A table's lines, its cells parted by a bar alone; columns that no row fills are left out."""
    keys = [key for key in part.columns if any(row.get(key) is not None and row.get(key) != "" for row in rows)]
    lines = ["|".join(part.columns[key] for key in keys)]
    return lines + ["|".join(shown(key, row.get(key)) for key in keys) for row in rows]


def write(
    folder: Path,
    name: str,
    outcomes: Mapping[str, Outcome],
    facts: Mapping[str, Any],
    *,
    command: str,
    date: str,
    seconds: float,
) -> tuple[Path, Path]:
    """Write NAME.json and NAME.md, each whole or not at all; return where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": dict(facts),
        "date": date,
        "command": command,
        "seconds": round(seconds, 1),
        "summary": summary.lines(outcomes),
        "parts": {
            part: {
                "state": outcome.state,
                "seconds": round(outcome.seconds, 1),
                "cases": outcome.num_cases,
                "problems": outcome.problems,
                "rows": outcome.rows,
            }
            for part, outcome in outcomes.items()
        },
    }
    page = markdown(outcomes, facts, command=command, date=date, seconds=seconds)
    paths = folder / f"{name}.json", folder / f"{name}.md"
    for path, text in zip(paths, (json.dumps(document, indent=1, ensure_ascii=False) + "\n", page), strict=True):
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        partial.replace(path)
    return paths
