"""`make bench`: our server and PEFT on the same work, on this machine, in one go, beside the limits
that its bytes and operations set.

    python -m benchmarks.run --size S             # about ten minutes on two cores
    python -m benchmarks.run --size S --quick     # one run of each point, not the best of three
    python -m benchmarks.run --size M --formats int8,int4-rounded+int8 --peers none

For each format of the base, two servers start: one with no adapter registered, one with 32
adapters of ranks 8 to 64 on all seven linears and a thousand small ones. Then 1, 8 and 32 requests
at a time, 64 tokens in and 64 out: base only on either server, and each request with an adapter of
its own, in turn with PEFT's `generate` for the same mixed batch (always in float32: it's what PEFT
runs on a CPU). The best of the runs counts, since others may share the machine.

Prints a table; writes it, and every run, to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.formats import FLOAT, FORMATS, Format
from benchmarks.serving import HERE, make_base, say, script, serve

CONCURRENCY = (1, 8, 32)
NUM_ADAPTERS, NUM_SMALL, FIRST_SMALL = 32, 1000, 1000
PROMPT_TOKENS = OUTPUT_TOKENS = 64
LENGTHS = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
CHUNK_TOKENS = 512
"""The server's default token budget: a prefill of many prompts takes several steps."""


def make_models(size: str) -> Path:
    """The base's folder; base and adapters are made once and kept."""
    model = make_base(size)
    adapters = model.with_name(f"{size}-adapters")
    if not (adapters / f"lora-{NUM_ADAPTERS - 1:04d}" / "adapter_config.json").exists():
        say(f"making {NUM_ADAPTERS} adapters …")
        script("make_model.py", size, str(model), "--only-adapters", "--adapters", NUM_ADAPTERS)
    if not (adapters / f"lora-{FIRST_SMALL + NUM_SMALL - 1:04d}" / "adapter_config.json").exists():
        say(f"making {NUM_SMALL} small adapters …")
        small = ("--adapters", NUM_SMALL, "--first", FIRST_SMALL, "--ranks", 1, "--targets", "q_proj")
        script("make_model.py", size, str(model), "--only-adapters", *small)
    return model


class Peft:
    """PEFT in a process of its own, idle between its turns."""

    def __init__(self, model: Path, num_adapters: int, *, python: str = sys.executable, dtype: str = "float32") -> None:
        sizes = ("--adapters", num_adapters, "--prompt-tokens", PROMPT_TOKENS, "--output-tokens", OUTPUT_TOKENS)
        command = [python, "-P", str(HERE / "peft_generate.py"), str(model), "--dtype", dtype, *map(str, sizes)]
        # alone on the cores in its turns, it's fastest with OpenMP's own wait policy, in which
        # threads spin for a while
        env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, concurrency: int, mode: str = "mixed") -> dict[str, Any]:
        """One batch of so many rows, each with an adapter of its own, or `base` only."""
        assert self._process.stdin is not None
        print(json.dumps({"concurrency": concurrency, "mode": mode}), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"PEFT's process ended with {self._process.wait()}")
        result: dict[str, Any] = json.loads(line)
        return result


