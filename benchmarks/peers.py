"""Our server beside llama.cpp's, vLLM and PEFT: the same work, in alternating turns.

    python -m benchmarks.peers --size S           # an hour on two cores, once all is installed
    python -m benchmarks.peers --size S --quick   # one pair of turns a row
    python -m benchmarks.peers --size M --peers llama.cpp --formats llama.cpp:Q8_0=int8
    python -m benchmarks.peers --size real        # a trained base, pairs of equal quality

The first run installs each peer into an environment of its own below `.peers/`, which takes half an
hour and five gigabytes, and converts the base and its adapters. A peer that can't be installed or
started is a row that says why.

The work: a prompt of 64 tokens, random or (`real`) of this project's documentation, 64 tokens out,
greedy, all requests at once; the base, or request i for adapter i of 32. Each row is a pair of
formats, ours and the peer's, and one number of requests: turns alternate, and each round is begun
by the other one. Both stay up meanwhile and an idle one waits without computing (its share of the
processor is in the table); where memory is short, each is started for its turn and stopped after
it. Nothing is stopped and continued by signals: threads that spin would be caught in the middle. A
turn beside which anything else took more than a tenth of a core is dropped and taken again.

With `--size real` the loss of every format is measured first (`benchmarks/peers_quality.py`), and
pairs are chosen by it: each of llama.cpp's common formats beside ours that is nearest, and beside
ours on llama.cpp's own file (`gguf`), whose weights are the same to the bit; and each of our fast
ones beside llama.cpp's that loses least of those that lose as much or more. Speculation is
off on both sides, and in rows of their own on; prompts of 512 and 2,000 tokens come after those of
64.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks import peers_limits, reporting
from benchmarks import peers_quality as quality
from benchmarks.formats import file_format, file_type
from benchmarks.make_model import Size
from benchmarks.peers_installing import PeerUnavailableError
from benchmarks.peers_page import REAL, text
from benchmarks.peers_pairs import (
    LLAMA_CPP_COMMON,
    LLAMA_CPP_REAL,
    OURS_REAL,
    default_pairs,
    is_bfloat16_fast,
    pairs_by_quality,
    parse_pairs,
)
from benchmarks.peers_rows import BASE, MAX_OTHERS, MODE_WORDS, MODES, Pair, Row, Turn, speeds
from benchmarks.peers_serving import START, Running, Work, ours, started_peer
from benchmarks.quality import prose
from benchmarks.serving import make_base, say, script
from loraserve.text.tokenizer import Tokenizer

REQUESTS, NUM_ADAPTERS, ROUNDS = (1, 8, 32), 32, 5
PROMPTS, REAL_PROMPTS = (64,), (64, 512, 2000)
MAX_PROMPT_TOKENS = 16_384
"""Of all requests of a row: longer ones aren't asked for by as many at once."""
MAX_DROPPED = 10
"""Turns of a row that are taken again; after as many it isn't measured."""
QUIET_TIMEOUT_S = 60.0
SPARE_BYTES = 3 * 2**30
"""Memory that a contender takes beside its weights: KV, buffers, compilers."""


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


def take_turn(asked: Running, idle: Running | None, row: Row, seed: int) -> Turn:
    """Measure one burst, and what else computed meanwhile."""

    def now() -> tuple[float, float, float, float, float]:
        idle_s = 0.0 if idle is None else cpu_s(idle.pid)
        own_s = time.process_time() + children_s()
        return time.perf_counter(), busy_s(), cpu_s(asked.pid), idle_s, own_s

    before = now()
    burst = asked.burst(row.requests, row.mode, row.prompt_tokens, seed)
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
                running.burst(self._work.max_requests, self._mode, PROMPTS[0], 0)
            self._settings[label] = running.settings
            yield running


