"""Our server beside llama.cpp's, vLLM and PEFT: the same work, in alternating turns.

    python -m benchmarks.peers --size S           # an hour on two cores, once all is installed
    python -m benchmarks.peers --size S --quick   # one pair of turns a row
    python -m benchmarks.peers --size M --peers llama.cpp --formats llama.cpp:Q8_0=int8

The first run installs each peer into an environment of its own below `.peers/`, which takes half an
hour and five gigabytes, and converts the base and its adapters. A peer that can't be installed or
started is a row that says why.

The work: a prompt of 64 random tokens, 64 tokens out, greedy, all requests at once; the base, or
request i for adapter i of 32. Each row is a pair of formats, ours and the peer's, and one number of
requests: turns alternate, and each round is begun by the other one. Both stay up meanwhile and an
idle one waits without computing (its share of the processor is in the table); where memory is
short, each is started for its turn and stopped after it. Nothing is stopped and continued by
signals: threads that spin would be caught in the middle.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks import reporting
from benchmarks.formats import FORMATS
from benchmarks.make_model import SIZES
from benchmarks.peers_installing import PeerUnavailableError
from benchmarks.peers_rows import BASE, MODE_WORDS, MODES, Pair, Row, Turn, speeds, tables
from benchmarks.peers_serving import START, Running, Work, ours, started_peer
from benchmarks.serving import make_base, say, script

REQUESTS, NUM_ADAPTERS, ROUNDS = (1, 8, 32), 32, 5
QUIET_TIMEOUT_S = 60.0
SPARE_BYTES = 3 * 2**30
"""Memory that a contender takes beside its weights: KV, buffers, compilers."""


def default_pairs(peers: Sequence[str], instructions: Sequence[str]) -> list[Pair]:
    """Return each peer's best formats on this processor, with ours that is nearest or fastest.

    llama.cpp rounds activations to eight bits in its formats of four bits too, as we do in
    int4-rounded. bfloat16 is fast only where the processor multiplies it. Both programs can hold
    adapters in eight bits, too: what follows a plus is the adapters' format.
    """
    is_fast = bool({"avx512_bf16", "amx_bf16"} & set(instructions))
    wide = "bfloat16" if is_fast else "float32"
    pairs = {
        "llama.cpp": [
            ("Q4_0", "int4-rounded"),
            ("Q4_0+Q8_0", "int4-rounded+int8"),
            ("Q8_0", "int8"),
            ("Q8_0+Q8_0", "int8+int8"),
        ],
        "vllm": [(wide, "int8")],
        "peft": [("float32", "float32")] + ([("bfloat16", "bfloat16")] if is_fast else []),
    }
    return [Pair(peer, theirs, our) for peer in peers for theirs, our in pairs[peer]]


def parse_pairs(text: str, peers: Sequence[str]) -> list[Pair]:
    """Return the pairs of `PEER:FORMAT=OURS,…`.

    Raises:
        ValueError: which one isn't a pair, and of what there is a choice.
    """
    pairs = []
    for item in text.split(","):
        peer, _, formats = item.strip().partition(":")
        theirs, _, our = formats.partition("=")
        if peer not in peers or not theirs or our not in FORMATS:
            raise ValueError(
                f"--formats has {item!r}; expected PEER:FORMAT=OURS with a PEER of {', '.join(peers)} "
                f"and OURS of {', '.join(FORMATS)}, such as llama.cpp:Q8_0=int8."
            )
        pairs.append(Pair(peer, theirs, our))
    return pairs


def order(number: int) -> tuple[str, str]:
    """Return which contender begins a round, then the other."""
    return ("peer", "ours") if number % 2 == 0 else ("ours", "peer")


def fits(num_bytes: int, available: int) -> bool:
    """Return whether one more contender has room: its weights twice, and what it needs beside."""
    return 2 * num_bytes + SPARE_BYTES <= available


def cpu_s(pid: int) -> float:
    """Processor seconds of a process and what it started."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def busy_s() -> float:
    """Processor seconds of everything on the machine."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))


def children_s() -> float:
    """Processor seconds of what this process has started and waited for: the load generators."""
    times = os.times()
    return times.children_user + times.children_system


def take_turn(asked: Running, idle: Running | None, requests: int, mode: str, seed: int) -> Turn:
    """Measure one burst, and what else computed meanwhile."""

    def now() -> tuple[float, float, float, float, float]:
        idle_s = 0.0 if idle is None else cpu_s(idle.pid)
        own_s = time.process_time() + children_s()
        return time.perf_counter(), busy_s(), cpu_s(asked.pid), idle_s, own_s

    before = now()
    burst = asked.burst(requests, mode, seed)
    wall, busy, worked, waited, generated = (b - a for a, b in zip(before, now(), strict=True))
    return Turn.of(burst, max(0.0, busy - worked - waited - generated) / wall, max(0.0, waited) / wall)


def wait_until_quiet(cores: float, timeout_s: float = QUIET_TIMEOUT_S) -> bool:
    """Wait for a second in which the whole machine computes on no more than so many cores.

    Return False if there was none in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        before, started = busy_s(), time.monotonic()
        time.sleep(1)
        if busy_s() - before <= cores * (time.monotonic() - started):
            return True
    return False


