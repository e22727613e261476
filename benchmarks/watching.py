"""Looks at a running server all along: the bytes of its tiers against their budgets,
and the memory of its processes.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Self

import httpx2
import psutil

from benchmarks.figures import Scrape, increase, mib, parse, total
from benchmarks.serving import Server

INTERVAL_S = 0.25
USES = ("kv_used", "kv_idle", "adapters_used", "adapters_idle")
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
        if "loraserve.engine.worker.main" in child.cmdline():
            return child
    raise SystemExit("the server has no engine process")


@dataclass(slots=True)
class Seen:
    """The largest of each, over all samples; bytes."""

    num_samples: int = 0
    adapters_on_device: float = 0.0
    kv_on_device: float = 0.0
    """KV bytes of sequences that run and of idle prefixes."""
    device: float = 0.0
    """Adapters and KV together."""
    device_budget: float = 0.0
    host: float = 0.0
    host_budget: float = 0.0
    over_budget: float = 0.0
    """The largest excess of the device or the host over what it may hold; 0: never."""
    engine_rss: int = 0
    server_rss: int = 0
    engine_cpu_s: float = 0.0
    """Seconds that the engine computed for, on all cores together: others on the machine change it
    less than the time on the clock.
    """
    server_cpu_s: float = 0.0

    def take(self, now: Scrape) -> None:
        """One more sample."""
        self.num_samples += 1
        uses = {use: total(now, "loraserve_device_memory_bytes", use=use) for use in USES}
        adapters, kv = uses["adapters_used"] + uses["adapters_idle"], uses["kv_used"] + uses["kv_idle"]
        budget = total(now, "loraserve_device_memory_budget_bytes")
        host = total(now, "loraserve_adapter_bytes", tier="host")
        host_budget = total(now, "loraserve_adapter_budget_bytes", tier="host")
        self.adapters_on_device = max(self.adapters_on_device, adapters)
        self.kv_on_device = max(self.kv_on_device, kv)
        self.device = max(self.device, adapters + kv)
        self.device_budget = max(self.device_budget, budget)
        self.host = max(self.host, host)
        self.host_budget = max(self.host_budget, host_budget)
        self.over_budget = max(self.over_budget, adapters + kv - budget, host - host_budget)

    @staticmethod
    def largest(all_seen: Iterable[Seen]) -> Seen:
        """The largest of each, over several; processor time is added up.

        Raises:
            ValueError: there are none.
        """
        merged = Seen()
        rows = list(all_seen)
        if not rows:
            raise ValueError("Nothing was seen; expected one or more.")
        for field in fields(Seen):
            values = [getattr(row, field.name) for row in rows]
            is_sum = field.name.endswith("cpu_s") or field.name == "num_samples"
            setattr(merged, field.name, sum(values) if is_sum else max(values))
        return merged

    def device_words(self) -> str:
        """Adapters and KV apart, and together of the budget, in MiB."""
        apart = f"{mib(self.adapters_on_device)} + {mib(self.kv_on_device)}"
        return f"{apart}; {mib(self.device)} of {mib(self.device_budget)}"

    def over_words(self) -> str:
        return f"{mib(self.over_budget)} MiB" if self.over_budget > 0 else "never"


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
        self.seen.take(now)
        self.seen.engine_rss = max(self.seen.engine_rss, self._engine.memory_info().rss)
        self.seen.server_rss = max(self.seen.server_rss, self._process.memory_info().rss)

    def changed(self, name: str, **labels: str) -> float:
        """How much a counter rose within the with block."""
        return increase(self.before, self.after, name, **labels)

    def hits(self) -> dict[str, float]:
        """Tier → the share of requests whose adapter was there when they came."""
        found = {tier: self.changed("loraserve_adapter_lookups_total", tier=tier) for tier in TIERS}
        whole = sum(found.values())
        return {tier: count / whole if whole else math.nan for tier, count in found.items()}

    def mean_load_s(self) -> float:
        """Seconds that a load took on its thread, on average; nan where there was none."""
        num_loads = self.changed("loraserve_adapter_loads_total")
        return self.changed("loraserve_adapter_load_seconds_total") / num_loads if num_loads else math.nan

    def delayed_s(self) -> float:
        """The seconds that the step's thread was kept from its steps by adapters,
        all steps together.
        """
        return self.changed("loraserve_step_loading_delay_seconds_sum")
