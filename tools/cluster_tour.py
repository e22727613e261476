"""`make cluster`: a cluster on this machine, with everything around it, shown and checked.

Ray Serve with two engine replicas on the bundled pack, PostgreSQL, and an S3 store (moto). It
completes, kills a replica under streams, grows to three replicas under load and shrinks to one, and
checks every answer and the bill. Exit code 0: all were right.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from ray_cluster import ENGINE, REPLICA, RayCluster  # noqa: E402
from s3_server import S3Server  # noqa: E402

from loraserve import AsyncClient, Client  # noqa: E402
from loraserve.demo.card import EXAMPLE, read_card, reliable_frames  # noqa: E402
from loraserve.demo.checks import check_answers, check_models, check_stranger  # noqa: E402
from loraserve.demo.demo_model import Access, TourCheck  # noqa: E402
from loraserve.demo.frames import STYLES, Frame  # noqa: E402
from loraserve.demo.pack import adapter_dirs, base_dir, pack_dir  # noqa: E402
from loraserve.demo.pack_demo import MAX_TOKENS, check_completions, check_tools, pack_demo, questions_of  # noqa: E402

FLAGS = (
    *("--memory-budget", "64MiB", "--host-cache", "64MiB", "--max-num-seqs", "32", "--log-level", "warning"),
    *("--cpus-per-replica", "0.5", "--replicas", "2", "--min-replicas", "1", "--max-replicas", "3"),
    *("--target-requests", "16", "--scale-up-delay", "2", "--scale-down-delay", "10", "--drain-s", "2"),
)
NUM_PROMPTS = 8
LONG_TOKENS = 160
SCALE_S = 240.0


@dataclass
class Bill:
    """What clients were sent, which is what may be billed."""

    num_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class Tour:
    """The steps, and what they found."""

    cluster: RayCluster
    console: Console
    checks: list[TourCheck] = field(default_factory=list)
    bill: Bill = field(default_factory=Bill)
    key: str = ""
    num_chunks: int = 0
    """Chunks of streams that came so far."""

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def run(self) -> None:
        began = time.monotonic()
        self.say("Starting Ray, Serve, the ingress and two engine replicas …")
        self.cluster.start()
        self.say(f"Ready at {self.cluster.url} after {time.monotonic() - began:.1f} s.")
        self.say(self.cluster.run("status").stdout.rstrip())
        self.complete()
        self.kill_replica()
        self.scale()
        self.check_bill()

    def complete(self) -> None:
        tenants = {name: self.cluster.make_tenant(name) for name in ("demo", "stranger", "streams")}
        self.key = tenants["streams"]
        for owner in ("demo", "streams"):
            with Client(self.cluster.url, api_key=tenants[owner]) as client:
                for name, directory in adapter_dirs().items():
                    client.adapters.push(str(directory), name=name)
        access, model = Access(self.cluster.url, tenants["demo"], base_dir().name), pack_demo()
        frames = self.frames()
        self.say(f"Asking {len(frames)} prompts of {len(STYLES)} models, on two replicas …")
        self.checks += check_answers(access, questions_of(frames), MAX_TOKENS)
        self.checks += [check_completions(access, frames[1]), check_tools(access, frames[1])]
        self.checks += [check_models(access, model), check_stranger(access, model, tenants["stranger"])]
        routed = {
            name.split('"')[1]: int(value)
            for name, value in self.cluster.metrics().items()
            if name.startswith("loraserve_cluster_routed_total")
        }
        self.say(f"Requests by why their replica was chosen: {routed}.")

    def frames(self) -> list[Frame]:
        return [EXAMPLE, *reliable_frames(read_card(pack_dir()))[: NUM_PROMPTS - 1]]

    def kill_replica(self) -> None:
        asked = [(style, frame) for frame in self.frames()[:4] for style in STYLES]
        self.say(f"{len(asked)} long streams, one after the other; then again, at once, with kills …")
        alone = [text for pair in asked for text in asyncio.run(self.streams([pair]))]

        async def with_kills() -> list[str]:
            # found before: a replica may compute all of its streams while processes are listed
            replica = self.cluster.pids(REPLICA)[0]
            streaming = asyncio.create_task(self.streams(asked))
            began = self.num_chunks
            await self.until_chunks(began + 1, streaming)
            os.kill(replica, signal.SIGKILL)
            self.say(f"Killed the replica with the process {replica}.")
            await self.until_chunks(began + 300, streaming)
            engine = await asyncio.to_thread(self.cluster.kill, ENGINE)
            self.say(f"Killed the engine with the process {engine}.")
            return await streaming

        together = asyncio.run(with_kills())
        num_right = sum(one == other for one, other in zip(alone, together, strict=True))
        self.checks.append(
            TourCheck("streams through kills", num_right, len(asked), "a text differs from the one it has alone")
        )
        lost = self.cluster.metrics().get('loraserve_cluster_replays_total{cause="lost"}', 0.0)
        self.say(f"{lost:.0f} streams went on at another replica.")
        self.checks.append(TourCheck("streams moved from the killed one", int(lost > 0), 1, "none was"))

    async def until_chunks(self, num: int, streaming: asyncio.Task[list[str]]) -> None:
        """Return once so many chunks came, or all streams ended."""
        while self.num_chunks < num and not streaming.done():
            await asyncio.sleep(0.01)

    def scale(self) -> None:
        many = [(style, frame) for frame in self.frames() for style in STYLES]
        for num, asked in ((1, many[:2]), (3, many), (1, many[:2])):
            began = time.monotonic()
            texts = asyncio.run(self.ask_until(num, asked))
            took_s = time.monotonic() - began
            found = self.cluster.num_ready()
            problem = f"{found} replicas after {took_s:.0f} s"
            self.checks.append(TourCheck(f"replicas: {num}", int(found == num), 1, problem))
            alone = dict(zip(asked, texts, strict=False))
            num_same = sum(text == alone[asked[i % len(asked)]] for i, text in enumerate(texts))
            if texts:
                self.checks.append(TourCheck(f"streams until then ({num})", num_same, len(texts), "a text differs"))
            self.say(f"{found} replicas after {took_s:.0f} s, with {len(texts)} streams meanwhile.")

    async def ask_until(self, num_replicas: int, asked: Sequence[tuple[str, Frame]]) -> list[str]:
        """Ask again and again until there are so many replicas; return all answers in order."""
        deadline, texts = time.monotonic() + SCALE_S, list[str]()
        while await asyncio.to_thread(self.cluster.num_ready) != num_replicas and time.monotonic() < deadline:
            texts += await self.streams(asked)
        return texts

    async def streams(self, asked: Sequence[tuple[str, Frame]]) -> list[str]:
        """Return the texts of long streams, and note what they cost."""
        async with AsyncClient(self.cluster.url, api_key=self.key) as client:

            async def one(style: str, frame: Frame) -> str:
                stream = await client.completions.create(
                    model=base_dir().name if style == "plain" else style,
                    prompt=frame.prompt,
                    max_tokens=LONG_TOKENS,
                    temperature=1.0,
                    seed=7,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
                text = ""
                async with stream:
                    async for chunk in stream:
                        self.num_chunks += 1
                        text += "".join(choice.text for choice in chunk.choices)
                        if chunk.usage is not None:
                            self.bill.num_requests += 1
                            self.bill.prompt_tokens += chunk.usage.prompt_tokens
                            self.bill.completion_tokens += chunk.usage.completion_tokens
                return text

            return list(await asyncio.gather(*(one(*pair) for pair in asked)))

    def check_bill(self) -> None:
        deadline = time.monotonic() + 15
        while (found := self.billed()) != self.bill and time.monotonic() < deadline:
            time.sleep(0.5)
        problem = f"billed {found}, expected {self.bill}"
        self.checks.append(TourCheck("billed exactly once", int(found == self.bill), 1, problem))
        self.say(f"Billed: {found.num_requests} requests, {found.completion_tokens} tokens.")

    def billed(self) -> Bill:
        with Client(self.cluster.url, api_key=self.key) as client:
            rows = list(client.usage.sums())
        return Bill(
            sum(row.num_requests for row in rows),
            sum(row.prompt_tokens for row in rows),
            sum(row.completion_tokens for row in rows),
        )

    def report(self, took_s: float) -> int:
        table = Table(title="The tour", title_justify="left")
        for column in ("checked", "right", ""):
            table.add_column(column)
        for check in self.checks:
            table.add_row(check.what, f"{check.num_right} of {check.num_tried}", "ok" if check.is_right else "WRONG")
        self.console.print(table)
        wrong = [check for check in self.checks if not check.is_right]
        for check in wrong:
            self.say(f"{check.what}: {check.problem}")
        self.say(f"Time to ready: {self.cluster.ready_s:.1f} s. The tour: {took_s:.0f} s.")
        self.say("All checks passed." if not wrong else f"{len(wrong)} of {len(self.checks)} checks failed.")
        return 1 if wrong else 0


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    began = time.monotonic()
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="loraserve-cluster-")))
        folder.chmod(0o755)
        postgres = str(ROOT / "tests" / "postgres.sh")
        url = subprocess.run([postgres, "start", str(folder / "pg")], check=True, capture_output=True, text=True).stdout
        ending.callback(subprocess.run, [postgres, "stop", str(folder / "pg")], check=False)
        s3 = ending.enter_context(S3Server())
        variables = {
            "LORASERVE_DATABASE_URL": url.strip(),
            "LORASERVE_STORE_URL": f"s3://{s3.make_bucket()}/blobs",
            **s3.variables,
        }
        cluster = RayCluster(folder / "data", flags=FLAGS, variables=variables)
        ending.callback(cluster.stop)
        tour = Tour(cluster, Console())
        try:
            tour.run()
        except BaseException:
            tour.say(f"The cluster's log ends:\n{cluster.tail()}")
            raise
        return tour.report(time.monotonic() - began)


if __name__ == "__main__":
    raise SystemExit(main())
