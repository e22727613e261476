"""`make gpu`: every check and benchmark that needs a GPU, in one call of under ten minutes.

    python3 -P benchmarks/gpu/run.py                       # all parts
    python3 -P benchmarks/gpu/run.py --only check-lora,kernels --peers ~/peers
    python3 -P benchmarks/gpu/run.py --tiny                # without a GPU: everything at toy
                                                           # sizes in Triton's interpreter,
                                                           # nothing measured

Needs Python 3.11, torch 2.11, triton 3.6 and numpy; neither a network nor the server's packages.
Parts that compare with transformers and PEFT say so where these are missing. Prints a summary;
writes all of it to benchmarks/results/ (a dry run: to build/gpu-tiny/) after every part.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = (str(ROOT), str(ROOT / "kernels"))
sys.path[:0] = [path for path in PATHS if path not in sys.path]

from benchmarks.gpu import prepared, report, summary  # noqa: E402 (once they can be found)
from benchmarks.gpu.parts import BY_NAME, PARTS  # noqa: E402
from benchmarks.gpu.supervise import Job, Run, run_parts, run_together, side_by_side  # noqa: E402

COMPILED = ROOT / "build" / "gpu-triton"
"""Triton's cache: kept from one run to the next."""

MOST_TOGETHER = 4
"""Parts of a dry run at a time."""
SHARE_OF_CHECKS = 0.45
"""Of the time, at most, where something is to be timed as well."""


def parse(arguments: list[str]) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"parts, separated by commas: {', '.join(names)}")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds after which it stops")
    parser.add_argument(
        "--peers",
        type=Path,
        default=prepared.PEERS if prepared.PEERS.is_dir() else None,
        help="a folder with vLLM's and SGLang's kernels, as tools/gpu_peers.sh makes it; .gpu/peers where it is there",
    )
    parser.add_argument("--tiny", action="store_true", help="a dry run in Triton's interpreter, without a GPU")
    parser.add_argument("--out", type=Path, help="the folder for results; $OUT by itself, where that is set")
    parser.add_argument(
        "--tuned", type=Path, help="a file of tile sizes, as the part `tune` writes it, for the kernels to read"
    )
    parser.add_argument("--name", help="of the results; gpu-DATE by itself")
    options = parser.parse_args(arguments)
    wanted = [name for name in options.only.split(",") if name]
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(names)}")
    options.parts = [name for name in names if not wanted or name in wanted]
    if options.peers is not None and not options.peers.is_dir():
        parser.error(f"{options.peers} isn't a folder")
    if options.tuned is not None and not options.tuned.is_file():
        parser.error(f"{options.tuned} isn't a file; the part tune writes one")
    return options


def environment(is_tiny: bool, tuned: Path | None = None) -> dict[str, str]:
    """The worker's: where Triton interprets is decided before its first import."""
    paths = [
        *PATHS,
        # for the GPU machine's Python: where they are missing alone
        *([str(prepared.PACKAGES)] if prepared.PACKAGES.is_dir() and find_spec("msgspec") is None else []),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    if is_tiny:
        found |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    else:
        found.pop("TRITON_INTERPRET", None)
        found.setdefault("TRITON_CACHE_DIR", str(COMPILED))
    if tuned is not None:
        found["LORASERVE_GPU_TUNING"] = str(tuned.resolve())
    return found


def interpreter_obstacle() -> str | None:
    """Why Triton's interpreter can't run here, before a worker fails with it case by case."""
    import numpy
    import triton

    versions = [
        tuple(int(number) for number in found.split(".")[:2]) for found in (triton.__version__, numpy.__version__)
    ]
    if versions[0] <= (3, 6) and versions[1] >= (2, 4):
        return (
            f"The interpreter of triton {triton.__version__} doesn't work with numpy {numpy.__version__}: a dry run "
            "takes numpy below 2.4, or triton 3.7. Runs on a GPU take any."
        )
    return None


def main() -> int:
    options = parse(sys.argv[1:])
    started, date = time.time(), f"{datetime.now(UTC):%Y-%m-%d}"
    own = ROOT / "build" / "gpu-tiny" if options.tiny else ROOT / "benchmarks" / "results"
    folder = options.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else own)
    name = options.name or f"gpu-{date}"
    command = f"make gpu ARGS={shlex.quote(shlex.join(sys.argv[1:]))}" if sys.argv[1:] else "make gpu"
    run = Run(options.parts)

    def save() -> None:
        took = time.time() - started
        report.write(folder, name, run.outcomes, run.facts, command=command, date=date, seconds=took)

    def changed() -> None:
        # a real run without a GPU has nothing to leave behind
        if run.facts and bool(run.facts.get("is_dry_run")) == options.tiny:
            save()
        for part, outcome in run.outcomes.items():
            if part not in told and outcome.state not in ("waiting", "running"):
                told.add(part)
                print(
                    f"{time.time() - started:6.1f} s  {part}: {outcome.state}, {outcome.num_cases} cases",
                    file=sys.stderr,
                    flush=True,
                )

    told: set[str] = set()
    if not options.tiny and not has_gpu():
        print(
            "No GPU that torch can use was found. Without one: --tiny, a dry run in Triton's interpreter.",
            file=sys.stderr,
        )
        return 2
    obstacle = interpreter_obstacle() if options.tiny else None
    if obstacle is not None:
        print(obstacle, file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    workers = environment(options.tiny, options.tuned)
    if not options.tiny and prepared.CACHE.is_file() and not (marker := COMPILED / ".unpacked").exists():
        count = prepared.unpack(prepared.CACHE, Path(workers["TRITON_CACHE_DIR"]))
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        print(f"{time.time() - started:6.1f} s  {count} kernels were compiled beforehand", file=sys.stderr, flush=True)
    tracebacks = folder / f"{name}.stderr.txt"
    tracebacks.unlink(missing_ok=True)
    arguments = {
        "peers": options.peers,
        "environment": workers,
        "on_change": changed,
        "tracebacks": tracebacks,
        "results": folder,
    }
    timed = []
    if options.tiny:
        # nothing is timed, and the interpreter takes one core
        jobs = [Job((part,), is_alone=False) for part in options.parts]
        together = min(MOST_TOGETHER, len(os.sched_getaffinity(0)))
        run_together(run, jobs, num_cores=together, deadline=started + options.budget_s, **arguments)
    else:
        timed = [part for part in options.parts if not BY_NAME[part].is_check]
        cores = len(os.sched_getaffinity(0))
        share = SHARE_OF_CHECKS if timed else 1.0
        jobs = side_by_side(options.parts, cores)
        # one thread each: there are as many processes as cores
        aside = {**arguments, "environment": workers | {"OMP_NUM_THREADS": "1"}}
        run_together(run, jobs, num_cores=cores, deadline=started + share * options.budget_s, **aside)
        last = Run(timed)
        run.outcomes |= last.outcomes
        last.facts = run.facts
        run_parts(last, deadline=started + options.budget_s, **arguments)
    if not tracebacks.stat().st_size:
        tracebacks.unlink()
    print(f"written: {folder / name}.md and .json", flush=True)
    if tracebacks.exists():
        print(f"what workers wrote to stderr: {tracebacks}", flush=True)
    print(report.brief(run.outcomes, run.facts, seconds=time.time() - started), flush=True)
    return 1 if summary.failed_checks(run.outcomes) else 0


def has_gpu() -> bool:
    # the workers alone use it: a context in this process would take memory from them
    import torch

    return torch.cuda.device_count() > 0


if __name__ == "__main__":
    sys.exit(main())
