"""Pushes adapters over a server's API, several at a time.

As a program of its own it pushes at a steady rate, so that its work is in no measurement's process,
and in idle time: a client that uploads isn't on the server's machine.

LORASERVE_API_KEY=… python -m benchmarks.pushing --url http://127.0.0.1:8000 --folder adapters
--first 200 --count 200 --rate 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.figures import percentile
from benchmarks.serving import say
from loraserve.background import BACKGROUND_NICENESS, lower_thread_priority

MAX_CLIENTS = 8
"""As many uploads as one tenant may have under way."""
TIMEOUT_S = 600.0
Files = Callable[[int], tuple[bytes, bytes]]


@dataclass(slots=True)
class Pushed:
    """Outcomes of some uploads."""

    upload_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    parity: Counter[str] = field(default_factory=Counter)
    """Verdicts of the certificates; empty where the server makes none."""
    wall_s: float = 0.0
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "uploads": len(self.upload_s),
            "wall_s": self.wall_s,
            "upload_p50_s": percentile(self.upload_s, 50),
            "upload_p99_s": percentile(self.upload_s, 99),
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "parity": dict(self.parity),
            "error": self.error,
        }


async def push(url: str, key: str, numbers: Iterable[int], name: Callable[[int], str], files: Files) -> Pushed:
    """Push these adapters, `MAX_CLIENTS` at a time; an upload that is told to come later does."""
    pushed, turns, started = Pushed(), iter(numbers), time.perf_counter()
    async with httpx2.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S
    ) as client:

        async def work() -> None:
            for number in turns:
                await push_one(client, name(number), files(number), pushed)

        async with asyncio.TaskGroup() as group:
            for _ in range(MAX_CLIENTS):
                group.create_task(work())
    pushed.wall_s = time.perf_counter() - started
    return pushed


async def push_one(client: httpx2.AsyncClient, name: str, files: tuple[bytes, bytes], pushed: Pushed) -> None:
    """One upload, as often as it's told to come later; what became of it is added to `pushed`."""
    config, weights = files
    parts = {
        "config": ("adapter_config.json", config, "application/json"),
        "weights": ("adapter_model.safetensors", weights, "application/octet-stream"),
    }
    started = time.perf_counter()
    while True:
        request = client.build_request("POST", f"/api/v1/adapters/{name}/versions", files=parts)
        # sent as one piece: in small ones the client's work would be as large as the server's
        request.read()
        answer = await client.send(request)
        pushed.statuses[answer.status_code] += 1
        if answer.status_code not in (429, 503):
            break
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
    pushed.upload_s.append(time.perf_counter() - started)
    if answer.status_code >= 300:
        pushed.error = answer.text[:300]
        return
    pushed.parity.update(check["status"] for check in answer.json().get("checks", ()) if check["name"] == "parity")


async def push_at_rate(url: str, key: str, folders: list[Path], rate: float) -> Pushed:
    """Push these directories, one beginning every 1 / `rate` s,
    or as soon as `MAX_CLIENTS` allow.
    """
    pushed, started, places = Pushed(), time.perf_counter(), asyncio.Semaphore(MAX_CLIENTS)
    async with httpx2.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S
    ) as client:

        async def send(i: int, folder: Path) -> None:
            await asyncio.sleep(max(0.0, started + i / rate - time.perf_counter()))
            async with places:
                await push_one(client, folder.name, read_folder(folder), pushed)

        await asyncio.gather(*(send(i, folder) for i, folder in enumerate(folders)))
    pushed.wall_s = time.perf_counter() - started
    return pushed


def read_folder(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "adapter_config.json").read_bytes(), (folder / "adapter_model.safetensors").read_bytes()


def progress(numbers: range, every: int = 500) -> Iterator[int]:
    """The numbers, and a word now and then of how far it has come."""
    for i, number in enumerate(numbers):
        if i and i % every == 0:
            say(f"  {i:,} of {len(numbers):,}")
        yield number


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of the adapters' directories")
    parser.add_argument("--first", type=int, default=0, help="the first directory, by name")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--rate", type=float, default=2.0, help="uploads begun a second")
    options = parser.parse_args(arguments)
    folders = sorted(path for path in options.folder.iterdir() if path.is_dir())
    folders = folders[options.first : options.first + options.count]
    lower_thread_priority(BACKGROUND_NICENESS, is_idle=True)
    pushed = asyncio.run(push_at_rate(options.url, os.environ["LORASERVE_API_KEY"], folders, options.rate))
    print(json.dumps(pushed.as_dict()))


if __name__ == "__main__":
    main()