@dataclass(frozen=True, slots=True)
class Limits:
    """Least work of a step: reading each weight once, and multiplying with it once for each
    row. Nothing else is counted.
    """

    machine: dict[str, Any]
    layer_weights: int
    head_weights: int
    adapter_weights: list[int]
    """Weights of the adapters, in the order in which requests take them."""
    kv_bytes_per_token: int

    @staticmethod
    def of(model: Path, machine: dict[str, Any]) -> Limits:
        config = json.loads((model / "config.json").read_text())
        h, i, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        kv = config["head_dim"] * config["num_key_value_heads"]
        features = {"q": (h, h), "k": (h, kv), "v": (h, kv), "o": (h, h), "gate": (h, i), "up": (h, i), "down": (i, h)}
        per_rank = layers * sum(a + b for a, b in features.values())
        folder = model.with_name(f"{model.name}-adapters")
        configs = [
            json.loads((folder / f"lora-{n:04d}" / "adapter_config.json").read_text()) for n in range(NUM_ADAPTERS)
        ]
        return Limits(
            machine,
            layers * sum(a * b for a, b in features.values()),
            h * config["vocab_size"],
            [c["r"] * per_rank for c in configs],
            2 * 4 * kv * layers,
        )

    def tokens_per_s(self, format: Format, concurrency: int, is_mixed: bool) -> float:
        """The most that this machine could do for so many requests at a time: weights read at its
        measured bandwidth, products at its measured rate of the format, adapters' in float32.
        """
        rate, float_rate, read = (self.machine[name] for name in (format.rate, FLOAT, "read_bytes_per_s"))
        adapters = sum(self.adapter_weights[:concurrency]) if is_mixed else 0
        weights = self.layer_weights + self.head_weights
        layer_bytes = self.layer_weights * format.layer_bytes
        weight_bytes = layer_bytes + self.head_weights * format.head_bytes
        adapter_bytes = adapters * format.adapter_bytes
        context = concurrency * (PROMPT_TOKENS + OUTPUT_TOKENS / 2) * self.kv_bytes_per_token
        decode = max(
            (weight_bytes + adapter_bytes + context) / read,
            2 * weights * concurrency / rate + 2 * adapters / float_rate,
        )
        num_steps = -(-concurrency * PROMPT_TOKENS // CHUNK_TOKENS)
        prefill = max(
            (num_steps * weight_bytes + adapter_bytes) / read,
            PROMPT_TOKENS * (2 * self.layer_weights * concurrency / rate + 2 * adapters / float_rate),
        )
        return concurrency * OUTPUT_TOKENS / (prefill + (OUTPUT_TOKENS - 1) * decode)


@dataclass(slots=True)
class Point:
    """All runs of one system at one number of requests at a time."""

    system: str
    format: str
    concurrency: int
    is_mixed: bool
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def best(self) -> float:
        return max(run["tokens_per_s"] for run in self.runs)

    def row(self, peft: float | None, limit: float) -> list[str]:
        ratio = f"{self.best / peft:.2f}" if peft else ""
        runs = " ".join(f"{run['tokens_per_s']:.0f}" for run in self.runs)
        best = max(self.runs, key=lambda run: run["tokens_per_s"])
        ttft = f"{best['ttft_p50_ms']:.0f}" if "ttft_p50_ms" in best else ""
        share = f"{100 * self.best / limit:.0f} %"
        return [self.system, self.format, str(self.concurrency), f"{self.best:.1f}", ratio, share, ttft, runs]


HEADER = ["system", "base", "requests at a time", "tokens/s", "× PEFT", "of the limit", "TTFT p50 ms", "runs"]
EMPTY, FULL, MIXED, PEFT = (
    "base only, none registered",
    "base only, 1032 registered",
    "an adapter each",
    "PEFT, an adapter each",
)


def measure(options: argparse.Namespace, model: Path, name: str, peft: Peft | None) -> list[Point]:
    """All points of one format; the systems take turns, so that a noisy minute hits them alike."""
    chosen = FORMATS[name]
    folder = model.with_name(f"{model.name}-adapters")
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    numbers = (*range(NUM_ADAPTERS), *range(FIRST_SMALL, FIRST_SMALL + NUM_SMALL))
    adapters = [folder / f"lora-{n:04d}" for n in numbers]
    points, seed = [], 1
    with contextlib.ExitStack() as stack:
        say(f"{name}: starting two servers, pushing {len(adapters)} adapters to one …")
        empty = stack.enter_context(serve(model, chosen.quantize, [], chosen.flags, dtype=chosen.dtype))
        # certificates take the engine a quarter of an hour on a slow machine and aren't what is
        # measured
        flags = ["--certify", "on-request", *chosen.flags]
        full = stack.enter_context(serve(model, chosen.quantize, adapters, flags, dtype=chosen.dtype))
        say(f"{name}: each adapter's first request, not counted …")
        full.load("lora-{:04d}", NUM_ADAPTERS, NUM_ADAPTERS, 0, vocab, **LENGTHS)
        empty.load("base", 1, NUM_ADAPTERS, 0, vocab, **LENGTHS)
        for concurrency in CONCURRENCY:
            base_only, registered = (
                Point(EMPTY, name, concurrency, False),
                Point(FULL, name, concurrency, False),
            )
            mixed, peer = Point(MIXED, name, concurrency, True), Point(PEFT, "float32", concurrency, True)
            for _ in range(1 if options.quick else options.repeat):
                seed += 1
                base_only.runs.append(empty.load("base", 1, concurrency, seed, vocab, **LENGTHS))
                registered.runs.append(full.load("base", 1, concurrency, seed, vocab, **LENGTHS))
                mixed.runs.append(full.load("lora-{:04d}", NUM_ADAPTERS, concurrency, seed, vocab, **LENGTHS))
                if peft is not None:
                    peer.runs.append(peft.generate(concurrency))
            here = [base_only, registered, mixed, *([peer] if peer.runs else [])]
            for point in here:
                say(f"  {point.system:28} {point.format:17} {concurrency:3}: {point.best:8.1f} tokens/s")
            points += here
    return points


def table(points: list[Point], limits: Limits) -> str:
    """The points as a Markdown table."""
    peers = [point for point in points if point.system == PEFT]
    peft = {c: max((p.best for p in peers if p.concurrency == c), default=None) for c in CONCURRENCY}
    rows = [HEADER, ["---"] * len(HEADER)]
    for point in points:
        limit = limits.tokens_per_s(FORMATS[point.format], point.concurrency, point.is_mixed)
        rows.append(point.row(peft[point.concurrency], limit))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def fastest(measurements: list[dict[str, Any]]) -> dict[str, Any]:
    """The machine's facts with the best of its measured rates:
    a limit that was taken in a noisy moment is no limit.
    """
    rates = {name: max(m[name] for m in measurements) for name in measurements[0] if name.endswith("_per_s")}
    return {**measurements[0], **rates}


def describe(options: argparse.Namespace, machine: dict[str, Any], load: float) -> str:
    quick = " --quick" if options.quick else ""
    command = f"make bench ARGS='--size {options.size} --formats {options.formats} --peers {options.peers}{quick}'"
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"""Size {options.size}, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, greedy, streamed; adapters of \
ranks 8, 16, 32 and 64 in turn on all seven linears.

- Machine: {machine["processor"]}, {machine["cores"]} threads, {", ".join(machine["instructions"])}; reads \
{machine["read_bytes_per_s"] / 1e9:.1f} GB/s, float32 {machine["float32_ops_per_s"] / 1e9:.0f} GFLOP/s, bfloat16 \
{machine["bfloat16_ops_per_s"] / 1e9:.0f}, int8 {machine["int8_ops_per_s"] / 1e9:.0f} GOP/s \
({machine["int8_library"]}), measured in the same run.
- Versions: Python {machine["python"]}, {versions}.
- Date: {datetime.now(UTC):%Y-%m-%d}. Command: `{command}`.
- Others on the machine: a load average of {load:.1f} on {machine["cores"]} cores before the start.
- The best of the runs counts; all of them are in the last column. PEFT runs in float32, in process, without a server.
- The limit: each weight, adapter weight and cached key read once a step, or multiplied at the measured rate, \
whichever takes longer.
"""


def formats(text: str) -> str:
    """Return names of formats, separated by commas.

    Raises:
        argparse.ArgumentTypeError: there is one that isn't known.
    """
    if unknown := set(text.split(",")) - set(FORMATS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}; expected some of {', '.join(FORMATS)}")
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=("S", "M"))
    parser.add_argument("--quick", action="store_true", help="one run of each point")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each point")
    parser.add_argument(
        "--formats", type=formats, default="float32,int8", help=f"some of {', '.join(FORMATS)}, in turn"
    )
    parser.add_argument("--peers", default="peft", choices=("peft", "none"))
    options = parser.parse_args(arguments)
    # threads that spin while they wait would take the other systems' cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    model = make_models(options.size)
    load = os.getloadavg()[0]
    say("measuring the machine …")
    measurements = [json.loads(script("machine.py"))]
    peft = None
    if options.peers == "peft":
        say("loading PEFT …")
        peft = Peft(model, NUM_ADAPTERS)
    points = []
    for name in options.formats.split(","):
        points += measure(options, model, name, peft)
        measurements.append(json.loads(script("machine.py")))
    if peft is not None:
        peft.close()
    machine = fastest(measurements)
    text = f"{describe(options, machine, load)}\n{table(points, Limits.of(model, machine))}\n"
    print(text)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    name = f"cpu-{options.size}-{datetime.now(UTC):%Y-%m-%d}{'-quick' if options.quick else ''}"
    (results / f"{name}.md").write_text(f"# Served tokens a second, size {options.size}, on a CPU\n\n{text}")
    runs = [{"system": p.system, "base": p.format, "concurrency": p.concurrency, "runs": p.runs} for p in points]
    (results / f"{name}.json").write_text(
        json.dumps({"machine": machine, "load_average": load, "points": runs}, indent=1) + "\n"
    )
    say(f"written: benchmarks/results/{name}.md and .json")


if __name__ == "__main__":
    main()
