"""Runs parts one after the other and writes down what happens, a line of JSON each, as it happens:
whoever reads has all but the case that killed it.

    python -m benchmarks.gpu.worker PLAN

PLAN is a JSON object: ``events`` (the file that lines are added to), ``parts`` (names, in order),
``first_case`` (of the first part), ``deadline`` (seconds since the epoch), ``peers``, ``is_alone``
(on the device), ``is_warming``, and ``shard`` and ``num_shards``: this process runs every so
manieth group of cases.

A case that raises is written down, and the next one runs. If the device is lost with it (an illegal
access ends every kernel of the process after it), the process ends with `DEVICE_LOST`, and its
parent starts another behind that case.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.gpu import stand_ins
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import BY_NAME, Case, Part

DEVICE_LOST = 70


class Worker:
    def __init__(self, plan: dict[str, Any], events: IO[str]) -> None:
        self._plan, self._events = plan, events
        peers = Path(plan["peers"]) if plan["peers"] else None
        results = Path(plan["results"]) if plan.get("results") else None
        self.machine = Machine.found(peers, is_alone=plan["is_alone"], is_warming=plan["is_warming"], results=results)

    def say(self, kind: str, **fields: object) -> None:
        self._events.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._events.flush()

    def run(self) -> None:
        """Every part gets its share of the time that is left;
        what one doesn't use is the next ones'.
        """
        self.say("machine", facts=self.machine.facts())
        parts = [BY_NAME[name] for name in self._plan["parts"]]
        for i, part in enumerate(parts):
            left = self._plan["deadline"] - time.time()
            share = part.weight / sum(p.weight for p in parts[i:])
            self.machine.deadline = time.time() + left * share
            self._run_part(part, self._plan["first_case"] if i == 0 else 0)

    def _run_part(self, part: Part, first_case: int) -> None:
        started, state, number = time.time(), "complete", -1
        groups: dict[str, int] = {}
        case: Case | None = None
        self.say("part", part=part.name, deadline=self.machine.deadline)
        try:
            for number, case in enumerate(part.cases(self.machine)):
                group = groups.setdefault(case.group or case.name, len(groups))
                if number < first_case or group % self._plan["num_shards"] != self._plan["shard"]:
                    continue
                if self.machine.is_late:
                    state = "out of time"
                    break
                self.say("case", part=part.name, number=number, name=case.name)
                try:
                    # a case's numbers don't depend on which others ran
                    torch.manual_seed(number)
                    rows = case.run()
                    # what it launched has to go wrong now, not in another case
                    self.machine.synchronize()
                    for row in rows:
                        self.say("row", part=part.name, row=row)
                except ModuleNotFoundError:
                    raise
                except Exception as error:
                    self._report(part, case.name, error)
        except ModuleNotFoundError as error:
            state = f"left out: {error.name} is missing"
        except Exception as error:
            self._report(part, "its cases", error)
            state = "failed"
        # the last case holds what the part's cases shared, and memory is measured by the next part
        case = None
        self.machine.free()
        self.say("end", part=part.name, state=state, seconds=time.time() - started)

    def _report(self, part: Part, name: str, error: Exception) -> None:
        traceback.print_exception(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:600]
        self.say("problem", part=part.name, case=name, text=f"{text} ({Path(last.filename).name}:{last.lineno})")
        try:
            self.machine.free()
        except Exception:
            # not through the interpreter's end: that would ask the device again
            os._exit(DEVICE_LOST)


def main() -> None:
    plan = json.loads(sys.argv[1])
    stand_ins.install()
    if "engine" in plan["parts"]:
        # the one part that computes with it, for penalties
        stand_ins.leave_out_broken("numba")
    with Path(plan["events"]).open("a") as events:
        Worker(plan, events).run()


if __name__ == "__main__":
    main()
