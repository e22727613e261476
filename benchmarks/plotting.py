"""Plots of results, by matplotlib: `pip install 'loraserve[bench]'`.

Nothing else of the project imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from benchmarks.asking import Summary
from benchmarks.figures import percentile
from benchmarks.registry_sites import Site
from benchmarks.watching import TIERS

# No date and no random names: the same points give the same file.
matplotlib.rcParams["svg.hashsalt"] = "loraserve"
COLORS = {"device": "#2a7f62", "host": "#e0a030", "disk": "#b04a4a"}


class TracePoint(Protocol):
    """Series of one trace in a plot."""

    @property
    def cv(self) -> float: ...
    @property
    def alpha(self) -> float: ...
    @property
    def summary(self) -> Summary: ...
    @property
    def hits(self) -> dict[str, float]: ...


def plot_trace(points: Sequence[TracePoint], out: Path) -> None:
    """`out` is an SVG: throughput, time to the first token, and where adapters were found,
    by the skew of popularity.
    """
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    # from uniform to strongly skewed
    alphas = sorted({point.alpha for point in points}, reverse=True)
    cvs = sorted({point.cv for point in points})
    at = {(point.cv, point.alpha): point for point in points}

    def series(cv: float, value: Callable[[TracePoint], float]) -> list[float]:
        return [value(at[cv, alpha]) for alpha in alphas]

    ticks = range(len(alphas))
    for cv in cvs:
        axes[0].plot(ticks, series(cv, lambda p: p.summary.tokens_per_s), marker="o", label=f"cv {cv:g}")
        for name, style, value in (
            ("p50", "-", lambda p: p.summary.ttft_p50_s),
            ("p99", "--", lambda p: p.summary.ttft_p99_s),
        ):
            axes[1].plot(ticks, series(cv, value), style, marker="o", label=f"{name}, cv {cv:g}")
    width = 0.8 / len(cvs)
    for i, cv in enumerate(cvs):
        places = [tick + (i - (len(cvs) - 1) / 2) * width for tick in ticks]
        bottom = [0.0] * len(alphas)
        for tier in TIERS:
            shares = [100 * at[cv, alpha].hits.get(tier, 0.0) for alpha in alphas]
            label = tier if i == 0 else None
            axes[2].bar(places, shares, 0.9 * width, bottom=bottom, color=COLORS[tier], label=label)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes[0].set(ylabel="tokens/s", title="throughput", ylim=(0, None))
    axes[1].set(ylabel="seconds", title="time to the first token", yscale="log")
    axes[2].set(ylabel="% of requests", title=f"found (bars: cv {', '.join(f'{cv:g}' for cv in cvs)})")
    for axis in axes:
        axis.set_xticks(list(ticks), [f"{alpha:g}" for alpha in alphas])
        axis.set_xlabel("alpha (1: uniform popularity)")
        axis.legend(fontsize="small")
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


def plot_registry(sites: Sequence[Site], calls: Sequence[str], passes: Sequence[str], out: Path) -> None:
    """`out` is an SVG: p99 of calls, and seconds of passes, by the number of versions."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    sizes = [site.num_versions for site in sites]
    for name in calls:
        times = [1e3 * percentile({**site.binds, **site.calls}[name].times_s, 99) for site in sites]
        left.plot(sizes, times, marker="o", label=name)
    for name in passes:
        right.plot(sizes, [site.passes[name].times_s[0] for site in sites], marker="o", label=name)
    left.set(ylabel="ms", title="p99 of a call")
    right.set(ylabel="seconds", title="a pass over everything")
    for axis in (left, right):
        axis.set(xscale="log", yscale="log", xlabel="versions")
        axis.legend(fontsize="small")
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)