class Stage:
    """The two contenders of a pair, in one mode: both up, or each for its turns.

    Args:
        settings: takes those of the contenders that were started, in words.
    """

    def __init__(self, pair: Pair, mode: str, work: Work, is_alone: bool, settings: dict[str, str]) -> None:
        self._pair, self._mode, self._work = pair, mode, work
        self._up: dict[str, Running] = {}
        self._stack = contextlib.ExitStack()
        self._is_alone = is_alone
        self._settings = settings

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            if not self._is_alone:
                # the peer first: where it can't start, nothing else needs to
                self._up["peer"] = stack.enter_context(self._started("peer"))
                self._is_alone = not fits(self._work.num_bytes, psutil.virtual_memory().available)
            if self._is_alone:
                say("  memory is short: each is started for its turns")
                stack.close()
                self._up.clear()
            else:
                self._up["ours"] = stack.enter_context(self._started("ours"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._up.clear()
        self._stack.close()

    @contextlib.contextmanager
    def contender(self, which: str) -> Iterator[tuple[Running, Running | None]]:
        """The one whose turn it is, and the one that waits, if it's up."""
        if self._up:
            yield self._up[which], self._up["peer" if which == "ours" else "ours"]
            return
        with self._started(which) as running:
            yield running, None

    @contextlib.contextmanager
    def _started(self, which: str) -> Iterator[Running]:
        pair = self._pair
        label = f"{pair.peer} {pair.format}, {MODE_WORDS[self._mode]}" if which == "peer" else f"loraserve {pair.ours}"
        say(f"  starting {label} …")
        with contextlib.ExitStack() as stack:
            if which == "peer":
                running = stack.enter_context(started_peer(pair.peer, self._work, pair.format, self._mode))
            else:
                running = stack.enter_context(ours(self._work, pair.ours, self._mode))
                running.burst(self._work.max_requests, self._mode, 0)
            self._settings[label] = running.settings
            yield running


def measure(pair: Pair, mode: str, work: Work, options: argparse.Namespace, settings: dict[str, str]) -> list[Row]:
    """All rows of a pair in one mode; those that can't be measured say why."""
    rows = [Row(pair, requests, mode) for requests in options.requests]
    say(f"{pair.peer} {pair.format} beside {pair.ours}, {MODE_WORDS[mode]}:")
    try:
        with Stage(pair, mode, work, options.alone, settings) as stage:
            for row in rows:
                take_rounds(row, stage, options.rounds, options.quiet)
                say(f"    {row.requests:3}: {speeds(row.peer)} and ours {speeds(row.ours)}, ratio {row.ratio:.2f}")
    except PeerUnavailableError as error:
        say(f"    not measured: {error}")
        for row in rows:
            if len(row.ours) < options.rounds or len(row.peer) < options.rounds:
                row.reason = str(error)
    return rows


def take_rounds(row: Row, stage: Stage, rounds: int, quiet: float | None) -> None:
    for number in range(rounds):
        seed = 1 + 1000 * row.requests + number
        for which in order(number):
            with stage.contender(which) as (asked, idle):
                if quiet is not None and not wait_until_quiet(quiet):
                    say("    no quiet second in a minute; measured anyway")
                turn = take_turn(asked, idle, row.requests, row.mode, seed)
            (row.peer if which == "peer" else row.ours).append(turn)


def text(options: argparse.Namespace, rows: Sequence[Row], settings: Mapping[str, str]) -> str:
    words = "\n".join(f"- {name}: {value}." for name, value in settings.items())
    speed, first_tokens = tables(rows)
    return f"""Size {options.size}; a prompt of 64 random tokens, 64 tokens out, greedy, all requests at once; the \
base, or request i for adapter i of {options.adapters} (ranks 8, 16, 32 and 64 in turn, all seven linears). Turns of \
the two contenders alternate, {options.rounds} of each a row.

{speed}

- Tokens a second of all requests together: of the best turn, and in parentheses of the median one. The ratio is that \
of the best turns; "of pairs": the median of the turns that followed each other, and their range.
- Others: cores that everything else on the machine took, at the median; idle one: the most that the contender took \
whose turn it wasn't. A row is worth little where either isn't near 0.
- Prompts are sent to servers as token ids; PEFT generates in process, without a server, and its rows begin and end \
together.

Time to first token, of servers, at the median of the turns; "last": of the request whose first token came last:

{first_tokens}

What ran, with its arithmetic, instruction set and threads:

{words}
"""


def work_of(options: argparse.Namespace) -> Work:
    """Make the base and its adapters unless they're there."""
    model = make_base(options.size).resolve()
    folder = model.with_name(f"{options.size}-adapters")
    adapters = tuple(folder / f"lora-{number:04d}" for number in range(options.adapters))
    if not all((path / "adapter_config.json").exists() for path in adapters):
        say(f"making {options.adapters} adapters …")
        script("make_model.py", options.size, str(model), "--only-adapters", "--adapters", options.adapters)
    cores = tuple(sorted(psutil.Process().cpu_affinity() or range(os.cpu_count() or 1)))
    return Work(Path(model), adapters, SIZES[options.size].vocab, max(options.requests), cores)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(item) for item in text.split(",")}))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=("S", "M"))
    parser.add_argument("--quick", action="store_true", help="one pair of turns a row")
    parser.add_argument("--rounds", type=int, help=f"pairs of turns a row (default: {ROUNDS})")
    parser.add_argument("--peers", default=",".join(START), help="(default: all of them)")
    parser.add_argument("--formats", help="PEER:FORMAT=OURS,… (default: each peer's best here, with ours beside it)")
    parser.add_argument("--modes", default=",".join(MODES), help="(default: base,mixed)")
    parser.add_argument("--requests", type=numbers, default=REQUESTS, help="at once (default: 1,8,32)")
    parser.add_argument("--adapters", type=int, default=NUM_ADAPTERS)
    parser.add_argument(
        "--quiet", type=float, metavar="CORES", help="wait a minute at most for a second without others"
    )
    parser.add_argument("--alone", action="store_true", help="start each for its turns, even where both have room")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else ROUNDS)
    peers, modes = options.peers.split(","), options.modes.split(",")
    for option, values, known in (("--peers", peers, START), ("--modes", modes, MODES)):
        if unknown := set(values) - set(known):
            parser.error(f"{option} has {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    try:
        pairs = (
            parse_pairs(options.formats, peers) if options.formats else default_pairs(peers, machine["instructions"])
        )
    except ValueError as error:
        parser.error(str(error))
    work = work_of(options)
    rows: list[Row] = []
    settings: dict[str, str] = {}
    for pair in pairs:
        for mode in modes:
            # without adapters, what they are held in makes no difference
            if mode == BASE and "+" in pair.ours:
                continue
            rows += measure(pair, mode, work, options, settings)
    page = text(options, rows, settings)
    reporting.finish(
        "peers", "Beside llama.cpp, vLLM and PEFT", page, machine, options, arguments, rows=rows, settings=settings
    )


if __name__ == "__main__":
    main()