def measure(pair: Pair, mode: str, work: Work, options: argparse.Namespace, settings: dict[str, str]) -> list[Row]:
    """All rows of a pair in one mode; those that can't be measured say why."""
    # what longer prompts show doesn't depend on speculation
    prompts = options.prompts[:1] if work.speculation == "on" else options.prompts
    rows = [
        Row(pair, requests, mode, prompt_tokens, work.speculation)
        for prompt_tokens in prompts
        for requests in options.requests
        if requests * prompt_tokens <= MAX_PROMPT_TOKENS
    ]
    say(f"{pair.peer} {pair.format} beside {pair.ours}, {MODE_WORDS[mode]}, speculation {work.speculation}:")
    try:
        with Stage(pair, mode, work, options.alone, settings) as stage:
            for row in rows:
                take_rounds(row, stage, options.rounds, options.quiet)
                if row.reason:
                    say(f"    {row.requests:3}: {row.reason}")
                    continue
                found = f"{speeds(row.peer)} and ours {speeds(row.ours)}, ratio {row.ratio:.2f}"
                say(f"    {row.requests:3} of {row.prompt_tokens} tokens: {found}")
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
                turn = take_quiet_turn(asked, idle, row, seed, quiet)
            if turn is None:
                row.reason = f"more than {MAX_OTHERS} cores of other work beside {MAX_DROPPED} turns"
                return
            (row.peer if which == "peer" else row.ours).append(turn)


def take_quiet_turn(asked: Running, idle: Running | None, row: Row, seed: int, quiet: float | None) -> Turn | None:
    """Return a turn without other work beside it; None: the row has dropped too many."""
    while True:
        if quiet is not None and not wait_until_quiet(quiet):
            say("    no quiet second in a minute; measured anyway")
        turn = take_turn(asked, idle, row, seed)
        if turn.others <= MAX_OTHERS:
            return turn
        row.num_dropped += 1
        if row.num_dropped >= MAX_DROPPED:
            return None


def qualities_of(
    work: Work, text: Path, peers: Sequence[str], chosen: Sequence[Pair] | None
) -> dict[tuple[str, str], quality.Loss]:
    """Measure what our formats lose, and those of peers that are there.

    Args:
        chosen: pairs whose formats alone are measured; None: all that pairs are chosen from.
    """
    ours: Sequence[str] = (*OURS_REAL, *map(file_format, LLAMA_CPP_COMMON))
    theirs: Sequence[str] = LLAMA_CPP_REAL
    if chosen is not None:
        ours = [pair.ours for pair in chosen]
        theirs = [pair.format for pair in chosen if pair.peer == "llama.cpp"]
    elif "llama.cpp" not in peers:
        ours = OURS_REAL
    found: dict[tuple[str, str], quality.Loss] = {}
    if "llama.cpp" in peers:
        try:
            found |= quality.of_llama_cpp(work.model, text, theirs)
        except PeerUnavailableError as error:
            say(f"llama.cpp's formats aren't measured: {error}")
            ours = [name for name in ours if file_type(name) is None]
    return quality.of_ours(work.model, work.calibrated, text, ours) | found


def work_of(options: argparse.Namespace) -> Work:
    """Make the base and its adapters unless they're there."""
    model = make_base(options.size).resolve()
    folder = model.with_name(f"{options.size}-adapters")
    adapters = tuple(folder / f"lora-{number:04d}" for number in range(options.adapters))
    if not all((path / "adapter_config.json").exists() for path in adapters):
        say(f"making {options.adapters} adapters …")
        script("make_model.py", options.size, str(model), "--only-adapters", "--adapters", options.adapters)
    cores = tuple(sorted(psutil.Process().cpu_affinity() or range(os.cpu_count() or 1)))
    work = Work(
        model,
        adapters,
        Size.of(model).vocab,
        max(options.requests),
        cores,
        max_prompt_tokens=max(options.prompts),
    )
    if options.size != REAL:
        return work
    return dataclasses.replace(work, calibrated=calibrated_base(model), text_tokens=write_prompts(model))


def calibrated_base(model: Path) -> Path:
    """Return the checkpoint that `loraserve quantize` makes of a base; it's made once and kept."""
    out = model.with_name(f"{model.name}-int4")
    if not out.exists():
        say("quantizing the base, once …")
        command = [sys.executable, "-P", "-m", "loraserve.cli.main", "quantize", str(model), "--out", str(out)]
        subprocess.run([*command, "--to", "int4"], check=True, stdout=subprocess.DEVNULL)
    return out


