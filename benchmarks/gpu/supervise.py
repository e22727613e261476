"""Runs the parts in processes of their own, so that a kernel that breaks the device or never ends
costs its case and no more.

What is timed has the device to itself. Before that, checks run side by side, and so does a first
pass over what will be timed: it's compiling that takes long, on one core at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import BY_NAME, Outcome

STALL_S = 150.0
"""Without a word for so long, a case is taken as stuck;
the slowest one compiles for some tens of seconds.
"""
GRACE_S = 20.0
"""Past the deadline, for the case that runs."""
MAX_STARTS = 12
ENOUGH_CORES = 8
"""From here on a part's cases are divided among processes."""
PART_ENDED = "stopped: the part's time was over"

Command = Callable[[dict[str, Any]], list[str]]


def worker_command(plan: dict[str, Any]) -> list[str]:
    return [sys.executable, "-P", "-m", "benchmarks.gpu.worker", json.dumps(plan)]


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker at a time does.

    Attributes:
        shard, num_shards: it runs every so manieth group of the cases.
        is_alone: nobody else uses the device meanwhile.
        is_warming: kernels are compiled, and what is found is thrown away.
    """

    parts: tuple[str, ...]
    shard: int = 0
    num_shards: int = 1
    is_alone: bool = True
    is_warming: bool = False


def side_by_side(parts: Sequence[str], num_cores: int) -> list[Job]:
    """The jobs that may run at the same time, before what is timed: the checks among these parts,
    and the warming of the others, the checks first.
    """
    wanted = [BY_NAME[name] for name in parts if BY_NAME[name].is_check or BY_NAME[name].is_warmed]
    # more jobs than cores wait for each other; each process costs seconds and device memory
    is_divided = num_cores >= ENOUGH_CORES
    return [
        Job((part.name,), shard, num_shards, is_alone=False, is_warming=not part.is_check)
        for part in wanted
        for num_shards in (part.num_shards if is_divided else 1,)
        for shard in range(num_shards)
    ]


@dataclass(slots=True)
class Run:
    """What the workers have told so far.

    Attributes:
        facts: of the machine.
        outcomes: by part, in order.
    """

    parts: Sequence[str]
    facts: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    part: str | None = None
    case: int = -1
    case_name: str = ""
    part_deadline: float = float("inf")

    def __post_init__(self) -> None:
        self.outcomes = {name: Outcome() for name in self.parts}

    def hear(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "machine":
            self.facts |= event["facts"]
            return
        outcome = self.outcomes[event["part"]]
        if kind == "part":
            self.part, self.case, self.case_name, outcome.state = event["part"], -1, "its start", "running"
            self.part_deadline = event.get("deadline", float("inf"))
        elif kind == "case":
            self.case, self.case_name = event["number"], event["name"]
            outcome.num_cases += 1
        elif kind == "row":
            outcome.rows.append(event["row"])
        elif kind == "problem":
            outcome.problems.append(f"{event['case']}: {event['text']}")
        elif kind == "end":
            outcome.state, outcome.seconds, self.part = event["state"], outcome.seconds + event["seconds"], None

    def lost(self, why: str) -> tuple[list[str], int]:
        """The worker is gone: its case has failed.

        Returns the parts that are left, and which case of the first comes next.
        """
        waiting = [name for name, outcome in self.outcomes.items() if outcome.state == "waiting"]
        if self.part is None:
            # it has not come so far as to start one: whatever the reason, the next worker doesn't
            # try the same
            if waiting:
                first = self.outcomes[waiting.pop(0)]
                first.state, first.problems = "failed", [*first.problems, why]
            return waiting, 0
        self.outcomes[self.part].problems.append(f"{self.case_name}: {why}")
        if why == PART_ENDED:
            self.outcomes[self.part].state = "out of time"
            return waiting, 0
        if self.case < 0:
            self.outcomes[self.part].state = "failed"
            return waiting, 0
        return [self.part, *waiting], self.case + 1


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """What several workers have found of one part."""
    states = [outcome.state for outcome in outcomes]
    state = next((s for s in ("running", "waiting") if s in states), None)
    return Outcome(
        state or next((s for s in states if s != "complete"), "complete"),
        max(outcome.seconds for outcome in outcomes),
        [row for outcome in outcomes for row in outcome.rows],
        [problem for outcome in outcomes for problem in outcome.problems],
        sum(outcome.num_cases for outcome in outcomes),
    )


def run_together(
    run: Run, jobs: Sequence[Job], *, num_cores: int, on_change: Callable[[], None], **arguments: Any
) -> None:
    """Run the jobs side by side, as many at a time as there are cores.

    Args:
        arguments: as `run_parts` takes them.
    """
    parts_of_jobs = [(job, Run(job.parts)) for job in jobs]
    lock = threading.Lock()

    def changed() -> None:
        with lock:
            for job, part in parts_of_jobs:
                run.facts = {**part.facts, **run.facts}
                for name in job.parts:
                    if not job.is_warming:
                        found = [other.outcomes[name] for j, other in parts_of_jobs if name in j.parts]
                        run.outcomes[name] = merged(found)
            on_change()

    with ThreadPoolExecutor(max_workers=max(1, num_cores)) as pool:
        running = [pool.submit(run_parts, part, job=job, on_change=changed, **arguments) for job, part in parts_of_jobs]
        for each in running:
            each.result()


def run_parts(
    run: Run,
    *,
    job: Job | None = None,
    deadline: float,
    peers: Path | None,
    environment: dict[str, str],
    on_change: Callable[[], None],
    tracebacks: Path | None = None,
    results: Path | None = None,
    command: Command = worker_command,
    stall_s: float = STALL_S,
    grace_s: float = GRACE_S,
) -> None:
    """Run every part of `run`, in as many processes as it takes; returns at the deadline,
    or a little later.

    Args:
        job: all of the run's parts, alone on the device (None).
        deadline: seconds since the epoch.
        on_change: called after every part, and after a worker is gone.
        tracebacks: the file that workers add what they write to stderr to; None: this process's.
        results: the folder for files that a part writes; None: it writes none.
    """
    job = job or Job(tuple(run.parts))
    left, first_case = list(run.parts), 0
    with tempfile.TemporaryDirectory(prefix="loraserve-gpu-") as folder:
        for start in range(MAX_STARTS):
            events = Path(folder) / f"events-{start}"
            events.touch()
            plan = {
                **asdict(job),
                "events": str(events),
                "parts": left,
                "first_case": first_case,
                "deadline": deadline,
                "peers": str(peers) if peers else "",
                "tracebacks": str(tracebacks) if tracebacks else "",
                "results": str(results) if results else "",
            }
            watched = Watched(run, deadline + grace_s, stall_s, grace_s)
            why = _watch(command(plan), environment, events, watched, on_change, tracebacks)
            if why is None:
                break
            left, first_case = run.lost(why)
            on_change()
            if not left or time.time() >= deadline:
                break
    for outcome in run.outcomes.values():
        if outcome.state in ("waiting", "running"):
            outcome.state = "out of time" if time.time() >= deadline else "failed"
    on_change()


@dataclass(frozen=True, slots=True)
class Watched:
    """A run, and how long one of its workers may take."""

    run: Run
    last_moment: float
    stall_s: float
    grace_s: float


def _watch(
    command: list[str],
    environment: dict[str, str],
    events: Path,
    watched: Watched,
    on_change: Callable[[], None],
    tracebacks: Path | None,
) -> str | None:
    """Hear a worker out; why it is gone before its end, or None."""
    run = watched.run
    with nullcontext(None) if tracebacks is None else tracebacks.open("a") as errors:
        process = subprocess.Popen(command, env=environment, stderr=errors)
    run.part_deadline = float("inf")
    heard_at, why = time.time(), None
    with events.open() as lines:
        while True:
            is_over = process.poll() is not None
            while line := lines.readline():
                if not line.endswith("\n"):
                    # the rest is still to come
                    lines.seek(lines.tell() - len(line.encode()))
                    break
                event = json.loads(line)
                run.hear(event)
                heard_at = time.time()
                if event["kind"] == "end":
                    on_change()
            if is_over:
                break
            if time.time() > watched.last_moment:
                why = "stopped: the time was over"
            elif run.part is not None and time.time() > run.part_deadline + watched.grace_s:
                why = PART_ENDED
            elif time.time() - heard_at > watched.stall_s:
                why = f"stopped: no word for {watched.stall_s:.0f} s"
            if why is not None:
                process.kill()
                process.wait()
                return why
            time.sleep(0.1)
    if process.returncode == 0:
        return None
    return f"the process ended with {process.returncode}"
