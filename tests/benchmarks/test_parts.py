"""The parts of `make bench`: their options, and their pages and plots from given points."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import registered, trace
from benchmarks.__main__ import PARTS
from benchmarks.asking import Answer, Summary
from benchmarks.registered import Point, Turn
from benchmarks.traffic import Ask
from benchmarks.watching import Seen

ROOT = Path(__file__).resolve().parents[2]
HITS = {"device": 0.5, "host": 0.3, "disk": 0.2}
SEEN = Seen(9, 2**20, 2**21, 3 * 2**20, 2**22, 0.0, 2**20, 0.0, 2**29, 2**27, 4.0, 1.0)


def make_summary(tokens_per_s: float = 1.0) -> Summary:
    times = [i / tokens_per_s for i in range(1, 5)]
    return Summary.of([Answer(Ask(0.0, 0, 1, 4, 1), 0.0, token_times_s=times, status=200)])


def make_turn(tokens_per_s: float) -> Turn:
    return Turn(make_summary(tokens_per_s), SEEN, HITS)


@pytest.mark.parametrize("part", [*PARTS, "pushing", "registering", "loading", "noisy"])
def test_each_part_describes_purpose_in_help(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"benchmarks.{part}")
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    assert "python -m benchmarks" in capsys.readouterr().out


def test_parts_start_without_matplotlib() -> None:
    code = f"import sys; import {', '.join(f'benchmarks.{part}' for part in PARTS)}; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_ratio_is_median_of_consecutive_turns() -> None:
    point = Point(
        100, [make_turn(9.0), make_turn(4.0), make_turn(9.0)], [make_turn(10.0), make_turn(4.0), make_turn(6.0)]
    )
    assert point.ratio == pytest.approx(1.0)


def test_row_has_adapter_tiers_and_memory_growth() -> None:
    row = Point(1000, [make_turn(9.0)], [make_turn(10.0)], rss_before_bytes=2**28).row()
    assert row[:4] == ["1,000", "9.0", "0.900", "1000 (1.000)"]
    assert row[6:11] == ["50.0 % / 30.0 % / 20.0 %", "1 + 2; 3 of 4", "0 of 1", "never", "512 (+256)"]
    assert len(row) == len(registered.HEADER)


def test_trace_plot_is_deterministic_for_same_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plotting import plot_trace

    points = [trace.Point(cv, alpha, make_summary(), SEEN, HITS) for cv in trace.CVS for alpha in trace.QUICK_ALPHAS]
    for name in ("a.svg", "b.svg"):
        plot_trace(points, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text
    assert text == (tmp_path / "b.svg").read_text()


def test_trace_row_has_offered_load_and_refusals() -> None:
    row = trace.Point(4.0, 0.1, make_summary(), SEEN, HITS).row()
    assert len(row) == len(trace.HEADER)
    assert row[:2] == ["4", "0.1"]
    assert row[8:11] == ["0.0 %", "0", "50.0 % / 30.0 % / 20.0 %"]