def write_prompts(model: Path) -> Path:
    """Write the token ids of the text that prompts are cut out of; return the file."""
    path = model.with_name(f"{model.name}-prompts.json")
    path.write_text(json.dumps(Tokenizer(model).encode(prose(None))))
    return path


def write_evaluated(model: Path) -> Path:
    """Write the text that qualities are measured on; return the file."""
    path = model.with_name(f"{model.name}-text.txt")
    path.write_text(prose(None))
    return path


def numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(item) for item in text.split(",")}))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=("S", "M", REAL))
    parser.add_argument("--quick", action="store_true", help="one pair of turns a row")
    parser.add_argument("--rounds", type=int, help=f"pairs of turns a row (default: {ROUNDS})")
    parser.add_argument("--peers", default=",".join(START), help="(default: all of them)")
    parser.add_argument("--formats", help="PEER:FORMAT=OURS,… (default: each peer's best here, with ours beside it)")
    parser.add_argument("--modes", default=",".join(MODES), help="(default: base,mixed)")
    parser.add_argument("--requests", type=numbers, default=REQUESTS, help="at once (default: 1,8,32)")
    parser.add_argument("--prompts", type=numbers, help="tokens of prompts (default: 64; real: 64,512,2000)")
    parser.add_argument("--adapters", type=int, default=NUM_ADAPTERS)
    parser.add_argument(
        "--speculation", default="off,on", help="with --size real, of off and on (default: both, in rows of their own)"
    )
    parser.add_argument(
        "--quiet", type=float, metavar="CORES", help="wait a minute at most for a second without others"
    )
    parser.add_argument("--alone", action="store_true", help="start each for its turns, even where both have room")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else ROUNDS)
    options.speculation = tuple(options.speculation.split(","))
    if not options.speculation or set(options.speculation) - {"off", "on"}:
        parser.error(f"--speculation has {','.join(options.speculation)}; expected some of off, on")
    options.prompts = options.prompts or (REAL_PROMPTS if options.size == REAL else PROMPTS)
    peers, modes = options.peers.split(","), options.modes.split(",")
    for option, values, known in (("--peers", peers, START), ("--modes", modes, MODES)):
        if unknown := set(values) - set(known):
            parser.error(f"{option} has {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    try:
        chosen = parse_pairs(options.formats, peers) if options.formats else None
    except ValueError as error:
        parser.error(str(error))
    work, qualities, speculations = work_of(options), {}, ("auto",)
    if options.size == REAL:
        qualities, speculations = qualities_of(work, write_evaluated(work.model), peers, chosen), options.speculation
    pairs = chosen or default_pairs(peers, machine["instructions"])
    if options.size == REAL and chosen is None:
        pairs = pairs_by_quality(peers, qualities, is_bfloat16_fast(machine["instructions"]))
    rows: list[Row] = []
    settings: dict[str, str] = {}
    rate = peers_limits.read_rate()
    for pair in pairs:
        for mode in modes:
            # without adapters, what they are held in makes no difference
            if mode == BASE and "+" in pair.ours:
                continue
            for speculation in speculations:
                # vLLM and PEFT have nothing to be compared with ours
                if speculation != "on" or pair.peer == "llama.cpp":
                    rows += measure(pair, mode, dataclasses.replace(work, speculation=speculation), options, settings)
    page = text(options, rows, settings, qualities, peers_limits.text(work.model, rows, rate))
    reporting.finish(
        "peers",
        "Beside llama.cpp, vLLM and PEFT",
        page,
        machine,
        options,
        arguments,
        rows=rows,
        settings=settings,
        read_bytes_per_s=rate,
        qualities=[{"whose": who, "format": name, **dataclasses.asdict(one)} for (who, name), one in qualities.items()],
    )


if __name__ == "__main__":
    main()
