"""Summary of a run in a few lines: whether everything is right,
and the figures that the project has set itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.gpu.limits import geometric_mean
from benchmarks.gpu.parts import BY_NAME, Outcome, Row

MANY_ADAPTERS = 32
_NAMING = ("what", "site", "base", "ranks", "rows")


def failed_checks(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Checks that don't hold, and cases that broke, in words."""
    found = []
    for name, outcome in outcomes.items():
        found += [f"{name}: {described(row)}" for row in outcome.rows if row.get("ok") is False]
        found += [f"{name}: {problem}" for problem in outcome.problems]
    return found


def described(row: Row) -> str:
    """Return what a row is about: its check's name, or the cells that tell figures apart."""
    if "check" in row:
        return str(row["check"])
    named = (f"{row[key]} {key}" if key == "rows" else str(row[key]) for key in _NAMING if row.get(key) is not None)
    return ", ".join(named)


def lines(outcomes: Mapping[str, Outcome]) -> list[str]:
    checks = [row for name, outcome in outcomes.items() if BY_NAME[name].is_check for row in outcome.rows]
    # what a missing package left out is no check
    checks = [row for row in checks if row.get("ok") is not None]
    failed = failed_checks(outcomes)
    said = [f"{sum(row.get('ok') is True for row in checks)} of {len(checks)} checks hold."] if checks else []
    said += [f"**Not so:** {text}" for text in failed[:20]]
    if len(failed) > 20:
        said.append(f"… and {len(failed) - 20} more.")
    unfinished = [f"{name} ({outcome.state})" for name, outcome in outcomes.items() if outcome.state != "complete"]
    if unfinished:
        said.append(f"Not complete: {', '.join(unfinished)}.")
    for name, of_part in (
        ("engine", _engine),
        ("prefill", _prefill),
        ("tune", _tune),
        ("kernels", _kernels),
        ("decode", _decode),
    ):
        if name in outcomes:
            said += of_part(outcomes[name].rows)
    return said


def _engine(rows: list[Row]) -> list[str]:
    """The figures that a server's user would see, each with what it decides (docs/gpu.md)."""
    said = []
    for row in rows:
        what, base = row["what"], row["base"]
        if row.get("ms") is not None and (what == "ready" or "idle" in what or "cold" in what):
            said.append(f"Engine, {base}, {what}: {row['ms']:.0f} ms.")
        elif row.get("tokens_per_s") is not None and what.endswith("adapters"):
            said.append(
                f"Engine, {base}, {what}: {row['tokens_per_s']:.0f} tokens/s, p50 {row['p50_ms']:.1f} and "
                f"p99 {row['p99_ms']:.1f} ms between tokens."
            )
    return said


def _prefill(rows: list[Row]) -> list[str]:
    shares = _values(rows, "share")
    return [f"Prompts: {_percent(min(shares))} to {_percent(max(shares))} of the limit."] if shares else []


def _tune(rows: list[Row]) -> list[str]:
    gains = [row["gain"] for row in rows if row.get("gain") is not None]
    if not gains:
        return []
    better = [gain for gain in gains if gain >= 1.03]
    return [f"Tile sizes: {len(better)} of {len(gains)} shapes have better ones, by up to {max(gains):.2f} times."]


def _kernels(rows: list[Row]) -> list[str]:
    said = []
    many = [row for row in rows if row["adapters"] >= MANY_ADAPTERS and row["rows"] <= 256]
    shares = [row["share"] for row in many if row.get("share") is not None]
    if shares:
        said.append(
            f"Shrink and expand with {MANY_ADAPTERS} or more adapters: {_percent(geometric_mean(shares))} of the limit "
            f"(geometric mean), {_percent(min(shares))} at the least; the goal is 70 %."
        )
    for key, peer in (
        ("vllm_best", "vLLM's best"),
        ("vllm", "vLLM's default"),
        ("csgmv", "SGLang's csgmv"),
        ("loop", "a torch loop"),
    ):
        ratios = _values(rows, key)
        if ratios:
            slower = sum(ratio < 1 for ratio in ratios)
            said.append(
                f"{geometric_mean(ratios):.2f} times as fast as {peer} (geometric mean of {len(ratios)} shapes); "
                f"slower on {slower} of them, {min(ratios):.2f} times at the least."
            )
    return said


def _decode(rows: list[Row]) -> list[str]:
    said = []
    for base in dict.fromkeys(row["base"] for row in rows):
        here = [row for row in rows if row["base"] == base]
        shares = _values(here, "share")
        if shares:
            said.append(f"Decode, {base}: {_percent(min(shares))} to {_percent(max(shares))} of the limit.")
        for row in here:
            if row["rows"] == row["adapters"] == 64 and row.get("tax") and row.get("bytes_tax"):
                said.append(
                    f"Decode, {base}, 64 rows of 64 adapters: {row['tax']:.3f} times the step without adapters; the "
                    f"extra bytes cost {row['bytes_tax']:.3f}."
                )
    return said


def _values(rows: Iterable[Row], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"
