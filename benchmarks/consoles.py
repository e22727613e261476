"""Open consoles, as a browser has them, without the browser: what the page asks a server for, at
the page's pace, read and not looked at. A process of its own, told by lines what to do:

    open N       N more pages are open and have loaded everything; answers with a line of JSON
    close        all are closed; answers with what they asked for since they were open

Each page holds the stream of live figures and shows the residency map: all versions (again each
minute, and less often where there are many), and the tiers each three seconds. Beside them,
Prometheus scrapes `/metrics` each 15 s, as one does for a server, not for a page.
`loraserve/api/console/static/views/residency.js` has the pace. Browsers run
on other machines than the server: here they have the lowest priority, and count bytes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

LIVE_S, SCRAPE_S = 2.0, 15.0
EVERYTHING_S, PAGE_S, TIERS_S = 60.0, 24.0, 3.0
PAGE_ROWS, MOST = 200, 5000
_CURSOR = re.compile(rb'"next_cursor":"([^"]+)"')


class Connection:
    """HTTP/1.1 over one socket that is kept."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = urlsplit(url), key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, path: str, accept: str) -> tuple[asyncio.StreamReader, dict[bytes, bytes]]:
        """Send a GET; where the body can be read, and the headers.

        Raises:
            SystemExit: the answer isn't 200.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._url.hostname, self._url.port, limit=1 << 24)
        reader, writer = self._streams
        head = f"GET {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {self._key}\r\nAccept: {accept}\r\n\r\n"
        writer.write(head.encode())
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        if b" 200 " not in lines[0]:
            raise SystemExit(f"{path} answered {lines[0].decode()}")
        pairs = (line.split(b":", 1) for line in lines[1:] if line)
        return reader, {name.lower(): value.strip() for name, value in pairs}

    async def get(self, path: str, accept: str = "application/json") -> bytes:
        reader, headers = await self.send(path, accept)
        if b"content-length" in headers:
            return await reader.readexactly(int(headers[b"content-length"]))
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
        return body

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


@dataclass(slots=True)
class Page:
    """One open console.

    Attributes:
        place: of this page among all, from 0 to 1: pages that were opened at other times don't load
            everything together.
    """

    url: str
    key: str
    place: float
    has_scraper: bool
    asked: Counter[str]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    async def open(self) -> None:
        num_pages = await self._load(self._connect())
        every_s = max(EVERYTHING_S, PAGE_S * num_pages)
        work = [self._everything(every_s), self._tiers(), self._live(), *([self._scrape()] if self.has_scraper else ())]
        self.tasks = [asyncio.create_task(one) for one in work]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise SystemExit(f"a page ended: {result!r}")
        for connection in self.connections:
            connection.close()

    def _connect(self) -> Connection:
        self.connections.append(Connection(self.url, self.key))
        return self.connections[-1]

    async def _load(self, connection: Connection) -> int:
        """All pages of the list; how many there are."""
        cursor, num_pages = "", 0
        while True:
            body = await connection.get(f"/api/v1/residency?limit={PAGE_ROWS}{cursor}")
            self.asked["everything"] += 1
            self.asked["bytes"] += len(body)
            num_pages += 1
            found = _CURSOR.search(body, max(0, len(body) - 2000)) or _CURSOR.search(body)
            if found is None or num_pages * PAGE_ROWS >= MOST:
                return num_pages
            cursor = f"&cursor={quote(found[1].decode())}"

    async def _everything(self, every_s: float) -> None:
        connection = self._connect()
        await asyncio.sleep(every_s * self.place)
        while True:
            await self._load(connection)
            await asyncio.sleep(every_s)

    async def _tiers(self) -> None:
        connection = self._connect()
        await asyncio.sleep(TIERS_S * self.place)
        while True:
            self.asked["bytes"] += len(await connection.get("/api/v1/residency/tiers"))
            self.asked["tiers"] += 1
            await asyncio.sleep(TIERS_S)

    async def _live(self) -> None:
        reader, _ = await self._connect().send(f"/api/v1/live?interval_s={LIVE_S:g}", "text/event-stream")
        while piece := await reader.read(1 << 16):
            self.asked["figures"] += piece.count(b"event: figures")

    async def _scrape(self) -> None:
        connection = self._connect()
        while True:
            self.asked["bytes"] += len(await connection.get("/metrics", "text/plain"))
            self.asked["scrapes"] += 1
            await asyncio.sleep(SCRAPE_S)


async def run(url: str, key: str) -> None:
    """Do what the lines of standard input say, to their end."""
    pages: list[Page] = []
    asked: Counter[str] = Counter()
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        if line[0] == "open":
            count = int(line[1])
            pages = [Page(url, key, (number + 0.5) / count, number == 0, asked) for number in range(count)]
            await asyncio.gather(*(page.open() for page in pages))
            print(json.dumps(asked), flush=True)
            asked.clear()
        else:
            print(json.dumps(asked), flush=True)
            await asyncio.gather(*(page.close() for page in pages))
            pages = []
            asked.clear()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    options = parser.parse_args(arguments)
    with contextlib.suppress(OSError):
        os.nice(19)
    asyncio.run(run(options.url, os.environ["LORASERVE_API_KEY"]))


if __name__ == "__main__":
    main()
