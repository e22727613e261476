"""Looks at a running server all along: the bytes of its tiers against their budgets, and the memory of its processes."""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx2
import psutil

from benchmarks.figures import Scrape, increase, parse, total
from benchmarks.serving import Server

INTERVAL_S = 0.25
TIERS = ("device", "host", "disk")


def scrape(server: Server) -> Scrape:
    """The server's metrics now.

    Raises:
        SystemExit: they can't be read.
    """
    answer = httpx2.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {server.admin_key}"}, timeout=30)
    if answer.status_code != 200:
        raise SystemExit(f"/metrics answered {answer.status_code}: {answer.text[:200]}")
    return parse(answer.text)


def engine_process(server: Server) -> psutil.Process:
    """The process that computes.

    Raises:
        SystemExit: the server has none.
    """
    for child in psutil.Process(server.pid).children(recursive=True):
        if "loraserve.engine.worker" in child.cmdline():
            return child
    raise SystemExit("the server has no engine process")


@dataclass(slots=True)
class Seen:
    """The largest of each, over all samples."""

    num_samples: int = 0
    bytes_by_tier: dict[str, float] = field(default_factory=dict)
    budget_by_tier: dict[str, float] = field(default_factory=dict)
    over_budget: float = 0.0
    """The largest excess of a tier over what it may hold at that time; 0: never."""
    engine_rss_bytes: int = 0
    server_rss_bytes: int = 0
    engine_cpu_s: float = 0.0
    """What the engine computed for, on all cores together: others on the machine change it less than the time on the clock."""
    server_cpu_s: float = 0.0


class Watch:
    """A thread that samples while the with block runs."""

    def __init__(self, server: Server) -> None:
        self._server, self._engine = server, engine_process(server)
        self._process = psutil.Process(server.pid)
        self._cpu_s = (0.0, 0.0)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")
        self.seen = Seen()
        self.before: Scrape = {}
        self.after: Scrape = {}

    def __enter__(self) -> Self:
        self.before = scrape(self._server)
        self._cpu_s = self._cpu_now()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if error is None:
            engine_s, server_s = self._cpu_now()
            self.seen.engine_cpu_s, self.seen.server_cpu_s = engine_s - self._cpu_s[0], server_s - self._cpu_s[1]
            self.after = scrape(self._server)
            self._note(self.after)

    def _cpu_now(self) -> tuple[float, float]:
        engine, server = self._engine.cpu_times(), self._process.cpu_times()
        return engine.user + engine.system, server.user + server.system

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            # a server that is busy for a while answers the next time
            with contextlib.suppress(httpx2.HTTPError, psutil.Error):
                self._note(scrape(self._server))

    def _note(self, now: Scrape) -> None:
        seen = self.seen
        seen.num_samples += 1
        for tier in ("device", "host"):
            held = total(now, "loraserve_adapter_bytes", tier=tier)
            budget = total(now, "loraserve_adapter_budget_bytes", tier=tier)
            seen.bytes_by_tier[tier] = max(seen.bytes_by_tier.get(tier, 0.0), held)
            seen.budget_by_tier[tier] = max(seen.budget_by_tier.get(tier, 0.0), budget)
            seen.over_budget = max(seen.over_budget, held - budget)
        seen.engine_rss_bytes = max(seen.engine_rss_bytes, self._engine.memory_info().rss)
        seen.server_rss_bytes = max(seen.server_rss_bytes, self._process.memory_info().rss)

    def changed(self, name: str, **labels: str) -> float:
        """How much a counter rose within the with block."""
        return increase(self.before, self.after, name, **labels)

    def hits(self) -> dict[str, float]:
        """Tier → the share of requests whose adapter was there when they came."""
        found = {tier: self.changed("loraserve_adapter_lookups_total", tier=tier) for tier in TIERS}
        whole = sum(found.values())
        return {tier: count / whole if whole else math.nan for tier, count in found.items()}

    def delayed_s(self) -> float:
        """The seconds that steps were delayed by loading."""
        return self.changed("loraserve_step_delay_seconds_total")
