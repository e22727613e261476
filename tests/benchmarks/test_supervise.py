"""Workers that die, hang or run late cost a case, not the run.

The workers here are scripts that say what they are told to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Outcome
from benchmarks.gpu.supervise import Job, Run, merged, run_parts, run_together, side_by_side

PARTS = ["check-lora", "check-gemm"]
# runs cases 0 to 2 of every part; what it does at (part, case) stands in MISDEEDS
SCRIPT = """
import json, os, sys, time
plan, misdeeds = json.loads(sys.argv[1]), json.loads(os.environ["MISDEEDS"])
events = open(plan["events"], "a", buffering=1)
def say(**event): events.write(json.dumps(event) + "\\n")
if "start" in misdeeds: sys.exit(9)
say(kind="machine", facts={"pid": os.getpid()})
for i, part in enumerate(plan["parts"]):
    more = {"deadline": time.time() + misdeeds["deadline"]} if "deadline" in misdeeds else {}
    say(kind="part", part=part, **more)
    for number in range(plan["first_case"] if i == 0 else 0, 3):
        say(kind="case", part=part, number=number, name=f"case {number}")
        misdeed = misdeeds.get(f"{part} {number}")
        if misdeed == "die": os._exit(70)
        if misdeed == "hang": time.sleep(60)
        say(kind="row", part=part, row={"check": f"case {number}", "ok": True})
    say(kind="end", part=part, state="complete", seconds=1.0, num_cases=3)
"""


def supervise(misdeeds: dict[str, Any], *, budget_s: float = 30.0, stall_s: float = 30.0) -> Run:
    run = Run(PARTS)

    def command(plan: dict[str, Any]) -> list[str]:
        return [sys.executable, "-S", "-c", SCRIPT, json.dumps(plan)]

    run_parts(
        run,
        deadline=time.time() + budget_s,
        peers=None,
        environment={**os.environ, "MISDEEDS": json.dumps(misdeeds)},
        on_change=lambda: None,
        command=command,
        stall_s=stall_s,
        grace_s=0.5,
    )
    return run


def cases_of(run: Run, part: str) -> list[str]:
    return [row["check"] for row in run.outcomes[part].rows]


def test_every_case_is_heard() -> None:
    run = supervise({})
    assert [outcome.state for outcome in run.outcomes.values()] == ["complete", "complete"]
    assert cases_of(run, "check-gemm") == ["case 0", "case 1", "case 2"]
    assert run.facts


def test_case_killing_process_loses_only_failing_case() -> None:
    run = supervise({"check-lora 1": "die"})
    assert cases_of(run, "check-lora") == ["case 0", "case 2"]
    assert run.outcomes["check-lora"].problems == ["case 1: the process ended with 70"]
    assert cases_of(run, "check-gemm") == ["case 0", "case 1", "case 2"]


def test_hanging_case_is_stopped_and_next_case_runs() -> None:
    run = supervise({"check-lora 0": "hang"}, stall_s=0.7)
    assert cases_of(run, "check-lora") == ["case 1", "case 2"]
    assert "no word for" in run.outcomes["check-lora"].problems[0]
    assert run.outcomes["check-gemm"].state == "complete"


def test_overrunning_part_leaves_time_to_the_next() -> None:
    run = supervise({"check-lora 1": "hang", "deadline": 0.5})
    assert run.outcomes["check-lora"].state == "out of time"
    assert cases_of(run, "check-lora") == ["case 0"]
    assert run.outcomes["check-lora"].problems == ["case 1: stopped: the part's time was over"]
    assert run.outcomes["check-gemm"].state == "complete"


def test_run_ends_at_deadline_with_partial_results() -> None:
    started = time.time()
    run = supervise({"check-lora 2": "hang"}, budget_s=1.0)
    assert time.time() - started < 10
    assert cases_of(run, "check-lora") == ["case 0", "case 1"]
    assert [outcome.state for outcome in run.outcomes.values()] == ["out of time", "out of time"]


def test_worker_failing_at_start_is_not_restarted_forever() -> None:
    run = supervise({"start": "die"})
    assert [outcome.state for outcome in run.outcomes.values()] == ["failed", "failed"]
    assert run.outcomes["check-lora"].problems == ["the process ended with 9"]


def test_last_words_before_a_death_are_heard(tmp_path: Path) -> None:
    run = supervise({"check-gemm 2": "die"})
    assert cases_of(run, "check-gemm") == ["case 0", "case 1"]
    assert len(run.outcomes["check-gemm"].problems) == 1


def test_checks_and_warming_jobs_run_in_parallel() -> None:
    jobs = side_by_side(["check-lora", "check-rows", "kernels", "peft"], num_cores=16)
    assert [(job.parts, job.shard, job.num_shards, job.is_warming) for job in jobs] == [
        (("check-lora",), 0, 2, False),
        (("check-lora",), 1, 2, False),
        (("check-rows",), 0, 1, False),
        *((("kernels",), shard, 8, True) for shard in range(8)),
    ]
    assert not any(job.is_alone for job in jobs)
    assert [job.num_shards for job in side_by_side(["check-lora", "kernels"], num_cores=2)] == [1, 1]


def test_worker_results_are_merged_and_warming_results_dropped() -> None:
    run, changes = Run(["check-lora", "kernels"]), []
    jobs = [Job(("check-lora",), shard, 2, is_alone=False) for shard in range(2)]
    jobs.append(Job(("kernels",), is_alone=False, is_warming=True))

    def command(plan: dict[str, Any]) -> list[str]:
        return [sys.executable, "-S", "-c", SCRIPT, json.dumps(plan)]

    run_together(
        run,
        jobs,
        num_cores=2,
        on_change=lambda: changes.append(run.outcomes["check-lora"].state),
        deadline=time.time() + 30,
        peers=None,
        environment={**os.environ, "MISDEEDS": json.dumps({"check-lora 1": "die"})},
        command=command,
    )
    found = run.outcomes["check-lora"]
    assert cases_of(run, "check-lora") == ["case 0", "case 2"] * 2
    assert (found.state, len(found.problems), found.num_cases) == ("complete", 2, 6)
    assert run.outcomes["kernels"].state == "waiting"
    assert changes[-1] == "complete"


def test_part_is_complete_after_all_workers_complete() -> None:
    complete, late, running = Outcome("complete", 2.0), Outcome("out of time", 5.0), Outcome("running")
    assert merged([complete, complete]).state == "complete"
    assert (merged([complete, late]).state, merged([complete, late]).seconds) == ("out of time", 5.0)
    assert merged([late, running]).state == "running"
